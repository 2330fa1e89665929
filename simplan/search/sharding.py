"""FSDP's units of a stage in numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simplan.program.program import Phase
from simplan.program.units import Unit, fsdp_units, unit_of_layer
from simplan.search.layer_changes import Change, footprint_change
from simplan.search.layers import Layers
from simplan.search.mesh import Mesh
from simplan.search.part import Part
from simplan.search.sharded_pass import LayerArrays, UnitArrays
from simplan.spec.layer import CollectiveKind, LayerKind

__all__ = ["ShardedStage", "layer_arrays", "sharded_stage"]


class ShardedStage(NamedTuple):
    """Units of a stage.

    Attributes:
        units: In the order in which FSDP ends their forward.
        arrays: Their numbers.
        reduce_s: REDUCE_GRAD from its first reduce-scatter on: copies and reduce-scatters take turns,
            and all-reduces of replicas run beside them.
    """

    units: tuple[Unit, ...]
    arrays: UnitArrays
    reduce_s: float


def sharded_stage(layers: Layers, part: Part, mesh: Mesh, *, keep_last: bool, replicated: bool) -> ShardedStage:
    """Units of a stage, priced.

    Args:
        layers: The layers.
        part: The stage.
        mesh: Where messages go.
        keep_last: See ``fsdp_units``.
        replicated: Shards have replicas.
    """
    state, num_shards = layers.state, mesh.num_shards
    units = fsdp_units([layers.specs[i] for i in part.layers], num_shards, keep_last=keep_last)

    def copies_s(unit: Unit, phase: Phase) -> float:
        owned = [(part.start + i, layers.owned(part.start + i, tied=part.tied)) for i in unit.layers]
        return sum(layers.seconds(i, phase, elements) for i, elements in owned)

    gathered = [unit.padded * state.gathered for unit in units]
    scattered = [unit.padded * state.reduced for unit in units]
    output = [size // num_shards for size in scattered]
    casts = state.gathered != state.parameter
    reduce = CollectiveKind.REDUCE_SCATTER
    arrays = UnitArrays(
        gather_s=_floats([mesh.shard_s(CollectiveKind.ALL_GATHER, size) for size in gathered]),
        copy_s=_floats([copies_s(unit, Phase.GATHER_COPY) for unit in units]),
        reduce_copy_s=_floats([copies_s(unit, Phase.REDUCE_COPY) for unit in units]),
        scatter_s=_floats([mesh.shard_s(reduce, size) for size in scattered]),
        all_reduce_s=_floats(
            [mesh.replicate_s(CollectiveKind.ALL_REDUCE, size) if replicated else 0.0 for size in output]
        ),
        stays=np.array([unit.stays for unit in units]),
        gathered=_integers(gathered),
        cast=_integers([size // num_shards if casts else 0 for size in gathered]),
        whole=_integers([unit.elements * state.gathered for unit in units]),
        accumulated=_integers([unit.elements * state.accumulated for unit in units]),
        scattered=_integers(scattered),
        output=_integers(output),
    )
    ends_s = np.cumsum(arrays.scatter_s + np.concatenate(([0.0], arrays.reduce_copy_s[1:])))
    reduce_s = (ends_s + np.cumsum(arrays.all_reduce_s[::-1])[::-1]).max()
    return ShardedStage(units, arrays, float(reduce_s))


def layer_arrays(layers: Layers, part: Part, units: tuple[Unit, ...]) -> LayerArrays:
    """Numbers of the layers of the only stage of a model."""
    of_layer = unit_of_layer(units)
    begins, ends = (np.full(len(part.layers), -1) for _ in range(2))
    for index, unit in enumerate(units):
        begins[unit.layers[0]], ends[unit.layers[-1]] = index, index
    times = {phase: [layers.passed(i, phase).seconds for i in part.layers] for phase in _BOTH}
    changes: dict[Phase, list[Change]] = {phase: [] for phase in _BOTH}
    alone = []
    for i in part.layers:
        footprint = layers.facts(i, (False, False), tied=part.tied).footprint
        if layers.specs[i].kind is LayerKind.HEAD:
            loss = footprint._replace(forward=footprint.forward[:1], backward=footprint.backward[:1])
            alone = [footprint_change(loss, phase).during for phase in _BOTH]
            footprint = footprint._replace(forward=footprint.forward[1:], backward=footprint.backward[1:])
        for phase in _BOTH:
            changes[phase].append(footprint_change(footprint, phase))
    return LayerArrays(
        _floats(times[Phase.FORWARD]),
        _floats(times[Phase.BACKWARD]),
        _integers(changes[Phase.FORWARD]),
        _integers(changes[Phase.BACKWARD]),
        _integers([of_layer[position] for position in range(len(part.layers))]),
        begins,
        ends,
        *alone,
    )


_BOTH = (Phase.FORWARD, Phase.BACKWARD)


def _floats(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, np.float64)


def _integers(values: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)
