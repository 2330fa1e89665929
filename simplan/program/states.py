"""Which parameters, gradients and optimizer states of its stages a rank holds, divides and updates."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simplan.program.partition_states import partition_states
from simplan.program.program import LayerWork, Message, Phase
from simplan.program.stage import Deal, Stages
from simplan.program.units import padded_elements, shard_dimension
from simplan.spec.layer import CollectiveKind
from simplan.spec.optimizer import UPDATES

__all__ = ["OptimizerStates"]


class OptimizerStates:
    """States of one rank.

    FSDP shards every parameter along one dimension (``shard_dimension``), padded, as it does gradients and optimizer
    states; experts of which other ranks have others among the ranks that have the same ones, or not at all. ZeRO-1
    leaves parameters and gradients whole. Of torch it gives each of them, whole, to one rank of the shard group to
    update; experts of which other ranks have others are whole on their rank, which updates them itself. Of other
    software every rank of the group updates as many elements of flat buffers, of experts those of the ranks that have
    the same ones.

    Args:
        stages: Facts about the stages.
        rank: The rank.
    """

    def __init__(self, stages: Stages, rank: int) -> None:
        self._stages, self._rank = stages, rank
        plan, mapping = stages.plan, stages.mapping
        self._group = mapping.shard_group(rank)
        self._mine = stages.stages_of(mapping.place(rank).pp)
        self._num_shards = len(self._group) if plan.shards_parameters else 1
        self._expert_shards = plan.expert_shards
        self._shard_rank = self._group.index(rank)
        self.shares_evenly = plan.shards_optimizer_only and stages.software.optimizer_shards == "elements"
        deals = plan.shards_optimizer_only and not self.shares_evenly
        self._deal = self._dealt(mapping.place(rank).pp) if deals else None
        self._num_same_experts = len(mapping.expert_group(rank))

    @property
    def held_elements(self) -> int:
        """Parameters whose weights the rank holds between steps."""
        return sum(self._held(stage, position) for stage in self._mine for position in self._positions(stage))

    @property
    def gradient_elements(self) -> int:
        """Those of them that are trained: whose gradients it holds, too."""
        return sum(
            self._held(stage, position, trained=True) for stage in self._mine for position in self._positions(stage)
        )

    @property
    def trained_elements(self) -> int:
        """Parameters whose optimizer states it holds."""
        if self.shares_evenly:
            return sum(work.num_parameters for stage in self._mine for work in self.updates(stage))
        if self._deal is None:
            return self.gradient_elements
        return sum(self._deal[self._shard_rank].values()) + self.expert_elements

    @property
    def temporary_bytes(self) -> int:
        """Of the optimizer's step. Experts that other ranks do not have are updated in a step of their own."""
        largest = max(self.expert_elements, self.trained_elements - self.expert_elements)
        return UPDATES[self._stages.training.update].num_temporaries * largest * self._stages.state.moment

    def expert_gradients(self, stage: int) -> list[int]:
        """Elements of each gradient of a stage that is averaged over the ranks with the same experts, in order."""
        if self._expert_shards > 1 or not any(self._stages.experts[stage]):
            return []
        return [
            parameter.num_elements
            for layer in self._stages.layers[stage]
            for parameter in layer.parameters
            if parameter.expert
        ]

    @property
    def expert_elements(self) -> int:
        """Of experts that other ranks do not have, what this one holds, of all stages."""
        places = ((stage, position) for stage in self._mine for position in self._positions(stage))
        return sum(self._experts_shard(stage, position) for stage, position in places)

    def partial_elements(self, stage: int) -> int:
        """Gradients of a stage that the rank holds and that are summed over tensor-parallel ranks."""
        shapes = [
            parameter.shape
            for layer in self._stages.layers[stage]
            for parameter in layer.parameters
            if parameter.partial_gradient
        ]
        return sum(self._own_part(shape) for shape in shapes)

    def _own_part(self, shape: tuple[int, ...]) -> int:
        """Elements of a tensor that are in the rank's shard: as many as in the others, but at the end fewer or none."""
        if self._num_shards == 1:
            return math.prod(shape)
        size = shape[shard_dimension(shape, self._num_shards)]
        each = -(-size // self._num_shards)
        return math.prod(shape) // size * max(0, min(each, size - self._shard_rank * each))

    def work(self, stage: int, phase: Phase) -> tuple[LayerWork, ...]:
        """A phase over all that the rank trains of a stage."""
        if self._num_shards == 1:
            return self._stages.work(stage, range(len(self._stages.layers[stage])), phase)
        found = self._stages.sharded_work.get((stage, phase))
        if found is None:
            b = self._stages.plan.microbatch_size
            layers = self._stages.layers[stage]
            found = self._stages.sharded_work[stage, phase] = tuple(
                LayerWork(layers[position], phase, b, self._held(stage, position, trained=True))
                for position in self._positions(stage)
            )
        return found

    def updates(self, stage: int) -> tuple[LayerWork, ...]:
        """The optimizer's work on a stage."""
        if self.shares_evenly:
            return tuple(self._even_updates(stage))
        if self._deal is None:
            return self.work(stage, Phase.OPTIMIZER)
        return tuple(work for _, work in self._dealt_updates(stage))

    @property
    def num_updated_tensors(self) -> int:
        """Parameters that it updates, or its shard of them, counted as tensors; a shard may be empty."""
        if self._deal is None:
            return len(self._trained_tensors())
        keys = self._trained_tensors()
        return list(partition_states([size for *_, size in keys], len(self._group))).count(self._shard_rank)

    def layer_updates(self, stage: int) -> list[tuple[int, LayerWork, int]]:
        """The same by layer: its position, the work, and of how many parameters the rank has states, no padding."""
        if self._deal is not None:
            return [(position, work, work.num_parameters) for position, work in self._dealt_updates(stage)]
        if self.shares_evenly:
            return [(position, work, work.num_parameters) for position, work in enumerate(self._even_updates(stage))]
        works = zip(self._positions(stage), self.work(stage, Phase.OPTIMIZER), strict=True)
        return [(position, work, self._own_elements(stage, position)) for position, work in works]

    def _even_updates(self, stage: int) -> Iterator[LayerWork]:
        """By layer, its part of the elements; rounded up, as buffers are padded."""
        b, experts = self._stages.plan.microbatch_size, self._stages.experts[stage]
        for position in self._positions(stage):
            dense = self._stages.trained[stage][position] - experts[position]
            number = -(-dense // len(self._group)) - (-experts[position] // self._num_same_experts)
            yield LayerWork(self._stages.layers[stage][position], Phase.OPTIMIZER, b, number)

    def _dealt_updates(self, stage: int) -> list[tuple[int, LayerWork]]:
        """Of ZeRO-1, by layer of which the rank owns something."""
        assert self._deal is not None
        b, mine = self._stages.plan.microbatch_size, self._deal[self._shard_rank]
        layers, experts = self._stages.layers[stage], self._stages.experts[stage]
        updated = [mine.get((stage, position), 0) + experts[position] for position in self._positions(stage)]
        return [
            (position, LayerWork(layers[position], Phase.OPTIMIZER, b, number))
            for position, number in enumerate(updated)
            if number
        ]

    def _own_elements(self, stage: int, position: int) -> int:
        """Parameters of a layer that the rank holds, without what a shard is padded with."""
        if self._num_shards == 1:
            return self._stages.owned[stage][position]
        layer = self._stages.layers[stage][position]
        held = [layer.parameters[index] for index in self._own_indices(stage, position)]
        shapes = [parameter.shape for parameter in held if not parameter.expert]
        sharded = sum(self._own_part(shape) for shape in shapes)
        return sharded + self._experts_shard(stage, position)

    def gathers(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Updated parameters that ranks gather afterwards, where they share evenly: (group, bytes)."""
        if not self.shares_evenly:
            return
        experts = self.expert_elements
        dense = sum(map(sum, (self._stages.trained[stage] for stage in self._mine))) - experts
        same = self._stages.mapping.expert_group(self._rank)
        ahead = self._stages.software.gathers_ahead  # then the others are gathered when forward needs them
        for group, elements in ((self._group, 0 if ahead else dense), (same, experts)):
            if elements and len(group) > 1:
                yield group, elements * self._stages.state.parameter

    def broadcasts(self) -> tuple[Message, ...]:
        """Updated parameters that go round afterwards, in order; the same object for all ranks of a group."""
        found = self._stages.broadcasts.get(self._group)
        if found is None:
            width = self._stages.state.parameter
            sizes = [(rank, width * sum(owned.values())) for rank, owned in zip(self._group, self._deal or ())]  # noqa: B905
            found = self._stages.broadcasts[self._group] = tuple(
                Message(CollectiveKind.BROADCAST, size, (owner, *(rank for rank in self._group if rank != owner)))
                for owner, size in sizes
                if size
            )
        return found

    def _dealt(self, pp_rank: int) -> Deal:
        """Who owns what of a pipeline rank; the same for all its ranks, so made once."""
        found = self._stages.deals.get(pp_rank)
        if found is None:
            keys = self._trained_tensors()
            found = self._stages.deals[pp_rank] = tuple({} for _ in self._group)
            owners = partition_states([size for *_, size in keys], len(self._group))
            for (stage, position, size), owner in zip(keys, owners, strict=True):
                found[owner][stage, position] = found[owner].get((stage, position), 0) + size
        return found

    def _trained_tensors(self) -> list[tuple[int, int, int]]:
        """Stage, position and elements of every parameter that is trained, experts excepted."""
        return [
            (stage, position, parameter.num_elements)
            for stage in self._mine
            for position in self._positions(stage)
            for index in self._own_indices(stage, position)
            if not ((parameter := self._stages.layers[stage][position].parameters[index]).expert or parameter.frozen)
        ]

    def _positions(self, stage: int) -> range:
        return range(len(self._stages.layers[stage]))

    def _own_indices(self, stage: int, position: int) -> list[int]:
        """Parameters of a layer, without a tied one that another layer of the stage brings."""
        layer = self._stages.layers[stage][position]
        shared = self._stages.owned[stage][position] != layer.num_parameters
        return [i for i, p in enumerate(layer.parameters) if not (shared and p.name in layer.tied)]

    def _held(self, stage: int, position: int, *, trained: bool = False) -> int:
        """The same on all ranks of the stage, since shards are padded; so counted once."""
        if self._num_shards == 1:
            return (self._stages.trained if trained else self._stages.owned)[stage][position]
        key = (stage, position, trained)
        found = self._stages.held.get(key)
        if found is None:
            found = self._stages.held[key] = self._shard(stage, position, trained=trained)
        return found

    def _shard(self, stage: int, position: int, *, trained: bool) -> int:
        layer = self._stages.layers[stage][position]
        held = [layer.parameters[index] for index in self._own_indices(stage, position)]
        shapes = [parameter.shape for parameter in held if not (parameter.expert or (trained and parameter.frozen))]
        sharded = sum(padded_elements(shape, self._num_shards) // self._num_shards for shape in shapes)
        return sharded + self._experts_shard(stage, position)

    def _experts_shard(self, stage: int, position: int) -> int:
        """What the rank holds of experts that other ranks do not have, padding included."""
        shapes = [p.shape for p in self._stages.layers[stage][position].parameters if p.expert]
        return sum(padded_elements(shape, self._expert_shards) // self._expert_shards for shape in shapes)
