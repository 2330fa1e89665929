"""Everything about the pipeline of a plan that its schedule does not change: what its stages and ranks take."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Phase
from simplan.search.candidate import Candidate
from simplan.search.numbers import Numbers
from simplan.search.part import Part
from simplan.search.rank_numbers import completing_s
from simplan.search.replicas import reduced_backward_s
from simplan.search.sharding import ShardedStage
from simplan.sim.pipeline.peaks import PipelineBytes
from simplan.sim.pipeline.times import PipelineTimes
from simplan.spec.layer import CollectiveKind
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["Column"]

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
_F, _B, _I, _W = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT


class Column:
    """A plan with a pipeline, in numbers.

    Args:
        numbers: Of the job.
        candidate: Any plan with these.
    """

    def __init__(self, numbers: Numbers, candidate: Candidate) -> None:
        self._numbers, self._c = numbers, candidate
        self.layout, self._layers, self._mesh = (
            numbers.layout(candidate),
            numbers.layers(candidate),
            numbers.mesh(candidate),
        )
        self._splits = SCHEDULE_FACTS[candidate.schedule].splits_backward
        self._sharded = [numbers.sharded(candidate, part) for part in self.layout.parts]
        self._ranks = [numbers.rank(candidate, parts) for parts in self.layout.ranks]

    @property
    def num_units(self) -> int:
        """Most units of a stage."""
        return max(len(stage.units) if stage else 0 for stage in self._sharded)

    def write_times(self, times: PipelineTimes, k: int) -> None:
        """Fills in the plan's column."""
        index, rank_index = self.layout.part_of, self.layout.kind_of
        compute_s, reduce_copy_s, reduce_s = self._stage_times
        times.compute_s[:, :, k] = compute_s[:, index]
        times.reduce_copy_s[:, k] = reduce_copy_s[index]
        times.reduce_s[:, k] = reduce_s[index]
        times.send_forward_s[:, k] = times.send_backward_s[:, k] = self._sends_s
        for places, stage in zip(self.layout.places, self._sharded, strict=True):
            if stage is not None:
                times.gather_s[places, : len(stage.units), k] = stage.arrays.gather_s
                times.copy_s[places, : len(stage.units), k] = stage.arrays.copy_s
        times.tied_s[k] = self._tied_s
        times.update_s[:, k] = np.array([rank.update_s for rank in self._ranks])[rank_index]
        times.after_s[:, k] = np.array([rank.after_s for rank in self._ranks])[rank_index]

    def write_bytes(self, held: PipelineBytes, k: int, num_microbatches: int) -> None:
        """Fills in the plan's column."""
        slots, changes = self._changes
        held.during[slots, :, k], held.after[slots, :, k] = changes
        held.sent[:, :, k] = self._sent_bytes
        resting, of_microbatch, rebuilt = self._rank_bytes
        held.base[:, k] = resting + num_microbatches * of_microbatch
        held.extra[:, k] = rebuilt

    def least_time_s(self, num_microbatches: int) -> float:
        """A bound: no rank is through before its first input is there, all its work is done, and what it gave is used.

        Where backward is whole the last action of a rank is a backward of its first stage, after which come those of
        all stages before it, one after the other.
        """
        m, layout, p = num_microbatches, self.layout, self._c.pp
        forward_s, backward_s, last_s, input_s, weight_s, _ = self._stage_times[0]
        each_s = input_s + weight_s if self._splits else backward_s
        busy_s = m * forward_s + (m - 1) * each_s + (each_s if self._splits else last_s)
        of_rank_s = np.bincount(np.array(layout.placement), busy_s[layout.part_of], p)
        sends_s = self._sends_s[: p - 1]
        before_s = np.concatenate(([0.0], np.cumsum(forward_s[layout.part_of[: p - 1]] + sends_s)))
        after_s = np.concatenate(([0.0], np.cumsum(backward_s[layout.part_of[: p - 1]] + sends_s)))
        bounds_s = before_s + of_rank_s + (0.0 if self._splits else after_s)
        return float(bounds_s.max()) + min(rank.update_s for rank in self._ranks)

    @cached_property
    def _stage_times(self) -> tuple[_Floats, _Floats, _Floats]:
        """By part: F, B, the last B, I, W, the last W; REDUCE_GRAD up to its first reduce-scatter; the rest of it."""
        found = [self._part_times(part, stage) for part, stage in zip(self.layout.parts, self._sharded, strict=True)]
        compute, copies, rest = zip(*found, strict=True)
        return np.array(compute).T, np.array(copies), np.array(rest)

    def _part_times(self, part: Part, sharded: ShardedStage | None) -> tuple[tuple[float, ...], float, float]:
        layers, c, numbers = self._layers, self._c, self._numbers
        input_s = weight_s = backward_s = last_s = 0.0
        if not self._splits or self._numbers.whole_in_weight(part):
            backward_s = last_s = weight_s = layers.pass_s(part, _B)
        else:
            input_s, weight_s = layers.pass_s(part, _I), layers.pass_s(part, _W)
        if sharded is None and c.dp * c.cp > 1 and not self._splits:
            data_s = self._mesh.data_s
            last_s = reduced_backward_s(layers, part, _B, numbers.software, numbers.bucket_bytes, data_s)
        compute_s = (layers.pass_s(part, _F), backward_s, last_s, input_s, weight_s, weight_s)
        completing = completing_s(layers, self._mesh, part, c, divides=numbers.num_microbatches(c) > 1)
        if sharded is None:
            return compute_s, 0.0, completing
        return compute_s, float(sharded.arrays.reduce_copy_s[0]), sharded.reduce_s + completing

    @cached_property
    def _sends_s(self) -> _Floats:
        """By boundary; back takes as long as forward."""
        within = self._mesh.within_nodes(self.layout.placement)
        places = [(crossing.sizes, same) for crossing, same in zip(self.layout.crossings[:-1], within, strict=True)]
        send = CollectiveKind.SEND
        seconds = {
            (sizes, same): sum(self._mesh.between_s(send, size, same_node=same) for size in sizes)
            for sizes, same in set(places)
        }
        return np.array([seconds[place] for place in places])

    @property
    def _tied_s(self) -> float:
        first, last, num_bytes = self.layout.placement[0], self.layout.placement[-1], self._layers.tied_bytes
        if not num_bytes or first == last:
            return 0.0
        [same_node] = self._mesh.within_nodes((first, last))
        return self._mesh.between_s(CollectiveKind.ALL_REDUCE, num_bytes, same_node=same_node)

    @cached_property
    def _changes(self) -> tuple[_Integers, _Integers]:
        """Slots that change memory, and by how much, ``(2, slots, stages)``: at the worst moment, and after."""
        found = []
        for part, stage in zip(self.layout.parts, self._sharded, strict=True):
            change = self._numbers.stage_changes(self._c, part, split=self._splits)
            if stage is not None:
                change = change + self._numbers.sharding_changes(self._c, part, split=self._splits)
            found.append(change)
        changes = np.array(found)  # parts, slots, 2
        slots = np.flatnonzero(changes.any(axis=(0, 2)))
        return slots, changes[self.layout.part_of][:, slots].transpose(2, 1, 0)

    @cached_property
    def _sent_bytes(self) -> _Integers:
        """What a rank holds of what it has sent, ``(2, stages)``: outputs of a stage, and gradients of its input."""
        crossings = self.layout.crossings
        found = np.zeros((2, len(crossings)), np.int64)
        found[0] = [crossing.made_bytes for crossing in crossings]
        found[1, 1:] = [sum(crossing.sizes) for crossing in crossings[:-1]]
        return found

    @cached_property
    def _rank_bytes(self) -> tuple[_Integers, _Integers, _Integers]:
        """By rank: between steps; the same for each microbatch, receive buffers and images; DDP's second buckets."""
        layout = self.layout
        crossed = np.array([sum(crossing.sizes) for crossing in layout.crossings])
        received = crossed + np.concatenate(([0], crossed[:-1]))
        of_rank = np.bincount(np.array(layout.placement), received, self._c.pp).astype(np.int64)
        of_rank[layout.placement[0]] += self._layers.batch_bytes
        resting = np.array([rank.resting_bytes for rank in self._ranks])[layout.kind_of]
        return resting, of_rank, np.array([rank.rebuild_bytes for rank in self._ranks])[layout.kind_of]
