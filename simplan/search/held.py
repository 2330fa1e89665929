"""A bound on memory that costs little: what the first pipeline rank holds when its first backward begins."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from simplan.predict.build import assign_layers, cost_model
from simplan.program.action import ActionKind
from simplan.program.stage import Stages
from simplan.program.table import plan_table
from simplan.search.candidate import Candidate
from simplan.search.layers import WHOLE_MODEL, Way
from simplan.search.question import Question
from simplan.spec.plan import StageAssignment
from simplan.spec.rules import num_microbatches

__all__ = ["HeldBytes"]

_BACKWARD = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


class _Layer(NamedTuple):
    """What a rank has of a layer: elements of weights, and bytes kept of a microbatch, its input among them."""

    trained: int
    frozen: int
    kept_bytes: int
    input_bytes: int


class HeldBytes:
    """Bytes that the first pipeline rank of a candidate needs at least.

    At its first backward it holds weights, gradients and optimizer states of its stages, and what it keeps of every
    microbatch that has come through them. Inputs of stages, buffers, tables and all that comes and goes are left out.
    Of precisions below 16 bits one microbatch counts, since copies of weights are kept once for all of them.

    Args:
        question: What every candidate shares.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._context_bytes = int(question.software.context_bytes.get(question.cluster.device.kind, 0))
        self._layers: dict[tuple[Way, int], tuple[_Layer, ...]] = {}
        self._splits: dict[tuple[Way, int, int], tuple[int, ...]] = {}
        self._begun: dict[tuple[str, int, int, int], Counter[int]] = {}

    def bytes(self, candidate: Candidate) -> int:
        """At least so many."""
        asked, plan = self._question, candidate.plan()
        state = asked.software.state(asked.training, plan)
        shards = candidate.dp_shard * candidate.cp
        if candidate.ep > 1:  # experts are dealt out over other ranks: never over more than all
            shards = candidate.dp * candidate.cp
        of_weights = shards if candidate.shards_parameters else 1
        of_states = shards if candidate.zero_stage else 1
        optimizer_bytes = state.optimizer_bytes(asked.training.optimizer)
        layers, bounds = self._of_layers(candidate), self._bounds(candidate)
        total = float(self._context_bytes)
        for stage, number in self._forwards(candidate).items():
            own = layers[bounds[stage] : bounds[stage + 1]]
            trained, frozen = sum(one.trained for one in own), sum(one.frozen for one in own)
            total += (trained * (state.parameter + state.gradient) + frozen * state.frozen) / of_weights
            total += trained * optimizer_bytes / of_states
            kept_bytes = sum(one.kept_bytes for one in own) - sum(one.input_bytes for one in own[:1])
            total += max(0, kept_bytes) * (number if state.linear is None else min(number, 1))
        return int(total)

    def _of_layers(self, candidate: Candidate) -> tuple[_Layer, ...]:
        key = Way.of(candidate), candidate.ep
        if key not in self._layers:
            asked = self._question
            plan = candidate._replace(pp=1, virtual_stages=1, schedule="none").plan()
            whole = StageAssignment((0, len(asked.model.layers)))
            stages = Stages(asked.model, asked.training, plan, asked.software, whole, WHOLE_MODEL)
            self._layers[key] = tuple(
                _Layer(
                    sum(p.num_elements for p in layer.parameters if not p.frozen and p.name not in layer.tied),
                    sum(p.num_elements for p in layer.parameters if p.frozen),
                    facts.footprint.activations,
                    facts.footprint.input_bytes,
                )
                for layer, facts in (
                    (layer, stages.facts(0, position)) for position, layer in enumerate(stages.layers[0])
                )
            )
        return self._layers[key]

    def _bounds(self, candidate: Candidate) -> tuple[int, ...]:
        key = Way.of(candidate)._replace(recompute="none"), candidate.ep, candidate.num_stages
        if key not in self._splits:
            asked, plan = self._question, candidate.plan()
            cost = cost_model(asked.cluster, asked.training, plan, asked.software, None)
            self._splits[key] = tuple(assign_layers(asked.model, plan, asked.software, cost).boundaries)
        return self._splits[key]

    def _forwards(self, candidate: Candidate) -> Counter[int]:
        """By stage of the first rank, its forwards before its first backward; at least one of each stage counts."""
        plan = candidate.plan()
        number = num_microbatches(self._question.training, plan)
        key = candidate.schedule, candidate.pp, candidate.virtual_stages, number
        if key not in self._begun:
            row = plan_table(plan, number)[0]
            found: Counter[int] = Counter({action.stage: 0 for action in row if action.kind is ActionKind.FORWARD})
            for action in row:
                if action.kind in _BACKWARD:
                    break
                if action.kind is ActionKind.FORWARD:
                    found[action.stage] += 1
            self._begun[key] = found
        return self._begun[key]
