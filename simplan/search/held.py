"""A bound on memory that costs little: what the ends of a pipeline hold at a few moments of a step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from simplan.program.table import unshard_of
from simplan.search.candidate import Candidate
from simplan.search.moments import Moment, RankMoments, end_moments
from simplan.search.outline import Floats, Outlines
from simplan.search.question import Question
from simplan.spec.software import StateBytes

__all__ = ["HeldBytes"]


class _End(NamedTuple):
    """What a rank holds.

    Attributes:
        trained, experts, frozen: Weights that are trained but for experts, these, and frozen ones.
        passing_bytes: What comes and goes, at the worst moment.
    """

    trained: float
    experts: float
    frozen: float
    passing_bytes: float


class HeldBytes:
    """Bytes that the first or the last pipeline rank of a candidate needs at least.

    It holds weights, gradients and optimizer states of its stages, what it keeps of every microbatch that is under way,
    and what the backward of one layer needs besides; of FSDP also weights that are gathered and gradients that add up
    whole. Receive buffers, tables and all else that comes and goes are left out, and the allocator's reserve for that.
    Of precisions below 16 bits one microbatch counts, since copies of weights are kept once for all of them.

    Args:
        question: What every candidate shares.
        outlines: Of the same question.
    """

    def __init__(self, question: Question, outlines: Outlines) -> None:
        self._question, self._outlines = question, outlines
        self._context_bytes = int(question.software.context_bytes.get(question.cluster.device.kind, 0))
        self._reserve = 1 + question.software.reserve_fraction
        self._moments: dict[Hashable, tuple[RankMoments, ...]] = {}
        self._states: dict[tuple[bool, bool], StateBytes] = {}
        self._ends: dict[Hashable, list[_End]] = {}

    def bytes(self, c: Candidate) -> int:
        """At least so many."""
        state = self._state(c)
        shards = c.dp_shard * c.cp
        expert_shards = c.dp * c.cp * c.tp if c.ep > 1 else shards  # never dealt out over more than all
        of_weights, of_experts = (shards, expert_shards) if c.shards_parameters else (1, 1)
        of_states, of_expert_states = (shards, expert_shards) if c.zero_stage else (1, 1)
        optimizer_bytes = state.optimizer_bytes(self._question.training.optimizer)
        weight_bytes = state.parameter + state.gradient
        most = 0.0
        for end in self._of_ends(c, state):
            held = end.trained * (weight_bytes / of_weights + optimizer_bytes / of_states)
            held += end.experts * (weight_bytes / of_experts + optimizer_bytes / of_expert_states)
            most = max(most, held + end.frozen * state.frozen / of_weights + self._reserve * end.passing_bytes)
        return self._context_bytes + int(most)

    def _of_ends(self, c: Candidate, state: StateBytes) -> list[_End]:
        many = self._question.training.global_batch_size // (c.dp * c.microbatch_size)
        shape = c.schedule, c.pp, c.virtual_stages, many
        key = self._outlines.way(c), shape, c.reshard_after_forward, c.zero_stage == 3, c.grad_sync
        found = self._ends.get(key)
        if found is None:
            if shape not in self._moments:
                self._moments[shape] = end_moments(c, many)
            found = self._ends[key] = [self._of_end(c, rank, state) for rank in self._moments[shape]]
        return found

    def _of_end(self, c: Candidate, rank: RankMoments, state: StateBytes) -> _End:
        outline, bounds = self._outlines.of(c), self._outlines.boundaries(c)
        first, end = bounds[rank.stages], bounds[rank.stages + 1]

        def of_stages(sums: Floats) -> Floats:
            return sums[end] - sums[first]

        kept_bytes, between_bytes = of_stages(outline.kept_bytes), of_stages(outline.between_bytes)
        if self._question.software.preallocated_receives:  # inputs of stages are in buffers
            kept_bytes = np.maximum(0, kept_bytes - outline.input_bytes[first])
        dense = of_stages(outline.trained)
        most = 0.0
        for moment in rank.moments:
            once = state.linear is not None
            in_flight = np.minimum(moment.in_flight, 1) if once else moment.in_flight
            passing = float(kept_bytes @ in_flight)
            if not once:
                passing += float(between_bytes @ moment.between)
                if moment.backward is not None:
                    passing += max(0.0, float(outline.backward_bytes[end[moment.backward] - 1]))
            if c.shards_parameters:
                passing += self._whole_bytes(c, moment, dense, state)
            most = max(most, passing)
        experts, frozen = float(of_stages(outline.experts).sum()), float(of_stages(outline.frozen).sum())
        return _End(float(dense.sum()), experts, frozen, most)

    def _whole_bytes(self, c: Candidate, moment: Moment, dense: Floats, state: StateBytes) -> float:
        """Of FSDP: gradients that add up whole, and weights of stages that stay gathered."""
        software, plan = self._question.software, c.plan()
        found = 0.0
        if not software.reduces_every(plan):
            found += float(dense @ moment.adding_up) * state.accumulated
        if software.lists_of_shards or moment.backward is None:
            return found
        stays = unshard_of(plan) == "once" if c.pp > 1 else not (c.zero_stage == 3 and c.reshard_after_forward)
        gathered = float(dense.sum()) if stays else float(dense @ moment.wanted) if c.pp > 1 else 0.0
        return found + gathered * state.gathered

    def _state(self, c: Candidate) -> StateBytes:
        key = c.shards_parameters, c.ep > 1
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._question.software.state(self._question.training, c.plan())
        return found
