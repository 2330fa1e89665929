"""Constant-MFU baseline: errors of one constant utilization, fitted to the same runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.statistics import ErrorFigures
from simplan.job import Job
from simplan.model.layer import Attention, Gemm, LayerKind
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation, recompute_of
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.program.tables.partition import assign_stage_layers, balanced_assignment

__all__ = ["constant_mfu", "step_flops"]


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
    return float(job.training.global_batch_size * (job.model.flops_per_sequence() + again))


def _assignment(model: ModelSpec, plan: ParallelPlan) -> StageAssignment:
    if plan.recompute_layers is None:  # all blocks count the same, regardless of the stage
        return StageAssignment((0, len(model.layers)))
    if plan.stage_layers is not None:
        return assign_stage_layers(plan.stage_layers, model.num_last_layers)
    return balanced_assignment([layer.flops() for layer in model.layers], plan.num_stages, model.num_last_layers)


def constant_mfu(outcomes: Iterable[RunOutcome]) -> ErrorFigures:
    """Errors of FLOPs / (devices x rate), with one rate per file, device and precision: the median over its runs.

    The rate is the device peak times a constant utilization. A predictor that does not beat this baseline shows no
    knowledge of plans.
    """
    rates: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        run, measured_s = outcome.run, outcome.run.measured.step_time_s
        if outcome.predicted is not None and measured_s is not None:
            rate = outcome.predicted.flops / run.cluster.num_devices / measured_s
            rates[outcome.file, run.cluster.device, run.plan.precision].append(rate)
    # predicted over measured time: work / median, over work / own
    return ErrorFigures.of([float(own / np.median(group)) - 1 for group in rates.values() for own in group])
