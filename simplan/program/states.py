"""Which parameters, gradients and optimizer states of its stages a rank holds, divides and updates."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simplan.program.partition_states import partition_states
from simplan.program.program import LayerWork, Phase
from simplan.program.stage import Stages
from simplan.program.units import padded_elements

__all__ = ["OptimizerStates"]


class OptimizerStates:
    """States of one rank.

    FSDP shards every parameter along its first dimension, padded, as it does gradients and optimizer states. ZeRO-1
    leaves parameters and gradients whole and gives each of them, whole, to one rank of the shard group to update.

    Args:
        stages: Facts about the stages.
        rank: The rank.
    """

    def __init__(self, stages: Stages, rank: int) -> None:
        self._stages = stages
        plan, mapping = stages.plan, stages.mapping
        self._group = mapping.shard_group(rank)
        self._mine = stages.stages_of(mapping.place(rank).pp)
        self._num_shards = len(self._group) if plan.shards_parameters else 1
        self._owners: dict[tuple[int, int, int], int] = {}
        if plan.shards_optimizer_only:
            keys = [
                (stage, position, index)
                for stage in self._mine
                for position, layer in enumerate(stages.layers[stage])
                for index in range(len(layer.parameters))
                if index in self._own_indices(stage, position)
            ]
            sizes = [self._owned_elements(key) for key in keys]
            self._owners = dict(zip(keys, partition_states(sizes, len(self._group)), strict=True))
        self._shard_rank = self._group.index(rank)

    @property
    def held_elements(self) -> int:
        """Parameters whose weights and gradients the rank holds between steps."""
        return sum(self._held(stage, position) for stage in self._mine for position in self._positions(stage))

    @property
    def trained_elements(self) -> int:
        """Parameters whose optimizer states it holds."""
        if not self._owners:
            return self.held_elements
        return sum(self._owned_elements(key) for key, owner in self._owners.items() if owner == self._shard_rank)

    def partial_elements(self, stage: int) -> int:
        """Gradients of a stage that the rank holds and that are summed over tensor-parallel ranks."""
        shapes = [
            parameter.shape
            for layer in self._stages.layers[stage]
            for parameter in layer.parameters
            if parameter.partial_gradient
        ]
        return sum(math.prod(shape) // shape[0] * self._own_rows(shape[0]) for shape in shapes)

    def _own_rows(self, rows: int) -> int:
        """Rows of a tensor that are in the rank's shard: as many as in the others, but at the end fewer or none."""
        each = -(-rows // self._num_shards)
        return rows if self._num_shards == 1 else max(0, min(each, rows - self._shard_rank * each))

    def work(self, stage: int, phase: Phase) -> tuple[LayerWork, ...]:
        """A phase over all that the rank holds of a stage."""
        if self._num_shards == 1:
            return self._stages.work(stage, range(len(self._stages.layers[stage])), phase)
        b = self._stages.plan.microbatch_size
        layers = self._stages.layers[stage]
        return tuple(
            LayerWork(layers[position], phase, b, self._held(stage, position)) for position in self._positions(stage)
        )

    def updates(self, stage: int) -> tuple[LayerWork, ...]:
        """The optimizer's work on a stage."""
        if not self._owners:
            return self.work(stage, Phase.OPTIMIZER)
        b = self._stages.plan.microbatch_size
        found = []
        for position in self._positions(stage):
            keys = [key for key in self._owners if key[:2] == (stage, position)]
            elements = sum(self._owned_elements(key) for key in keys if self._owners[key] == self._shard_rank)
            if elements:
                found.append(LayerWork(self._stages.layers[stage][position], Phase.OPTIMIZER, b, elements))
        return tuple(found)

    def broadcasts(self) -> Iterator[tuple[int, int]]:
        """Updated parameters that go round afterwards: (owning rank, bytes), in order."""
        for number, rank in enumerate(self._group):
            elements = sum(self._owned_elements(key) for key, owner in self._owners.items() if owner == number)
            if elements:
                yield rank, elements * self._stages.state.parameter

    def _positions(self, stage: int) -> range:
        return range(len(self._stages.layers[stage]))

    def _own_indices(self, stage: int, position: int) -> list[int]:
        """Parameters of a layer, without a tied one that another layer of the stage brings."""
        layer = self._stages.layers[stage][position]
        shared = self._stages.owned[stage][position] != layer.num_parameters
        return [i for i, p in enumerate(layer.parameters) if not (shared and p.name in layer.tied)]

    def _held(self, stage: int, position: int) -> int:
        layer = self._stages.layers[stage][position]
        if self._num_shards == 1:
            return self._stages.owned[stage][position]
        shapes = [layer.parameters[index].shape for index in self._own_indices(stage, position)]
        return sum(padded_elements(shape, self._num_shards) // self._num_shards for shape in shapes)

    def _owned_elements(self, key: tuple[int, int, int]) -> int:
        stage, position, index = key
        return self._stages.layers[stage][position].parameters[index].num_elements
