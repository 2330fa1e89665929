"""What is not modelled of optimizers and of clipped gradients."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.optimizer import LAYERWISE
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["unmodelled_optimizers"]


def unmodelled_optimizers(training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Norms over parameters and gradients of which ranks have parts in ways that are not written out."""
    asked = []
    if training.clip_grad_norm is not None:
        asked.append(("training.clip_grad_norm", f"{training.clip_grad_norm:g}", "clipping", "leave it out"))
    if training.optimizer in LAYERWISE:
        asked.append(("training.optimizer", training.optimizer, "it", "use adamw"))
        if plan.offload_optimizer:
            rule = "with states of one layer after the other on the device (plan.offload_optimizer) is not modelled yet"
            yield Problem(field="training.optimizer", value=training.optimizer, rule=rule, fix="use adamw")
    for field, value, what, fix in asked:
        if plan.ep > 1:
            rule = f"{what} with experts that are split over ranks (plan.ep = {plan.ep}) is not modelled yet"
            yield Problem(field=field, value=value, rule=rule, fix=fix)
        if software.optimizer_shards == "elements":
            rule = f"{what} with {software.id}, whose ranks update parts of flat buffers, is not modelled yet"
            yield Problem(field=field, value=value, rule=rule, fix=fix)
