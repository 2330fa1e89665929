"""Rejection of action tables that torch would run incorrectly without an error, or that the executor cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from simplan.errors import NotModelledError, Problem, ProgramError
from simplan.plan.plan import ParallelPlan
from simplan.program.action import Action, ActionKind, Table
from simplan.program.tables.check import check_table
from simplan.software.software import SoftwareSpec

_SPLIT = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def check_executable(table: Table, plan: ParallelPlan, software: SoftwareSpec) -> None:
    """Checks an action table before ranks start on it.

    The table must pass ``check_table`` (complete, no duplicates, REDUCE_GRAD after the last backward, one OPTIM at the
    end, only neighboring stages communicate, no deadlock). Tests with torch 2.13 found further rules:

    - forwards of the last stage must be in the order of microbatches, because torch assigns losses in that order;
    - a split backward with FSDP that reshards after forward loses the gradients of all parameters;
    - DistributedDataParallel with several stages on a rank fails in the second step, and it does not reduce the
      gradients of a split backward;
    - DDP reduces in the backward of the last forward it ran, so without a pipeline that must be the last backward's
      forward (every backward's forward if DDP reduces every microbatch);
    - in a pipeline FSDP computes only on stages that an UNSHARD has all-gathered, and reduces once per step.

    Args:
        software: The framework profile, whose bucket sizes torch must support.

    Raises:
        ProgramError: The table is invalid, or torch would run it incorrectly.
        NotModelledError: The executor cannot run the table yet.
    """
    if len(table) != plan.pp:
        raise ProgramError(f"the table has {len(table)} rows; plan.pp = {plan.pp} needs as many")
    forwards = [action for row in table for action in row if action.kind is ActionKind.FORWARD]
    if not forwards:
        raise ProgramError("the table has no forward")
    num_microbatches = 1 + max(action.microbatch or 0 for action in forwards)
    check_table(table, plan.num_stages, num_microbatches)
    wrong = [*_loss_order(table), *_several_ddp_stages(table, plan), *_lost_by_split(table, plan)]
    wrong += [*_unsynchronized(table, plan), *_sharding(table, plan)]
    if wrong:
        raise ProgramError("\n".join(wrong))
    not_modelled = [*_not_modelled(table, plan, software)]
    if not_modelled:
        raise NotModelledError(not_modelled)


def _replicates(plan: ParallelPlan) -> bool:
    """Returns True if the plan uses DistributedDataParallel: unsharded parameters and averaged gradients."""
    return plan.num_averaging > 1 and not plan.shards_parameters


def _loss_order(table: Table) -> Iterator[str]:
    last = max(action.stage for row in table for action in row)
    order = [action for row in table for action in row if action.stage == last and action.kind is ActionKind.FORWARD]
    for before, after in pairwise(order):
        if (before.microbatch or 0) > (after.microbatch or 0):
            yield f"action {after} comes after {before}: the last stage must run forwards in order of microbatches"
            return


def _several_ddp_stages(table: Table, plan: ParallelPlan) -> Iterator[str]:
    if not _replicates(plan):
        return
    for rank, row in enumerate(table):
        stages = sorted({action.stage for action in row})
        if len(stages) > 1:
            yield (
                f"rank {rank} has stages {stages}: torch's DistributedDataParallel takes one stage per rank; "
                "use plan.virtual_stages = 1, or plan.dp_shard with plan.zero_stage = 2 or 3"
            )
            return


def _lost_by_split(table: Table, plan: ParallelPlan) -> Iterator[str]:
    """Yields a split backward whose gradients torch loses or does not reduce."""
    split = _first(table, _SPLIT)
    if split is None:
        return
    if plan.reshards:
        yield (
            f"action {split}: a split backward needs plan.reshard_after_forward = false, "
            "else torch loses the gradients of resharded parameters"
        )
    if _replicates(plan):
        yield (
            f"action {split}: torch's DistributedDataParallel does not reduce the gradients of a split backward; "
            "use plan.dp_shard with plan.zero_stage = 2"
        )


def _unsynchronized(table: Table, plan: ParallelPlan) -> Iterator[str]:
    if plan.pp > 1 or not _replicates(plan):
        return
    compute = [action for action in table[0] if action.kind.is_compute]
    every = plan.reduces_every_microbatch
    reduced = [a for a in compute if a.kind is ActionKind.BACKWARD] if every else compute[-1:]
    prepared = {after: before for before, after in pairwise(compute)}
    for backward in reduced:
        if prepared.get(backward) != Action(backward.stage, ActionKind.FORWARD, backward.microbatch):
            which = "every" if every else "the last"
            rule = "must directly follow its forward, where DDP prepares the reduction"
            yield f"action {backward}: {which} backward {rule}"
            return


def _sharding(table: Table, plan: ParallelPlan) -> Iterator[str]:
    """Yields stages with missing or superfluous UNSHARD and RESHARD; ``check_table`` has checked their order."""
    unshard = _first(table, (ActionKind.UNSHARD, ActionKind.RESHARD))
    if plan.pp > 1 and plan.shards_parameters:
        gathered = {action.stage for row in table for action in row if action.kind is ActionKind.UNSHARD}
        missing = [str(stage) for stage in range(plan.num_stages) if stage not in gathered]
        if missing:
            yield f"stages {', '.join(missing)} have no UNSHARD: FSDP all-gathers the stages of a pipeline nowhere else"
    elif unshard is not None and plan.shards_parameters:
        yield f"action {unshard}: without a pipeline FSDP all-gathers each layer by itself; remove UNSHARD and RESHARD"
    elif unshard is not None:
        yield f"action {unshard}: the plan does not shard parameters; remove UNSHARD and RESHARD"


def _not_modelled(table: Table, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    split = _first(table, _SPLIT)
    if split is not None and len(table) == 1:
        rule = "a split backward needs a pipeline"
        yield Problem(field="table", value=str(split), rule=rule, fix=f"use {split.stage}B")
    if split is not None and software.compiled:
        rule = f"the backward of a compiled block is one function, which {split} would run whole"
        yield Problem(field="software.compiled", value="true", rule=rule, fix="use false, or a table without I and W")
    if plan.pp > 1 and plan.grad_sync == "microbatch" and plan.num_averaging > 1:
        rule = "torch's pipelines reduce gradients once per step, at REDUCE_GRAD"
        yield Problem(field="plan.grad_sync", value=plan.grad_sync, rule=rule, fix="use step")
    torch_default = (2**20, 25 * 2**20)  # the only sizes with a smaller first bucket
    if _replicates(plan) and not software.grad_overlap:
        rule, fix = "torch's DDP reduces gradients while backward runs", "use a profile with grad_overlap: true"
        yield Problem(field="software.grad_overlap", value="false", rule=rule, fix=fix)
    uses_software = _replicates(plan) and software.grad_overlap and plan.bucket_bytes is None
    if uses_software and (software.first_bucket_bytes, software.bucket_bytes) != torch_default:
        yield Problem(
            field="software.bucket_bytes",
            value=str(software.bucket_bytes),
            rule="torch uses 1 MiB for the first bucket and 25 MiB for the others",
            fix="set plan.bucket_bytes, which torch uses for all buckets",
        )


def _first(table: Table, kinds: tuple[ActionKind, ...]) -> Action | None:
    return next((action for row in table for action in row if action.kind in kinds), None)
