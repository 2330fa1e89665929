"""Speed of one prediction, and of one truncated evaluation of a search, each job in a process of its own.

``python -m benchmarks.predict_speed MODEL FRAMEWORK SCHEDULE`` measures one job and prints the result as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.alone import alone, peak_bytes
from benchmarks.table import BenchmarkRow
from simplan import catalog
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.step_summary import evaluate_step
from simplan.sim.compiled import load_compiled
from simplan.training import TrainingSpec

_ROUNDS = 5
_GOALS_S = {
    "gpt3-175b torch 1f1b": 0.25,
    "gpt3-175b megatron-lm-2022 1f1b": 0.25,
    "gpt3-175b megatron-core 1f1b": 0.25,
    "gpt3-175b megatron-deepspeed 1f1b": 0.25,
    "gpt3-175b megatron-bridge 1f1b": 0.25,
    "gpt3-175b nemo 1f1b": 0.25,
    "gpt3-175b maxtext 1f1b": 0.25,
    "gpt3-175b torch interleaved_1f1b": 0.1,
    "gpt3-175b torchtitan interleaved_1f1b": 0.1,
    "gpt3-175b megatron-lm-2022 interleaved_1f1b": 0.1,
    "gpt3-175b megatron-core interleaved_1f1b": 0.1,
    "gpt3-175b megatron-bridge interleaved_1f1b": 0.1,
    "gpt3-175b nemo interleaved_1f1b": 0.1,
    "llama3.1-405b megatron-core 1f1b": 0.5,
    "deepseek-moe-16b megatron-core none": 0.05,
}
_TRUNCATED_S = 0.015


def predict_speed() -> Iterator[BenchmarkRow]:
    """Rows for CPU seconds of predictions with memory and interval, cold and warm, and of truncated steps with memory.

    A first prediction runs in whatever engine suits one prediction. Warm ones run after the compiled engine was loaded,
    as in a search.
    """
    for name, goal_s in _GOALS_S.items():
        result = alone("benchmarks.predict_speed", *name.split())
        yield BenchmarkRow(
            f"first predict of a process {name}",
            "",
            f"{result['first_s']:.3f} s, {result['import_s'] + result['first_s']:.3f} s with imports; the second "
            f"{result['second_s']:.3f} s; {result['first_bytes'] / 2**20:.0f} MiB",
            ok=True,
        )
        memory = f"; {result['peak_bytes'] / 2**20:.0f} MiB"
        yield _row(f"predict {name}", goal_s, result["predict_s"], memory)
        yield _row(f"truncated step with memory {name}", _TRUNCATED_S, result["truncated_s"])


def _row(what: str, goal_s: float, seconds: list[float], more: str = "") -> BenchmarkRow:
    middle_s = statistics.median(seconds)
    time_text = f"{middle_s:.3f} s (of {_ROUNDS} {min(seconds):.3f} to {max(seconds):.3f}){more}"
    return BenchmarkRow(what, f"at most {goal_s} s", time_text, middle_s <= goal_s)


def _measured(size: str, framework: str, schedule: str) -> dict[str, Any]:
    """CPU seconds and peak memory in this process, which has predicted nothing before."""
    import_s = time.process_time()  # of the interpreter and all modules
    job = job_of(size, framework, schedule)
    first_s, second_s = (_cpu_s(partial(predict, job)) for _ in range(2))
    first_bytes = peak_bytes()
    load_compiled()
    warm = {
        "predict_s": cpu_seconds(partial(predict, job), _ROUNDS),
        "truncated_s": cpu_seconds(partial(evaluate_step, job), _ROUNDS),
    }
    cold = {"import_s": import_s, "first_s": first_s, "second_s": second_s, "first_bytes": first_bytes}
    return {**cold, **warm, "peak_bytes": peak_bytes()}


def cpu_seconds(run: Callable[[], object], rounds: int) -> list[float]:
    """CPU seconds of each round, after one that warms caches."""
    return [_cpu_s(run) for _ in range(rounds + 1)][1:]


def _cpu_s(run: Callable[[], object]) -> float:
    start_s = time.process_time()
    run()
    return time.process_time() - start_s


def job_of(size: str, framework: str, schedule: str) -> Job:
    """Job of a large model, or of experts on one node."""
    fields: dict[str, Any]
    model = catalog.model(size)
    if size == "gpt3-175b":
        model = model.model_copy(update={"vocab_size": 51200, "tied_embeddings": False})
        cluster, batch = catalog.cluster("dgx-a100-80gb", 1024), 1536
        fields = {"tp": 8, "pp": 8, "recompute": "selective"}
    elif size == "llama3.1-405b":
        cluster, batch, fields = catalog.cluster("dgx-h100", 16384), 2048, {"tp": 8, "pp": 16}
    else:
        cluster, batch, fields = catalog.cluster("dgx-h100", 8), 16, {"ep": 8}
    if framework == "megatron-deepspeed":
        fields["sequence_parallel"] = False
    if schedule != "none":
        fields |= {"schedule": schedule, "virtual_stages": 3 if schedule == "interleaved_1f1b" else 1}
    replicas = cluster.num_devices // (fields.get("tp", 1) * fields.get("pp", 1))
    sharded = framework in ("torch", "torchtitan") and schedule == "interleaved_1f1b"  # DDP has one stage a rank
    fields |= {"dp_shard": replicas, "zero_stage": 2} if sharded else {"dp_replicate": replicas}
    training = TrainingSpec(global_batch_size=batch)
    return Job(model, cluster, training, ParallelPlan(**fields), catalog.software(framework))


if __name__ == "__main__":
    print(json.dumps(_measured(*sys.argv[1:])))
