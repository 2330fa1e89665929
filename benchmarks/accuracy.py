"""Predicted and measured step times on this machine's CPU, two ranks.

Rounds alternate: odd ones calibrate, even ones run every plan. The prediction is the median over the calibrations, the
measurement the median over the steps of all runs, so neither has seen the other's data and both saw the same minutes.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.table import Row
from executor.calibrate import calibrate
from executor.run import run_job
from simplan.cost.calibration import Calibration, CalibrationRequest, ShapeRequest
from simplan.cost.kinds import kinds_needed
from simplan.predict import job_of, predict
from simplan.prediction import Prediction
from simplan.program.measurement import Measurement
from simplan.spec import catalogue
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
from simplan.validate.compare import Comparison, compare

__all__ = ["accuracy"]

_NUM_RANKS = 2
_ROUNDS = 6
_CALIBRATION_S = 60.0
_STEPS = 5

_MODELS = (
    ModelSpec(
        name="gpt",
        family="gpt",
        num_hidden_layers=8,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=4096,
        seq_len=128,
    ),
    ModelSpec(
        name="llama",
        family="llama",
        num_hidden_layers=6,
        hidden_size=320,
        num_attention_heads=5,
        num_key_value_heads=5,
        intermediate_size=864,
        vocab_size=4096,
        seq_len=128,
    ),
)
_PLANS = {
    "DDP": ParallelPlan(dp_replicate=2, microbatch_size=2),
    "naive": ParallelPlan(pp=2, schedule="naive", microbatch_size=2),
    "GPipe": ParallelPlan(pp=2, schedule="gpipe", microbatch_size=2),
    "1F1B": ParallelPlan(pp=2, schedule="1f1b", microbatch_size=2),
    "interleaved": ParallelPlan(pp=2, virtual_stages=2, microbatch_size=2),
    "ZeRO-1": ParallelPlan(dp_shard=2, zero_stage=1, microbatch_size=2),
    "ZeRO-2": ParallelPlan(dp_shard=2, zero_stage=2, microbatch_size=2),
    "ZeRO-3": ParallelPlan(dp_shard=2, microbatch_size=2),
    "ZeRO-3, recompute": ParallelPlan(dp_shard=2, microbatch_size=2, recompute="full"),
    "TP": ParallelPlan(tp=2, sequence_parallel=False, microbatch_size=2),
    "TP with SP": ParallelPlan(tp=2, microbatch_size=2),
    "CP all-gather": ParallelPlan(cp=2, cp_comm="all_gather", microbatch_size=2),
    "CP all-to-all": ParallelPlan(cp=2, cp_comm="a2a", microbatch_size=2),
}
_BOTH_MODELS = ("DDP", "naive", "GPipe", "1F1B", "ZeRO-3", "TP with SP")  # the others with one of them
_STAGE_LAYERS = {  # fixed, so that every calibration predicts the split that runs
    ("gpt", 2): (5, 3),
    ("llama", 2): (4, 2),
    ("gpt", 4): (2, 2, 2, 2),
    ("llama", 4): (2, 2, 1, 1),
}
_TRAINING = TrainingSpec(global_batch_size=16, precision="fp32")


@dataclass(frozen=True, slots=True)
class _Case:
    model: ModelSpec
    plan_name: str

    @property
    def name(self) -> str:
        return f"{self.model.name} {self.plan_name}"

    @property
    def plan(self) -> ParallelPlan:
        plan = _PLANS[self.plan_name]
        if plan.pp == 1:
            return plan
        return plan.model_copy(update={"stage_layers": _STAGE_LAYERS[self.model.name, plan.num_stages]})

    def predict(self, calibration: Calibration) -> Prediction:
        return predict(
            self.name,
            self.model,
            catalogue.cluster("this-machine", num_devices=_NUM_RANKS),
            _TRAINING,
            self.plan,
            catalogue.software("torch"),
            calibration,
        )


def accuracy() -> list[Row]:
    """One row per model and plan, and their mean."""
    cases = _cases()
    calibrations: list[Calibration] = []
    runs: dict[str, list[Measurement]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_ROUNDS):
            print(f"accuracy: round {number + 1} of {_ROUNDS}", flush=True)
            if number % 2 == 0:
                calibrations.append(_calibrate(cases))
            else:
                for case in cases:
                    job = job_of(
                        case.predict(calibrations[-1]),
                        num_steps=_STEPS,
                        num_warmup_steps=2,
                        profile_memory=False,
                        device="cpu",
                    )
                    runs[case.name].append(run_job(job, Path(folder) / f"{number} {case.name}"))
    rows, errors, structures, held = [], [], [], []
    for case in cases:
        predictions = [case.predict(calibration) for calibration in calibrations]
        predicted_s = [found.step_time_s for found in predictions]
        measured_s = [seconds for run in runs[case.name] for seconds in run.step_times_s]
        middle_s, truth_s = statistics.median(predicted_s), statistics.median(measured_s)
        error = middle_s / truth_s - 1
        comparisons = [_compared(found, run) for found, run in zip(predictions, runs[case.name], strict=True)]
        errors.append(error)
        structures += [comparison.structure_equal for comparison in comparisons]
        held += [comparison.interval_holds for comparison in comparisons]
        rows.append(
            Row(
                f"step time, {case.name}, 2 ranks",
                "",
                f"predicted {1e3 * middle_s:.0f} ms ({1e3 * min(predicted_s):.0f} to {1e3 * max(predicted_s):.0f}), "
                f"measured {1e3 * truth_s:.0f} ms (p10 to p90 {_p10_to_p90(measured_s)}): {error:+.1%}",
                abs(error) <= 0.12,
            )
        )
    mean = statistics.fmean(abs(error) for error in errors)
    rows.append(
        Row(
            "step time, mean absolute error",
            "at most 12 %",
            f"{mean:.1%} (largest {max(map(abs, errors)):.1%})",
            mean <= 0.12,
        )
    )
    rows.append(
        Row(
            "actions and collectives as predicted",
            "all",
            f"{sum(structures)} of {len(structures)} runs",
            all(structures),
        )
    )
    rows.append(Row("measured step inside the predicted 90 % interval", "", f"{sum(held)} of {len(held)} runs", True))
    return rows


def _cases() -> list[_Case]:
    """Every plan with one of the models in turn, the basic ones with both."""
    return [
        _Case(model, name)
        for number, name in enumerate(_PLANS)
        for model in (_MODELS if name in _BOTH_MODELS else (_MODELS[number % len(_MODELS)],))
    ]


def _calibrate(cases: list[_Case]) -> Calibration:
    shapes = {
        (case.model.name, case.plan.shard): ShapeRequest(model=case.model, shard=case.plan.shard, microbatch_size=2)
        for case in cases
    }
    kinds = frozenset().union(*(kinds_needed(case.plan, case.model) for case in cases))
    request = CalibrationRequest(
        shapes=tuple(shapes.values()),
        num_ranks=_NUM_RANKS,
        budget_s=_CALIBRATION_S,
        communication=tuple(sorted(kinds)),
        matmuls=False,
    )
    return calibrate(request)


def _compared(found: Prediction, run: Measurement) -> Comparison:
    return compare(found.to_json(), run)


def _p10_to_p90(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    tenth = int(0.1 * (len(ordered) - 1))
    return f"{1e3 * ordered[tenth]:.0f} to {1e3 * ordered[-1 - tenth]:.0f}"
