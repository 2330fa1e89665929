"""Whole default spaces under several frameworks: how long the exact answer takes on two cores."""

from __future__ import annotations

from pathlib import Path

from benchmarks.before import BEFORE, HERE, checkout, run_in
from benchmarks.table import Row

__all__ = ["search_speed"]

_SEARCH = """
import json, resource, sys, time
from simplan.search import search
from simplan.spec import catalogue
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec

size, framework = sys.argv[1:]
if size == "gpt3-175b":
    changes = {"vocab_size": 51200, "tied_embeddings": False}  # untied: FSDP's pipelines are refused with tied ones
    model, devices, batch = catalogue.model(size).model_copy(update=changes), ("dgx-a100-80gb", 1024), 1536
else:
    model, devices, batch = catalogue.model(size), ("dgx-h100", 128), 512
cluster, training = catalogue.cluster(*devices), TrainingSpec(global_batch_size=batch)
software = catalogue.software(framework)
try:
    from simplan.job import Job
    asked = [Job(model, cluster, training, ParallelPlan(), software)]
except ImportError:
    asked = [model, cluster, training, software]
start_s = time.perf_counter()
found = search(*asked, jobs=2, explain=False)
taken_s = time.perf_counter() - start_s
peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
space = found.space
print(json.dumps({"taken_s": taken_s, "peak_bytes": peak * 1024, "total": space.total, "bounded": space.bounded,
                  "timed": space.timed, "best_s": found.best.step_time_s}))
"""

_GOALS_S = {
    ("gpt3-175b", "torch"): 30,
    ("gpt3-175b", "megatron-lm-2022"): 30,
    ("llama3-70b", "megatron-core"): 8,
    ("llama3-70b", "torchtitan"): 12,
    ("llama3-70b", "maxtext"): 25,
    ("llama3-70b", "megatron-deepspeed"): 25,
    ("llama3-70b", "megatron-bridge"): 25,
}
_PEAK_BYTES = 2**29


def search_speed() -> list[Row]:
    """GPT-3 175B on 1,024 A100s and Llama 3 70B on 128 H100s."""
    with checkout(BEFORE) as before:
        return [_row(size, framework, goal_s, before) for (size, framework), goal_s in _GOALS_S.items()]


def _row(size: str, framework: str, goal_s: float, before: Path) -> Row:
    found, then = (run_in(root, _SEARCH, size, framework) for root in (HERE, before))
    return Row(
        f"the default space of {size} under {framework}, exactly, on 2 cores",
        f"at most {goal_s} s, 0.5 GiB",
        f"{found['taken_s']:.1f} s, {found['peak_bytes'] / 2**30:.2f} GiB in the largest process "
        f"({found['total']:,} candidates, {found['bounded']:,} bounded, {found['timed']:,} timed; "
        f"best {found['best_s']:.3f} s); at {BEFORE} {then['taken_s']:.1f} s, {then['peak_bytes'] / 2**30:.2f} GiB "
        f"({then['bounded']:,} bounded, {then['timed']:,} timed; best {then['best_s']:.3f} s)",
        found["taken_s"] <= goal_s and found["peak_bytes"] <= _PEAK_BYTES,
    )
