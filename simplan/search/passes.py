"""What microbatches do on their way through a pipeline; plans share it that differ in data parallelism alone."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Phase
from simplan.program.stage import Crossing
from simplan.search.candidate import Candidate
from simplan.search.numbers import Numbers
from simplan.search.part import Part
from simplan.search.replicas import reduced_backward_s
from simplan.spec.layer import CollectiveKind
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["Passes"]

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
_F, _B, _I, _W = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT


class Passes:
    """Stages of a plan with a pipeline, by part of its layout.

    Args:
        numbers: Of the job.
        candidate: Any plan with these.

    Attributes:
        layout: Which stages there are.
    """

    def __init__(self, numbers: Numbers, candidate: Candidate) -> None:
        self._numbers, self._c = numbers, candidate
        self._layers, self._mesh = numbers.layers(candidate), numbers.mesh(candidate)
        self._m = numbers.num_microbatches(candidate)
        self._splits = SCHEDULE_FACTS[candidate.schedule].splits_backward
        self.layout = numbers.layout(candidate, self._layers)

    @cached_property
    def compute_s(self) -> _Floats:
        """``(parts, 6)``: F, B, the last B, I, W, the last W."""
        layers, layout, c = self._layers, self.layout, self._c
        found = np.zeros((len(layout.parts), 6))
        found[:, 0] = layout.counts @ layers.passes_s(_F)
        if not self._splits:
            found[:, 1:] = (layout.counts @ layers.passes_s(_B))[:, None]
            if not c.shards_parameters and c.dp * c.cp > 1:
                buckets = (self._numbers.buckets(c, part) for part in layout.parts)
                found[:, 2] = [reduced_backward_s(layers, *of) for of in zip(layout.parts, buckets, strict=True)]
            return found
        found[:, 3] = layout.counts @ layers.passes_s(_I)
        found[:, 4:] = (layout.counts @ layers.passes_s(_W))[:, None]
        for place, part in enumerate(layout.parts):
            if self._numbers.whole_in_weight(part):
                found[place, 1:] = layers.pass_s(part, _B)
                found[place, 3] = 0.0
        return found

    @cached_property
    def sends_s(self) -> _Floats:
        """``(stages - 1,)``: by boundary; back takes as long as forward."""
        first, within = self.layout.part_of[:-1], self._mesh.within_nodes(self.layout.placement)
        found = np.zeros(len(first))
        for same_node in set(within.tolist()):
            of_part_s = np.array([self._send_s(part, same_node=same_node) for part in self.layout.parts])
            found = np.where(within == same_node, of_part_s[first], found)
        return found

    def _send_s(self, part: Part, *, same_node: bool) -> float:
        crossings = self._leaving(part)
        return sum(self._mesh.between_s(CollectiveKind.SEND, one.num_bytes, same_node=same_node) for one in crossings)

    def _leaving(self, part: Part) -> tuple[Crossing, ...]:
        return self._layers.leaving(part) if part.hands_on else ()

    @cached_property
    def tied_s(self) -> float:
        """All-reduce of a weight that the first and the last stage share."""
        ends, num_bytes = self.layout.placement[[0, -1]], self._layers.tied_bytes
        if not num_bytes or ends[0] == ends[1]:
            return 0.0
        [same_node] = self._mesh.within_nodes(ends)
        return self._mesh.between_s(CollectiveKind.ALL_REDUCE, num_bytes, same_node=bool(same_node))

    @cached_property
    def least_s(self) -> float:
        """A bound: no rank is through before its first input is there, all its work is done, and what it gave is used.

        Where backward is whole the last action of a rank is a backward of its first stage, after which come those of
        all stages before it, one after the other.
        """
        m, layout, p = self._m, self.layout, self._c.pp
        forward_s, backward_s, last_s, input_s, weight_s, _ = self.compute_s.T
        each_s = input_s + weight_s if self._splits else backward_s
        busy_s = m * forward_s + (m - 1) * each_s + (each_s if self._splits else last_s)
        of_rank_s = layout.by_rank(busy_s)
        first, sends_s = layout.part_of[: p - 1], self.sends_s[: p - 1]
        of_rank_s[1:] += np.cumsum(forward_s[first] + sends_s)
        if not self._splits:
            of_rank_s[1:] += np.cumsum(backward_s[first] + sends_s)
        return float(of_rank_s.max())

    @cached_property
    def changes(self) -> _Integers:
        """``(parts, slots, 2)``: bytes more at the worst moment, and after."""
        numbers, c, layers = self._numbers, self._c, self._layers
        return np.array([numbers.stage_changes(c, layers, part, split=self._splits) for part in self.layout.parts])

    @cached_property
    def crossing_bytes(self) -> _Integers:
        """``(parts, 2)``: of what a stage hands on, what it made itself, and all."""
        leaving = [self._leaving(part) for part in self.layout.parts]
        made = [[one.num_bytes for one in found if not one.passes] for found in leaving]
        every = [[one.num_bytes for one in found] for found in leaving]
        return np.array([list(map(sum, made)), list(map(sum, every))], np.int64).T

    @cached_property
    def buffer_bytes(self) -> _Integers:
        """``(ranks,)``: receive buffers of all microbatches, and their images."""
        layout = self.layout
        crossed = self.crossing_bytes[layout.part_of, 1]
        received = crossed.copy()
        received[1:] += crossed[:-1]
        of_rank = np.bincount(layout.placement, received, self._c.pp).astype(np.int64)
        of_rank[layout.placement[0]] += self._layers.batch_bytes
        return np.asarray(of_rank * self._m)
