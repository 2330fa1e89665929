"""FSDP's units of a stage in numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Phase
from simplan.program.units import Unit, fsdp_units, unit_of_layer
from simplan.search.layer_changes import footprint_change
from simplan.search.layers import Layers
from simplan.search.mesh import Mesh
from simplan.search.part import Part
from simplan.search.replicas import MessageTime
from simplan.search.sharded_pass import LayerArrays, UnitArrays
from simplan.spec.layer import CollectiveKind

__all__ = ["ShardedStage", "UnitBytes", "layer_arrays", "sharded_stage"]

_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]


class UnitBytes(NamedTuple):
    """Gradients of a unit.

    Attributes:
        whole: As they come.
        accumulated: As they are added up.
    """

    whole: int
    accumulated: int


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

    def unit_bytes(self, part: Part) -> dict[int, UnitBytes]:
        """Gradients of each unit, by the layer of the model with which it begins."""
        begins = (part.start + unit.layers[0] for unit in self.units)
        sizes = zip(self.arrays.whole.tolist(), self.arrays.accumulated.tolist(), strict=True)
        return {layer: UnitBytes(*size) for layer, size in zip(begins, sizes, strict=True)}


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
    seen: dict[tuple[int, ...], int] = {}  # units that are alike cost the same
    alike = [
        seen.setdefault(tuple(layers.kinds[part.start + i] for i in unit.layers), n) for n, unit in enumerate(units)
    ]
    of_unit = np.searchsorted(list(seen.values()), alike)
    distinct = [units[n] for n in seen.values()]

    def copies_s(phase: Phase) -> _Floats:
        owned = [[(part.start + i, layers.owned(part.start + i, tied=part.tied)) for i in u.layers] for u in distinct]
        return np.array([sum(layers.seconds(i, phase, elements) for i, elements in of_unit) for of_unit in owned])[
            of_unit
        ]

    def messages_s(message_s: MessageTime, kind: CollectiveKind, sizes: _Integers) -> _Floats:
        return np.array([message_s(kind, size) for size in sizes.tolist()])[of_unit]

    elements, padded = np.array([(unit.elements, unit.padded) for unit in distinct], np.int64).T
    gathered, scattered = padded * state.gathered, padded * state.reduced
    output = scattered // num_shards
    casts = state.gathered != state.parameter
    arrays = UnitArrays(
        gather_s=messages_s(mesh.shard_s, CollectiveKind.ALL_GATHER, gathered),
        copy_s=copies_s(Phase.GATHER_COPY),
        reduce_copy_s=copies_s(Phase.REDUCE_COPY),
        scatter_s=messages_s(mesh.shard_s, CollectiveKind.REDUCE_SCATTER, scattered),
        all_reduce_s=messages_s(mesh.replicate_s, CollectiveKind.ALL_REDUCE, output)
        if replicated
        else np.zeros(len(units)),
        stays=np.array([unit.stays for unit in units]),
        gathered=gathered[of_unit],
        cast=(gathered // num_shards * casts)[of_unit],
        whole=(elements * state.gathered)[of_unit],
        accumulated=(elements * state.accumulated)[of_unit],
        scattered=scattered[of_unit],
        output=output[of_unit],
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
    distinct = sorted(set(layers.kinds))
    kind_of = np.searchsorted(distinct, layers.kinds)
    footprints = [layers.facts(i, (False, False), tied=part.tied).footprint for i in distinct]
    head = footprints[distinct.index(layers.kinds[-1])]
    loss = head._replace(forward=head.forward[:1], backward=head.backward[:1])
    footprints[distinct.index(layers.kinds[-1])] = head._replace(forward=head.forward[1:], backward=head.backward[1:])
    forward_s, backward_s = [np.array([layers.passed(i, phase).seconds for i in distinct])[kind_of] for phase in _BOTH]
    forward, backward = [
        np.array([footprint_change(f, phase) for f in footprints], np.int64)[kind_of] for phase in _BOTH
    ]
    model, of_loss = (footprint_change(loss, phase).during for phase in _BOTH)
    return LayerArrays(
        forward_s,
        backward_s,
        forward,
        backward,
        np.array([of_layer[position] for position in range(len(part.layers))], np.int64),
        begins,
        ends,
        model,
        of_loss,
    )


_BOTH = (Phase.FORWARD, Phase.BACKWARD)
