"""A bound on memory that costs little: what the ends of a pipeline hold when their first backward begins."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.action import Action, ActionKind
from simplan.program.table import plan_table
from simplan.search.candidate import Candidate
from simplan.search.outline import Floats, Outlines
from simplan.search.question import Question
from simplan.sim.pipeline.orders import COMPILED_SCHEDULES, B, F, compute_order
from simplan.spec.software import StateBytes

__all__ = ["HeldBytes"]

_WHOLE_BACKWARDS = (ActionKind.BACKWARD,)
_BACKWARDS = (*_WHOLE_BACKWARDS, ActionKind.BACKWARD_INPUT)


class _Begun(NamedTuple):
    """What a pipeline rank has done when its first backward begins.

    Attributes:
        stages: Its stages.
        forwards: Of each of them, the microbatches that have come through.
        backward: The stage whose backward begins; None where it is the first of two parts.
    """

    stages: NDArray[np.int64]
    forwards: NDArray[np.int64]
    backward: int | None


class HeldBytes:
    """Bytes that the first or the last pipeline rank of a candidate needs at least.

    At its first backward it holds weights, gradients and optimizer states of its stages, what it keeps of every
    microbatch that has come through them, and what the backward of one layer needs besides. Receive buffers, tables
    and all else that comes and goes are left out. Of precisions below 16 bits one microbatch counts, since copies of
    weights are kept once for all of them.

    Args:
        question: What every candidate shares.
        outlines: Of the same question.
    """

    def __init__(self, question: Question, outlines: Outlines) -> None:
        self._question, self._outlines = question, outlines
        self._context_bytes = int(question.software.context_bytes.get(question.cluster.device.kind, 0))
        self._reserve = 1 + question.software.reserve_fraction
        self._begun: dict[Hashable, tuple[_Begun, ...]] = {}
        self._weights: dict[tuple[bool, bool], StateBytes] = {}
        self._kept: dict[Hashable, list[tuple[float, float, float, float]]] = {}

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
        for trained, experts, frozen, passing in self._of_ends(c, state):
            held = trained * (weight_bytes / of_weights + optimizer_bytes / of_states)
            held += experts * (weight_bytes / of_experts + optimizer_bytes / of_expert_states)
            most = max(most, held + frozen * state.frozen / of_weights + self._reserve * passing)
        return self._context_bytes + int(most)

    def _of_ends(self, c: Candidate, state: StateBytes) -> list[tuple[float, float, float, float]]:
        """Weights that are trained, experts, frozen ones, and bytes that come and go; of both ends of the pipeline."""
        many = self._question.training.global_batch_size // (c.dp * c.microbatch_size)
        key = self._outlines.way(c), c.pp, c.virtual_stages, c.schedule, many
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = [self._of_end(c, begun, state) for begun in self._ends(c, many)]
        return found

    def _of_end(self, c: Candidate, begun: _Begun, state: StateBytes) -> tuple[float, float, float, float]:
        outline, bounds = self._outlines.of(c), self._outlines.boundaries(c)
        first, end = bounds[begun.stages], bounds[begun.stages + 1]

        def of_rank(sums: Floats) -> float:
            return float((sums[end] - sums[first]).sum())

        kept_bytes = outline.kept_bytes[end] - outline.kept_bytes[first]
        if self._question.software.preallocated_receives:  # inputs of stages are in buffers
            kept_bytes = np.maximum(0, kept_bytes - outline.input_bytes[first])
        forwards = begun.forwards if state.linear is None else np.minimum(begun.forwards, 1)
        passing = float((kept_bytes * forwards).sum())
        if begun.backward is not None and state.linear is None:
            passing += max(0.0, float(outline.backward_bytes[bounds[begun.backward + 1] - 1]))
        return of_rank(outline.trained), of_rank(outline.experts), of_rank(outline.frozen), passing

    def _state(self, c: Candidate) -> StateBytes:
        key = c.shards_parameters, c.ep > 1
        found = self._weights.get(key)
        if found is None:
            found = self._weights[key] = self._question.software.state(self._question.training, c.plan())
        return found

    def _ends(self, c: Candidate, many: int) -> tuple[_Begun, ...]:
        key = c.schedule, c.pp, c.virtual_stages, many
        found = self._begun.get(key)
        if found is None:
            found = self._begun[key] = _compiled(c, many) if c.schedule in COMPILED_SCHEDULES else _listed(c, many)
        return found


def _compiled(c: Candidate, many: int) -> tuple[_Begun, ...]:
    order = compute_order(c.schedule, c.pp, many, c.virtual_stages)
    found = []
    for rank in sorted({0, c.pp - 1}):
        kinds, stages = order.kind[rank, : order.length], order.stage[rank, : order.length]
        begins = int(np.argmax(kinds != F))
        own = np.flatnonzero(order.rank_of == rank)
        forwards = np.bincount(stages[:begins], minlength=c.num_stages)[own]
        found.append(_Begun(own, forwards, int(stages[begins]) if kinds[begins] == B else None))
    return tuple(found)


def _listed(c: Candidate, many: int) -> tuple[_Begun, ...]:
    table = plan_table(c.plan(), many)
    return tuple(_of_row(table[rank]) for rank in sorted({0, c.pp - 1}))


def _of_row(row: tuple[Action, ...]) -> _Begun:
    forwards = {action.stage: 0 for action in row if action.kind is ActionKind.FORWARD}
    backward = None
    for action in row:
        if action.kind in _BACKWARDS:
            backward = action.stage if action.kind in _WHOLE_BACKWARDS else None
            break
        if action.kind is ActionKind.FORWARD:
            forwards[action.stage] += 1
    stages = sorted(forwards)
    return _Begun(np.array(stages), np.array([forwards[stage] for stage in stages]), backward)
