"""Which part of every layer one rank holds and computes under tensor, context and expert parallelism."""

from __future__ import annotations

from typing import Literal

from simplan.base import Count, Spec

__all__ = ["Shard"]


class Shard(Spec):
    """The part of a layer that each of its tensor-, context- and expert-parallel ranks has; all have equal parts.

    Attributes:
        tp: Tensor-parallel ranks: heads, MLP columns and vocabulary are split (Shoeybi et al. 2019).
        sequence_parallel: Outside of attention and MLP these ranks split the tokens (Korthikanti et al. 2022).
        cp: Context-parallel ranks: tokens are split everywhere.
        cp_comm: How attention then gets at all keys: sent round a ring (Liu et al. 2023), gathered, or exchanged for
            heads (DeepSpeed-Ulysses, Jacobs et al. 2023).
        ep: Expert-parallel ranks: experts are split, and tokens are exchanged for those of other ranks (Lepikhin et al.
            2021, GShard).
        etp: Tensor-parallel ranks of an expert: its matrices are split as those of an MLP are; 1 or ``tp``.
    """

    tp: Count = 1
    sequence_parallel: bool = False
    cp: Count = 1
    cp_comm: Literal["ring", "all_gather", "a2a"] = "ring"
    ep: Count = 1
    etp: Count = 1

    @property
    def experts_apart(self) -> bool:
        """Experts are not split as other weights are, so that other ranks have the same ones."""
        return self.ep > 1 or self.etp < self.tp
