"""Speed of one prediction, and of one truncated evaluation of a search."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.table import BenchmarkRow
from simplan import catalog
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.step_summary import evaluate_step
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
    "gpt3-175b torch interleaved_1f1b": 0.5,
    "gpt3-175b torchtitan interleaved_1f1b": 0.5,
    "gpt3-175b megatron-lm-2022 interleaved_1f1b": 0.5,
    "gpt3-175b megatron-core interleaved_1f1b": 0.5,
    "gpt3-175b megatron-bridge interleaved_1f1b": 0.5,
    "gpt3-175b nemo interleaved_1f1b": 0.5,
    "llama3.1-405b megatron-core 1f1b": 0.5,
    "deepseek-moe-16b megatron-core none": 0.05,
}
_TRUNCATED_S = 0.015


def predict_speed() -> list[BenchmarkRow]:
    """Rows for CPU seconds of a warm ``predict`` with memory and interval, and of a truncated step with memory."""
    rows = []
    for name, goal_s in _GOALS_S.items():
        job = _job(*name.split())
        truncated = _row(f"truncated step with memory {name}", _TRUNCATED_S, partial(evaluate_step, job))
        rows += [_row(f"predict {name}", goal_s, partial(predict, job)), truncated]
    return rows


def _job(size: str, framework: str, schedule: str) -> Job:
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


def _row(what: str, goal_s: float, run: Callable[[], object]) -> BenchmarkRow:
    run()  # once, to warm caches
    seconds = []
    for _ in range(_ROUNDS):
        start_s = time.process_time()
        run()
        seconds.append(time.process_time() - start_s)
    middle_s = statistics.median(seconds)
    found = f"{middle_s:.3f} s (of {_ROUNDS} {min(seconds):.3f} to {max(seconds):.3f})"
    return BenchmarkRow(what, f"at most {goal_s} s", found, middle_s <= goal_s)
