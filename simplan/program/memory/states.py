"""Which parameters, gradients and optimizer states of its stages a rank holds, divides and updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from simplan.model.layer import CollectiveKind, ParameterSpec
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.units import shard_elements
from simplan.program.program import LayerWork, Message, Phase
from simplan.training.optimizer import UPDATES

__all__ = ["LayerStates", "RankStates", "layer_states", "partition_states"]


class LayerStates(NamedTuple):
    """Elements of a layer's parameters that a rank holds, of which FSDP shards each along one dimension.

    Attributes:
        weights: Between steps.
        trained: Those whose gradients it holds as well.
        experts: Of these, experts of which other ranks have others.
        partial: Of these, gradients that are parts, which tensor-parallel ranks sum.
    """

    weights: int
    trained: int
    experts: int
    partial: int


def layer_states(
    parameters: Iterable[ParameterSpec], num_shards: int, expert_shards: int, shard: int = 0
) -> LayerStates:
    """What a rank holds of a layer.

    Args:
        parameters: That the layer brings.
        num_shards: Ranks over which each is sharded; 1 for none.
        expert_shards: The same of experts of which other ranks have others.
        shard: Which of the shards; the first, which is as large as what others are padded to.
    """
    found = [0, 0, 0, 0]
    for parameter in parameters:
        over, index = (expert_shards, 0) if parameter.expert else (num_shards, shard)
        number = shard_elements(parameter.shape, over, index)
        for place, counts in enumerate((True, not parameter.frozen, parameter.expert, parameter.partial_gradient)):
            found[place] += number * counts
    return LayerStates(*found)


class RankStates:
    """States of one rank.

    FSDP shards parameters, gradients and optimizer states. ZeRO-1 leaves parameters and gradients whole, and divides
    optimizer states: torch gives each parameter, whole, to one rank of the shard group to update, but for experts of
    which other ranks have others, which are updated where they are; with other software every rank of the group updates
    as many elements of flat buffers, of experts those of the ranks that have the same ones.

    Args:
        stages: Facts about the stages.
        rank: The rank.
    """

    def __init__(self, stages: Stages, rank: int) -> None:
        self._stages, self._rank = stages, rank
        plan, mapping = stages.plan, stages.mapping
        self._group, self._pp_rank = mapping.shard_group(rank), mapping.place(rank).pp
        self._mine = stages.stages_of(self._pp_rank)
        self._shards = (len(self._group) if plan.shards_parameters else 1, plan.expert_shards)
        self._shard = self._group.index(rank)
        self.shares_evenly = plan.shards_optimizer_only and stages.software.optimizer_shards == "elements"
        self._deals = plan.shards_optimizer_only and not self.shares_evenly
        self._num_same_experts = len(mapping.expert_group(rank))
        self._held = {stage: self._layers(stage) for stage in self._mine}
        self._updated = {stage: self._updates(stage) for stage in self._mine}

    def _layers(self, stage: int, *, exact: bool = False) -> list[LayerStates]:
        """What it holds of each layer; padding included unless ``exact``."""
        brought = self._stages.brought[stage]
        shard = self._shard if exact and self._shards[0] > 1 else 0
        alike = {id(parameters): parameters for parameters in brought}
        found = {key: layer_states(parameters, *self._shards, shard) for key, parameters in alike.items()}
        return [found[id(parameters)] for parameters in brought]

    def _updates(self, stage: int) -> list[int]:
        """By layer, parameters whose optimizer states it has; rounded up where buffers are padded."""
        held = self._held[stage]
        if self.shares_evenly:
            ranks, same = len(self._group), self._num_same_experts
            return [-(-(each.trained - each.experts) // ranks) - (-each.experts // same) for each in held]
        if self._deals:
            mine = self._dealt()[self._shard]
            return [mine.get((stage, position), 0) + each.experts for position, each in enumerate(held)]
        return [each.trained for each in held]

    def _total(self, field: str) -> int:
        return sum(getattr(each, field) for layers in self._held.values() for each in layers)

    @property
    def held_elements(self) -> int:
        """Parameters whose weights the rank holds between steps."""
        return self._total("weights")

    @property
    def gradient_elements(self) -> int:
        """Those of them that are trained: whose gradients it holds, too."""
        return self._total("trained")

    @property
    def expert_elements(self) -> int:
        """Of experts that other ranks do not have, what this one holds, of all stages."""
        return self._total("experts")

    @property
    def trained_elements(self) -> int:
        """Parameters whose optimizer states it holds."""
        return sum(map(sum, self._updated.values()))

    @property
    def temporary_bytes(self) -> int:
        """Of the optimizer's step. Experts that other ranks do not have are updated in a step of their own."""
        largest = max(self.expert_elements, self.trained_elements - self.expert_elements)
        return UPDATES[self._stages.training.update].num_temporaries * largest * self._stages.state.moment

    def expert_gradients(self, stage: int) -> list[int]:
        """Elements of each gradient of a stage that is averaged over the ranks with the same experts, in order."""
        if self._shards[1] > 1:
            return []
        return [p.num_elements for parameters in self._stages.brought[stage] for p in parameters if p.expert]

    def partial_elements(self, stage: int) -> int:
        """Gradients of a stage that the rank holds and that are summed over tensor-parallel ranks."""
        return sum(each.partial for each in self._layers(stage, exact=True))

    def work(self, stage: int, phase: Phase) -> tuple[LayerWork, ...]:
        """A phase over all that the rank trains of a stage."""
        return self._works(stage, phase, [each.trained for each in self._held[stage]])

    def updates(self, stage: int) -> tuple[LayerWork, ...]:
        """The optimizer's work on a stage; of parameters that are dealt out, on layers of which it has some."""
        works = self._works(stage, Phase.OPTIMIZER, self._updated[stage])
        return tuple(work for work in works if work.num_parameters) if self._deals else works

    def _works(self, stage: int, phase: Phase, numbers: Sequence[int]) -> tuple[LayerWork, ...]:
        plan, layers = self._stages.plan, self._stages.layers[stage]
        return tuple(
            LayerWork(layer, phase, plan.microbatch_size, number, on_host=plan.offload_optimizer)
            for layer, number in zip(layers, numbers, strict=True)
        )

    @property
    def num_updated_tensors(self) -> int:
        """Parameters that it updates, or its shard of them, counted as tensors; a shard may be empty."""
        sizes = [size for *_, size in self._trained_tensors()]
        return partition_states(sizes, len(self._group)).count(self._shard) if self._deals else len(sizes)

    def gathers(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Updated parameters that ranks gather afterwards, where they share evenly: (group, bytes)."""
        if not self.shares_evenly:
            return
        experts = self.expert_elements
        dense = self.gradient_elements - experts
        same = self._stages.mapping.expert_group(self._rank)
        ahead = self._stages.software.gathers_ahead  # then the others are gathered when forward needs them
        for group, elements in ((self._group, 0 if ahead else dense), (same, experts)):
            if elements and len(group) > 1:
                yield group, elements * self._stages.state.parameter

    def broadcasts(self) -> tuple[Message, ...]:
        """Updated parameters that go round afterwards, in order; the same object for all ranks of a group.

        An owner of nothing sends one FP32 number, as in torch's ZeroRedundancyOptimizer.
        """
        found = self._stages.broadcasts.get(self._group)
        if found is None:
            width, dealt = self._stages.state.parameter, self._dealt() if self._deals else ()
            sizes = [width * sum(owned.values()) for owned in dealt]
            found = self._stages.broadcasts[self._group] = tuple(
                Message(CollectiveKind.BROADCAST, size or 4, (owner, *(rank for rank in self._group if rank != owner)))
                for owner, size in zip(self._group, sizes, strict=False)
                if any(sizes)
            )
        return found

    def _dealt(self) -> Sequence[dict[tuple[int, int], int]]:
        """By rank of the group, elements it owns of (stage, layer); the same for all of them, so made once."""
        found = self._stages.deals.get(self._pp_rank)
        if found is None:
            keys = list(self._trained_tensors())
            found = self._stages.deals[self._pp_rank] = tuple({} for _ in self._group)
            owners = partition_states([size for *_, size in keys], len(self._group))
            for (stage, position, size), owner in zip(keys, owners, strict=True):
                found[owner][stage, position] = found[owner].get((stage, position), 0) + size
        return found

    def _trained_tensors(self) -> Iterator[tuple[int, int, int]]:
        """Stage, position and elements of every parameter that is trained, experts excepted."""
        for stage in self._mine:
            for position, parameters in enumerate(self._stages.brought[stage]):
                yield from ((stage, position, p.num_elements) for p in parameters if not (p.expert or p.frozen))


def partition_states(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Owner of each parameter: the largest first, each to the rank that has least so far."""
    owners = [0] * len(sizes)
    filled = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = filled.index(min(filled))
        filled[owners[index]] += sizes[index]
    return owners
