"""Parameters, gradients and optimizer states that a rank holds, divides and updates for its stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from simplan.model.layer import CollectiveKind, ParameterSpec
from simplan.plan.plan import RankGroup
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.units import shard_elements
from simplan.program.program import Communication, LayerWork, Phase
from simplan.training import UPDATES


class LayerStates(NamedTuple):
    """Elements of a layer's parameters that a rank holds; FSDP shards each parameter along one dimension.

    Attributes:
        weights: Weights held between steps.
        packed: Weights of these that are stored in few bits.
        packed_bytes: Bytes of these, with their scales.
        trained: Weights of these that have gradients.
        experts: Elements of expert-parallel parameters.
        partial: Elements whose gradients are partial sums, to be all-reduced over tensor-parallel ranks.
    """

    weights: int
    packed: int
    packed_bytes: int
    trained: int
    experts: int
    partial: int


def layer_states(
    parameters: Iterable[ParameterSpec], num_shards: int, expert_shards: int, shard: int = 0
) -> LayerStates:
    """Computes the elements that a rank holds of a layer.

    Args:
        num_shards: Ranks over which each parameter is sharded; 1 for no sharding.
        expert_shards: Ranks over which expert-parallel parameters are sharded; 1 for no sharding.
        shard: Index of the shard; shard 0 has the padded size.
    """
    found = [0, 0, 0, 0]
    packed = packed_bytes = 0
    for parameter in parameters:
        over, index = (expert_shards, 0) if parameter.expert else (num_shards, shard)
        number = shard_elements(parameter.shape, over, index)
        for place, counts in enumerate((True, not parameter.frozen, parameter.expert, parameter.partial_gradient)):
            found[place] += number * counts
        if parameter.stored is not None:
            packed += number
            packed_bytes += parameter.stored.shard_bytes(parameter.shape, over, index)
    return LayerStates(found[0], packed, packed_bytes, *found[1:])


class RankStates:
    """Parameters, gradients and optimizer states of one rank.

    FSDP shards parameters, gradients and optimizer states. ZeRO-1 keeps parameters and gradients unsharded, and divides
    optimizer states. In torch, each whole parameter has one owner in the shard group, which updates it; expert-parallel
    parameters are updated where they are. In other frameworks every rank of the group updates an equal part of flat
    buffers; for expert-parallel parameters, the group is the ranks with the same experts.

    Attributes:
        elements: Elements that the rank holds, over all its stages.
        shares_evenly: True if every rank of a shard group updates an equal part of flat buffers.
    """

    def __init__(self, stages: Stages, rank: int) -> None:
        self.stages, self._rank = stages, rank
        plan, mapping = stages.plan, stages.mapping
        self._group, self._pp_rank = mapping.group("shard", rank), mapping.place(rank).pp
        self._mine = stages.stages_of(self._pp_rank)
        self._shards = (len(self._group) if plan.shards_parameters else 1, plan.expert_shards)
        self._shard = self._group.index(rank)
        self.shares_evenly = plan.shards_optimizer_only and stages.software.optimizer_shards == "elements"
        self._deals = plan.shards_optimizer_only and not self.shares_evenly
        self._num_same_experts = len(mapping.group("expert", rank))
        self._held = {stage: self._layers(stage) for stage in self._mine}
        every = [each for layers in self._held.values() for each in layers]
        self.elements = LayerStates(*map(sum, zip(*every, strict=True)))
        self._updated = {stage: self._updates(stage) for stage in self._mine}

    def _layers(self, stage: int, *, exact: bool = False) -> list[LayerStates]:
        """Returns the elements held of each layer, including padding unless ``exact``."""
        brought = self.stages.brought[stage]
        shard = self._shard if exact and self._shards[0] > 1 else 0
        alike = {id(parameters): parameters for parameters in brought}
        found = {key: layer_states(parameters, *self._shards, shard) for key, parameters in alike.items()}
        return [found[id(parameters)] for parameters in brought]

    def _updates(self, stage: int) -> list[int]:
        """Returns, per layer, parameters whose optimizer states the rank holds; rounded up if buffers are padded."""
        held = self._held[stage]
        if self.shares_evenly:
            ranks, same = len(self._group), self._num_same_experts
            return [-(-(each.trained - each.experts) // ranks) - (-each.experts // same) for each in held]
        if self._deals:
            mine = self._dealt()[self._shard]
            return [mine.get((stage, position), 0) + each.experts for position, each in enumerate(held)]
        return [each.trained for each in held]

    @property
    def trained_elements(self) -> int:
        """Elements of parameters whose optimizer states the rank holds."""
        return sum(map(sum, self._updated.values()))

    @property
    def other_shards_elements(self) -> int:
        """Elements of the weights of which the rank holds shards, without its own shards."""
        brought = (parameters for stage in self._mine for parameters in self.stages.brought[stage])
        return sum(p.num_elements for parameters in brought for p in parameters) - self.elements.weights

    @property
    def temporary_bytes(self) -> int:
        """Temporary bytes of the optimizer step, in which expert-parallel parameters are updated separately."""
        largest = max(self.elements.experts, self.trained_elements - self.elements.experts)
        return UPDATES[self.stages.training.update].num_temporaries * largest * self.stages.state.moment

    def expert_gradients(self, stage: int) -> list[int]:
        """Returns elements of each gradient of a stage that is averaged over ranks with the same experts, in order."""
        if self._shards[1] > 1:
            return []
        return [p.num_elements for parameters in self.stages.brought[stage] for p in parameters if p.expert]

    def partial_elements(self, stage: int) -> int:
        """Returns elements of gradients of a stage that are all-reduced over tensor-parallel ranks."""
        return sum(each.partial for each in self._layers(stage, exact=True))

    def work(self, stage: int, phase: Phase) -> tuple[LayerWork, ...]:
        """Returns a phase over all trained parameters that the rank holds of a stage."""
        return self._works(stage, phase, [each.trained for each in self._held[stage]])

    def updated_work(self, stage: int, phase: Phase) -> tuple[LayerWork, ...]:
        """Returns a phase over the parameters of a stage that the rank updates."""
        return self._works(stage, phase, self._updated[stage])

    def updates(self, stage: int) -> tuple[LayerWork, ...]:
        """Returns the optimizer's work on a stage; with whole-parameter owners, only layers with owned parameters."""
        works = self.updated_work(stage, Phase.OPTIMIZER)
        return tuple(work for work in works if work.num_parameters) if self._deals else works

    def _works(self, stage: int, phase: Phase, numbers: Sequence[int]) -> tuple[LayerWork, ...]:
        plan, layers = self.stages.plan, self.stages.layers[stage]
        return tuple(
            LayerWork(layer, phase, plan.microbatch_size, number, on_host=plan.offload_optimizer)
            for layer, number in zip(layers, numbers, strict=True)
        )

    @property
    def tensor_sizes(self) -> list[int]:
        """Elements of every trained parameter, in the order of the model, except expert-parallel ones."""
        return [size for *_, size in self._trained_tensors()]

    @property
    def num_updated_tensors(self) -> int:
        """Number of tensors that the rank updates fully or by a shard, which may be empty."""
        sizes = self.tensor_sizes
        return partition_states(sizes, len(self._group)).count(self._shard) if self._deals else len(sizes)

    def gathers(self) -> Iterator[tuple[RankGroup, int]]:
        """Yields all-gathers of updated parameters after an evenly sharded update: (group, bytes)."""
        if not self.shares_evenly:
            return
        experts = self.elements.experts
        dense = self.elements.trained - experts
        same = self.stages.mapping.group("expert", self._rank)
        ahead = self.stages.software.overlap_param_gather  # then the others are all-gathered when forward needs them
        for group, elements in ((self._group, 0 if ahead else dense), (same, experts)):
            if elements and len(group) > 1:
                yield group, elements * self.stages.state.parameter

    def broadcasts(self) -> tuple[Communication, ...]:
        """Returns the broadcasts of updated parameters, in order; the same object for all ranks of a group.

        An owner without parameters sends one FP32 number, as in torch's ZeroRedundancyOptimizer.
        """
        communications = self.stages.broadcasts.get(self._group)
        if communications is None:
            width, dealt = self.stages.state.parameter, self._dealt() if self._deals else ()
            sizes = [width * sum(owned.values()) for owned in dealt]
            communications = self.stages.broadcasts[self._group] = tuple(
                Communication(
                    CollectiveKind.BROADCAST,
                    size or 4,
                    RankGroup.of("shard", (owner, *(rank for rank in self._group if rank != owner))),
                )
                for owner, size in zip(self._group, sizes, strict=False)
                if any(sizes)
            )
        return communications

    def _dealt(self) -> Sequence[dict[tuple[int, int], int]]:
        """Returns, per rank of the group, the elements that it owns of (stage, layer); created once for all ranks."""
        found = self.stages.deals.get(self._pp_rank)
        if found is None:
            keys = list(self._trained_tensors())
            found = self.stages.deals[self._pp_rank] = tuple({} for _ in self._group)
            owners = partition_states([size for *_, size in keys], len(self._group))
            for (stage, position, size), owner in zip(keys, owners, strict=True):
                found[owner][stage, position] = found[owner].get((stage, position), 0) + size
        return found

    def _trained_tensors(self) -> Iterator[tuple[int, int, int]]:
        """Yields stage, position and elements of every trained parameter, except expert-parallel ones."""
        for stage in self._mine:
            for position, parameters in enumerate(self.stages.brought[stage]):
                yield from ((stage, position, p.num_elements) for p in parameters if not (p.expert or p.frozen))


def partition_states(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the owner of each parameter: parameters by descending size, each to the rank with the smallest sum."""
    owners = [0] * len(sizes)
    filled = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = filled.index(min(filled))
        filled[owners[index]] += sizes[index]
    return owners
