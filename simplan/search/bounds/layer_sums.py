"""Prefix sums of per-layer costs for one layer configuration, used to bound many plans."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.analytic import AnalyticCost
from simplan.cost.calibration.format import Calibration
from simplan.cost.model import CostModel
from simplan.cost.program_costs import pass_time_s
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan, StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS, stage_ranks
from simplan.predict.build import cost_model
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.script import Scripts
from simplan.program.lowering.stage import Stages
from simplan.program.memory.footprint import layers_effects
from simplan.program.program import Communication, LayerWork, Phase
from simplan.program.tables.partition import assign_stage_layers, balanced_assignment
from simplan.search.bounds.device_groups import LAYER_AXES, Groups, groups_of, spreads_alike
from simplan.training import LAYERWISE

_WHOLE_MODEL = ((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),)
"""Action table of one microbatch through all layers."""
_MANY = 10**9  # parameters; large enough that the update time per parameter is constant

Floats = NDArray[np.float64]


class LayerSums(NamedTuple):
    """Per-layer costs of one microbatch on the first rank of a stage.

    Attributes:
        summed: ``(7, layers + 1)`` Prefix sums of the first seven fields of ``StageSums``, exclusive of the layer.
        input_bytes, output_bytes: ``(layers,)`` Input of a layer, and its output without tensors it only passes on.
        backward_bytes: ``(layers,)`` Peak bytes of a layer's backward beyond the saved activations.
        update_s: Optimizer seconds per parameter.
        balance_s: ``(layers,)`` Seconds per layer that the balanced split uses.
    """

    summed: Floats
    input_bytes: Floats
    output_bytes: Floats
    backward_bytes: Floats
    update_s: float
    balance_s: list[float]


class StageSums(NamedTuple):
    """Per-stage costs of one microbatch, ``(ways, stages)``; a way is a layer configuration.

    Attributes:
        forward_s, backward_s: Seconds of a pass, including the exposed collectives inside layers.
        trained, experts, frozen: Weight elements, tied weights counted once: trained except expert-parallel ones;
            trained expert-parallel ones; frozen ones.
        kept_bytes: Bytes saved for backward, including layer inputs.
        between_bytes: Part of ``kept_bytes`` still saved between dgrad and wgrad; 0 for an unsplit backward.
        input_bytes: Input bytes of the first layer.
        output_bytes: Bytes that the last layer hands to the next stage.
        backward_bytes: Peak bytes of the backward of the last layer beyond the saved activations.
        update_s: ``(ways, 1)`` Optimizer seconds per parameter.
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
        """Sums over the stages of one pipeline.

        Args:
            layers: One entry per layer configuration.
            boundaries: By layer configuration, ``(stages + 1,)``: first layer of each stage, then the number of layers.
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


class Pipeline(NamedTuple):
    """Pipeline shared by a set of plans: its ranks, stages, placement, and split or unsplit backward.

    Attributes:
        layers: One entry per layer configuration.
        boundaries: By layer configuration, ``(stages + 1,)``: first layer of each stage, then the number of layers.
        stages: Sums over the stages, by layer configuration.
        placement: ``(stages,)`` Pipeline rank of each stage.
        splits: True if backward is split into dgrad and wgrad.
    """

    layers: Sequence[LayerSums]
    boundaries: Sequence[NDArray[np.int64]]
    stages: StageSums
    placement: NDArray[np.int64]
    splits: bool

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return int(self.placement.max()) + 1

    def of_ranks(self, of_stages: Floats) -> Floats:
        """``(ways, ranks)`` Sums over the stages of each rank, from ``(ways, stages)``."""
        ranks = [of_stages[:, self.placement == rank].sum(axis=1) for rank in range(self.num_ranks)]
        return np.stack(ranks, axis=1)


class LayerSumsCache:
    """Cache of ``LayerSums`` by layer configuration."""

    def __init__(self, job: Job, calibration: Calibration | None = None) -> None:
        self._job, self._calibration = job, calibration
        self.in_low_precision = job.training.precision in job.software.low_precision
        self._sums: dict[Hashable, LayerSums] = {}
        self._boundaries: dict[Hashable, NDArray[np.int64]] = {}

    def of(self, plan: ParallelPlan) -> LayerSums:
        """Sums for the layer configuration of a plan."""
        facts = SCHEDULE_FACTS.get(plan.schedule)
        splits = facts is not None and facts.splits_backward
        per_node = self._job.cluster.devices_per_node
        groups = {axis: groups_of(plan, per_node, axis) for axis in LAYER_AXES}
        placed = () if spreads_alike(plan, per_node) else tuple(groups.values())
        key = self._split_of(plan), plan.recompute, plan.recompute_modules, splits, placed
        if (layer_sums := self._sums.get(key)) is None:
            layer_sums = self._sums[key] = self._made(plan, groups, splits=splits)
        return layer_sums

    def boundaries(self, plan: ParallelPlan) -> NDArray[np.int64]:
        """``(stages + 1,)``: first layer of each stage, then the number of layers; split as in ``predict``."""
        ranks = stage_ranks(plan.schedule, plan.pp, plan.num_stages)
        key = self._split_of(plan), ranks
        if (found := self._boundaries.get(key)) is None:
            model, stages = self._job.model, plan.num_stages
            given = plan.stage_layers or self._job.software.equal_stage_layers(model.num_blocks, stages)
            found = self._boundaries[key] = np.array(
                balanced_assignment(self.of(plan).balance_s, stages, model.num_last_layers, ranks).boundaries
                if given is None
                else assign_stage_layers(given, model.num_last_layers).boundaries
            )
        return found

    def cost_cache(self, plan: ParallelPlan) -> CostCache:
        """Cost estimates for a plan; ranks of communication are devices."""
        job = self._job.with_plan(plan if plan.placement is None else plan.model_copy(update={"placement": None}))
        return CostCache(cost_model(job, self._calibration), sends=job.cluster.cores_per_node is None)

    def _split_of(self, plan: ParallelPlan) -> Hashable:
        """Key of a layer configuration; includes the number of microbatches in low precision.

        Low-precision weights may be quantized once for all microbatches.
        """
        many = self._job.with_plan(plan).num_microbatches if self.in_low_precision else 0
        return plan.shard, plan.microbatch_size, plan.shards_parameters, many

    def _made(self, plan: ParallelPlan, groups: Mapping[str, Groups], *, splits: bool) -> LayerSums:
        job = self._job
        alone = {"pp": 1, "virtual_stages": 1, "schedule": "none", "stage_layers": None, "placement": None}
        plan = plan.model_copy(update=alone)
        cost_cache = self.cost_cache(plan)
        stages = Stages(job.with_plan(plan), StageAssignment((0, len(job.model.layers))), _WHOLE_MODEL)
        passes = _PassTimes(job, plan, stages, groups, cost_cache)
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
        counts = job.training.optimizer not in LAYERWISE and cost_cache.sends
        update_s = cost_cache.work_s(update) / _MANY if counts else 0.0
        input_bytes, output_bytes, backward_bytes = fields[7:]
        return LayerSums(summed, input_bytes, output_bytes, backward_bytes, update_s, balance_s.tolist())


def _bytes_of(stages: Stages, position: int, *, splits: bool) -> tuple[float, ...]:
    """Element and byte fields of ``StageSums`` for one layer, in field order."""
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
    """Lower bounds on the time of forward and backward per layer.

    Ring context-parallel communication counts as free, and so does expert dispatch with ``expert_overlap``.

    Args:
        plan: Plan without a pipeline.
        stages: All layers as one stage.
        groups: By axis, devices of its groups.
    """

    def __init__(
        self, job: Job, plan: ParallelPlan, stages: Stages, groups: Mapping[str, Groups], cost_cache: CostCache
    ) -> None:
        self._groups = {axis: of_axis[0] for axis, of_axis in groups.items()}
        self._others = {of_axis[0]: of_axis for of_axis in groups.values() if len(of_axis) > 1}
        self._hidden = {"cp"} if plan.cp > 1 and plan.cp_comm == "ring" else set()
        if job.software.expert_overlap:
            self._hidden |= {"ep", "etp"}
        self._size, self._stages, self._scripts, self._cost_cache = (
            plan.microbatch_size,
            stages,
            Scripts(stages),
            cost_cache,
        )

    def of_layer(self, position: int, *, splits: bool) -> tuple[float, float, float]:
        """Seconds of a layer: for the balanced split, forward, and backward (split or not, the faster one)."""
        layer = self._stages.layers[0][position]
        works = (LayerWork(layer, phase, self._size, layer.num_parameters) for phase in _BOTH)
        backward_s = self._seconds(position, Phase.BACKWARD)
        if splits:
            backward_s = min(backward_s, sum(self._seconds(position, part) for part in _PARTS))
        return sum(map(self._cost_cache.work_s, works)), self._seconds(position, Phase.FORWARD), backward_s

    def _seconds(self, position: int, phase: Phase) -> float:
        segments = self._scripts.computed(0, position, phase)
        return pass_time_s(segments, self._groups, self._cost_cache.work_s, self._communication_s, self._hidden)

    def _communication_s(self, communication: Communication) -> float:
        groups = self._others.get(communication.ranks, (communication.ranks,))
        return min(self._cost_cache.communication_s(communication._replace(ranks=group)) for group in groups)


class CostCache:
    """Seconds of compute and communication by a cost model, cached.

    Args:
        sends: Count communication. False for ranks that share cores, where its lower bound is 0.
    """

    def __init__(self, cost: CostModel, *, sends: bool) -> None:
        self._cost, self.sends = cost, sends
        self._communications_s: dict[Communication, float] = {}

    def work_s(self, work: LayerWork) -> float:
        """Compute seconds of one phase of one layer."""
        return self._cost.compute_s(work) if isinstance(self._cost, AnalyticCost) else self._cost.compute(work).seconds

    def collective_s(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Seconds of a collective or P2P send of whole bytes in the fastest of some groups; 0 for none."""
        if num_bytes <= 0:
            return 0.0
        return min(self.communication_s(Communication(kind, int(num_bytes), group)) for group in groups)

    def communication_s(self, communication: Communication) -> float:
        """Seconds of a collective or P2P send."""
        if not self.sends or len(communication.ranks) == 1:
            return 0.0
        if (found := self._communications_s.get(communication)) is None:
            cost = self._cost
            found = (
                cost.communication_s(communication)
                if isinstance(cost, AnalyticCost)
                else cost.communication(communication).seconds
            )
            self._communications_s[communication] = found
        return found
