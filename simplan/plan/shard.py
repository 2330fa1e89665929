"""Split of every layer under tensor, context and expert parallelism."""

from __future__ import annotations

from typing import Literal

from simplan.base import Count, Spec


class Shard(Spec):
    """Split of a layer into equal parts over tensor-, context- and expert-parallel ranks.

    Attributes:
        tp: Tensor-parallel ranks: heads, MLP columns and vocabulary are split (Shoeybi et al. 2019).
        sequence_parallel: Outside of attention and MLP these ranks split the tokens (Korthikanti et al. 2022).
        cp: Context-parallel ranks: tokens are split everywhere.
        cp_comm: Context-parallel attention: keys and values sent around a ring (Liu et al. 2023), all-gathered, or an
            all-to-all of tokens for heads (DeepSpeed-Ulysses, Jacobs et al. 2023).
        ep: Expert-parallel ranks: experts are split, and tokens are sent to their experts by all-to-all (Lepikhin et
            al. 2021, GShard).
        etp: Tensor-parallel ranks of an expert, whose matrices are split like those of an MLP; 1 or ``tp``.
    """

    tp: Count = 1
    sequence_parallel: bool = False
    cp: Count = 1
    cp_comm: Literal["ring", "all_gather", "a2a"] = "ring"
    ep: Count = 1
    etp: Count = 1

    @property
    def experts_apart(self) -> bool:
        """True if experts are split over other ranks than the other weights."""
        return self.ep > 1 or self.etp < self.tp
