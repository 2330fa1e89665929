"""Prefix sums of the bytes and times of layers for one layer configuration, used to bound many plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.calibration.format import Calibration
from simplan.cost.model import CostModel
from simplan.cost.program_costs import pass_time_s
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.optimizers import LAYERWISE
from simplan.plan.plan import LAYER_AXES, ParallelPlan, StageAssignment
from simplan.plan.schedules import SCHEDULE_FACTS, stage_ranks
from simplan.predict.build import balances_unequal_stages, cost_model, given_stage_layers
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.script import Scripts
from simplan.program.lowering.stage import Stages
from simplan.program.memory.footprint import layers_effects
from simplan.program.memory.low_precision_footprint import persistent_weight_bytes
from simplan.program.program import Communication, LayerWork, Phase
from simplan.program.tables.partition import (
    assign_stage_layers,
    balanced_assignment,
    balanced_unequal_assignment,
)
from simplan.search.bounds.device_groups import Groups, groups_of

_WHOLE_MODEL = ((Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)),)
"""Action table of one microbatch through all layers."""
_NUM_SUMMED = 7  # fields of StageBytes, the first ones, that are sums over layers
_MANY = 10**9  # parameters; large enough that the update time per parameter is constant

Floats = NDArray[np.float64]


class LayerBytes(NamedTuple):
    """Memory of the layers for one microbatch on the first rank of a stage.

    Attributes:
        summed: ``(7, layers + 1)`` Prefix sums of the first seven fields of ``StageBytes``, exclusive of the layer.
        input_bytes, output_bytes: ``(layers,)`` Input of a layer, and its output without tensors it only passes on.
        backward_bytes: ``(layers,)`` Peak bytes of a layer's backward beyond the saved activations.
    """

    summed: Floats
    input_bytes: Floats
    output_bytes: Floats
    backward_bytes: Floats

    def of_stages(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Floats:
        """``(10, stages)`` Fields of ``StageBytes`` for stages of some layers.

        Args:
            starts, ends: ``(stages,)`` First layer of each stage, and the one after its last.
        """
        summed = self.summed[:, ends] - self.summed[:, starts]
        last = ends - 1
        return np.vstack([summed, self.input_bytes[starts], self.output_bytes[last], self.backward_bytes[last]])


class LayerTimes(NamedTuple):
    """Times of the layers for one microbatch on the first rank of a stage.

    Attributes:
        summed: ``(2, layers + 1)`` Prefix sums of forward and backward seconds, exclusive of the layer. Those of
            forward have all passes of a microbatch through the layer.
        update_s: Optimizer seconds per parameter.
        last_forward_s: Seconds of the trained forward of the last layer, and of the passes that come after it.
    """

    summed: Floats
    update_s: float
    last_forward_s: float

    def of_stages(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Floats:
        """``(4, stages)`` Fields of ``BoundStageTimes``; for arguments see ``LayerBytes.of_stages``."""
        last_backward_s = self.summed[1, ends] - self.summed[1, ends - 1]
        update_s = np.full(len(ends), self.update_s)
        return np.vstack([self.summed[:, ends] - self.summed[:, starts], last_backward_s, update_s])


class StageBytes(NamedTuple):
    """Memory of each stage for one microbatch, ``(configs, stages)``; a config is a layer configuration.

    Attributes:
        trained, experts, frozen: Weight elements, tied weights counted once: trained except expert-parallel ones;
            trained expert-parallel ones; frozen ones, those of few bits as equally many bytes of others.
        scale_bytes: Scales of weights of few bits that every rank holds.
        quantized_bytes: Quantized weights between steps, minus the weights that they replace.
        kept_bytes: Bytes saved for backward, including layer inputs.
        between_bytes: Part of ``kept_bytes`` still saved between dgrad and wgrad; 0 for an unsplit backward.
        input_bytes: Input bytes of the first layer.
        output_bytes: Bytes that the last layer hands to the next stage, and of which it gets gradients.
        backward_bytes: Peak bytes of the backward of the last layer beyond the saved activations.
    """

    trained: Floats
    experts: Floats
    frozen: Floats
    scale_bytes: Floats
    quantized_bytes: Floats
    kept_bytes: Floats
    between_bytes: Floats
    input_bytes: Floats
    output_bytes: Floats
    backward_bytes: Floats


class BoundStageTimes(NamedTuple):
    """Times of each stage for one microbatch, ``(configs, stages)``.

    Attributes:
        forward_s, backward_s: Seconds of a pass, including the exposed collectives inside layers.
        last_backward_s: Part of ``backward_s`` of the last layer.
        update_s: Optimizer seconds per parameter.
    """

    forward_s: Floats
    backward_s: Floats
    last_backward_s: Floats
    update_s: Floats


class Layers:
    """Bytes and times of all layers in one layer configuration, each worked out once it is needed.

    Most candidates are rejected by their bytes, so times of many configurations are never needed.

    Args:
        job: Job with the plan, without a pipeline.
        stages: All layers as one stage; shared by configurations that differ in times only.
        untrained: The same for every pass of a microbatch in forward alone.
        groups: By axis, devices of the groups of collectives.
        cost_cache: Cost estimates for the plan.
        splits: True if backward is split into dgrad and wgrad.
    """

    def __init__(
        self,
        job: Job,
        stages: Stages,
        untrained: Sequence[Stages],
        groups: Mapping[str, Groups],
        cost_cache: CostCache,
        *,
        splits: bool,
    ) -> None:
        self._job, self._stages, self._groups, self._cost_cache = job, stages, groups, cost_cache
        self._untrained, self._splits = untrained, splits

    @cached_property
    def bytes(self) -> LayerBytes:
        """Memory of the layers."""
        fields = self._by_layer(lambda position: _bytes_of(self._stages, position, splits=self._splits))
        summed = np.pad(np.cumsum(fields[:_NUM_SUMMED], axis=1), ((0, 0), (1, 0)))
        return LayerBytes(summed, *fields[_NUM_SUMMED:])

    @cached_property
    def times(self) -> LayerTimes:
        """Times of the layers."""
        job, plan, cost_cache = self._job, self._job.plan, self._cost_cache
        passes = _PassTimes(job, self._stages, self._groups, cost_cache)
        fields = self._by_layer(lambda position: passes.of_layer(position, splits=self._splits))
        last_forward_s = float(fields[0, -1])
        for stages in self._untrained:
            pass_times, seconds = _PassTimes(job, stages, self._groups, cost_cache), dict[str, float]()
            for position, layer in enumerate(stages.layers[0]):
                if layer.key not in seconds:
                    seconds[layer.key] = pass_times.forward_s(position)
                fields[0, position] += seconds[layer.key]
                last_forward_s += 0.0 if stages.comes_first else seconds[layer.key]
        block = self._stages.layers[0][1]
        update = LayerWork(block, Phase.OPTIMIZER, plan.microbatch_size, _MANY, on_host=plan.offload_optimizer)
        in_backward = job.training.optimizer_in_backward  # next to it under FSDP2
        counts = job.training.optimizer not in LAYERWISE and cost_cache.sends and not in_backward
        update_s = cost_cache.work_s(update) / _MANY if counts else 0.0
        return LayerTimes(np.pad(np.cumsum(fields, axis=1), ((0, 0), (1, 0))), update_s, last_forward_s)

    @cached_property
    def second_model_elements(self) -> tuple[float, int]:
        """Weights of a reference model next to the one that is trained, and bytes per weight; zeros for none."""
        stages = next((untrained for untrained in self._untrained if untrained.is_second_model), None)
        if stages is None:
            return 0.0, 0
        return float(sum(stages.owned[0])), int(stages.state.frozen)

    @cached_property
    def balance_s(self) -> tuple[float, ...]:
        """``(layers,)`` Seconds per layer that the balanced split uses."""
        size, layers, seconds = self._job.plan.microbatch_size, self._stages.layers[0], dict[str, float]()
        for layer in layers:
            if layer.key not in seconds:
                works = (LayerWork(layer, phase, size, layer.num_parameters) for phase in _BOTH)
                seconds[layer.key] = sum(map(self._cost_cache.work_s, works))
        return tuple(seconds[layer.key] for layer in layers)

    def _by_layer(self, facts: Callable[[int], tuple[float, ...]]) -> Floats:
        """``(facts, layers)`` Facts of each layer by its position, worked out once for equal layers."""
        alternates = self._job.plan.recompute == "selective_layer"
        known: dict[Hashable, tuple[float, ...]] = {}
        rows = []
        for position, layer in enumerate(self._stages.layers[0]):
            key = layer.key, position % 2 if alternates else 0
            if key not in known:
                known[key] = facts(position)
            rows.append(known[key])
        return np.array(rows, np.float64).T


class LayerConfiguration(NamedTuple):
    """A layer configuration of a pipeline.

    Attributes:
        ranks: Layers on each pipeline rank; the same unless their devices differ.
        devices: Device of each pipeline rank.
        boundaries: ``(stages + 1,)`` First layer of each stage, then the number of layers; ``(0, layers)`` if the split
            is unknown: over unequal devices it depends on their memory.
        first_boundaries: The same of the split that such devices get if all of it fits; None if the split is known, or
            if this one is not.
    """

    ranks: Sequence[Layers]
    devices: tuple[int, ...]
    boundaries: NDArray[np.int64]
    first_boundaries: NDArray[np.int64] | None = None

    def stages(self, placement: NDArray[np.int64], of: Callable[[Layers], LayerBytes | LayerTimes]) -> Floats:
        """``(fields, stages)`` Bytes or times of stages; each rank has one of all layers if the split is unknown.

        Args:
            placement: ``(stages,)`` Pipeline rank of each stage.
            of: Selects bytes or times.
        """
        starts, ends = (
            np.broadcast_to(ends_of_stages, placement.shape)
            for ends_of_stages in (self.boundaries[:-1], self.boundaries[1:])
        )
        of_stages = of(self.ranks[0]).of_stages(starts, ends)
        for layers in {id(of): of for of in self.ranks[1:] if of is not self.ranks[0]}.values():
            here = np.array([of is layers for of in self.ranks])[placement]
            of_stages[:, here] = of(layers).of_stages(starts[here], ends[here])
        return of_stages


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Pipeline shared by a set of plans: its ranks, stages, placement, and split or unsplit backward.

    Attributes:
        configs: Layer configurations.
        placement: ``(stages,)`` Pipeline rank of each stage.
        splits: True if backward is split into dgrad and wgrad.
    """

    configs: Sequence[LayerConfiguration]
    placement: NDArray[np.int64]
    splits: bool

    @classmethod
    def of(cls, configs: Sequence[LayerConfiguration], placement: Sequence[int], *, splits: bool) -> Pipeline:
        """Make the pipeline of some layer configurations, which all have a known split of layers or none."""
        num_stages, num_ranks = len(configs[0].boundaries) - 1, len(configs[0].devices)
        return cls(configs, np.array(placement) if num_stages >= num_ranks else np.arange(num_ranks), splits)

    @cached_property
    def stages(self) -> StageBytes:
        """Memory of the stages, by layer configuration."""
        return StageBytes(
            *np.stack([config.stages(self.placement, lambda of: of.bytes) for config in self.configs], axis=1)
        )

    @cached_property
    def layers(self) -> StageBytes:
        """Memory of the single layers in place of stages, ``(configs, layers)``."""
        starts = np.arange(self.configs[0].boundaries[-1])
        return StageBytes(
            *np.stack([config.ranks[0].bytes.of_stages(starts, starts + 1) for config in self.configs], axis=1)
        )

    @cached_property
    def times(self) -> BoundStageTimes:
        """Times of the stages, by layer configuration."""
        return BoundStageTimes(
            *np.stack([config.stages(self.placement, lambda of: of.times) for config in self.configs], axis=1)
        )

    def take(self, configs: NDArray[np.int64]) -> Pipeline:
        """The pipeline of some of its layer configurations."""
        return Pipeline([self.configs[config] for config in configs.tolist()], self.placement, self.splits)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return int(self.placement.max()) + 1

    @property
    def has_split(self) -> bool:
        """False if every rank has one stage of all layers, as their split is unknown."""
        return len(self.configs[0].boundaries) - 1 == len(self.placement)

    def of_ranks(self, of_stages: Floats) -> Floats:
        """``(configs, ranks)`` Sums over the stages of each rank, from ``(configs, stages)``."""
        ranks = [of_stages[:, self.placement == rank].sum(axis=1) for rank in range(self.num_ranks)]
        return np.stack(ranks, axis=1)


class LayersCache:
    """Cache of ``Layers`` by layer configuration, and of the split of layers into stages."""

    def __init__(self, job: Job, calibration: Calibration | None = None) -> None:
        self._job, self._calibration = job, calibration
        self.in_low_precision = job.training.precision in job.software.low_precision
        self._layers: dict[Hashable, Layers] = {}
        self._stages: dict[Hashable, tuple[Stages, ...]] = {}
        self._boundaries: dict[Hashable, NDArray[np.int64]] = {}

    def layers(self, plan: ParallelPlan, microbatch_size: int, node_group: int | None = None) -> Layers:
        """Layer configuration of a plan, on the devices of a node group."""
        facts, cluster = SCHEDULE_FACTS.get(plan.schedule), self._job.cluster
        splits = facts is not None and facts.splits_backward
        groups: dict[str, Groups] = {axis: groups_of(plan, cluster, axis, node_group) for axis in LAYER_AXES}
        of_plan = plan.shard, microbatch_size, plan.shards_parameters, plan.recompute, plan.recompute_modules
        # low-precision weights may be quantized once for all microbatches
        many = self._job.with_plan(plan).num_microbatches if self.in_low_precision else 0
        key = (*of_plan, splits, many, node_group, *groups.values())
        if (layers := self._layers.get(key)) is None:
            alone = {"pp": 1, "virtual_stages": 1, "schedule": "none", "stage_layers": None, "placement": None}
            cost_cache = self.cost_cache(plan.model_copy(update=alone), node_group)
            job = self._job.with_plan(
                plan.model_copy(update=alone | {"microbatch_size": microbatch_size, "microbatch_sizes": None})
            )
            if (stages := self._stages.get(of_plan)) is None:
                stages = self._stages[of_plan] = _stages_of_passes(job)
            layers = self._layers[key] = Layers(job, stages[0], stages[1:], groups, cost_cache, splits=splits)
        return layers

    def boundaries(self, plan: ParallelPlan, balanced: Layers) -> NDArray[np.int64]:
        """See ``LayerConfiguration``; split as in ``predict``.

        Args:
            balanced: The layers to split.
        """
        num_last, ranks = self._job.model.num_last_layers, stage_ranks(plan.schedule, plan.pp, plan.num_stages)
        fixed = given_stage_layers(self._job.with_plan(plan))
        if self._job.cluster.is_mixed and fixed is None:
            return np.array([0, len(self._job.model.layers)])
        key = (ranks, fixed) if fixed is not None else (ranks, balanced.balance_s)
        if (boundaries := self._boundaries.get(key)) is None:
            if fixed is not None:
                assignment = assign_stage_layers(fixed, num_last)
            else:
                assignment = balanced_assignment(balanced.balance_s, plan.num_stages, num_last, ranks)
            boundaries = self._boundaries[key] = np.array(assignment.boundaries)
        return boundaries

    def first_boundaries(self, plan: ParallelPlan, ranks: Sequence[Layers]) -> NDArray[np.int64] | None:
        """See ``LayerConfiguration``.

        Args:
            ranks: Layers of each pipeline rank.
        """
        job = self._job.with_plan(plan)
        if not balances_unequal_stages(job) or any(len(groups) > 1 for groups in job.stage_groups):
            return None
        of_stages = stage_ranks(plan.schedule, plan.pp, plan.num_stages) or tuple(range(plan.num_stages))
        times_s = tuple(layers.balance_s for layers in ranks)
        if (boundaries := self._boundaries.get((of_stages, times_s))) is None:
            assignment = balanced_unequal_assignment(times_s, of_stages, job.model.num_last_layers)
            boundaries = self._boundaries[of_stages, times_s] = np.array(assignment.boundaries)
        return boundaries

    def cost_cache(self, plan: ParallelPlan, node_group: int | None = None) -> CostCache:
        """Cost estimates for a plan; ranks of communication are devices."""
        job = self._job.with_plan(plan if plan.placement is None else plan.model_copy(update={"placement": None}))
        return CostCache(cost_model(job, self._calibration), node_group, sends=job.cluster.cores_per_node is None)


def _stages_of_passes(job: Job) -> tuple[Stages, ...]:
    """All layers as one stage: of the pass that is trained, and of those in forward alone."""
    assignment = StageAssignment((0, len(job.model.layers)))
    trained = Stages(job, assignment, _WHOLE_MODEL)
    if not job.training.is_of_preferences:
        return (trained,)
    from simplan.program.lowering.passes import forward_passes  # only where needed

    return trained, *(Stages(job, assignment, _WHOLE_MODEL, forward) for forward in forward_passes(job))


def _bytes_of(stages: Stages, position: int, *, splits: bool) -> tuple[float, ...]:
    """Fields of ``StageBytes`` for one layer, in field order."""
    layer, facts = stages.layers[0][position], stages.facts(0, position)
    footprint, between = facts.footprint, 0
    if splits:
        between = facts.split().between_activations + facts.split().between_logits
    parameters = [p for p in layer.parameters if p.name not in layer.tied]
    trained = sum(stages.state.elements_of(p) for p in parameters if not p.frozen)
    experts = sum(p.num_elements for p in parameters if p.expert and not p.frozen)
    frozen: float = sum(p.num_elements for p in parameters if p.frozen and p.stored is None)
    scale_bytes = 0
    for p in parameters:
        if p.stored is not None:
            frozen += p.stored.divided_bytes(p.shape) / stages.state.frozen
            scale_bytes += p.stored.replicated_bytes(p.shape)
    worst = sum(effect.during_bytes for effect in layers_effects([footprint], forward=False))
    made = sum(tensor.num_bytes for tensor in stages.leaving([layer]) if tensor.returns and not tensor.passes)
    kept = 0 if stages.plan.offload_activations else footprint.activations
    quantized = persistent_weight_bytes(layer, stages.state)
    return trained - experts, experts, frozen, scale_bytes, quantized, kept, between, footprint.input_bytes, made, worst


_BOTH = (Phase.FORWARD, Phase.BACKWARD)
_PARTS = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


class _PassTimes:
    """Lower bounds on the time of forward and backward per layer.

    Ring context-parallel communication counts as free, and so does expert dispatch with ``expert_overlap``.

    Args:
        job, stages, groups, cost_cache: See ``Layers``.
    """

    def __init__(self, job: Job, stages: Stages, groups: Mapping[str, Groups], cost_cache: CostCache) -> None:
        plan = job.plan
        self._groups = {axis: of_axis[0] for axis, of_axis in groups.items()}
        self._others = {of_axis[0]: of_axis for of_axis in groups.values() if len(of_axis) > 1}
        self._hidden = {"cp"} if plan.cp > 1 and plan.cp_comm == "ring" else set()
        if job.software.expert_overlap:
            self._hidden |= {"ep", "etp"}
        self._scripts, self._cost_cache = Scripts(stages), cost_cache

    def of_layer(self, position: int, *, splits: bool) -> tuple[float, float]:
        """Seconds of a layer: forward, and backward (split or not, the faster one)."""
        backward_s = self._seconds(position, Phase.BACKWARD)
        if splits:
            backward_s = min(backward_s, sum(self._seconds(position, part) for part in _PARTS))
        return self.forward_s(position), backward_s

    def forward_s(self, position: int) -> float:
        """Seconds of the forward of a layer."""
        return self._seconds(position, Phase.FORWARD)

    def _seconds(self, position: int, phase: Phase) -> float:
        segments = self._scripts.computed(0, position, phase)
        return pass_time_s(segments, self._groups, self._cost_cache.work_s, self._communication_s, self._hidden)

    def _communication_s(self, communication: Communication) -> float:
        groups = self._others.get(communication.ranks, (communication.ranks,))
        return min(self._cost_cache.communication_s(communication._replace(ranks=group)) for group in groups)


class CostCache:
    """Seconds of compute and communication by a cost model, cached.

    Args:
        node_group: Node group of the device that computes; None for equal nodes.
        sends: Count communication. False for ranks that share cores, where its lower bound is 0.
    """

    def __init__(self, cost: CostModel, node_group: int | None = None, *, sends: bool) -> None:
        self._cost, self._node_group, self.sends = cost, node_group, sends
        self._communications_s: dict[Communication, float] = {}

    def work_s(self, work: LayerWork) -> float:
        """Compute seconds of one phase of one layer."""
        of_group = work if self._node_group is None else work._replace(group=self._node_group)
        return self._cost.compute(of_group).seconds

    def collective_s(self, kind: CollectiveKind, num_bytes: float, groups: Groups) -> float:
        """Seconds of a collective or P2P send of whole bytes in the fastest of some groups; 0 for none."""
        if num_bytes <= 0:
            return 0.0
        return min(self.communication_s(Communication(kind, int(num_bytes), group)) for group in groups)

    def communication_s(self, communication: Communication) -> float:
        """Seconds of a collective or P2P send."""
        if not self.sends or len(communication.ranks) == 1:
            return 0.0
        if (seconds := self._communications_s.get(communication)) is None:
            seconds = self._communications_s[communication] = self._cost.communication(communication).seconds
        return seconds
