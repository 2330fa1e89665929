"""A model under one way of splitting it, as running sums over its layers: what bounds on many plans are made of."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.analytic import AnalyticCost
from simplan.predict.build import cost_model
from simplan.program.action import Action, ActionKind
from simplan.program.footprint import layers_effects
from simplan.program.partition import assign_stage_layers, balanced_assignment
from simplan.program.program import LayerWork, Message, Phase
from simplan.program.script import Scripts
from simplan.program.stage import Stages
from simplan.search.candidate import Candidate
from simplan.search.question import Question
from simplan.spec.optimizer import LAYERWISE
from simplan.spec.plan import RankMapping, StageAssignment
from simplan.spec.schedules import SCHEDULE_FACTS

__all__ = ["CostCache", "Floats", "LayerSplit", "LayerSums", "LayerSumsCache", "costs_of"]

_WHOLE_MODEL = ((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),)
"""A table of one microbatch through all layers."""
_MANY = 10**9  # parameters, whose update takes as many times as long as that of one

Floats = NDArray[np.float64]


class LayerSplit(NamedTuple):
    """All of a plan that the numbers of a layer depend on."""

    tp: int
    sequence_parallel: bool
    cp: int
    cp_comm: str
    microbatch_size: int
    recompute: str
    recompute_modules: tuple[str, ...]
    shards_parameters: bool

    @classmethod
    def of(cls, candidate: Candidate) -> LayerSplit:
        """The split of a candidate."""
        return cls(
            candidate.tp,
            candidate.sequence_parallel,
            candidate.cp,
            candidate.cp_comm,
            candidate.microbatch_size,
            candidate.recompute,
            candidate.recompute_modules,
            candidate.shards_parameters,
        )


class LayerSums(NamedTuple):
    """Of a microbatch on the first rank of a stage. Sums run over the layers before one, ``(layers + 1,)``.

    Attributes:
        forward_s, backward_s: Seconds of passes with the exchanges that they wait for, summed.
        trained, experts, frozen: Elements of weights, tied ones once, summed; trained ones but for experts of which
            other ranks have others, these, and those that are frozen.
        kept_bytes: Kept from forward to backward, the inputs of layers among them, summed.
        between_bytes: Of these, kept between the two parts of a backward, summed; none of a whole backward.
        input_bytes: By layer, its input.
        backward_bytes: By layer, what its backward holds at its worst moment beyond what was kept.
        update_s: Seconds of the optimizer for one parameter.
        block_s: By layer, what the balanced split counts.
    """

    forward_s: Floats
    backward_s: Floats
    trained: Floats
    experts: Floats
    frozen: Floats
    kept_bytes: Floats
    between_bytes: Floats
    input_bytes: Floats
    backward_bytes: Floats
    update_s: float
    block_s: list[float]


class LayerSumsCache:
    """Sums of the ways in which candidates split layers, each made once.

    Args:
        question: What every candidate shares; devices are their own and there is no calibration.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._in_low_precision = question.training.precision in question.software.low_precision
        self._known: dict[Hashable, LayerSums] = {}
        self._splits: dict[Hashable, NDArray[np.int64]] = {}

    def of(self, candidate: Candidate) -> LayerSums:
        """The sums of a candidate."""
        facts = SCHEDULE_FACTS.get(candidate.schedule)
        splits = facts is not None and facts.splits_backward
        key = self.split_of(candidate), splits
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._made(candidate, splits=splits)
        return found

    def boundaries(self, candidate: Candidate) -> NDArray[np.int64]:
        """``(stages + 1,)``: the first layer of each stage, and how many there are; as ``predict`` splits them."""
        split, *more = self.split_of(candidate)
        key = split._replace(recompute="none", recompute_modules=()), *more, candidate.num_stages
        found = self._splits.get(key)
        if found is None:
            model, stages = self._question.model, candidate.num_stages
            equal = self._question.software.equal_stage_layers(model.num_blocks, stages)
            found = self._splits[key] = np.array(
                balanced_assignment(self.of(candidate).block_s, stages, model.num_last_layers).boundaries
                if equal is None
                else assign_stage_layers(equal, model.num_last_layers).boundaries
            )
        return found

    def split_of(self, candidate: Candidate) -> tuple[LayerSplit, int, int]:
        """All that the sums depend on; also the number of microbatches, where weights are quantized once for all."""
        dp, size = candidate.dp, candidate.microbatch_size
        many = self._question.training.global_batch_size // (dp * size) if self._in_low_precision else 0
        return LayerSplit.of(candidate), candidate.ep, many

    def _made(self, candidate: Candidate, *, splits: bool) -> LayerSums:
        asked = self._question
        plan = candidate._replace(pp=1, virtual_stages=1, schedule="none").plan()
        prices = costs_of(asked, candidate)
        whole = StageAssignment((0, len(asked.model.layers)))
        stages = Stages(asked.job(plan), whole, _WHOLE_MODEL)
        passes = _Passes(candidate, asked, stages, prices)
        known: dict[Hashable, tuple[float, ...]] = {}
        rows = []
        for position, layer in enumerate(stages.layers[0]):
            key = layer.key, stages.facts(0, position).kept
            if key not in known:
                known[key] = (*passes.of_layer(position, splits=splits), *_held(stages, position, splits=splits))
            rows.append(known[key])
        block_s, *of_layers = np.array(rows).T
        *sums, input_bytes, backward_bytes = of_layers
        update = LayerWork(stages.layers[0][1], Phase.OPTIMIZER, candidate.microbatch_size, _MANY)
        update_s = 0.0 if asked.training.optimizer in LAYERWISE else prices.work_s(update) / _MANY
        forward_s, backward_s, trained, experts, frozen, kept_bytes, between_bytes = map(_sums, sums)
        return LayerSums(
            forward_s, backward_s, trained, experts, frozen, kept_bytes, between_bytes, input_bytes, backward_bytes,
            update_s, block_s.tolist(),
        )  # fmt: skip


def costs_of(question: Question, candidate: Candidate) -> CostCache:
    """CostCache of what a candidate does."""
    cost = cost_model(question.job(candidate.plan()), None)
    assert isinstance(cost, AnalyticCost), "there is no calibration"
    return CostCache(cost)


def _sums(of_layers: Floats) -> Floats:
    return np.concatenate([np.zeros(1), of_layers.cumsum()])


def _held(stages: Stages, position: int, *, splits: bool) -> tuple[float, ...]:
    """Of a layer: trained weights but for experts, experts, frozen ones, and the bytes of an ``LayerSums``."""
    layer, facts = stages.layers[0][position], stages.facts(0, position)
    footprint, between = facts.footprint, 0
    if splits:
        between = facts.split().between_activations + facts.split().between_logits
    own = [p for p in layer.parameters if p.name not in layer.tied]
    trained = sum(p.num_elements for p in own if not p.frozen)
    experts = sum(p.num_elements for p in own if p.expert and not p.frozen)
    frozen = sum(p.num_elements for p in own if p.frozen)
    worst = sum(effect.during_bytes for effect in layers_effects([footprint], forward=False))
    return trained - experts, experts, frozen, footprint.activations, between, footprint.input_bytes, worst


_BOTH = (Phase.FORWARD, Phase.BACKWARD)
_PARTS = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


class _Passes:
    """How long passes take at least.

    What a ring of context-parallel ranks sends, and tokens that travel to experts while another microbatch is
    computed, may take no time.

    Args:
        candidate: The plan.
        question: What every candidate shares.
        stages: All layers as one stage.
        prices: Of work and messages.
    """

    def __init__(self, candidate: Candidate, question: Question, stages: Stages, prices: CostCache) -> None:
        self._groups = RankMapping.of(candidate.plan()).exchanging_groups(0)
        self._hidden = {"cp"} if candidate.cp > 1 and candidate.cp_comm == "ring" else set()
        if question.software.expert_overlap:
            self._hidden |= {"ep", "etp"}
        self._size, self._stages, self._scripts, self._prices = (
            candidate.microbatch_size, stages, Scripts(stages), prices,
        )  # fmt: skip

    def of_layer(self, position: int, *, splits: bool) -> tuple[float, float, float]:
        """What the balanced split counts of a layer, its forward and its backward, which may be in two parts."""
        layer = self._stages.layers[0][position]
        works = (LayerWork(layer, phase, self._size, layer.num_parameters) for phase in _BOTH)
        backward_s = self._seconds(position, Phase.BACKWARD)
        if splits:
            backward_s = min(backward_s, sum(self._seconds(position, part) for part in _PARTS))
        return sum(map(self._prices.work_s, works)), self._seconds(position, Phase.FORWARD), backward_s

    def _seconds(self, position: int, phase: Phase) -> float:
        """All that is computed, and what exchanges take beyond the products that they run beside."""
        total_s = hidden_s = 0.0
        for segment in self._scripts.computed(0, position, phase):
            total_s += sum(map(self._prices.work_s, segment.work))
            exchange = segment.exchange
            if exchange is None or exchange.axis in self._hidden:
                continue
            if segment.beside is not None or not exchange.beside:
                hidden_s = 0.0 if segment.beside is None else self._prices.work_s(segment.beside)
            message_s = self._prices.message_s(exchange.among(self._groups[exchange.axis]))
            total_s += max(0.0, message_s - hidden_s)
            hidden_s = max(0.0, hidden_s - message_s)
        return total_s


class CostCache:
    """What a cost model says, without its words; ways of splitting and recomputing layers have most work in common.

    Args:
        cost: The model.
    """

    def __init__(self, cost: AnalyticCost) -> None:
        self._cost = cost
        self._of_work: dict[LayerWork, float] = {}
        self._of_message: dict[Message, float] = {}

    def work_s(self, work: LayerWork) -> float:
        """One phase of one layer."""
        found = self._of_work.get(work)
        if found is None:
            found = self._of_work[work] = self._cost.compute_s(work)
        return found

    def message_s(self, message: Message) -> float:
        """A collective or a send of few ranks."""
        found = self._of_message.get(message)
        if found is None:
            found = self._of_message[message] = self._cost.message_s(message)
        return found
