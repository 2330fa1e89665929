"""Rules about pipelines: their stages, their schedules, and a backward in two parts."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS, is_custom_schedule, splits_backward
from simplan.rules.rule import not_modelled, problem_of, rule, unmodelled
from simplan.software.software import SoftwareSpec
from simplan.wording import either, nearest_divisors


@rule("a pipeline needs a schedule, and one rank has none", reads="pp schedule")
def schedule_goes_with_pipeline(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if plan.pp > 1 and plan.schedule == "none":
        sentence = f"a pipeline of {plan.pp} ranks needs a schedule"
        yield problem_of(job, "plan.schedule", sentence, f"use {either(SCHEDULE_FACTS)}")
    if plan.pp == 1 and plan.schedule != "none":
        sentence = "must be none when pp = 1: there is no pipeline"
        yield problem_of(job, "plan.schedule", sentence, "remove it, or use pp = 2 or more")


@rule("virtual_stages must be what the schedule takes", reads="pp virtual_stages schedule")
def virtual_stages_of_schedule(job: Job) -> Iterator[Problem]:
    """Number of virtual stages that a built-in schedule needs; custom schedules define theirs in the action table."""
    plan, facts = job.plan, SCHEDULE_FACTS.get(job.plan.schedule)
    if plan.virtual_stages > 1 and plan.pp == 1:
        sentence = "must be 1 when pp = 1: there is no pipeline"
        yield problem_of(job, "plan.virtual_stages", sentence, "remove it, or use pp = 2 or more")
    if facts is None or plan.pp == 1:
        return
    wanted = facts.virtual_stages
    if wanted is None and plan.virtual_stages == 1:
        sentence = "interleaving needs several stages on a rank"
        yield problem_of(job, "plan.virtual_stages", sentence, "use virtual_stages = 2 or more, or schedule = 1f1b")
    elif wanted == 1 and plan.virtual_stages > 1:
        sentence = f"takes one stage a rank, and virtual_stages = {plan.virtual_stages}"
        yield problem_of(job, "plan.schedule", sentence, "use interleaved_1f1b, or virtual_stages = 1")
    elif wanted is not None and plan.virtual_stages != wanted:
        sentence = f"must be {wanted} with {plan.schedule}, which goes down the ranks and back up"
        yield problem_of(job, "plan.virtual_stages", sentence, "remove it")


@rule("a split backward can recompute the attention core alone", reads="pp schedule recompute recompute_modules")
def split_backward_recompute(job: Job) -> Iterator[Problem]:
    plan = job.plan
    if not _splits(plan):
        return
    if plan.recompute not in ("none", "selective"):
        sentence = f"would recompute layers in both parts of a backward, which {plan.schedule} splits in two"
        yield problem_of(job, "plan.recompute", sentence, "use none or selective, or schedule = 1f1b")
    if plan.recompute_modules not in (None, ("core_attn",)):
        sentence = f"would recompute modules in both parts of a backward, which {plan.schedule} splits in two"
        yield problem_of(job, "plan.recompute_modules", sentence, "remove it, or use schedule = 1f1b")


@rule(
    "torch loses gradients of a split backward with reshard_after_forward",
    outside_torch="a split backward with reshard_after_forward is not modeled",
    reads="pp schedule shards_parameters reshard_after_forward",
)
def split_backward_reshard(job: Job) -> Iterator[Problem]:
    plan, software = job.plan, job.software
    if _splits(plan) and plan.reshards:
        sentence = (
            f"torch loses the gradients of parameters that are resharded when a backward is split ({plan.schedule})"
            if software.runtime != "xla"
            else f"with a split backward ({plan.schedule}) is not modeled for {software.id}"
        )
        yield problem_of(job, "plan.reshard_after_forward", sentence, "use reshard_after_forward = false")


@rule(
    "DistributedDataParallel does not reduce what a split backward makes",
    outside_torch="a split backward of replicas whose parameters are unsharded is not modeled",
    reads="pp schedule dp cp shards_parameters",
)
def split_backward_ddp(job: Job) -> Iterator[Problem]:
    plan, software = job.plan, job.software
    if _splits(plan) and _by_torchs_ddp(plan, software):
        sentence = (
            "splits backward, and torch's DistributedDataParallel does not reduce what a split backward makes"
            if software.runtime != "xla"
            else f"splits backward, which is not modeled for {software.id} where parameters are unsharded"
        )
        fix = f"use dp_shard = {plan.dp} and dp_replicate = 1 with zero_stage = 2, or schedule = 1f1b"
        yield problem_of(job, "plan.schedule", sentence, fix)


@rule("every stage needs a layer", reads="num_stages stage_layers")
def stages_within_layers(job: Job) -> Iterator[Problem]:
    plan, layers = job.plan, job.model.num_blocks
    split = plan.stage_layers or (1,)
    alone = (split[0] == 0) + (len(split) > 1 and split[-1] == 0)  # stages of the embedding or the head
    if plan.num_stages > layers + alone:
        sentence = f"{plan.num_stages} stages must be at most {_blocks(job)}"
        fix = f"use at most {layers}" if plan.virtual_stages == 1 else "use fewer stages"
        if plan.stage_layers is None and plan.num_stages <= layers + 2:
            separate = "embedding" if plan.num_stages == layers + 1 else "embedding and head"
            ends = "[0, 1, ..., 1]" if plan.num_stages == layers + 1 else "[0, 1, ..., 1, 0]"
            fix += f", or stage_layers: {ends} with {layers} ones, for separate stages of {separate}"
        yield problem_of(job, _stages_field(plan), sentence, fix)


@rule("stage_layers must deal out all blocks to all stages", reads="num_stages stage_layers")
def stage_layers_are_all(job: Job) -> Iterator[Problem]:
    stage_layers, stages, layers = job.plan.stage_layers, job.plan.num_stages, job.model.num_blocks
    if stage_layers is None:
        return
    if len(stage_layers) != stages:
        sentence = f"has {len(stage_layers)} entries and the plan has {stages} stages"
    elif 0 in stage_layers[1:-1]:
        sentence = "has a stage without layers between others; only the first and the last have something else"
    elif sum(stage_layers) != layers:
        sentence = f"sums to {sum(stage_layers)} and the model has {_blocks(job)}"
    else:
        return
    balanced = tuple(layers // stages + (stage < layers % stages) for stage in range(min(stages, 17)))
    fix = f"e.g. {_first_16(balanced)}, or remove it"
    yield problem_of(job, "plan.stage_layers", sentence, fix, value=_first_16(stage_layers))


def _first_16(numbers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, numbers[:16]))}{', ...' if len(numbers) > 16 else ''}]"


@rule("stages must divide the blocks: the software has as many in each", reads="num_stages stage_layers")
def stages_equal(job: Job) -> Iterator[Problem]:
    plan, software = job.plan, job.software
    stages, blocks = plan.num_stages, job.model.num_blocks
    if software.uniform_stages == "always" and plan.stage_layers is None and stages <= blocks and blocks % stages:
        value = plan.pp if plan.virtual_stages == 1 else plan.virtual_stages
        sentence = f"{stages} stages must divide the {blocks} blocks of the model: {software.id} has as many in each"
        fix = f"use {either(nearest_divisors(blocks // (stages // value), value))}, or give stage_layers"
        yield problem_of(job, _stages_field(plan), sentence, fix)


@rule(
    "DistributedDataParallel fails with several stages on a rank",
    outside_torch="several stages on a rank of replicas whose parameters are unsharded are not modeled",
    reads="virtual_stages dp cp shards_parameters",
)
def virtual_stages_ddp(job: Job) -> Iterator[Problem]:
    plan, software = job.plan, job.software
    if plan.virtual_stages > 1 and _by_torchs_ddp(plan, software):
        sentence = (
            "torch's DistributedDataParallel fails with several stages on a rank"
            if software.runtime != "xla"
            else f"is not modeled for {software.id} where parameters are unsharded"
        )
        fix = f"use dp_shard = {plan.dp} and dp_replicate = 1 with zero_stage = 3, or virtual_stages = 1"
        yield problem_of(job, "plan.virtual_stages", sentence, fix)


@unmodelled("this schedule is not modeled", reads="schedule")
def schedule_modelled(job: Job) -> Iterator[Problem]:
    if job.plan.schedule == "zb-2p-optsync":
        what = "an optimizer step for which pipeline ranks wait for each other"
        yield not_modelled(job, "plan.schedule", what, "use zb-2p")


@unmodelled("a backward in two parts through experts is not modeled", reads="schedule")
def split_backward_of_experts(job: Job) -> Iterator[Problem]:
    if job.model.num_experts and splits_backward(job.plan.schedule):
        what = "a backward in two parts through experts"
        yield not_modelled(job, "plan.schedule", what, "use 1f1b or interleaved_1f1b")


@unmodelled("a backward in two parts through convolutions is not modeled", reads="schedule")
def split_backward_of_convolutions(job: Job) -> Iterator[Problem]:
    if job.model.depths and splits_backward(job.plan.schedule):
        what = "the memory of convolutions whose backward is in two parts"
        yield not_modelled(job, "plan.schedule", what, "use 1f1b")


@unmodelled("a backward that may be in two parts is not modeled with adapters", reads="schedule")
def split_backward_of_adapters(job: Job) -> Iterator[Problem]:
    name = job.plan.schedule
    if job.model.lora_rank and _may_split(name):
        what = "a schedule of one's own" if is_custom_schedule(name) else "a backward in two parts"
        what += " with adapters (model.lora_rank)"
        yield not_modelled(job, "plan.schedule", what, "use 1f1b or interleaved_1f1b")


@unmodelled("a backward that may be in two parts is not modeled in 8 or 4 bits", reads="schedule")
def split_backward_in_low_precision(job: Job) -> Iterator[Problem]:
    name, precision = job.plan.schedule, job.training.precision
    if precision in job.software.low_precision and _may_split(name):
        what = "a schedule of your own" if is_custom_schedule(name) else "a backward in two parts"
        sentence = (
            f"{what} is not modeled with training.precision = {precision}: a linear layer in low "
            "precision is one function of autograd, which makes the gradients of input and weight together"
        )
        yield problem_of(job, "plan.schedule", sentence, "use 1f1b, or precision bf16")


@unmodelled("the backward of a compiled block cannot be split", reads="schedule")
def split_backward_compiled(job: Job) -> Iterator[Problem]:
    if job.software.compiled and job.software.executable and splits_backward(job.plan.schedule):
        sentence = "splits backward, and that of a compiled block is one function with both parts"
        yield problem_of(job, "plan.schedule", sentence, "use 1f1b or interleaved_1f1b, or software.compiled = false")


@unmodelled("a backward that may be split is not modeled with layers for multi-token prediction", reads="schedule")
def split_backward_of_mtp(job: Job) -> Iterator[Problem]:
    if job.model.mtp_num_layers and _may_split(job.plan.schedule):
        layers = job.model.mtp_num_layers
        what = f"a custom schedule, or one with a split backward, with model.mtp_num_layers = {layers}"
        yield not_modelled(job, "plan.schedule", what, "use 1f1b or interleaved_1f1b")


def _splits(plan: ParallelPlan) -> bool:
    """True for a pipeline with split backward: input gradients first, weight gradients later."""
    return plan.pp > 1 and splits_backward(plan.schedule)


def _may_split(name: str) -> bool:
    """True for a schedule that splits backward, and for a custom schedule, which may."""
    return is_custom_schedule(name) or splits_backward(name)


def _stages_field(plan: ParallelPlan) -> str:
    return "plan.pp" if plan.virtual_stages == 1 else "plan.virtual_stages"


def _blocks(job: Job) -> str:
    layers = job.model.num_blocks
    return f"num_hidden_layers = {layers}" if layers == job.model.num_hidden_layers else f"the {layers} blocks"


def _by_torchs_ddp(plan: ParallelPlan, software: SoftwareSpec) -> bool:
    """True when unsharded gradients are all-reduced by a DDP that does not support pipelines."""
    return plan.dp * plan.cp > 1 and not plan.shards_parameters and not software.ddp_in_pipelines
