"""What must hold for a plan that runs single modules, or only some blocks, again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from simplan.errors import Problem
from simplan.spec.layer import LayerKind
from simplan.spec.model import ModelSpec
from simplan.spec.numbers import either
from simplan.spec.plan import ParallelPlan, RecomputeModule
from simplan.spec.recompute_modules import has_module
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["recompute_rules", "unmodelled_recompute"]

_INSIDE: Mapping[RecomputeModule, RecomputeModule] = MappingProxyType({"moe_act": "moe", "shared_experts": "moe"})
"""Modules that are part of another one."""

_DISCARDED: tuple[RecomputeModule, ...] = ("layernorm", "moe_act")
"""Modules whose output is gone when products in 8 bits have quantized it."""


def recompute_rules(
    model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec
) -> Iterator[Problem]:
    """Plans that cannot be: modules that there are not, and options that have nothing to say something of."""
    if plan.recompute == "full" and software.expert_overlap:
        rule = "would send tokens again that travel beside another microbatch (software.expert_overlap)"
        fix = "use selective with recompute_modules, or expert_overlap = false"
        yield Problem(field="plan.recompute", value="full", rule=rule, fix=fix)
    if plan.recompute_layers is not None and plan.recompute_layers > model.num_blocks:
        rule = f"is more than the {model.num_blocks} blocks of the model"
        yield _layers_problem(plan, rule, "remove it: then all run again")
    if plan.recompute_layers is not None and plan.recompute != "full":
        rule = f"says how many blocks run again in full, and recompute is {plan.recompute}"
        yield _layers_problem(plan, rule, "use recompute = full, or remove it")
    if plan.recompute_modules is None:
        return
    named = f"[{', '.join(plan.recompute_modules)}]"
    field = "plan.recompute_modules"
    if plan.recompute != "selective":
        rule = f"says what selective recomputation runs again, and recompute is {plan.recompute}"
        yield Problem(field=field, value=named, rule=rule, fix="use recompute = selective, or remove it")
        return
    if not plan.recompute_modules or len(set(plan.recompute_modules)) < len(plan.recompute_modules):
        rule = "names a module twice" if plan.recompute_modules else "names no module"
        yield Problem(field=field, value=named, rule=rule, fix="name each module once, or use recompute = none")
    for module in dict.fromkeys(plan.recompute_modules):
        for rule, fix in _against(module, model, training, plan, software):
            yield Problem(field=field, value=module, rule=rule, fix=fix)


def _against(
    module: RecomputeModule, model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, software: SoftwareSpec
) -> Iterator[tuple[str, str]]:
    """Why a module cannot run again alone, and what else would do."""
    blocks = (layer for layer in set(software.layers_of(model, plan)) if layer.kind is LayerKind.BLOCK)
    if not any(has_module(layer, module) for layer in blocks):
        yield "no block of the model has such a module apart", "remove it"
    whole = _INSIDE.get(module)
    if whole in (plan.recompute_modules or ()):
        yield f"is part of {whole}, which runs again", "remove it"
    if module in _DISCARDED and training.precision == "fp8" and training.fp8_recipe == "delayed":
        yield (
            f"does not run again where fp8 has delayed scaling, in {software.id}",
            "remove it, or use another fp8_recipe",
        )
    if module == "moe" and software.expert_overlap:
        rule = "would send tokens again that travel beside another microbatch (software.expert_overlap)"
        yield rule, "use moe_act and shared_experts, or expert_overlap = false"


def unmodelled_recompute(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Plans that the software does not have, or that simplan does not model."""
    if plan.recompute_layers is not None and not software.recompute_layers:
        yield _layers_problem(plan, f"is not modelled for {software.id}: all blocks run again, or none", "remove it")
    if plan.recompute_layers is not None and model.family in ("resnet", "t5"):
        yield _layers_problem(plan, f"is not modelled for the family {model.family}", "remove it")
    known = ("core_attn", *software.recompute_modules)
    for module in plan.recompute_modules or ():
        if module not in known:
            fix = f"use {either(known)}, or software: megatron-core"
            rule = f"{software.id} does not run this module alone again"
            yield Problem(field="plan.recompute_modules", value=module, rule=rule, fix=fix)


def _layers_problem(plan: ParallelPlan, rule: str, fix: str) -> Problem:
    return Problem(field="plan.recompute_layers", value=str(plan.recompute_layers), rule=rule, fix=fix)
