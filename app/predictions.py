"""Predictions of the text of a scenario, and their key numbers; functions of a text run in worker processes.

Functions of a scenario raise a SpecError if the scenario is wrong, or if the cost model has no estimate for the plan.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from simplan.cost.calibration.format import Calibration
from simplan.cost.calibration.store import default_path, load
from simplan.explain import Explanation, explain
from simplan.goodput.engines.simulate import one_run
from simplan.goodput.result import GoodputResult
from simplan.io import json_text
from simplan.job import Job
from simplan.predict import Simulated, predict_step
from simplan.predict.memory import device_memory
from simplan.prediction import (
    MemoryVerdict,
    Prediction,
    RankMemory,
    TrainingRun,
    memory_verdict,
    training_run,
    worst_memory,
)
from simplan.program.program import gc_paused
from simplan.report.drawings.run_timeline import RunTimeline, run_timeline
from simplan.report.trace import predicted_trace, run_trace
from simplan.scenario import Scenario, parse_scenario
from simplan.scenario.whole_run.goodput import goodput_of
from simplan.search.fixes import Fix, fixes


@lru_cache(maxsize=4)
def predicted_step(text: str, calibrated_at: int) -> tuple[Prediction, Simulated]:
    """Prediction of a scenario together with the simulated step.

    Args:
        text: The scenario's YAML.
        calibrated_at: Modification time of this machine's calibration, a cache key; 0 without a calibration.
    """
    scenario = parse_scenario(text)
    prediction, simulated = predict_step(scenario.job, name=scenario.name, calibration=calibration_of(scenario))
    return prediction.with_budget(scenario.budget), simulated


def predicted(text: str, calibrated_at: int) -> Prediction:
    """Prediction of a scenario, with its timeline; for arguments see ``predicted_step``."""
    return predicted_step(text, calibrated_at)[0]


def prediction_text(text: str, calibrated_at: int) -> str:
    """Output file of ``simplan predict``."""
    return json_text(predicted(text, calibrated_at).to_json())


def trace_text(text: str, calibrated_at: int) -> str:
    """Output file of ``simplan trace``."""
    return json_text(predicted_trace(*predicted_step(text, calibrated_at)))


def plan_fixes(text: str, calibrated_at: int) -> tuple[Fix, ...]:
    """Smallest changes with which the plan of a scenario fits; empty if it fits already."""
    return fixes(predicted(text, calibrated_at), calibration_of(parse_scenario(text)))


def goodput_document(text: str, calibrated_at: int, num_runs: int, compares: bool) -> dict[str, Any]:
    """JSON document of ``simplan goodput``, whose seed is the default.

    Args:
        text, calibrated_at: See ``predicted_step``; with the sections of the whole run.
        num_runs, compares: See ``goodput_of``.
    """
    document: dict[str, Any] = json.loads(json_text(_goodput(text, calibrated_at, num_runs, compares).to_json()))
    return document


def simulated_run(text: str, calibrated_at: int, num_runs: int, number: int) -> RunTimeline:
    """Timeline of one of the runs of ``goodput_document``.

    Args:
        text, calibrated_at, num_runs: See ``goodput_document``.
        number: Number of the run, from 0.
    """
    return run_timeline(_goodput(text, calibrated_at, num_runs, compares=True), number)


def simulated_run_trace(text: str, calibrated_at: int, num_runs: int, number: int) -> str:
    """Output file of ``simplan goodput --trace``; for arguments see ``simulated_run``."""
    result = _goodput(text, calibrated_at, num_runs, compares=True)
    return json_text(run_trace(result, one_run(result.setup, seed=result.seed, number=number)))


@lru_cache(maxsize=4)
def _goodput(text: str, calibrated_at: int, num_runs: int, compares: bool) -> GoodputResult:
    scenario = parse_scenario(text)
    return goodput_of(
        scenario,
        prediction=predicted(text, calibrated_at),
        calibration=calibration_of(scenario),
        num_runs=num_runs,
        compares=compares,
    )


@lru_cache(maxsize=8)
def explained(text: str, calibrated_at: int) -> Explanation:
    """Explanation of the plan of a scenario, term by term."""
    return explain(*predicted_step(text, calibrated_at))


def calibration_of(scenario: Scenario) -> Calibration | None:
    """Timings of this machine, if the scenario runs on it."""
    return load(default_path()) if scenario.job.cluster.cores_per_node is not None else None


@dataclass(frozen=True, slots=True)
class Headline:
    """Key numbers of a prediction.

    Attributes:
        job: The job.
        step_time_s: Time of one optimizer step.
        step_time_interval_s: 90 % interval of the step time; None until the full prediction is computed.
        memory: Memory of the peak-memory rank.
        mfu: Model FLOPs utilization, causal attention counted half; None when the peak FLOP/s is unknown.
        least_known: What is known least, as a sentence without a period; empty until the full prediction is computed.
    """

    job: Job
    step_time_s: float
    step_time_interval_s: tuple[float, float] | None
    memory: RankMemory
    mfu: float | None
    least_known: str = ""

    @property
    def memory_verdict(self) -> MemoryVerdict | None:
        """Verdict on the peak memory; None when the capacity is unknown."""
        return memory_verdict(self.memory, self.memory.capacity_bytes)

    @property
    def samples_per_s(self) -> float:
        """Sequences or images per second, all devices together."""
        return self.job.sequences_per_step / self.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, all devices together; 0 for images."""
        return self.samples_per_s * self.job.model.seq_len

    def training(self, budget: float, price: float | None) -> TrainingRun:
        """Days, device-hours and cost to train on a budget, as ``simplan predict`` computes them.

        Args:
            budget: Number of tokens, or of images for models without tokens.
            price: Price per device and hour, in any currency; None for no cost.
        """
        images = self.job.model.sample != "sequence"
        return training_run(
            budget,
            self.step_time_s,
            self.step_time_interval_s,
            tokens_per_step=self.job.sequences_per_step * (1 if images else self.job.model.seq_len),
            num_devices=self.job.cluster.num_devices,
            price_per_device_hour=price,
        )


@gc_paused()
def quick_headline(scenario: Scenario) -> Headline | None:
    """Headline from step time and memory as a search computes them, in milliseconds; None if ranks share cores."""
    from simplan.predict.step_summary import summarized_step

    job = scenario.job
    if job.cluster.cores_per_node is not None:
        return None
    step = summarized_step(job, steps_overlap=False)
    step_time_s = float(step.seconds()[0])
    worst = worst_memory([device_memory(peaks, job, rank=rank) for rank, peaks in step.peaks().items()])
    peak_flop_per_s = job.cluster.peak_flop_per_s.get(job.training.precision)
    flop_per_s = job.flops_per_step() / step_time_s
    return Headline(job, step_time_s, None, worst, None if peak_flop_per_s is None else flop_per_s / peak_flop_per_s)


def headline_of_prediction(prediction: Prediction) -> Headline:
    """Headline from a full prediction."""
    whole = prediction
    least_known = "" if whole.weakest_term is None else whole.weakest_term.fact
    return Headline(
        whole.job, whole.step_time_s, whole.step_time_interval_s, whole.worst_memory, whole.mfu, least_known
    )


_IDLE = 0.3
"""Fraction of the device memory that a plan may leave free before its recomputation is questioned."""


def idle_memory_words(prediction: Prediction) -> str:
    """Advice for a plan that recomputes although much memory is free; empty for other plans."""
    if prediction.capacity_bytes is None or not prediction.fits or prediction.job.plan.recompute == "none":
        return ""
    free = 1 - prediction.worst_memory.device_bytes / prediction.capacity_bytes
    if free < _IDLE:
        return ""
    whole = prediction.job.plan.recompute == "full" and prediction.job.plan.recompute_layers is None
    what = "every block" if whole else "a part of the blocks"
    return (
        f"{free:.0%} of the device memory is free, and the plan recomputes {what} in backward. "
        "**Search** evaluates all plans, and finds the fastest one that fits."
    )
