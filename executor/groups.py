"""The process groups of one rank on the mesh [pp, dp_replicate, dp_shard, cp, tp]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from simplan.program.action import Table
from simplan.program.complete import stage_to_rank
from simplan.spec.plan import ParallelPlan, RankMapping

__all__ = ["Group", "Groups", "make_groups"]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group and the global ranks in it, in group order."""

    handle: dist.ProcessGroup
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups this rank is in; None where the plan has no such communication.

    Attributes:
        pp: Ranks of the same pipeline, first stage first.
        dp: Ranks that average whole gradients (DDP).
        shard: Ranks over which parameters (FSDP) or optimizer states (ZeRO-1) are sharded.
        replicate: Ranks that hold the same shard of the parameters.
        cp: Ranks that split the same sequences.
        tp: Ranks that split the same layers.
        ep: Ranks that have different experts and exchange tokens.
        experts: Ranks that average the gradients of the same experts, where other ranks have others; where FSDP shards
            these, the ranks over which it does.
        tied: The two ranks of the pipeline that hold a tied embedding.
        alone: No other rank exists: see ``executor.alone``.
    """

    pp: Group | None
    dp: Group | None
    shard: Group | None
    replicate: Group | None
    cp: Group | None
    tp: Group | None
    ep: Group | None
    experts: Group | None
    tied: Group | None
    alone: bool = False


def make_groups(
    plan: ParallelPlan, table: Table, rank: int, *, tied: bool, experts: bool, alone: bool = False
) -> Groups:
    """Makes all groups; every rank of the job must call this.

    Args:
        plan: The plan, whose ``RankMapping`` says which rank sits where.
        table: Its Level 1 table, which says on which ranks the first and the last stage are.
        rank: This rank.
        tied: The model's embedding and output head share one weight.
        experts: The model has experts.
        alone: No other rank exists, so only the groups of this one are made.
    """
    mapping = RankMapping.of(plan)
    placement = stage_to_rank(table)
    first, last = placement[0], placement[max(placement)]

    def mine(members: Callable[[int], tuple[int, ...]], wanted: bool = True) -> Group | None:
        everyone = [rank] if alone else range(mapping.world_size)
        lists = sorted({members(other) for other in everyone}) if wanted else []
        found = None
        for ranks in lists:
            if len(ranks) == 1:
                continue
            handle = dist.new_group(list(ranks))
            if rank in ranks:
                assert isinstance(handle, dist.ProcessGroup)
                found = Group(handle, ranks)
        return found

    def ends(other: int) -> tuple[int, ...]:
        pipeline = mapping.pp_group(other)
        return pipeline[first], pipeline[last]

    return Groups(
        pp=mine(mapping.pp_group),
        dp=mine(mapping.dp_group, not plan.shards_parameters),
        shard=mine(mapping.shard_group, plan.shards_parameters or plan.shards_optimizer_only),
        replicate=mine(mapping.replicate_group, plan.shards_parameters),
        cp=mine(mapping.cp_group),
        tp=mine(mapping.tp_group),
        ep=mine(mapping.ep_group),
        experts=mine(
            mapping.expert_shard_group if plan.expert_shards > 1 else mapping.expert_group,
            experts and plan.shard.experts_apart,
        ),
        tied=mine(ends, tied and first != last),
        alone=alone,
    )
