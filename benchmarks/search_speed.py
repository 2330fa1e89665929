"""Speed of exact searches of full default spaces under several frameworks, on two cores.

``python -m benchmarks.search_speed MODEL FRAMEWORK`` runs one search and prints the result as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from benchmarks.alone import alone
from benchmarks.table import BenchmarkRow
from simplan import catalog
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.search import search
from simplan.training import TrainingSpec

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


def search_speed() -> list[BenchmarkRow]:
    """Rows for GPT-3 175B on 1,024 A100s and Llama 3 70B on 128 H100s."""
    return [_row(size, framework, goal_s) for (size, framework), goal_s in _GOALS_S.items()]


def _row(size: str, framework: str, goal_s: float) -> BenchmarkRow:
    found = alone("benchmarks.search_speed", size, framework)
    return BenchmarkRow(
        f"the default space of {size} under {framework}, exactly, on 2 cores",
        f"at most {goal_s} s, 0.5 GiB",
        f"{found['taken_s']:.1f} s, {found['peak_bytes'] / 2**30:.2f} GiB in the largest process "
        f"({found['total']:,} candidates, {found['bounded']:,} bounded, {found['timed']:,} timed; "
        f"best {found['best_s']:.3f} s)",
        found["taken_s"] <= goal_s and found["peak_bytes"] <= _PEAK_BYTES,
    )


def _measured(size: str, framework: str) -> dict[str, Any]:
    model = catalog.model(size)
    if size == "gpt3-175b":
        # untied: FSDP in pipelines is not supported with tied weights
        model = model.model_copy(update={"vocab_size": 51200, "tied_embeddings": False})
        cluster, batch = catalog.cluster("dgx-a100-80gb", 1024), 1536
    else:
        cluster, batch = catalog.cluster("dgx-h100", 128), 512
    software = catalog.software(framework)
    start_s = time.perf_counter()
    job = Job(model, cluster, TrainingSpec(global_batch_size=batch), ParallelPlan(), software)
    result = search(job, jobs=2, explain=False)
    taken_s = time.perf_counter() - start_s
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    assert result.best is not None
    space = result.space
    return {"taken_s": taken_s, "peak_bytes": peak * 1024, "total": space.total, "bounded": space.bounded,
            "timed": space.timed, "best_s": result.best.step_time_s}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(_measured(*sys.argv[1:])))
