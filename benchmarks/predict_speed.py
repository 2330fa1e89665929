"""One prediction, and one truncated evaluation of a search, beside the same of an earlier commit in one run."""

from __future__ import annotations

import statistics

from benchmarks.before import BEFORE, HERE, checkout, run_in
from benchmarks.table import Row

__all__ = ["predict_speed"]

_ROUNDS = 5
_PROGRAM = """
import json, sys, time
from simplan.predict import predict
from simplan.spec import catalogue
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec

name = sys.argv[1]
size, framework, schedule = name.split()
changes = {"vocab_size": 51200, "tied_embeddings": False}
if size == "gpt3-175b":
    model, cluster = catalogue.model(size).model_copy(update=changes), catalogue.cluster("dgx-a100-80gb", 1024)
    training, fields = TrainingSpec(global_batch_size=1536), {"tp": 8, "pp": 8, "recompute": "selective"}
elif size == "llama3.1-405b":
    model, cluster = catalogue.model(size), catalogue.cluster("dgx-h100", 16384)
    training, fields = TrainingSpec(global_batch_size=2048), {"tp": 8, "pp": 16}
else:
    model, cluster = catalogue.model(size), catalogue.cluster("dgx-h100", 8)
    training, fields = TrainingSpec(global_batch_size=16), {"ep": 8}
if framework == "megatron-deepspeed":
    fields["sequence_parallel"] = False
if schedule != "none":
    fields |= {"schedule": schedule, "virtual_stages": 3 if schedule == "interleaved_1f1b" else 1}
replicas = cluster.num_devices // (fields.get("tp", 1) * fields.get("pp", 1))
sharded = framework in ("torch", "torchtitan") and schedule == "interleaved_1f1b"  # DDP has one stage a rank
fields |= {"dp_shard": replicas, "zero_stage": 2} if sharded else {"dp_replicate": replicas}
plan, software = ParallelPlan(**fields), catalogue.software(framework)
try:
    from simplan.job import Job
    from simplan.predict.step_summary import evaluate_step
    job = Job(model, cluster, training, plan, software)
    whole, truncated = lambda: predict(job), lambda: evaluate_step(job)
except ImportError:
    from simplan.predict.brief import brief_numbers
    asked = model, cluster, training, plan, software
    whole, truncated = lambda: predict("x", *asked), lambda: brief_numbers(*asked)

def seconds(run):
    run()
    found = []
    for _ in range(int(sys.argv[2])):
        start_s = time.process_time()
        run()
        found.append(time.process_time() - start_s)
    return found

evaluation_s = seconds(truncated)
print(json.dumps({"whole_s": seconds(whole), "truncated_s": evaluation_s}))
"""
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


def predict_speed() -> list[Row]:
    """Processor seconds of a warm ``predict`` with memory and interval, and of a truncated step with memory."""
    rows = []
    with checkout(BEFORE) as before:
        for name, goal_s in _GOALS_S.items():
            now, then = (run_in(root, _PROGRAM, name, str(_ROUNDS)) for root in (HERE, before))
            rows.append(_row(f"predict {name}", goal_s, now["whole_s"], then["whole_s"]))
            rows.append(
                _row(f"truncated step with memory {name}", _TRUNCATED_S, now["truncated_s"], then["truncated_s"])
            )
    return rows


def _row(what: str, goal_s: float, now_s: list[float], then_s: list[float]) -> Row:
    middle_s, before_s = statistics.median(now_s), statistics.median(then_s)
    found = (
        f"{middle_s:.3f} s (of {len(now_s)} {min(now_s):.3f} to {max(now_s):.3f}); at {BEFORE} {before_s:.3f} s, "
        f"{before_s / middle_s:.1f} times as long"
    )
    return Row(what, f"at most {goal_s} s", found, middle_s <= goal_s)
