"""What is not modelled of optimizers and of clipped gradients."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.model import ModelSpec
from simplan.spec.optimizer import LAYERWISE
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["unmodelled_optimizers"]

_TORCH_OPTIMIZERS = frozenset({"torch", "torchtitan", "torchtitan-2025"})
"""Software whose optimizers are torch.optim's."""


def unmodelled_optimizers(
    model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec
) -> Iterator[Problem]:
    """Norms over parameters and gradients of which ranks have parts in ways that are not written out; other kernels."""
    yield from _other_kernels(training, plan, software)
    asked = []
    if training.clip_grad_norm is not None:
        asked.append(("training.clip_grad_norm", f"{training.clip_grad_norm:g}", "clipping", "leave it out"))
    if training.optimizer in LAYERWISE:
        asked.append(("training.optimizer", training.optimizer, "it", "use adamw"))
        if plan.offload_optimizer:
            rule = "with states of one layer after the other on the device (plan.offload_optimizer) is not modelled yet"
            yield Problem(field="training.optimizer", value=training.optimizer, rule=rule, fix="use adamw")
        if model.num_experts and plan.ep == 1 and plan.shard.experts_apart:
            rule = "with experts that tensor-parallel ranks do not split (plan.etp = 1) is not modelled yet"
            yield Problem(field="training.optimizer", value=training.optimizer, rule=rule, fix="use adamw")
    for field, value, what, fix in asked:
        if plan.ep > 1:
            rule = f"{what} with experts that are split over ranks (plan.ep = {plan.ep}) is not modelled yet"
            yield Problem(field=field, value=value, rule=rule, fix=fix)
        if software.optimizer_shards == "elements":
            rule = f"{what} with {software.id}, whose ranks update parts of flat buffers, is not modelled yet"
            yield Problem(field=field, value=value, rule=rule, fix=fix)


def _other_kernels(training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """``training.fused_optimizer`` where it says nothing, or nobody wrote out what it means."""
    if training.fused_optimizer is None:
        return
    value = str(training.fused_optimizer).lower()
    rule = ""
    if training.optimizer in LAYERWISE:
        rule = f"is of torch's optimizers, and {training.optimizer} is none: there is one way to compute its step"
    elif software.id not in _TORCH_OPTIMIZERS:
        rule = f"is of torch's optimizers, and {software.id} has its own"
    elif plan.offload_optimizer and not training.fused_optimizer:
        rule = "with states of one layer after the other on the device (plan.offload_optimizer) is not modelled yet"
    if rule:
        yield Problem(field="training.fused_optimizer", value=value, rule=rule, fix="leave it out")
