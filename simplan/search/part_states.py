"""What a rank of a stage holds of its parameters, and what work on them takes once gradients are complete."""

from __future__ import annotations

from typing import NamedTuple

from simplan.program.program import Phase
from simplan.search.layers import Layers
from simplan.search.mesh import Mesh
from simplan.search.part import Part
from simplan.spec.layer import CollectiveKind

__all__ = ["PartStates", "part_states"]


class PartStates(NamedTuple):
    """One stage.

    Attributes:
        elements: Parameters that the rank holds.
        table_bytes: Tables that layers of the stage share, and those that each has.
        update_s: The optimizer step on all of them.
        summing_s: Sums of gradients over tensor-parallel ranks.
        dividing_s: Division of gradients by the number of microbatches.
    """

    elements: int
    table_bytes: int
    update_s: float
    summing_s: float
    dividing_s: float

    def completing_s(self, *, divides: bool) -> float:
        """REDUCE_GRAD beside data parallelism; gradients are divided where there are several microbatches."""
        return self.summing_s + (self.dividing_s if divides else 0.0)


def part_states(layers: Layers, part: Part, mesh: Mesh, *, sharded: bool) -> PartStates:
    """One stage of a mesh.

    Args:
        layers: The layers.
        part: The stage.
        mesh: Where messages go.
        sharded: Parameters are.
    """
    num_shards = mesh.num_shards if sharded else 1
    runs = layers.kinds_in(part.start, part.stop)
    elements, partial = 0, 0
    update_s = dividing_s = summing_s = 0.0
    for i, count in runs:
        number = layers.held(i, num_shards, tied=part.tied)
        elements += count * number
        partial += count * layers.partial_elements[i]
        update_s += count * layers.seconds(i, Phase.OPTIMIZER, number)
        dividing_s += count * layers.seconds(i, Phase.SCALE, number)
    if partial // num_shards and layers.way.tp > 1:
        summing_s = mesh.tensor_s(CollectiveKind.ALL_REDUCE, partial // num_shards * layers.state.gradient)
    return PartStates(elements, _table_bytes(layers, part), update_s, summing_s, dividing_s)


def _table_bytes(layers: Layers, part: Part) -> int:
    kinds = [(layers.specs[i], count) for i, count in layers.kinds_in(part.start, part.stop)]
    shared = {table for layer, _ in kinds for table in layer.constants}
    tables = [*((table, 1) for table in shared), *((t, count) for layer, count in kinds for t in layer.buffers)]
    widths = layers.state.activation, layers.state.residual
    return sum(count * table.num_bytes(*widths) for table, count in tables)
