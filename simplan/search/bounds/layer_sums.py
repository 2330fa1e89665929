"""A model under one way of splitting its layers, as running sums over them: what bounds on many plans are made of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.analytic import AnalyticCost
from simplan.cost.base import CostModel
from simplan.cost.calibration.format import Calibration
from simplan.cost.compute.pass_time import pass_time_s
from simplan.job import Job
from simplan.plan.plan import ParallelPlan, RankMapping, StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict.build import cost_model
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.script import Scripts
from simplan.program.lowering.stage import Stages
from simplan.program.memory.footprint import layers_effects
from simplan.program.program import LayerWork, Message, Phase
from simplan.program.tables.partition import assign_stage_layers, balanced_assignment
from simplan.training.optimizer import LAYERWISE

__all__ = ["CostCache", "Floats", "LayerSums", "LayerSumsCache", "StageSums"]

_WHOLE_MODEL = ((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),)
"""A table of one microbatch through all layers."""
_MANY = 10**9  # parameters, whose update takes as many times as long as that of one

Floats = NDArray[np.float64]


class LayerSums(NamedTuple):
    """Numbers of a microbatch on the first rank of a stage.

    Attributes:
        summed: ``(fields, layers + 1)`` Sums over the layers before one of the first seven fields of ``StageSums``.
        input_bytes, output_bytes: By layer, its input, and what it hands to the next one that it was not given.
        backward_bytes: By layer, what its backward holds at its worst instant beyond what was kept.
        update_s: Seconds of the optimizer for one parameter.
        balance_s: By layer, the seconds that the balanced split counts.
    """

    summed: Floats
    input_bytes: Floats
    output_bytes: Floats
    backward_bytes: Floats
    update_s: float
    balance_s: list[float]


class StageSums(NamedTuple):
    """The same by stage, of several ways of splitting layers: ``(ways, stages)``, of one microbatch.

    Attributes:
        forward_s, backward_s: Seconds of passes with the exchanges that they wait for.
        trained, experts, frozen: Elements of weights, tied ones once; trained ones but for experts of which other ranks
            have others, these, and those that are frozen.
        kept_bytes: Kept from forward to backward, the inputs of layers among them.
        between_bytes: Of these, kept between the two parts of a backward; none of a whole backward.
        input_bytes: Input of the first layer.
        output_bytes: What the last layer hands to the next stage.
        backward_bytes: What the first backward of the stage holds at its worst instant beyond what was kept.
        update_s: ``(ways, 1)`` Seconds of the optimizer for one parameter.
    """

    forward_s: Floats
    backward_s: Floats
    trained: Floats
    experts: Floats
    frozen: Floats
    kept_bytes: Floats
    between_bytes: Floats
    input_bytes: Floats
    output_bytes: Floats
    backward_bytes: Floats
    update_s: Floats

    @classmethod
    def of(cls, layers: Sequence[LayerSums], boundaries: Sequence[NDArray[np.int64]]) -> StageSums:
        """Stages of one pipeline.

        Args:
            layers: By way of splitting layers.
            boundaries: By way, the first layer of each stage, and how many layers there are.
        """
        pairs = list(zip(layers, boundaries, strict=True))
        summed = np.stack([np.diff(of.summed[:, bounds]) for of, bounds in pairs], axis=1)
        forward_s, backward_s, trained, experts, frozen, kept_bytes, between_bytes = summed
        return cls(
            forward_s, backward_s, trained, experts, frozen, kept_bytes, between_bytes,
            np.stack([of.input_bytes[bounds[:-1]] for of, bounds in pairs]),
            np.stack([of.output_bytes[bounds[1:] - 1] for of, bounds in pairs]),
            np.stack([of.backward_bytes[bounds[1:] - 1] for of, bounds in pairs]),
            np.array([[of.update_s] for of in layers]),
        )  # fmt: skip


class LayerSumsCache:
    """Sums of the ways in which candidates split layers, each made once.

    Args:
        job: What every candidate shares.
        calibration: Timings of the device, if there are any.
    """

    def __init__(self, job: Job, calibration: Calibration | None = None) -> None:
        self._job, self._calibration = job, calibration
        self.in_low_precision = job.training.precision in job.software.low_precision
        self._sums: dict[Hashable, LayerSums] = {}
        self._boundaries: dict[Hashable, NDArray[np.int64]] = {}

    def of(self, plan: ParallelPlan) -> LayerSums:
        """The sums of a plan."""
        facts = SCHEDULE_FACTS.get(plan.schedule)
        splits = facts is not None and facts.splits_backward
        key = self._split_of(plan), plan.recompute, plan.recompute_modules, splits
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = self._made(plan, splits=splits)
        return found

    def boundaries(self, plan: ParallelPlan) -> NDArray[np.int64]:
        """``(stages + 1,)``: the first layer of each stage, and how many there are; as ``predict`` splits them."""
        key = self._split_of(plan), plan.num_stages
        found = self._boundaries.get(key)
        if found is None:
            model, stages = self._job.model, plan.num_stages
            given = plan.stage_layers or self._job.software.equal_stage_layers(model.num_blocks, stages)
            found = self._boundaries[key] = np.array(
                balanced_assignment(self.of(plan).balance_s, stages, model.num_last_layers).boundaries
                if given is None
                else assign_stage_layers(given, model.num_last_layers).boundaries
            )
        return found

    def prices(self, plan: ParallelPlan) -> CostCache:
        """Prices of what a plan does."""
        job = self._job.with_plan(plan)
        return CostCache(cost_model(job, self._calibration), sends=job.cluster.cores_per_node is None)

    def _split_of(self, plan: ParallelPlan) -> Hashable:
        """What the layers of a rank depend on; the number of microbatches where weights are quantized once for all."""
        many = self._job.with_plan(plan).num_microbatches if self.in_low_precision else 0
        return plan.shard, plan.microbatch_size, plan.shards_parameters, many

    def _made(self, plan: ParallelPlan, *, splits: bool) -> LayerSums:
        job = self._job
        alone = {"pp": 1, "virtual_stages": 1, "schedule": "none", "stage_layers": None}
        plan = plan.model_copy(update=alone)
        prices = self.prices(plan)
        stages = Stages(job.with_plan(plan), StageAssignment((0, len(job.model.layers))), _WHOLE_MODEL)
        passes = _PassTimes(job, plan, stages, prices)
        known: dict[Hashable, tuple[float, ...]] = {}
        rows = []
        for position, layer in enumerate(stages.layers[0]):
            key = layer.key, position % 2 if plan.recompute == "selective_layer" else 0
            if key not in known:
                known[key] = (*passes.of_layer(position, splits=splits), *_bytes_of(stages, position, splits=splits))
            rows.append(known[key])
        balance_s, *fields = np.array(rows).T
        summed = np.concatenate([np.zeros((7, 1)), np.cumsum(fields[:7], axis=1)], axis=1)
        on_host = plan.offload_optimizer
        update = LayerWork(stages.layers[0][1], Phase.OPTIMIZER, plan.microbatch_size, _MANY, on_host=on_host)
        counts = job.training.optimizer not in LAYERWISE and prices.sends
        update_s = prices.work_s(update) / _MANY if counts else 0.0
        input_bytes, output_bytes, backward_bytes = fields[7:]
        return LayerSums(summed, input_bytes, output_bytes, backward_bytes, update_s, balance_s.tolist())


def _bytes_of(stages: Stages, position: int, *, splits: bool) -> tuple[float, ...]:
    """Of a layer, the fields of ``StageSums`` that are elements and bytes, in their order."""
    layer, facts = stages.layers[0][position], stages.facts(0, position)
    footprint, between = facts.footprint, 0
    if splits:
        between = facts.split().between_activations + facts.split().between_logits
    own = [p for p in layer.parameters if p.name not in layer.tied]
    trained = sum(p.num_elements for p in own if not p.frozen)
    experts = sum(p.num_elements for p in own if p.expert and not p.frozen)
    frozen = sum(p.num_elements for p in own if p.frozen)
    worst = sum(effect.during_bytes for effect in layers_effects([footprint], forward=False))
    made = sum(tensor.num_bytes for tensor in stages.leaving([layer]) if not tensor.passes)
    kept = 0 if stages.plan.offload_activations else footprint.activations
    return trained - experts, experts, frozen, kept, between, footprint.input_bytes, made, worst


_BOTH = (Phase.FORWARD, Phase.BACKWARD)
_PARTS = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


class _PassTimes:
    """How long passes through layers take at least.

    What a ring of context-parallel ranks sends, and tokens that travel to experts while another microbatch is
    computed, may take no time.

    Args:
        job: What every candidate shares.
        plan: The plan.
        stages: All layers as one stage.
        prices: Of work and messages.
    """

    def __init__(self, job: Job, plan: ParallelPlan, stages: Stages, prices: CostCache) -> None:
        self._groups = RankMapping.of(plan).exchanging_groups(0)
        self._hidden = {"cp"} if plan.cp > 1 and plan.cp_comm == "ring" else set()
        if job.software.expert_overlap:
            self._hidden |= {"ep", "etp"}
        self._size, self._stages, self._scripts, self._prices = plan.microbatch_size, stages, Scripts(stages), prices

    def of_layer(self, position: int, *, splits: bool) -> tuple[float, float, float]:
        """What the balanced split counts of a layer, its forward and its backward, which may be in two parts."""
        layer = self._stages.layers[0][position]
        works = (LayerWork(layer, phase, self._size, layer.num_parameters) for phase in _BOTH)
        backward_s = self._seconds(position, Phase.BACKWARD)
        if splits:
            backward_s = min(backward_s, sum(self._seconds(position, part) for part in _PARTS))
        return sum(map(self._prices.work_s, works)), self._seconds(position, Phase.FORWARD), backward_s

    def _seconds(self, position: int, phase: Phase) -> float:
        segments = self._scripts.computed(0, position, phase)
        return pass_time_s(segments, self._groups, self._prices.work_s, self._prices.message_s, self._hidden)


class CostCache:
    """Seconds of work and messages by a cost model, without its words.

    Args:
        cost: The model.
        sends: Messages count; else they take no time, as the least that they do on cores that ranks share.
    """

    def __init__(self, cost: CostModel, *, sends: bool) -> None:
        self._cost, self.sends = cost, sends
        self._messages_s: dict[Message, float] = {}

    def work_s(self, work: LayerWork) -> float:
        """One phase of one layer."""
        return self._cost.compute_s(work) if isinstance(self._cost, AnalyticCost) else self._cost.compute(work).seconds

    def message_s(self, message: Message) -> float:
        """A collective or a send."""
        if not self.sends or len(message.ranks) == 1:
            return 0.0
        found = self._messages_s.get(message)
        if found is None:
            cost = self._cost
            found = cost.message_s(message) if isinstance(cost, AnalyticCost) else cost.message(message).seconds
            self._messages_s[message] = found
        return found
