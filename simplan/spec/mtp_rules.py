"""What must hold where a model has layers for multi-token prediction (``simplan.spec.models.mtp``)."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.model import ModelSpec
from simplan.spec.numbers import either, nearest_divisors
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS, is_own_schedule
from simplan.spec.software import SoftwareSpec

__all__ = ["mtp_rules", "unmodelled_mtp"]

_FIELD = "model.mtp_num_layers"


def mtp_rules(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Plans that cannot split such a layer, and more of them than Megatron Core lets go with ``expert_overlap``.

    (NVIDIA/Megatron-LM at d98e8a6, megatron/core/transformer/transformer_config.py.)
    """
    if software.expert_overlap and model.mtp_num_layers > 1:
        rule = "must be at most 1 with software.expert_overlap"
        fix = "use 1, or software.expert_overlap = false"
        yield Problem(field=_FIELD, value=str(model.mtp_num_layers), rule=rule, fix=fix)
    if model.mtp_num_layers and model.hidden_size % plan.tp:
        yield Problem(
            field="plan.tp",
            value=str(plan.tp),
            rule=f"must divide model.hidden_size = {model.hidden_size}, the columns of a projection that ranks split "
            "(mtp_num_layers)",
            fix=f"use {either(nearest_divisors(model.hidden_size, plan.tp))}",
        )


def unmodelled_mtp(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Software that does not train such layers, or plans with which simplan does not model them."""
    if not model.mtp_num_layers:
        return
    if not software.mtp:
        what = f"multi-token prediction with {software.id}"
        yield _not_modelled(_FIELD, model.mtp_num_layers, what, "use 0, or software: megatron-core")
    facts = SCHEDULE_FACTS.get(plan.schedule)
    for field, value, holds, what, fix in (
        ("model.lora_rank", model.lora_rank, model.lora_rank > 0, "adapters", "use 0"),
        ("plan.zero_stage", plan.zero_stage, plan.shards_parameters, "sharding of parameters", "use 0 or 1"),
        (
            "plan.schedule",
            plan.schedule,
            is_own_schedule(plan.schedule) or (facts is not None and facts.splits_backward),
            "a schedule of your own, or with a backward in two parts,",
            "use 1f1b or interleaved_1f1b",
        ),
        ("plan.offload_activations", "true", plan.offload_activations, "activations on the host", "remove it"),
    ):
        if holds:
            yield _not_modelled(field, value, f"{what} beside {_FIELD} = {model.mtp_num_layers}", fix)


def _not_modelled(field: str, value: object, what: str, fix: str) -> Problem:
    return Problem(field=field, value=str(value), rule=f"{what} is not modelled yet", fix=fix)
