"""Full predictions of large plans, each in a separate process, and a schedule computed from stage times.

``python -m benchmarks.large_plan`` measures one plan and prints the result as JSON; with a number of ranks, it measures
the plan of this size on a network of shared links.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from benchmarks.alone import alone, peak_bytes
from benchmarks.table import BenchmarkRow
from simplan import catalog
from simplan.cluster.topology import LeafSpine
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import StepContext, build_program, cost_model, predict, predict_step, simulate_program
from simplan.program.schedules import PipelineShape, StageTimes, zb_2p
from simplan.training import TrainingSpec

_ROUNDS = 3
_NUM_RANKS = (256, 1024, 4096, 16384)
_MICROBATCHES = 32


def large_plan() -> list[BenchmarkRow]:
    """Rows for Llama 3 70B, tp 8, pp 4, 32 microbatches: every layer and collective of a step, folded to 4 ranks."""
    runs = [alone("benchmarks.large_plan") for _ in range(_ROUNDS)]
    step_s = statistics.median(run["step_s"] for run in runs)
    predict_s = statistics.median(run["predict_s"] for run in runs)
    most_bytes = max(run["peak_bytes"] for run in runs)
    return [
        BenchmarkRow(
            "Level 2 step of Llama 3 70B, tp 8, pp 4, 32 microbatches, folded: lower, price, simulate",
            "under 3 s, under 1 GiB",
            f"{step_s:.2f} s, {most_bytes / 2**30:.2f} GiB ({runs[0]['ops']:,} operations of {runs[0]['ranks']} "
            f"ranks); the whole prediction with its interval {predict_s:.2f} s (median of {_ROUNDS})",
            step_s < 3 and most_bytes < 2**30,
        ),
        _found_schedule(),
        *_contended_rows(),
    ]


def _contended_rows() -> list[BenchmarkRow]:
    """Rows for all ranks of Llama 3 70B on shared links: the CPU time per operation hardly grows with the cluster."""
    rows: list[BenchmarkRow] = []
    first_s = 0.0
    for num_ranks in _NUM_RANKS:
        run = alone("benchmarks.large_plan", str(num_ranks))
        per_op_s = run["cpu_s"] / run["ops"]
        first_s = first_s or per_op_s
        is_named = num_ranks == 1024
        rows.append(
            BenchmarkRow(
                f"the same without folding on shared links (ECMP), dp {num_ranks // 32}: {num_ranks:,} ranks, CPU time",
                "under 60 s, under 4 GiB" if is_named else "about linear",
                f"{run['cpu_s']:.0f} s, {run['peak_bytes'] / 2**30:.1f} GiB ({run['ops']:,} operations, "
                f"{run['segments']:,} intervals of constant rates); {per_op_s / first_s:.2f} times the CPU time per "
                f"operation of {_NUM_RANKS[0]} ranks",
                per_op_s < 2 * first_s and (not is_named or (run["cpu_s"] < 60 and run["peak_bytes"] < 2**32)),
            )
        )
    return rows


def _found_schedule() -> BenchmarkRow:
    """Row for zb-2p with stage times of a 28.3 B model on 32 A100s (Qi et al. 2024, arXiv:2401.10241, table 6)."""
    shape = PipelineShape(32, 256, times=StageTimes.equal(32, 10.402e-3, 10.248e-3, 7.698e-3, 0.46e-3))
    seconds = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        zb_2p(shape)
        seconds.append(time.perf_counter() - start_s)
    middle_s = statistics.median(seconds)
    time_text = f"{middle_s:.2f} s (of {_ROUNDS} rounds {min(seconds):.2f} to {max(seconds):.2f})"
    return BenchmarkRow("finding zb-2p for p = 32, m = 256", "under 2 s", time_text, middle_s < 2)


def _measured() -> dict[str, Any]:
    model, plan = catalog.model("llama3-70b"), ParallelPlan(tp=8, pp=4)
    cluster, training = catalog.cluster("dgx-h100", num_devices=32), TrainingSpec(global_batch_size=32)
    job = Job(model, cluster, training, plan, catalog.software("torch"))
    start_s = time.perf_counter()
    prediction = predict(job, name="llama3-70b")
    predict_s = time.perf_counter() - start_s
    program, cost = build_program(prediction), cost_model(job, None)
    start_s = time.perf_counter()
    program = build_program(prediction)
    simulate_program(program, cost, StepContext.of(job))
    step_s = time.perf_counter() - start_s
    return {"step_s": step_s, "predict_s": predict_s, "peak_bytes": peak_bytes(), "ops": len(program.ops),
            "ranks": len(program.ranks)}  # fmt: skip


def _contended(num_ranks: int) -> dict[str, Any]:
    """CPU time of a prediction with its interval, of which the longer of two truncated steps has ``ops`` operations."""
    predict_step(_on_shared_links(64))  # compiles, and loads numba
    start_s = time.process_time()
    _, step = predict_step(_on_shared_links(num_ranks))
    cpu_s = time.process_time() - start_s
    assert step.contention is not None
    assert len(step.program.ranks) == num_ranks
    return {"cpu_s": cpu_s, "peak_bytes": peak_bytes(), "ops": len(step.program),
            "segments": len(step.contention.segments.op)}  # fmt: skip


def _on_shared_links(num_ranks: int) -> Job:
    """Llama 3 70B, tp 8, pp 4, on leaf switches of 4 nodes with an oversubscription of 2:1."""
    dp = num_ranks // 32
    topology = LeafSpine(kind="leaf_spine", nodes_per_leaf=4, oversubscription=2, spines=8, routing="ecmp")
    cluster = catalog.cluster("dgx-h100", num_devices=num_ranks).model_copy(update={"topology": topology})
    training, plan = TrainingSpec(global_batch_size=dp * _MICROBATCHES), ParallelPlan(tp=8, pp=4, dp_replicate=dp)
    return Job(catalog.model("llama3-70b"), cluster, training, plan, catalog.software("torch"))


if __name__ == "__main__":
    print(json.dumps(_contended(int(sys.argv[1])) if len(sys.argv) > 1 else _measured()))
