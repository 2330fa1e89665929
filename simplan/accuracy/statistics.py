"""Error figures over published runs, memory verdicts, and the constant-MFU baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simplan.accuracy.outcome import RunOutcome
from simplan.job import Job
from simplan.model.layer import Attention, Gemm, LayerKind
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation, recompute_of
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.plan.schedules import stage_ranks
from simplan.prediction import MemoryKind
from simplan.program.tables.partition import assign_stage_layers, balanced_assignment


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Figures of relative errors (predicted over measured, minus 1), as fractions; None without runs.

    Attributes:
        mape: Mean absolute error.
        median_ape, p90_ape, max_ape: Median, 90th percentile (linear interpolation) and maximum of absolute errors.
        bias: Mean signed error: positive if predictions are too long, or too large.
    """

    num: int
    mape: float | None = None
    median_ape: float | None = None
    p90_ape: float | None = None
    max_ape: float | None = None
    bias: float | None = None

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorFigures:
        """Compute the figures of errors."""
        if not errors:
            return cls(0)
        sizes = np.abs(errors)
        return cls(
            num=len(errors),
            mape=float(sizes.mean()),
            median_ape=float(np.median(sizes)),
            p90_ape=float(np.percentile(sizes, 90)),
            max_ape=float(sizes.max()),
            bias=float(np.mean(errors)),
        )


@dataclass(frozen=True, slots=True)
class IntervalFigures:
    """Errors of predictions, and coverage and width of their 90% intervals.

    Attributes:
        interval_coverage: Fraction of measurements inside their intervals; None without any.
        median_interval_half_width: Median of half the interval width over the prediction; None without any.
    """

    errors: ErrorFigures
    interval_coverage: float | None
    median_interval_half_width: float | None

    @classmethod
    def of(cls, errors: Sequence[float], covered: Sequence[bool], half_widths: Sequence[float]) -> IntervalFigures:
        """Compute the figures; predictions without an interval have an error only."""
        return cls(
            ErrorFigures.of(errors),
            float(np.mean(covered)) if covered else None,
            float(np.median(half_widths)) if half_widths else None,
        )

    def to_json(self) -> dict[str, Any]:
        """As a part of the JSON document."""
        figures = asdict(self)
        errors: dict[str, Any] = figures.pop("errors")
        return errors | figures


def step_time_figures(outcomes: Iterable[RunOutcome]) -> IntervalFigures:
    """Figures of the runs with a measured and a predicted step time."""
    errors, covered, half_widths = [], [], []
    for outcome in outcomes:
        if outcome.error is None:
            continue
        errors.append(outcome.error)
        if outcome.predicted is not None and outcome.predicted.step_time_interval_s is not None:
            low_s, high_s = outcome.predicted.step_time_interval_s
            covered.append(bool(outcome.in_interval))
            half_widths.append((high_s - low_s) / 2 / outcome.predicted.step_time_s)
    return IntervalFigures.of(errors, covered, half_widths)


def memory_figures(outcomes: Iterable[RunOutcome]) -> dict[str, IntervalFigures]:
    """Figures of the runs with a measured peak: ``all`` counts each run once; the others are by kind of figure."""
    peaks: dict[str, list[tuple[RunOutcome, MemoryKind, float]]] = {"all": []}
    for outcome in outcomes:
        errors = outcome.memory_errors
        peaks["all"] += [(outcome, kind, error) for kind, error in [*errors.items()][:1]]
        for kind, error in errors.items():
            peaks.setdefault(kind, []).append((outcome, kind, error))
    return {name: _memory_figures(of_kind) for name, of_kind in peaks.items()}


def _memory_figures(peaks: Sequence[tuple[RunOutcome, MemoryKind, float]]) -> IntervalFigures:
    covered, half_widths = [], []
    for outcome, kind, _ in peaks:
        interval_gib = outcome.memory_interval_gib(kind)
        if outcome.predicted is not None and interval_gib is not None:
            covered.append(bool(outcome.in_memory_interval(kind)))
            half_widths.append((interval_gib[1] - interval_gib[0]) / 2 / outcome.predicted.memory_gib[kind])
    return IntervalFigures.of([error for _, _, error in peaks], covered, half_widths)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Counts of correct and wrong out-of-memory predictions.

    Attributes:
        fit, oom: Correct predictions of runs that fit, and of runs out of memory.
        missed: Runs out of memory that were predicted to fit.
        false_alarms: Runs that fit and were predicted not to.
        unknown: Runs without a verdict, since the device memory is unknown.
    """

    fit: int = 0
    oom: int = 0
    missed: int = 0
    false_alarms: int = 0
    unknown: int = 0

    @property
    def right(self) -> float | None:
        """Fraction of correct verdicts; None without verdicts."""
        total = self.fit + self.oom + self.missed + self.false_alarms
        return (self.fit + self.oom) / total if total else None

    def to_json(self) -> dict[str, Any]:
        """As a part of the JSON document."""
        return {"right": self.right, **asdict(self)}


def verdicts(outcomes: Iterable[RunOutcome]) -> Verdicts:
    """Count the verdicts on runs whose memory was predicted."""
    counts: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        if outcome.predicted is None or not outcome.predicted.memory_gib:
            continue
        foretold, true = outcome.predicted.oom, outcome.run.measured.oom
        if foretold is None:
            counts["unknown"] += 1
        elif foretold == true:
            counts["oom" if true else "fit"] += 1
        else:
            counts["missed" if true else "false_alarms"] += 1
    return Verdicts(**counts)


def step_flops(job: Job) -> float:
    """FLOPs of a step: model FLOPs with causal attention counted half, plus recomputed FLOPs.

    Full recomputation counts as one more forward of all blocks, as is usual, although the last GEMM need not be
    recomputed. If only some blocks per stage are recomputed, stages have equal FLOPs unless the plan sets
    ``stage_layers``.
    """
    layers, plan = job.model.layers, job.plan
    assignment = _assignment(job.model, plan)
    again = 0
    for number, layer in enumerate(layers):
        mode = recompute_of(layer, plan, assignment.place(number))
        if layer.kind is LayerKind.BLOCK and mode != "none":
            indices = recomputation(layer, mode, number - 1, plan.recompute_modules).kernels
            kernels = layer.kernels if mode == "full" else [layer.kernels[index] for index in indices]
            again += sum(kernel.flops for kernel in kernels if isinstance(kernel, Gemm | Attention))
    num_sequences = job.training.global_batch_size * job.training.sequences_per_sample
    return float(num_sequences * (job.model.flops_per_sequence() + again))


def _assignment(model: ModelSpec, plan: ParallelPlan) -> StageAssignment:
    if plan.recompute_layers is None:  # all blocks count the same, regardless of the stage
        return StageAssignment((0, len(model.layers)))
    if plan.stage_layers is not None:
        return assign_stage_layers(plan.stage_layers, model.num_last_layers)
    ranks = stage_ranks(plan.schedule, plan.pp, plan.num_stages)
    return balanced_assignment([layer.flops() for layer in model.layers], plan.num_stages, model.num_last_layers, ranks)


def constant_mfu(outcomes: Iterable[RunOutcome]) -> ErrorFigures:
    """Errors of FLOPs / (devices x rate), with one rate per file, device and precision: the median over its runs.

    The rate is the device peak times a constant utilization. A predictor that does not beat this baseline shows no
    knowledge of plans.
    """
    rates: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        run, measured_s = outcome.run, outcome.run.measured.step_time_s
        if outcome.predicted is not None and measured_s is not None:
            job = run.known_job
            rate = outcome.predicted.flops / job.cluster.num_devices / measured_s
            rates[outcome.file, job.cluster.device.id, job.training.precision].append(rate)
    # predicted over measured time: work / median, over work / own
    return ErrorFigures.of([float(run_rate / np.median(group)) - 1 for group in rates.values() for run_rate in group])
