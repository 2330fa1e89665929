"""Parameters, gradients and optimizer states that a rank holds, divides and updates for its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from simplan.model.layer import CollectiveKind, LayerSpec, ParameterSpec
from simplan.optimizers import UPDATES, StoredTensor, Widths, newton_schulz_products, projection_products
from simplan.plan.plan import RankGroup
from simplan.program.lowering.fsdp_units import shard_elements
from simplan.program.lowering.stage import Stages
from simplan.program.memory.footprint import brought_parameters
from simplan.program.memory.tensors import stored_tensor
from simplan.program.program import Communication, LayerWork, Phase, TensorUpdates
from simplan.software.software import StateBytes


class LayerStates(NamedTuple):
    """Elements of a layer's parameters that a rank holds; FSDP shards each parameter along one dimension.

    Attributes:
        weights: Weights held between steps.
        packed: Weights of these that are stored in few bits.
        packed_bytes: Bytes of these, with their scales.
        trained: Weights of these that are not frozen.
        experts: Elements of expert-parallel parameters that are not frozen.
        partial: Elements whose gradients are partial sums, to be all-reduced over tensor-parallel ranks.
        gradients: Weights that have gradients.
    """

    weights: int
    packed: int
    packed_bytes: int
    trained: int
    experts: int
    partial: int
    gradients: int


def layer_states(
    parameters: Iterable[ParameterSpec],
    num_shards: int,
    expert_shards: int,
    shard: int = 0,
    state: StateBytes | None = None,
) -> LayerStates:
    """Computes the elements that a rank holds of a layer.

    Args:
        num_shards: Ranks over which each parameter is sharded; 1 for no sharding.
        expert_shards: Ranks over which expert-parallel parameters are sharded; 1 for no sharding.
        shard: Index of the shard; shard 0 has the padded size.
        state: Bytes per element; None where no copy of a frozen weight is trained.
    """
    found = [0] * 5
    packed = packed_bytes = 0
    for parameter in parameters:
        over, index = (expert_shards, 0) if parameter.expert else (num_shards, shard)
        number = shard_elements(parameter.shape, over, index)
        if state is not None:
            number = state.elements_of(parameter, number)
        trained = not parameter.frozen
        experts, partial = trained and parameter.expert, parameter.partial_gradient
        for place, counts in enumerate((True, trained, experts, partial, parameter.has_gradient)):
            found[place] += number * counts
        if parameter.stored is not None:
            packed += number
            packed_bytes += parameter.stored.shard_bytes(parameter.shape, over, index)
    return LayerStates(found[0], packed, packed_bytes, *found[1:])


def second_model_bytes(stages: Stages, rank: int) -> int:
    """Computes the bytes of a reference model next to the one that is trained, of which a rank holds its stages.

    Args:
        stages: Stages of the reference model.
    """
    mapping = stages.mapping
    shards = (len(mapping.group("shard", rank)), stages.plan.expert_shards) if stages.is_sharded else (1, 1)
    mine = stages.stages_of(mapping.place(rank).pp)
    held = (layer_states(parameters, *shards) for stage in mine for parameters in stages.brought[stage])
    return sum(each.weights for each in held) * stages.state.frozen


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
        self._facts = UPDATES[stages.training.update]
        self._held = {stage: self._layers(stage) for stage in self._mine}
        every = [each for layers in self._held.values() for each in layers]
        self.elements = LayerStates(*map(sum, zip(*every, strict=True)))
        self._updated = {stage: self._updates(stage) for stage in self._mine}

    def _layers(self, stage: int, *, exact: bool = False) -> list[LayerStates]:
        """Returns the elements held of each layer, including padding unless ``exact``."""
        brought = self.stages.brought[stage]
        shard = self._shard if exact and self._shards[0] > 1 else 0
        alike = {id(parameters): parameters for parameters in brought}
        found = {
            key: layer_states(parameters, *self._shards, shard, self.stages.state) for key, parameters in alike.items()
        }
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
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer states and master copies that the rank holds."""
        state = self.stages.state
        if not self._facts.by_tensor:
            return self.trained_elements * int(state.optimizer_bytes(self.stages.training.optimizer))
        held = sum(self._facts.state_bytes(tensor, self._widths) for tensor in self._all_stored)
        return held + self.trained_elements * int(state.master)

    @property
    def paged_bytes(self) -> int:
        """Bytes of these in managed memory, which leaves the device when that is full."""
        if not self._facts.by_tensor or not self._facts.is_paged:
            return 0
        return sum(self._facts.paged_bytes(tensor, self._widths) for tensor in self._all_stored)

    @property
    def temporary_bytes(self) -> int:
        """Temporary bytes of the optimizer step, in which expert-parallel parameters are updated separately."""
        if self._facts.by_tensor:
            return self._largest_scratch_bytes(self._all_stored)
        largest = max(self.elements.experts, self.trained_elements - self.elements.experts)
        return UPDATES[self.stages.training.update].num_temporaries * largest * self.stages.state.moment

    def scratch_bytes(self, stage: int, layers: Iterable[int]) -> int:
        """Returns temporary bytes of the optimizer while it updates one tensor after the other of some layers."""
        return self._largest_scratch_bytes(tensor for layer in layers for tensor in self._stored[stage][layer])

    def _largest_scratch_bytes(self, tensors: Iterable[StoredTensor]) -> int:
        facts = UPDATES[self.stages.training.update]
        return max((facts.scratch_bytes(tensor, self._widths) for tensor in tensors), default=0)

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
        if self._facts.by_tensor:
            known: dict[tuple[StoredTensor, ...], TensorUpdates] = {}
            works = tuple(
                work._replace(updates=known.setdefault(tensors, self._tensor_updates(tensors)))
                for work, tensors in zip(works, self._stored[stage], strict=True)
            )
        return tuple(work for work in works if work.num_parameters) if self._deals else works

    def _works(self, stage: int, phase: Phase, numbers: Sequence[int]) -> tuple[LayerWork, ...]:
        plan, layers = self.stages.plan, self.stages.layers[stage]
        return tuple(
            LayerWork(layer, phase, plan.microbatch_size, number, on_host=plan.offload_optimizer)
            for layer, number in zip(layers, numbers, strict=True)
        )

    def _tensor_updates(self, tensors: Sequence[StoredTensor]) -> TensorUpdates:
        """Returns the update of some tensors; matrices are orthogonalized whole."""
        facts, fraction = self._facts, self.stages.state.update_fraction
        products = Counter[tuple[int, int, int]]()
        for tensor in tensors:
            if tensor.is_matrix and facts.orthogonalizes:
                products.update(dict(newton_schulz_products(tensor.whole_shape or tensor.shape)))
            elif tensor.is_matrix and facts.projects:
                projected = projection_products(tensor.shape, self._widths.rank)
                products.update(dict(projected if facts.projects_back else projected[:1]))
        num_bytes = sum(facts.tensor_bytes(tensor, fraction, self._widths) for tensor in tensors)
        one_by_one = facts.others is None or facts.others.by_tensor
        alone = sum(not self._is_flat and (tensor.is_matrix or one_by_one) for tensor in tensors)
        return TensorUpdates(num_bytes, alone, tuple(products.items()))

    @cached_property
    def _widths(self) -> Widths:
        return self.stages.state.widths(trainer=self.stages.software.trainer)

    @property
    def _is_flat(self) -> bool:
        """True if the framework's optimizers update one flat buffer in place of tensors."""
        return self.stages.software.optimizer_shards == "elements"

    @property
    def _all_stored(self) -> list[StoredTensor]:
        """Tensors of which the rank holds optimizer states; a flat buffer is one."""
        if self._is_flat:
            return [StoredTensor((self.trained_elements,))]
        return [tensor for layers in self._stored.values() for tensors in layers for tensor in tensors]

    @cached_property
    def _stored(self) -> dict[int, list[tuple[StoredTensor, ...]]]:
        """By stage and layer, the tensors, or shards of tensors, of which the rank holds optimizer states."""
        return {stage: self._stored_of(stage) for stage in self._mine}

    def _stored_of(self, stage: int) -> list[tuple[StoredTensor, ...]]:
        if self._is_flat:
            return [(StoredTensor((number,)),) if number else () for number in self._updated[stage]]
        if self.stages.software.flat_shards and self.stages.plan.shards_parameters:  # a tensor per unit
            return [(StoredTensor((each.trained,)),) if each.trained else () for each in self._held[stage]]
        owned = self._owned_tensors if self._deals else None
        shards, over_experts = self._shards
        found = []
        for position, (layer, parameters) in enumerate(
            zip(self.stages.layers[stage], self.stages.brought[stage], strict=True)
        ):
            mine = [p for p in parameters if not p.frozen]
            if owned is not None:
                mine = [p for p in mine if p.expert or (stage, position, p.name) in owned]
            found.append(tuple(stored_tensor(p, layer, over_experts if p.expert else shards) for p in mine))
        return found

    @property
    def tensor_sizes(self) -> list[int]:
        """Elements of every trained parameter, in the order of the model, except expert-parallel ones."""
        return [parameter.num_elements for *_, parameter in self._trained_tensors()]

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

    def whole_gathers(self) -> tuple[Communication, ...]:
        """Returns the all-gathers of tensors that the optimizer needs whole and of which FSDP2 leaves shards.

        Muon gathers its update in BF16 (Liu et al. 2025, arXiv:2502.16982, algorithm 1), Adafactor gradient and weight.
        """
        facts, state = self._facts, self.stages.state
        if not facts.gathers or self._shards[0] == 1:
            return ()
        widths = (2,) if facts.orthogonalizes else (state.gradient, state.parameter)
        return tuple(
            Communication(CollectiveKind.ALL_GATHER, width * len(self._group) * tensor.num_elements, self._group)
            for tensor in self._all_stored
            if tensor.is_matrix or facts.gathers == "all"
            for width in widths
        )

    def broadcasts(self) -> tuple[Communication, ...]:
        """Returns the broadcasts of updated parameters, in order; the same object for all ranks of a group.

        Megatron Core has one all-gather in their place for Muon, padded to the largest part. An owner without
        parameters sends one FP32 number, as in torch's ZeroRedundancyOptimizer.
        """
        communications = self.stages.broadcasts.get(self._group)
        if communications is None:
            width, dealt = self.stages.state.parameter, self._dealt() if self._deals else ()
            sizes = [width * sum(owned.values()) for owned in dealt]
            layerwise = self.stages.software.runtime == "megatron" and self._facts.orthogonalizes
            if layerwise and any(sizes):  # core/optimizer/layer_wise_optimizer.py
                padded = len(self._group) * max(sizes)
                whole = Communication(CollectiveKind.ALL_GATHER, padded, self._group)
                self.stages.broadcasts[self._group] = (whole,)
                return (whole,)
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
            found = self.stages.deals[self._pp_rank] = tuple({} for _ in self._group)
            keys = list(self._trained_tensors())
            for (stage, position, parameter), owner in zip(keys, self._owners(keys), strict=True):
                each = found[owner].get((stage, position), 0)
                found[owner][stage, position] = each + parameter.num_elements
        return found

    def _owners(self, keys: Sequence[tuple[int, int, ParameterSpec]]) -> list[int]:
        """Returns the owner of each parameter, as an index into the shard group."""
        return partition_states([parameter.num_elements for *_, parameter in keys], len(self._group))

    @property
    def _owned_tensors(self) -> set[tuple[int, int, str]]:
        """Stage, position and name of every parameter that the rank owns."""
        keys = list(self._trained_tensors())
        owners = zip(keys, self._owners(keys), strict=True)
        return {(stage, position, p.name) for (stage, position, p), owner in owners if owner == self._shard}

    def _trained_tensors(self) -> Iterator[tuple[int, int, ParameterSpec]]:
        """Yields stage, position and every trained parameter, except expert-parallel ones."""
        for stage in self._mine:
            for position, parameters in enumerate(self.stages.brought[stage]):
                yield from ((stage, position, p) for p in parameters if not (p.expert or p.frozen))


def stored_tensors(layers: Sequence[LayerSpec]) -> Iterator[StoredTensor]:
    """Yields the whole tensors of layers of which an optimizer has states."""
    for layer, parameters in zip(layers, brought_parameters(layers), strict=True):
        yield from (stored_tensor(parameter, layer, 1) for parameter in parameters if not parameter.frozen)


def partition_states(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the owner of each parameter: parameters by descending size, each to the rank with the smallest sum."""
    owners = [0] * len(sizes)
    filled = [0] * num_ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = filled.index(min(filled))
        filled[owners[index]] += sizes[index]
    return owners
