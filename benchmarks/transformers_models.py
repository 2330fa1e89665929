"""Predicted and measured step times and memory peaks of Hugging Face transformers models on two CPU ranks.

Each model is calibrated; then each of its plans is predicted and run immediately. No constant is fitted to these
models.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.table import BenchmarkRow
from executor.calibration.calibrate import calibrate
from executor.run import run_job
from simplan import catalog
from simplan.cost.calibration.format import Calibration, CalibrationRequest, ShapeRequest
from simplan.cost.calibration.store import kinds_needed
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, run_spec_of
from simplan.training import TrainingSpec
from simplan.validate.compare import AT_THIS_SPEED, compare

_SIZES = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 4096, "seq_len": 128}
_LLAMA = {"family": "llama", "num_key_value_heads": 2, "intermediate_size": 688}
_EXPERTS = {"family": "moe", "num_key_value_heads": 2, "moe_intermediate_size": 512, "num_experts": 4, "top_k": 2}
_MODELS = (
    ModelSpec(name="GPT-2", family="gpt", **_SIZES),
    ModelSpec(name="Llama", **_LLAMA, **_SIZES),
    ModelSpec(name="Qwen3", **_LLAMA, **_SIZES, qk_norm="head"),
    ModelSpec(name="Mixtral", **_EXPERTS, **_SIZES),
)
_PLANS = {
    "DDP": ParallelPlan(dp_replicate=2, microbatch_size=2),
    "FSDP2": ParallelPlan(dp_shard=2, microbatch_size=2),
    "tensor parallelism": ParallelPlan(tp=2, microbatch_size=2),  # of Llamas
}
_TRAINING = TrainingSpec(global_batch_size=16, precision="fp32")
_CALIBRATION_S = 25.0
_STEPS = 15


def transformers_models() -> Iterator[BenchmarkRow]:
    """One row for the step time and one for the memory peak of each model and plan."""
    if find_spec("transformers") is None:
        yield BenchmarkRow(
            "models of transformers", "", "transformers is not installed: pip install 'simplan[transformers]'", True
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        for model in _MODELS:
            calibration = _calibrated(model)
            for name, plan in _plans(model).items():
                yield from _rows(model, name, plan, calibration, Path(folder) / f"{model.name} {name}")


def _plans(model: ModelSpec) -> dict[str, ParallelPlan]:
    """Plans under which transformers' code of a model runs, by name."""
    return {name: plan for name, plan in _PLANS.items() if plan.tp == 1 or model.family == "llama"}


def _calibrated(model: ModelSpec) -> Calibration:
    plans = _plans(model).values()
    kinds = frozenset().union(*(kinds_needed(plan, model, _TRAINING) for plan in plans))
    shapes = tuple(
        ShapeRequest(model=model, shard=shard, microbatch_size=2, model_code="transformers")
        for shard in dict.fromkeys(plan.shard for plan in plans)
    )
    request = CalibrationRequest(
        shapes=shapes, num_ranks=2, budget_s=_CALIBRATION_S, communication=tuple(sorted(kinds))
    )
    return calibrate(request)


def _rows(
    model: ModelSpec, name: str, plan: ParallelPlan, calibration: Calibration, folder: Path
) -> Iterator[BenchmarkRow]:
    cluster = catalog.cluster("this-machine", num_devices=2)
    job = Job(model, cluster, _TRAINING, plan, catalog.software("transformers"))
    prediction = predict(job, name=f"{model.name} {name}", calibration=calibration)
    run = run_job(run_spec_of(prediction, num_steps=_STEPS, num_warmup_steps=2, device="cpu"), folder)
    comparison = compare(prediction, run)
    predicted_s, measured_s = prediction.step_time_s, statistics.median(run.step_times_s)
    at_this_speed = next((row for row in comparison.rows if row.name == AT_THIS_SPEED), None)
    also = "" if at_this_speed is None else f", {_found(at_this_speed.predicted, measured_s)} at the speed of the run"
    yield BenchmarkRow(
        f"step time, {model.name} {name}",
        "",
        f"predicted {_found(predicted_s, measured_s)}{also}, measured {1e3 * measured_s:.0f} ms "
        f"({1e3 * min(run.step_times_s):.0f} to {1e3 * max(run.step_times_s):.0f})",
        True,
    )
    (peak,) = (row for row in comparison.rows if row.name.startswith("peak memory, allocated"))
    yield BenchmarkRow(
        f"peak memory, {model.name} {name}",
        "at most 5 %",
        f"predicted {1024 * peak.predicted:.1f} MiB, measured {1024 * peak.measured:.1f} MiB: "
        f"{peak.predicted / peak.measured - 1:+.1%}",
        abs(peak.predicted / peak.measured - 1) <= 0.05,
    )
    yield BenchmarkRow(
        f"actions and collectives, {model.name} {name}",
        "as predicted",
        "as predicted" if comparison.structure_equal else "differ",
        comparison.structure_equal,
    )


def _found(predicted_s: float, measured_s: float) -> str:
    return f"{1e3 * predicted_s:.0f} ms ({predicted_s / measured_s - 1:+.1%})"
