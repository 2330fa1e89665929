"""What data parallelism and the optimizer add to a pipeline: what plans share that differ in microbatches only."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simplan.search.candidate import Candidate
from simplan.search.layout import Layout
from simplan.search.numbers import Numbers
from simplan.sim.pipeline.slots import NUM_SLOTS
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["Upkeep"]

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]


class Upkeep:
    """Stages and ranks of a plan with a pipeline.

    Args:
        numbers: Of the job.
        candidate: Any plan with these.
        layout: Its stages.

    Attributes:
        layout: These.
    """

    def __init__(self, numbers: Numbers, candidate: Candidate, layout: Layout) -> None:
        self._numbers, self._c, self.layout = numbers, candidate, layout
        self._state = numbers.layers(candidate).state
        elements, table_bytes, *seconds = np.array(numbers.states(candidate, layout.parts)).T  # integers below 2^53
        self._elements, self._table_bytes = elements.astype(np.int64), table_bytes.astype(np.int64)
        self._update_s, self._summing_s, self._dividing_s = seconds
        self._sharded = numbers.sharded(candidate, layout.parts)
        if candidate.shards_optimizer_only:
            self._dealt = [numbers.dealt(candidate, parts) for parts in layout.ranks]

    @property
    def num_units(self) -> int:
        """Most units of a stage."""
        return max((len(stage.units) for stage in self._sharded), default=0)

    @cached_property
    def units_s(self) -> _Floats:
        """``(parts, units, 2)``: gathers, and copies out of them."""
        found = np.zeros((len(self.layout.parts), self.num_units, 2))
        for number, stage in enumerate(self._sharded):
            found[number, : len(stage.units), 0] = stage.arrays.gather_s
            found[number, : len(stage.units), 1] = stage.arrays.copy_s
        return found

    @cached_property
    def reduce_s(self) -> _Floats:
        """``(parts, 3)``: REDUCE_GRAD up to its first reduce-scatter; the rest; division of gradients."""
        found = np.array([np.zeros_like(self._summing_s), self._summing_s, self._dividing_s]).T
        if self._sharded:
            found[:, :2] += [(stage.arrays.reduce_copy_s[0], stage.reduce_s) for stage in self._sharded]
        return found

    @cached_property
    def update_s(self) -> _Floats:
        """``(2, ranks)``: the optimizer step with its host's part, and what follows it (ZeRO-1's broadcasts)."""
        layout, host_s = self.layout, self._numbers.host_step_s
        if self._c.shards_optimizer_only:
            return np.array([(host_s + deal.update_s, deal.broadcast_s) for deal in self._dealt])[layout.kind_of].T
        of_rank_s = host_s + layout.by_rank(self._update_s)
        return np.array([of_rank_s, np.zeros_like(of_rank_s)])

    @cached_property
    def least_update_s(self) -> float:
        """Of the quickest rank."""
        return float(self.update_s[0].min())

    @cached_property
    def resting_bytes(self) -> _Integers:
        """``(2, ranks)``: between steps, buffers of messages aside; and DDP's second buckets."""
        layout, state = self.layout, self._state
        elements = self._of_ranks(self._elements)
        trained = elements
        if self._c.shards_optimizer_only:
            trained = np.array([deal.elements for deal in self._dealt])[layout.kind_of]
        resting = elements * (state.parameter + state.gradient)
        resting += trained * state.optimizer_bytes(self._numbers.training.optimizer)
        resting += self._of_ranks(self._table_bytes)
        reduces = self._c.dp * self._c.cp > 1 and not self._c.shards_parameters
        return np.array([resting, elements * (state.gradient if reduces else 0)])

    def _of_ranks(self, of_parts: _Integers) -> _Integers:
        return self.layout.by_rank(of_parts).astype(np.int64)

    @cached_property
    def changes(self) -> _Integers:
        """``(parts, slots, 2)``: what FSDP does to memory: at the worst moment, and after."""
        if not self._sharded:
            return np.zeros((len(self.layout.parts), NUM_SLOTS, 2), np.int64)
        split = SCHEDULE_FACTS[self._c.schedule].splits_backward
        found = [self._numbers.sharding_changes(self._c, part, split=split) for part in self.layout.parts]
        return np.array(found)
