"""Times and bytes of every layer of a model under one way of splitting it, priced once for all plans that share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.program.action import Action, ActionKind
from simplan.program.footprint import LayerFootprint, layer_footprint
from simplan.program.program import LayerWork, Phase
from simplan.program.script import Scripts, Segment
from simplan.program.stage import Crossing, LayerFacts, Stages, layer_facts
from simplan.program.units import padded_elements
from simplan.search.candidate import Candidate
from simplan.search.layer_changes import Change, layer_change
from simplan.search.part import Part
from simplan.search.prices import Prices
from simplan.spec.layer import LayerKind, LayerSpec
from simplan.spec.plan import ParallelPlan, StageAssignment
from simplan.spec.recompute import recomputation

__all__ = ["WHOLE_MODEL", "Layers", "Pass", "Way"]

WHOLE_MODEL = ((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),)
"""A table of one microbatch through all layers."""


class Way(NamedTuple):
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
    def of(cls, candidate: Candidate) -> Way:
        """The way of a candidate."""
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

    @classmethod
    def of_sharding(cls, shards_parameters: bool) -> Way:
        """The way of a plan that does nothing else."""
        return cls(1, False, 1, "ring", 1, "none", (), shards_parameters)

    def plan(self) -> ParallelPlan:
        """A plan of as few devices as go with it."""
        fields = {name: value for name, value in self._asdict().items() if name != "shards_parameters"}
        plan = ParallelPlan(**fields | {"recompute_modules": self.recompute_modules or None})
        return plan.model_copy(update={"dp_shard": 2, "zero_stage": 3}) if self.shards_parameters else plan


class Pass(NamedTuple):
    """One pass through a layer.

    Attributes:
        seconds: From its beginning to the end of its last computation or exchange.
        computed_s: To the end of its last computation.
    """

    seconds: float
    computed_s: float


class Layers:
    """All layers of a model in one way.

    Args:
        model, training, software: What is trained.
        way: How its layers are split and run.
        prices: Of work and messages.

    Attributes:
        specs: The layers, as one rank has them.
        kinds: By layer, the number of the first layer that is like it.
        pattern: The same, to tell ways apart.
        state: Element widths.
        stage_changes: For whoever works out what stages of these layers do to memory, to keep it.
    """

    def __init__(self, job: Job, way: Way, prices: Prices) -> None:
        self.way, self._prices = way, prices
        whole = StageAssignment((0, len(job.model.layers)))
        self._stages = Stages(job, whole, WHOLE_MODEL)
        self._scripts = Scripts(self._stages)
        self.specs: Sequence[LayerSpec] = self._stages.layers[0]
        self.state = self._stages.state
        self.batch_bytes = self._stages.batch_bytes  # of one microbatch
        first: dict[tuple[str, int], int] = {}
        self.kinds = [first.setdefault((layer.key, self._variant(i)), i) for i, layer in enumerate(self.specs)]
        self.pattern = tuple(self.kinds)
        self._passes: dict[tuple[int, Phase, float], Pass] = {}
        self._of_kinds: dict[Phase, NDArray[np.float64]] = {}
        self._facts: dict[tuple[int, tuple[bool, bool], int], LayerFacts] = {}
        self.stage_changes: dict[tuple[Part, bool], NDArray[np.int64]] = {}
        self._footprints: dict[int, LayerFootprint] = {}
        self._changes: dict[tuple[int, tuple[bool, bool], Phase, bool], tuple[Change, int]] = {}
        self._runs: dict[Part, list[tuple[int, int]]] = {}
        self._seconds: dict[tuple[int, Phase, int], float] = {}
        self._held: dict[tuple[int, int, bool], int] = {}
        self._counted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._leaving: dict[Part, tuple[Crossing, ...]] = {}

    def _variant(self, layer: int) -> int:
        """With torchtitan's selective_layer every second block is recomputed."""
        return (layer - 1) % 2 if self.way.recompute == "selective_layer" else 0

    def passed(self, layer: int, phase: Phase, more_s: float = 0.0) -> Pass:
        """A pass through a layer.

        Args:
            layer: Its index.
            phase: Forward, backward or one of its parts.
            more_s: What is done right after its last computation, such as a division of gradients.
        """
        key = (self.kinds[layer], phase, more_s)
        found = self._passes.get(key)
        if found is None:
            script = self._scripts.computed(0, self.kinds[layer], phase)
            found = self._passes[key] = self._timed(script, more_s)
        return found

    @cached_property
    def distinct(self) -> list[int]:
        """Layers of which each is the first of its kind."""
        return sorted(set(self.kinds))

    def passes_s(self, phase: Phase) -> NDArray[np.float64]:
        """``(kinds,)``: a pass through one layer of each kind."""
        found = self._of_kinds.get(phase)
        if found is None:
            found = self._of_kinds[phase] = np.array([self.passed(i, phase).seconds for i in self.distinct])
        return found

    def kinds_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Layers of a stage that differ, each with how many are like it."""
        found = self._counted.get((start, stop))
        if found is None:
            found = self._counted[start, stop] = list(Counter(self.kinds[start:stop]).items())
        return found

    def pass_s(self, part: Part, phase: Phase) -> float:
        """Time of a pass through a stage."""
        return sum(count * self.passed(i, phase).seconds for i, count in self.kinds_in(part.start, part.stop))

    def runs(self, part: Part) -> list[tuple[int, int]]:
        """Layers that are alike and one after the other, each with how many; those at the ends of a stage are alone."""
        found = self._runs.get(part)
        if found is None:
            first, last = part.start + part.receives, part.stop - part.hands_on
            found = self._runs[part] = [(part.start, 1)] if part.receives else []
            for _, group in groupby(range(first, last), self.kinds.__getitem__):
                alike = list(group)
                found.append((alike[0], len(alike)))
            if part.hands_on and last >= first:  # else it is the layer that receives
                found.append((last, 1))
        return found

    def passed_back(self, part: Part, *, tied: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """A whole backward that divides gradients after each layer's last computation.

        Args:
            part: The stage.
            tied: It owns a weight that its embedding and its head share once.

        Returns:
            By layer in the order of the pass, its time, and that up to the end of its last computation.
        """
        passes = np.zeros((len(self.specs), 2))
        for i, _ in self.kinds_in(part.start, part.stop):
            passes[i] = self.passed(i, Phase.BACKWARD, self.seconds(i, Phase.SCALE, self.owned(i, tied=tied)))
        seconds, computed_s = passes[self._kinds_array[part.start : part.stop][::-1]].T
        return seconds, computed_s

    @cached_property
    def _kinds_array(self) -> NDArray[np.int64]:
        return np.array(self.kinds)

    def facts(self, layer: int, ends: tuple[bool, bool], *, tied: bool) -> LayerFacts:
        """What a layer keeps.

        Args:
            layer: Its index.
            ends: Its input, and the gradient of its output, come from other ranks.
            tied: The embedding and the head that share a weight are in one stage.
        """
        left = self._left(layer) if tied else 0
        key = (self.kinds[layer], ends, left)
        found = self._facts.get(key)
        if found is None:
            spec = self.specs[layer]
            kept = recomputation(spec, self._stages.plan.recompute, layer - 1, self._stages.plan.recompute_modules)
            inside = self._footprints.get(self.kinds[layer])
            if inside is None:
                inside = layer_footprint(spec, self.way.microbatch_size, self.state, kept)
                self._footprints[self.kinds[layer]] = inside
            found = layer_facts(spec, self.way.microbatch_size, self.state, kept, ends, left, inside=inside)
            self._facts[key] = found
        return found

    def leaving(self, part: Part) -> tuple[Crossing, ...]:
        """Tensors that a stage hands on."""
        found = self._leaving.get(part)
        if found is None:
            found = self._leaving[part] = self._stages.leaving(self.specs[part.start : part.stop])
        return found

    @cached_property
    def tied_bytes(self) -> int:
        """Gradient of a weight that the first and the last layer share."""
        return self._stages.tied_bytes

    def change(self, layer: int, ends: tuple[bool, bool], phase: Phase, *, tied: bool) -> tuple[Change, int]:
        """What a pass does to memory; see ``layer_change``, and ``facts`` for the rest."""
        key = (self.kinds[layer], ends, phase, tied)
        found = self._changes.get(key)
        if found is None:
            found = self._changes[key] = layer_change(self.facts(layer, ends, tied=tied), phase)
        return found

    def _left(self, layer: int) -> int:
        """See ``Stages``: autograd holds the head's gradient of a shared weight until it has the embedding's."""
        spec = self.specs[layer]
        match spec.kind:
            case LayerKind.HEAD:
                return sum(p.num_elements for p in spec.parameters if p.name in spec.tied) * self.state.residual
            case LayerKind.EMBEDDING:
                return -spec.parameters[0].num_elements * self.state.residual
            case LayerKind.BLOCK:
                return 0

    def seconds(self, layer: int, phase: Phase, elements: int) -> float:
        """Time of a phase of parameters or gradients over so many of their elements."""
        key = (self.kinds[layer], phase, elements)
        found = self._seconds.get(key)
        if found is None:
            work = LayerWork(self.specs[layer], phase, self.way.microbatch_size, elements)
            found = self._seconds[key] = self._prices.work_s(work)
        return found

    def owned(self, layer: int, *, tied: bool) -> int:
        """Parameters that a layer brings; a head whose weight is the embedding's of the same stage has it not."""
        return self.held(layer, 1, tied=tied)

    def held(self, layer: int, num_shards: int, *, tied: bool) -> int:
        """The same of one shard, where every tensor is padded to equal ones."""
        key = (self.kinds[layer], num_shards, tied)
        found = self._held.get(key)
        if found is None:
            spec = self.specs[layer]
            own = [p.shape for p in spec.parameters if not (tied and p.name in spec.tied)]
            found = self._held[key] = sum(padded_elements(shape, num_shards) // num_shards for shape in own)
        return found

    @cached_property
    def partial_elements(self) -> list[int]:
        """By layer, gradients that are summed over tensor-parallel ranks."""
        return [sum(p.num_elements for p in spec.parameters if p.partial_gradient) for spec in self.specs]

    @cached_property
    def block_times_s(self) -> list[float]:
        """By layer, forward and backward as the balanced split counts them: computation alone, nothing repeated."""
        found: list[float] = []
        for layer, spec in enumerate(self.specs):
            if self.kinds[layer] == layer:
                works = [LayerWork(spec, phase, self.way.microbatch_size, spec.num_parameters) for phase in _BOTH]
                seconds = sum(self._prices.work_s(work) for work in works)
            else:
                seconds = found[self.kinds[layer]]
            found.append(seconds)
        return found

    def _timed(self, script: Sequence[Segment], more_s: float) -> Pass:
        """Computations one after the other; each waits for the exchanges before it, as the lowering has it."""
        mapping = self._stages.mapping
        groups = mapping.exchanging_groups(0)
        last = max(number for number, segment in enumerate(script) if segment.exchange is None)
        now_s = before_s = pending_s = 0.0
        free_s = dict.fromkeys(groups, 0.0)
        for number, segment in enumerate(script):
            if segment.exchange is None:
                duration_s = sum(self._prices.work_s(work) for work in segment.work)
                before_s, now_s = now_s, max(now_s, pending_s) + duration_s + (more_s if number == last else 0.0)
                pending_s = 0.0
            else:
                axis, exchange = segment.exchange.axis, segment.exchange
                start_s = max(free_s[axis], before_s if exchange.beside else now_s, pending_s)
                free_s[axis] = start_s + self._prices.message_s(exchange.among(groups[axis]))
                pending_s = max(pending_s, free_s[axis])
        return Pass(max(now_s, pending_s), now_s)


_BOTH = (Phase.FORWARD, Phase.BACKWARD)
