"""The units in which FSDP gathers parameters and reduces gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from simplan.model.layer import LayerKind, LayerSpec

__all__ = [
    "Unit",
    "fsdp_units",
    "merged_units",
    "padded_elements",
    "shard_dimension",
    "shard_elements",
    "unit_of_layer",
    "units_at",
]


class Unit(NamedTuple):
    """Layers whose parameters FSDP handles together.

    Attributes:
        layers: Positions in the stage, ascending.
        elements: Parameters, a tied weight counted once; without experts of which other ranks have others, or these.
        padded: The same once every dimension that is sharded is padded to a multiple of the shards, as torch does.
        stays: It is not resharded between forward and backward, whatever the plan says.
        trained, trained_padded: As ``elements`` and ``padded``, without frozen weights: what has gradients.
        matrices: Elements of its trained parameters that are not vectors, in the order of forward.
        has_backward: Backward comes to it: to all but an embedding that is frozen.
        experts: It is the experts of a layer of which other ranks have others, sharded among those that have the same.
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


def fsdp_units(
    layers: Sequence[LayerSpec], num_shards: int, *, keep_last: bool, expert_shards: int = 1
) -> tuple[Unit, ...]:
    """Units of a stage in the order in which FSDP has ended their forward.

    Every layer is one, but for an embedding and a head that share a weight: they belong to the root, which ends last.
    Experts that are sharded among other ranks are one of their own, which ends before the rest of their layer
    (torchtitan, torchtitan/models/llama4/infra/parallelize.py, ``apply_fsdp``).

    Args:
        layers: The stage.
        num_shards: Ranks over which parameters are sharded.
        keep_last: The unit with which backward begins stays gathered.
        expert_shards: Ranks over which experts are sharded of which other ranks have others; 1 for none.
    """
    head = len(layers) - 1
    tied = layers[0].kind is LayerKind.EMBEDDING and bool(layers[head].tied)
    alone = range(1, head) if tied else range(len(layers))
    groups: list[tuple[int, ...]] = [(position,) for position in alone]
    if tied:
        groups.append((0, head))
    seen: dict[tuple[str, ...], tuple[Unit, ...]] = {}  # layers that are alike make units that are
    units: list[Unit] = []
    for group in groups:
        members = [layers[position] for position in group]
        key = tuple(layer.key for layer in members)
        if key not in seen:
            apart = expert_shards > 1 and any(p.expert for layer in members for p in layer.parameters)
            experts = [_unit(members, expert_shards, experts=True)] * apart
            seen[key] = (*experts, _unit(members, num_shards, tied=tied))
        units += [unit._replace(layers=group, stays=keep_last and group == groups[-1]) for unit in seen[key]]
    return tuple(units)


def _unit(layers: Sequence[LayerSpec], num_shards: int, *, tied: bool = False, experts: bool = False) -> Unit:
    """A unit that is nowhere yet."""
    owned = [
        parameter
        for layer in layers
        for parameter in layer.parameters
        if parameter.expert == experts and not (tied and parameter.name in layer.tied)
    ]
    trained = [parameter for parameter in owned if not parameter.frozen]
    return Unit(
        (),
        sum(parameter.num_elements for parameter in owned),
        sum(padded_elements(parameter.shape, num_shards) for parameter in owned),
        stays=False,
        trained=sum(parameter.num_elements for parameter in trained),
        trained_padded=sum(padded_elements(parameter.shape, num_shards) for parameter in trained),
        matrices=tuple(parameter.num_elements for parameter in trained if len(parameter.shape) > 1),
        has_backward=bool(trained) or layers[-1].kind is not LayerKind.EMBEDDING,
        experts=experts,
    )


def shard_dimension(shape: Sequence[int], num_shards: int) -> int:
    """The dimension along which a tensor is sharded: the first one, but of fewer experts than shards the second one.

    Else most shards of experts would be nothing but padding (torchtitan, torchtitan/models/llama4/infra/parallelize.py,
    ``shard_placement_fn``). torch shards no other dimension than the first one unevenly.
    """
    return int(len(shape) == 3 and shape[0] < num_shards and shape[1] % num_shards == 0)


def padded_elements(shape: Sequence[int], num_shards: int) -> int:
    """Elements of a tensor once the dimension that is sharded is padded to a multiple of ``num_shards``."""
    return num_shards * shard_elements(shape, num_shards)


def shard_elements(shape: Sequence[int], num_shards: int, shard: int = 0) -> int:
    """Elements of one of its shards: as many as in the others, but at the end fewer or none."""
    size = shape[shard_dimension(shape, num_shards)]
    each = -(-size // num_shards)
    return math.prod(shape) // size * max(0, min(each, size - shard * each))


def unit_of_layer(units: Sequence[Unit]) -> dict[int, int]:
    """By layer, the index of its unit; of one with experts of their own, that of the rest."""
    return {layer: index for index, unit in enumerate(units) for layer in unit.layers}


def units_at(layers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """By layer, the indices of what is there, as it is gathered: the last one first."""
    found: dict[int, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        found[layer] = (index, *found.get(layer, ()))
    return found


@lru_cache(maxsize=256)
def merged_units(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """A whole stage as one unit, for Level 1, and one of its experts where these are apart."""
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
    )
