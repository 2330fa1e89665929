"""Whole default spaces: how long the exact answer takes, of GPT-3 175B on 1,024 A100s also one plan."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.table import Row

__all__ = ["search_speed"]

_JOB = """
import json, resource, time
from collections import Counter
from simplan.search import Question, SearchSpace, search
from simplan.search.enumeration import Enumeration
from simplan.search.fast import FastEvaluator
from simplan.spec import catalogue
from simplan.spec.training import TrainingSpec

changes = {"vocab_size": 51200, "tied_embeddings": False}  # untied, for else most of FSDP's pipelines are refused
model = catalogue.model("gpt3-175b").model_copy(update=changes)
cluster, training = catalogue.cluster("dgx-a100-80gb", num_devices=1024), TrainingSpec(global_batch_size=1536)
software = catalogue.software("torch")
"""

_RATE = """
asked = Question(model, cluster, training, software)
enumeration = Enumeration(SearchSpace(), asked)
evaluator = FastEvaluator(asked)
plans = list(enumeration.candidates(enumeration.meshes, Counter()))
covered = [plan for plan in plans if evaluator.covers(plan)]
parts = [covered[start : start + 16384] for start in range(0, len(covered), 16384)]  # as many as a search at once
FastEvaluator(asked).device_bytes(covered[::1000]), FastEvaluator(asked).step_times_s(covered[::1000])  # numba loads
start_s = time.process_time()
for part in parts:
    evaluator.device_bytes(part)
    evaluator.step_times_s(part)
print(json.dumps({"plans": len(plans), "covered": len(covered), "taken_s": time.process_time() - start_s}))
"""

_SEARCH = """
start_s = time.perf_counter()
found = search(model, cluster, training, software, jobs=2)
taken_s = time.perf_counter() - start_s
peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
space = found.space
print(json.dumps({"taken_s": taken_s, "peak_bytes": peak * 1024, "total": space.total, "bounded": space.bounded,
                  "timed": space.timed, "best_s": found.best.step_time_s}))
"""

_WRITTEN_OUT = """
model, cluster = catalogue.model("llama3-70b"), catalogue.cluster("dgx-h100", num_devices=128)
training, software = TrainingSpec(global_batch_size=512), catalogue.software("megatron-core")
""" + _SEARCH.replace("software, jobs=2", "software, jobs=2, explain=False")


def search_speed() -> list[Row]:
    """Plans a second of one core, each with its memory and its step time; and the whole search on two."""
    rate, whole, written = _run(_RATE), _run(_SEARCH), _run(_WRITTEN_OUT)
    per_s = rate["covered"] / rate["taken_s"]
    return [
        Row(
            "plans of GPT-3 175B on 1,024 A100s a second and core, each timed with memory, none left out by a bound",
            "10,000",
            f"{per_s:,.0f} ({rate['covered']:,} plans in {rate['taken_s']:.1f} s of processor time; "
            f"{rate['plans'] - rate['covered']:,} others are predicted one by one)",
            per_s >= 10_000,
        ),
        Row(
            "its whole default space, exactly, on 2 cores",
            "under 60 s, under 2 GiB",
            f"{whole['taken_s']:.1f} s, {whole['peak_bytes'] / 2**30:.2f} GiB at most in one process and its largest "
            f"child ({whole['total']:,} candidates, {whole['bounded']:,} bounded, {whole['timed']:,} timed; "
            f"best {whole['best_s']:.3f} s)",
            whole["taken_s"] < 60 and whole["peak_bytes"] < 2 * 2**30,
        ),
        Row(
            "the default space of Llama 3 70B on 128 H100s under megatron-core, whose plans are written out one by "
            "one, exactly, on 2 cores",
            "under 120 s",
            f"{written['taken_s']:.1f} s ({written['total']:,} candidates, {written['bounded']:,} bounded, "
            f"{written['timed']:,} timed; best {written['best_s']:.3f} s)",
            written["taken_s"] < 120,
        ),
    ]


def _run(program: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _JOB + program], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
