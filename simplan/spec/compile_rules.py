"""What is not modelled, and cannot be run, of compiled blocks."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["unmodelled_compilation"]


def unmodelled_compilation(training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """What torch.compile by block does not go with, as the executor runs it."""
    if not (software.compiled and software.executable):
        return
    facts = SCHEDULE_FACTS.get(plan.schedule)
    if facts is not None and facts.splits_backward:
        rule = "splits backward, and that of a compiled block is one function with both parts"
        fix = "use 1f1b or interleaved_1f1b, or software.compiled = false"
        yield Problem(field="plan.schedule", value=plan.schedule, rule=rule, fix=fix)
    if plan.offload_activations:
        rule = "moves tensors that a compiled block keeps for itself, which is not modelled"
        yield Problem(field="plan.offload_activations", value="true", rule=rule, fix="use software.compiled = false")
    if training.precision in software.low_precision:
        rule = "in compiled blocks is not modelled: casts are fused with what is around them"
        fix = "use bf16, or software.compiled = false"
        yield Problem(field="training.precision", value=training.precision, rule=rule, fix=fix)
