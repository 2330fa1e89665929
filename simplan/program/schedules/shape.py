"""What a schedule is made for, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simplan.program.action import Table

__all__ = ["PipelineShape", "Schedule"]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline and what runs through it in a step.

    Attributes:
        num_ranks: Pipeline ranks p.
        num_microbatches: Microbatches m of a step.
        virtual_stages: Stages of each rank, v.
    """

    num_ranks: int
    num_microbatches: int
    virtual_stages: int = 1

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return self.num_ranks * self.virtual_stages


Schedule = Callable[[PipelineShape], Table]
"""Gives the compute actions of every pipeline rank, in the order in which the rank does them."""
