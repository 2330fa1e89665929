"""Lower bounds on the device memory of a plan: of an average rank, and of the ends of a pipeline."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.action import Action, ActionKind, Table
from simplan.program.schedules import SCHEDULES, PipelineShape
from simplan.program.table import unshard_of
from simplan.search.candidate import Candidate
from simplan.search.layer_sums import Floats, LayerSumsCache
from simplan.search.question import Question
from simplan.spec.plan import ParallelPlan
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.shard import Shard
from simplan.spec.software import StateBytes

__all__ = ["AverageRankMemoryBound", "EndRankMemoryBound"]

_Integers = NDArray[np.int64]
_F, _B, _I, _W = range(4)
_KINDS = {
    ActionKind.FORWARD: _F,
    ActionKind.BACKWARD: _B,
    ActionKind.BACKWARD_INPUT: _I,
    ActionKind.BACKWARD_WEIGHT: _W,
}
_AHEAD = 3  # as in ``simplan.program.complete``
_ROUNDS = 4  # of microbatches, as many as there are ranks each, that fill every schedule but GPipe


class AverageRankMemoryBound:
    """Bytes that the worst device of a candidate needs at least.

    The worst pipeline rank holds no less than the average, and the worst shard no less than an even one. Between
    forward and backward of a microbatch every block keeps its input, whatever runs again. Gradients, other activations
    and buffers are left out; a weight that two layers share counts once.

    Args:
        question: What every candidate shares.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._parameters: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._context_bytes = int(question.software.context_bytes.get(question.cluster.device.kind, 0))
        if question.cluster.cores_per_node is not None:  # a calibration says how much
            self._context_bytes = 0
        self._widths: dict[bool, StateBytes] = {}
        model = question.model
        # nothing of the first block is kept before its first adapter
        self._kept_blocks = 0 if model.family in ("resnet", "t5") else model.num_blocks - (model.lora_rank > 0)

    def bytes(self, candidate: Candidate) -> int:
        """At least so many."""
        trained, frozen, experts = self._of_replica(candidate.tp, candidate.ep)
        num_shards = candidate.dp_shard * candidate.cp
        sharded = candidate.shards_parameters
        state = self._state(sharded)
        weights = (trained * state.parameter + frozen * state.frozen) / (num_shards if sharded else 1)
        optimizer_bytes = state.optimizer_bytes(self._question.training.optimizer)
        states = trained * optimizer_bytes / (num_shards if candidate.zero_stage else 1)
        if experts:  # at least one of each, over all ranks of a stage
            all_ranks = candidate.dp * candidate.cp * candidate.tp
            weights += experts * candidate.ep * state.parameter / (all_ranks if sharded else candidate.ep)
            states += experts * candidate.ep * optimizer_bytes / (all_ranks if candidate.zero_stage else candidate.ep)
        return self._context_bytes + int((weights + states + self._inputs_bytes(candidate, state)) / candidate.pp)

    def _inputs_bytes(self, c: Candidate, state: StateBytes) -> float:
        """Of one microbatch, of all blocks."""
        if not self._kept_blocks:
            return 0.0
        tokens = c.microbatch_size * self._question.model.seq_len / (c.cp * (c.tp if c.sequence_parallel else 1))
        width = 1 if state.linear is not None else min(state.activation, state.residual)
        return tokens * self._question.model.hidden_size * width * self._kept_blocks

    def _state(self, sharded: bool) -> StateBytes:
        if sharded not in self._widths:
            plan = ParallelPlan(dp_shard=2) if sharded else ParallelPlan()
            self._widths[sharded] = self._question.software.state(self._question.training, plan)
        return self._widths[sharded]

    def _of_replica(self, tp: int, ep: int) -> tuple[int, int, int]:
        """Weights of all layers that one tensor- and expert-parallel rank has, tied ones once.

        Those that are trained, those that are frozen, and experts of which other ranks have others.
        """
        if (tp, ep) not in self._parameters:
            layers = self._question.model.layers_of(Shard(tp=tp, ep=ep))
            held = [p for layer in layers for p in layer.parameters if p.name not in layer.tied]
            frozen = sum(p.num_elements for p in held if p.frozen)
            experts = sum(p.num_elements for p in held if p.expert)
            self._parameters[tp, ep] = sum(p.num_elements for p in held) - frozen - experts, frozen, experts
        return self._parameters[tp, ep]


class InFlight(NamedTuple):
    """What is under way when an action of a rank begins, by stage of the rank.

    Attributes:
        in_flight: Microbatches between forward and backward, or its first part.
        between: Microbatches between the two parts of a backward.
        adding_up: Whether gradients of some microbatches, but not of all, have been made: 1 or 0.
        backward: The stage, of the rank's own, whose whole backward begins; None where something else does.
        wanted: The next three different stages of the rank, which FSDP gathers ahead: 1 or 0.
    """

    in_flight: _Integers
    between: _Integers
    adding_up: _Integers
    backward: int | None
    wanted: _Integers


class RankInFlight(NamedTuple):
    """InFlightStates of one rank.

    Attributes:
        stages: Its stages, ascending.
        states: When its first backward begins, when most microbatches are under way, when all of its stages have made
            gradients, and when the last backward of the stage begins that is first done with all.
    """

    stages: _Integers
    states: tuple[InFlight, ...]


def end_rank_states(candidate: Candidate, many: int) -> tuple[RankInFlight, ...]:
    """InFlightStates of the first and the last rank of a candidate's pipeline.

    Of a long step, as if it had fewer microbatches: no more are under way then, and of GPipe as many less.

    Args:
        candidate: The plan.
        many: Its microbatches.
    """
    p, v = candidate.pp, candidate.virtual_stages
    few = min(many, _ROUNDS * p + many % p)
    facts = SCHEDULE_FACTS.get(candidate.schedule)
    if p == 1:
        few = min(many, 2)
    elif facts is None or facts.needs_times:
        few = many
    table = SCHEDULES[candidate.schedule](PipelineShape(p, few, v)) if p > 1 else _one_rank(few)
    found = []
    for rank in sorted({0, p - 1}):
        kinds, stages = np.array([(_KINDS[action.kind], action.stage) for action in table[rank]]).T
        found.append(_states(kinds, stages, many - few))
    return tuple(found)


def _one_rank(many: int) -> Table:
    return (tuple(Action(0, kind, each) for each in range(many) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)),)


def _states(kinds: NDArray[np.integer], stages: NDArray[np.integer], more: int) -> RankInFlight:
    own, place = np.unique(stages, return_inverse=True)
    completes = np.flatnonzero((kinds == _B) | (kinds == _W))
    first, last = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
    last[place[completes]] = completes  # of equal places the last one stays
    first[place[completes[::-1]]] = completes[::-1]
    under_way = np.cumsum(np.select([kinds == _F, kinds == _I], [1, 0], -1))
    backwards = np.flatnonzero((kinds == _B) | (kinds == _I))
    all_began = backwards[backwards > first.max()][:1]
    most = min(int(np.argmax(under_way)) + 1, len(kinds) - 1)
    times = sorted({int(backwards[0]), most, *all_began.tolist(), int(last.min())})
    states = [_state_at(kinds, place, len(own), time) for time in times]
    if more and not np.any(kinds[: int((kinds == _F).sum())] != _F):  # all forwards come first
        states = [m._replace(in_flight=m.in_flight + more * (m.in_flight == m.in_flight.max())) for m in states[:1]]
    return RankInFlight(own, tuple(states))


def _state_at(kinds: NDArray[np.integer], place: _Integers, num_stages: int, time: int) -> InFlight:
    done = [np.bincount(place[:time][kinds[:time] == kind], minlength=num_stages) for kind in (_F, _B, _I, _W)]
    forwards, wholes, inputs, weights = done
    completed = wholes + weights
    adding_up = (completed > 0) & (completed < forwards.max())
    backward = int(place[time]) if kinds[time] == _B else None
    wanted = np.zeros(num_stages, np.int64)
    ahead = place[time:]
    while len(ahead) and wanted.sum() < _AHEAD:
        wanted[ahead[0]] = 1
        ahead = ahead[ahead != ahead[0]]
    return InFlight(forwards - wholes - inputs, inputs - weights, adding_up.astype(np.int64), backward, wanted)


class _End(NamedTuple):
    """What a rank holds.

    Attributes:
        trained, experts, frozen: Weights that are trained but for experts, these, and frozen ones.
        passing_bytes: What comes and goes, at the worst under_way.
    """

    trained: float
    experts: float
    frozen: float
    passing_bytes: float


class EndRankMemoryBound:
    """Bytes that the first or the last pipeline rank of a candidate needs at least.

    It holds weights, gradients and optimizer states of its stages, what it keeps of every microbatch that is under way,
    and what the backward of one layer needs besides; of FSDP also weights that are gathered and gradients that add up
    whole. Receive buffers, tables and all else that comes and goes are left out, and the allocator's reserve for that.
    Of precisions below 16 bits one microbatch counts, since copies of weights are kept once for all of them.

    Args:
        question: What every candidate shares.
        layer_sums: Of the same question.
    """

    def __init__(self, question: Question, layer_sums: LayerSumsCache) -> None:
        self._question, self._layer_sums = question, layer_sums
        self._context_bytes = int(question.software.context_bytes.get(question.cluster.device.kind, 0))
        self._reserve = 1 + question.software.reserve_fraction
        self._in_flight: dict[Hashable, tuple[RankInFlight, ...]] = {}
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
        key = self._layer_sums.split_of(c), shape, c.reshard_after_forward, c.zero_stage == 3, c.grad_sync
        found = self._ends.get(key)
        if found is None:
            if shape not in self._in_flight:
                self._in_flight[shape] = end_rank_states(c, many)
            found = self._ends[key] = [self._of_end(c, rank, state) for rank in self._in_flight[shape]]
        return found

    def _of_end(self, c: Candidate, rank: RankInFlight, state: StateBytes) -> _End:
        sums, bounds = self._layer_sums.of(c), self._layer_sums.boundaries(c)
        first, end = bounds[rank.stages], bounds[rank.stages + 1]

        def of_stages(sums: Floats) -> Floats:
            return sums[end] - sums[first]

        kept_bytes, between_bytes = of_stages(sums.kept_bytes), of_stages(sums.between_bytes)
        if self._question.software.preallocated_receives:  # inputs of stages are in buffers
            kept_bytes = np.maximum(0, kept_bytes - sums.input_bytes[first])
        dense = of_stages(sums.trained)
        most = 0.0
        for under_way in rank.states:
            once = state.linear is not None
            in_flight = np.minimum(under_way.in_flight, 1) if once else under_way.in_flight
            passing = float(kept_bytes @ in_flight)
            if not once:
                passing += float(between_bytes @ under_way.between)
                if under_way.backward is not None:
                    passing += max(0.0, float(sums.backward_bytes[end[under_way.backward] - 1]))
            if c.shards_parameters:
                passing += self._whole_bytes(c, under_way, dense, state)
            most = max(most, passing)
        experts, frozen = float(of_stages(sums.experts).sum()), float(of_stages(sums.frozen).sum())
        return _End(float(dense.sum()), experts, frozen, most)

    def _whole_bytes(self, c: Candidate, under_way: InFlight, dense: Floats, state: StateBytes) -> float:
        """Of FSDP: gradients that add up whole, and weights of stages that stay gathered."""
        software, plan = self._question.software, c.plan()
        found = 0.0
        if not software.reduces_every(plan):
            found += float(dense @ under_way.adding_up) * state.accumulated
        if software.lists_of_shards or under_way.backward is None:
            return found
        stays = unshard_of(plan) == "once" if c.pp > 1 else not (c.zero_stage == 3 and c.reshard_after_forward)
        gathered = float(dense.sum()) if stays else float(dense @ under_way.wanted) if c.pp > 1 else 0.0
        return found + gathered * state.gathered

    def _state(self, c: Candidate) -> StateBytes:
        key = c.shards_parameters, c.ep > 1
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._question.software.state(self._question.training, c.plan())
        return found
