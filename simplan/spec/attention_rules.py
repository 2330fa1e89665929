"""What must hold where the attention core is in 8 bits (Transformer Engine's ``fp8_dpa``)."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["unmodelled_low_attention"]

_FAMILIES = ("llama", "moe", "deepseek")
_WITHOUT = "or fp8_dot_product_attention: false"


def unmodelled_low_attention(
    model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec
) -> Iterator[Problem]:
    """What has no effect, and what is not modelled; nothing where attention is in 16 bits."""
    if not software.fp8_dot_product_attention:
        return
    if training.precision not in ("fp8", "mxfp8"):
        rule = f"is for training.precision = fp8 and mxfp8, and it is {training.precision}"
        yield _problem(rule, "use one of them, " + _WITHOUT)
        return
    if training.precision not in cluster.device.kernels.low_attention:
        rule = f"on {cluster.device.id} is not modelled yet: nobody published its rate in {training.precision} there"
        yield _problem(rule, f"use b200-sxm, gb200, b300-sxm or gb300, {_WITHOUT}")
    if model.family not in _FAMILIES:
        rule = f"of the family {model.family} is not modelled yet"
        yield _problem(rule, f"models: {', '.join(_FAMILIES)}; {_WITHOUT}")
    if model.document_lengths:
        rule = "of packed documents (model.document_lengths) is not modelled yet"
        yield _problem(rule, "remove them, " + _WITHOUT)
    if plan.cp > 1:
        yield _problem(f"with plan.cp = {plan.cp} is not modelled yet: keys are exchanged", "use cp = 1, " + _WITHOUT)


def _problem(rule: str, fix: str) -> Problem:
    return Problem(field="software.fp8_dot_product_attention", value="true", rule=rule, fix=fix)
