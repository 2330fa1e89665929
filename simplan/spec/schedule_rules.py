"""What must hold between a plan's stages, their schedule and the framework that runs it."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.model import ModelSpec
from simplan.spec.numbers import either
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import REFUSED_SCHEDULES, SCHEDULE_FACTS, is_own_schedule
from simplan.spec.software import SoftwareSpec

__all__ = ["schedule_rules", "stage_rules"]


def schedule_rules(plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Schedules that there are not, or that do not go with the rest of the plan."""
    name = plan.schedule
    if plan.pp > 1 and name == "none":
        yield Problem(
            field="plan.schedule",
            value="none",
            rule=f"a pipeline of {plan.pp} ranks needs a schedule",
            fix=f"use {either(SCHEDULE_FACTS)}",
        )
    if plan.pp == 1 and name != "none":
        yield Problem(
            field="plan.schedule",
            value=name,
            rule="must be none when pp = 1: there is no pipeline",
            fix="remove it, or use pp = 2 or more",
        )
    if plan.virtual_stages > 1 and plan.pp == 1:
        yield Problem(
            field="plan.virtual_stages",
            value=str(plan.virtual_stages),
            rule="must be 1 when pp = 1: there is no pipeline",
            fix="remove it, or use pp = 2 or more",
        )
    if name == "none" or name in REFUSED_SCHEDULES or plan.pp == 1:
        return
    if is_own_schedule(name):  # what it takes shows in its table
        return
    yield from _virtual_stages_rules(plan)
    if SCHEDULE_FACTS[name].splits_backward:
        yield from _split_rules(plan, software)


def _virtual_stages_rules(plan: ParallelPlan) -> Iterator[Problem]:
    wanted = SCHEDULE_FACTS[plan.schedule].virtual_stages
    if wanted is None and plan.virtual_stages == 1:
        yield Problem(
            field="plan.virtual_stages",
            value="1",
            rule="interleaving needs several stages on a rank",
            fix="use virtual_stages = 2 or more, or schedule = 1f1b",
        )
    elif wanted == 1 and plan.virtual_stages > 1:
        yield Problem(
            field="plan.schedule",
            value=plan.schedule,
            rule=f"takes one stage a rank, and virtual_stages = {plan.virtual_stages}",
            fix="use interleaved_1f1b, or virtual_stages = 1",
        )
    elif wanted is not None and plan.virtual_stages != wanted:
        yield Problem(
            field="plan.virtual_stages",
            value=str(plan.virtual_stages),
            rule=f"must be {wanted} with {plan.schedule}, which goes down the ranks and back up",
            fix="remove it",
        )


def _split_rules(plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """A backward in two parts: first the gradients that other stages wait for, later those of weights."""
    name = plan.schedule
    if plan.recompute not in ("none", "selective"):
        yield Problem(
            field="plan.recompute",
            value=plan.recompute,
            rule=f"would run layers again in both parts of a backward, which {name} splits in two",
            fix="use none or selective, or schedule = 1f1b",
        )
    if plan.recompute_modules not in (None, ("core_attn",)):
        yield Problem(
            field="plan.recompute_modules",
            value=f"[{', '.join(plan.recompute_modules or ())}]",
            rule=f"would run modules again in both parts of a backward, which {name} splits in two",
            fix="remove it, or use schedule = 1f1b",
        )
    in_torch = software.framework == "torch"
    if plan.shards_parameters and plan.zero_stage == 3 and plan.reshard_after_forward:
        yield Problem(
            field="plan.reshard_after_forward",
            value="true",
            rule=f"torch loses the gradients of parameters that are resharded when a backward is split ({name})"
            if in_torch
            else f"with a split backward ({name}) is not modelled for {software.id}",
            fix="use reshard_after_forward = false",
        )
    if plan.dp * plan.cp > 1 and not plan.shards_parameters and not software.ddp_splits:
        yield Problem(
            field="plan.schedule",
            value=name,
            rule="splits backward, and torch's DistributedDataParallel does not reduce what a split backward makes"
            if in_torch
            else f"splits backward, which is not modelled for {software.id} where parameters are whole",
            fix=f"use dp_shard = {plan.dp} and dp_replicate = 1 with zero_stage = 2, or schedule = 1f1b",
        )


def stage_rules(model: ModelSpec, plan: ParallelPlan) -> Iterator[Problem]:
    """Stages that cannot have a layer each, or that do not have all of them."""
    layers, stages = model.num_blocks, plan.num_stages
    named = f"num_hidden_layers = {layers}" if layers == model.num_hidden_layers else f"the {layers} blocks"
    split = plan.stage_layers or (1,)
    alone = (split[0] == 0) + (len(split) > 1 and split[-1] == 0)  # stages of the embedding or the head
    if stages > layers + alone:
        yield Problem(
            field="plan.pp" if plan.virtual_stages == 1 else "plan.virtual_stages",
            value=str(plan.pp if plan.virtual_stages == 1 else plan.virtual_stages),
            rule=f"{stages} stages must be at most {named}",
            fix=f"use at most {layers}" if plan.virtual_stages == 1 else "use fewer stages",
        )
    if plan.stage_layers is not None:
        yield from _stage_layers_rules(plan.stage_layers, stages, layers, named)


def _stage_layers_rules(stage_layers: tuple[int, ...], stages: int, layers: int, named: str) -> Iterator[Problem]:
    shown = f"[{', '.join(str(n) for n in stage_layers[:16])}{', ...' if len(stage_layers) > 16 else ''}]"
    balanced = [layers // stages + (stage < layers % stages) for stage in range(min(stages, 16))]
    example = f"e.g. [{', '.join(str(n) for n in balanced)}{', ...' if stages > 16 else ''}], or remove it"
    if len(stage_layers) != stages:
        rule = f"has {len(stage_layers)} entries and the plan has {stages} stages"
        yield Problem(field="plan.stage_layers", value=shown, rule=rule, fix=example)
    elif 0 in stage_layers[1:-1]:
        rule = "has a stage without layers between others; only the first and the last have something else"
        yield Problem(field="plan.stage_layers", value=shown, rule=rule, fix=example)
    elif sum(stage_layers) != layers:
        rule = f"sums to {sum(stage_layers)} and the model has {named}"
        yield Problem(field="plan.stage_layers", value=shown, rule=rule, fix=example)
