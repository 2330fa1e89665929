"""The process groups of one rank on the mesh [pp, dp]."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from simplan.spec.plan import RankMapping

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
        dp: Ranks with the same stage.
        pp: Ranks of the same pipeline, first stage first.
        tied: First and last rank of the pipeline, for a tied embedding that both hold.
    """

    dp: Group | None
    pp: Group | None
    tied: Group | None


def make_groups(mapping: RankMapping, rank: int, *, tied: bool) -> Groups:
    """Makes all groups; every rank of the job must call this.

    Args:
        mapping: Which rank sits where.
        rank: This rank.
        tied: The model's embedding and output head share one weight.
    """

    def mine(lists: list[tuple[int, ...]]) -> Group | None:
        found = None
        for ranks in lists:
            handle = dist.new_group(list(ranks))
            if rank in ranks:
                assert isinstance(handle, dist.ProcessGroup)
                found = Group(handle, ranks)
        return found

    pipelines = [mapping.pp_group(d) for d in range(mapping.dp)] if mapping.pp > 1 else []
    return Groups(
        dp=mine([mapping.dp_group(p) for p in range(mapping.pp)] if mapping.dp > 1 else []),
        pp=mine(pipelines),
        tied=mine([(ranks[0], ranks[-1]) for ranks in pipelines] if tied else []),
    )
