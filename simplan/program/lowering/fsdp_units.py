"""FSDP units: groups of layers whose parameters are all-gathered and whose gradients are reduced together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from simplan.model.layer import LayerKind, LayerSpec, ParameterSpec

if TYPE_CHECKING:
    from simplan.software.software import StateBytes


class Unit(NamedTuple):
    """An FSDP unit: layers whose parameters FSDP handles together.

    Attributes:
        layers: Positions in the stage, ascending.
        elements: Elements of its parameters, a tied weight counted once. A unit of experts counts only expert-parallel
            parameters, any other unit only the rest.
        padded: ``elements`` after padding each sharded dimension to a multiple of the shards, as torch does.
        stays: True if the unit is not resharded between forward and backward, regardless of the plan.
        trained, trained_padded: ``elements`` and ``padded`` of weights with gradients.
        matrices: Elements of each of these weights that is not a vector, in the order of forward.
        has_backward: True unless backward does not reach the unit: all weights in it and before it are frozen.
        experts: True for the expert-parallel experts of a layer, sharded over the ranks that hold the same experts.
        packed: ``padded`` of weights of few bits alone.
        packed_bytes: Bytes of these when they are gathered; they stay packed.
    """

    layers: tuple[int, ...]
    elements: int
    padded: int
    stays: bool
    trained: int
    trained_padded: int
    matrices: tuple[int, ...]
    has_backward: bool = True
    experts: bool = False
    packed: int = 0
    packed_bytes: int = 0

    def gathered_bytes(self, state: StateBytes) -> int:
        """Returns the bytes of the all-gathered unit."""
        return (self.padded - self.packed) * state.gathered + self.packed_bytes

    def stored_bytes(self, state: StateBytes) -> int:
        """Returns the bytes of the shards of all ranks, without scales that ranks do not share."""
        return (self.padded - self.packed) * state.parameter + self.packed_bytes


def fsdp_units(
    layers: Sequence[LayerSpec],
    num_shards: int,
    *,
    keep_last: bool,
    expert_shards: int = 1,
    others_in_root: Collection[int] = (),
) -> tuple[Unit, ...]:
    """Returns the units of a stage in the order in which their forward ends in FSDP.

    Each layer is one unit, except an embedding and a head with a tied weight, and layers that are no modules. These
    belong to the root unit, which ends last. Experts sharded over a different group are a separate unit, which ends
    before the rest of their layer (torchtitan, torchtitan/models/llama4/infra/parallelize.py, ``apply_fsdp``).

    Args:
        layers: Layers of the stage.
        num_shards: Ranks over which parameters are sharded.
        keep_last: True if the unit with which backward begins stays unsharded.
        expert_shards: Ranks over which expert-parallel experts are sharded; 1 for no sharding.
        others_in_root: Positions of further layers in the root unit.
    """
    head = len(layers) - 1
    tied = layers[0].kind is LayerKind.EMBEDDING and bool(layers[head].tied)
    in_root = {position for position, layer in enumerate(layers) if layer.in_root or position in others_in_root}
    in_root |= {0, head} if tied else set()
    groups: list[tuple[int, ...]] = [(position,) for position in range(len(layers)) if position not in in_root]
    if in_root:
        groups.append(tuple(sorted(in_root)))
    seen: dict[tuple[str, ...], tuple[Unit, ...]] = {}  # equal layers have equal units
    units: list[Unit] = []
    for group in groups:
        is_root = group[0] in in_root
        members = [layers[position] for position in group]
        key = tuple(layer.key for layer in members)
        if key not in seen:
            apart = expert_shards > 1 and any(p.expert for layer in members for p in layer.parameters)
            experts = [_unit(_owned(members, experts=True), members[-1], expert_shards)._replace(experts=True)] * apart
            own = [p for p in _owned(members, tied=tied and is_root) if is_root or not (in_root and p.in_root)]
            if is_root:
                own += [p for i, layer in enumerate(layers) if i not in in_root for p in layer.parameters if p.in_root]
            seen[key] = (*experts, _unit(own, members[-1], num_shards))
        units += [unit._replace(layers=group, stays=keep_last and group == groups[-1]) for unit in seen[key]]
    return tuple(units)


def _owned(layers: Sequence[LayerSpec], *, tied: bool = False, experts: bool = False) -> list[ParameterSpec]:
    """Returns the parameters of layers that are experts, or all others; a tied weight once."""
    return [
        parameter
        for layer in layers
        for parameter in layer.parameters
        if parameter.expert == experts and not (tied and parameter.name in layer.tied)
    ]


def _unit(owned: Sequence[ParameterSpec], last: LayerSpec, num_shards: int) -> Unit:
    """Returns a unit without positions in a stage."""
    trained = [parameter for parameter in owned if parameter.has_gradient]
    stored = [(parameter, parameter.stored) for parameter in owned if parameter.stored is not None]
    return Unit(
        (),
        sum(parameter.num_elements for parameter in owned),
        sum(padded_elements(parameter.shape, num_shards) for parameter in owned),
        stays=False,
        trained=sum(parameter.num_elements for parameter in trained),
        trained_padded=sum(padded_elements(parameter.shape, num_shards) for parameter in trained),
        matrices=tuple(parameter.num_elements for parameter in trained if len(parameter.shape) > 1),
        has_backward=bool(trained) or last.kind is LayerKind.HEAD or not last.needed.isdisjoint(last.outputs),
        packed=sum(padded_elements(parameter.shape, num_shards) for parameter, _ in stored),
        packed_bytes=sum(form.gathered_bytes(parameter.shape, num_shards) for parameter, form in stored),
    )


def shard_dimension(shape: Sequence[int], num_shards: int) -> int:
    """Returns the dimension along which torch shards a tensor: 0, or another one of fewer experts than shards.

    Sharding few experts along dimension 0 would make most shards padding (torchtitan,
    torchtitan/models/llama4/infra/parallelize.py, ``shard_placement_fn``). Of the others, the first one that
    divides evenly is used, because torch shards only the first dimension unevenly. A rule refuses FSDP2 if none does.
    """
    even = (1, 2) if has_few_experts(shape, num_shards) else ()
    return next((dimension for dimension in even if shape[dimension] % num_shards == 0), 0)


def has_few_experts(shape: Sequence[int], num_shards: int) -> bool:
    """Returns True for the matrices of fewer experts than shards."""
    return len(shape) == 3 and shape[0] < num_shards


def padded_elements(shape: Sequence[int], num_shards: int) -> int:
    """Returns the elements of a tensor after padding its sharded dimension to a multiple of ``num_shards``."""
    return num_shards * shard_elements(shape, num_shards)


def shard_elements(shape: Sequence[int], num_shards: int, shard: int = 0) -> int:
    """Returns the elements of one shard of a tensor; the last shards may be smaller or empty.

    Few experts are never padded to the shards: their matrices are divided along the hidden dimension (MaxText, by
    logical_axis_rules), as flat buffers (DeepSpeed, FSDP1), or along a dimension that divides evenly (torch).
    """
    few = has_few_experts(shape, num_shards)
    size = math.prod(shape) if few or not shape else shape[0]
    each = -(-size // num_shards)
    return math.prod(shape) // size * max(0, min(each, size - shard * each))


def unit_of_layer(units: Sequence[Unit]) -> dict[int, int]:
    """Returns layer -> index of its unit; for a layer with a separate unit of experts, the other unit."""
    return {layer: index for index, unit in enumerate(units) for layer in unit.layers}


def units_at(layers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Returns layer -> indices of the units with this layer, in all-gather order: the last unit first."""
    found: dict[int, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        found[layer] = (index, *found.get(layer, ()))
    return found


@lru_cache(maxsize=256)
def merged_units(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Returns a whole stage as one unit, for Level 1, plus one unit of experts if these are separate."""
    experts = tuple(unit for unit in units if unit.experts)
    rest = tuple(unit for unit in units if not unit.experts)
    return (_one(experts), _one(rest)) if experts else (_one(rest),)


def _one(units: tuple[Unit, ...]) -> Unit:
    return Unit(
        tuple(sorted(layer for unit in units for layer in unit.layers)),
        sum(unit.elements for unit in units),
        sum(unit.padded for unit in units),
        stays=all(unit.stays for unit in units),
        trained=sum(unit.trained for unit in units),
        trained_padded=sum(unit.trained_padded for unit in units),
        matrices=tuple(matrix for unit in units for matrix in unit.matrices),
        experts=units[0].experts,
        packed=sum(unit.packed for unit in units),
        packed_bytes=sum(unit.packed_bytes for unit in units),
    )
