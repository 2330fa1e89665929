"""Whole default spaces under several frameworks: how long the exact answer takes, and how many plans are timed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks.table import Row

__all__ = ["search_speed"]

_GPT3 = """
changes = {"vocab_size": 51200, "tied_embeddings": False}  # untied, for else most of FSDP's pipelines are refused
model = catalogue.model("gpt3-175b").model_copy(update=changes)
cluster, training = catalogue.cluster("dgx-a100-80gb", num_devices=1024), TrainingSpec(global_batch_size=1536)
"""
_LLAMA3 = """
model, cluster = catalogue.model("llama3-70b"), catalogue.cluster("dgx-h100", num_devices=128)
training = TrainingSpec(global_batch_size=512)
"""
_SEARCH = """
import json, resource, sys, time
from simplan.job import Job
from simplan.search import search
from simplan.spec import catalogue
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
{question}
job = Job(model, cluster, training, ParallelPlan(), catalogue.software({software!r}))
start_s = time.perf_counter()
found = search(job, jobs=2, explain=False)
taken_s = time.perf_counter() - start_s
peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
space = found.space
print(json.dumps({{"taken_s": taken_s, "peak_bytes": peak * 1024, "total": space.total, "bounded": space.bounded,
                  "timed": space.timed, "best_s": found.best.step_time_s}}))
"""


class _Case(NamedTuple):
    """A space, and the most seconds that its search may take."""

    what: str
    question: str
    software: str
    most_s: int


_CASES = (
    *(_Case("GPT-3 175B on 1,024 A100s", _GPT3, name, 30) for name in ("torch", "megatron-lm-2022")),
    *(
        _Case("Llama 3 70B on 128 H100s", _LLAMA3, name, most_s)
        for name, most_s in (
            ("megatron-core", 8), ("torchtitan", 12), ("maxtext", 25), ("megatron-deepspeed", 25),
            ("megatron-bridge", 25),
        )
    ),
)  # fmt: skip
_MOST_BYTES = 2**29


def search_speed() -> list[Row]:
    """The whole default space of every case, exactly, on two cores."""
    return [_row(case) for case in _CASES]


def _row(case: _Case) -> Row:
    program = _SEARCH.format(question=case.question, software=case.software)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return Row(
        f"the default space of {case.what} under {case.software}, exactly, on 2 cores",
        f"under {case.most_s} s, under 0.5 GiB",
        f"{found['taken_s']:.1f} s, {found['peak_bytes'] / 2**30:.2f} GiB at most in one process and its largest child "
        f"({found['total']:,} candidates, {found['bounded']:,} bounded, {found['timed']:,} timed; "
        f"best {found['best_s']:.3f} s)",
        found["taken_s"] < case.most_s and found["peak_bytes"] < _MOST_BYTES,
    )
