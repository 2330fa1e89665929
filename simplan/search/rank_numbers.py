"""What a pipeline rank holds between steps and what ends its step, from the stages it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simplan.program.program import Phase
from simplan.search.candidate import Candidate
from simplan.search.layers import Layers
from simplan.search.mesh import Mesh
from simplan.search.part import Part
from simplan.search.replicas import dealt_update
from simplan.search.stage_numbers import table_bytes
from simplan.spec.layer import CollectiveKind

__all__ = ["RankNumbers", "completing_s", "rank_numbers"]


class RankNumbers(NamedTuple):
    """One pipeline rank.

    Attributes:
        resting_bytes: Between steps, receive buffers and inputs aside.
        rebuild_bytes: What DDP holds besides once, when it rebuilds its buckets.
        update_s: Its optimizer step.
        after_s: Until all have what others updated for them (ZeRO-1).
    """

    resting_bytes: int
    rebuild_bytes: int
    update_s: float
    after_s: float


def rank_numbers(
    layers: Layers, mesh: Mesh, parts: Sequence[Part], candidate: Candidate, optimizer: str
) -> RankNumbers:
    """The rank that holds most, and how long the slowest takes.

    Args:
        layers: The layers.
        mesh: Where messages go.
        parts: Its stages.
        candidate: The plan.
        optimizer: Its name.
    """
    state = layers.state
    num_shards = mesh.num_shards if candidate.shards_parameters else 1
    runs = [(i, count, part.tied) for part in parts for i, count in layers.kinds_in(part.start, part.stop)]
    held = [(i, count, layers.held(i, num_shards, tied=tied)) for i, count, tied in runs]
    elements = trained = sum(count * number for _, count, number in held)
    if candidate.shards_optimizer_only:
        trained, update_s, after_s = dealt_update(layers, parts, mesh.num_shards, mesh.shard_s)
    else:
        update_s, after_s = sum(n * layers.seconds(i, Phase.OPTIMIZER, number) for i, n, number in held), 0.0
    resting = elements * (state.parameter + state.gradient) + trained * state.optimizer_bytes(optimizer)
    resting += sum(table_bytes(layers, part) for part in parts)
    reduces = candidate.dp * candidate.cp > 1 and not candidate.shards_parameters
    return RankNumbers(resting, elements * state.gradient if reduces else 0, update_s, after_s)


def completing_s(layers: Layers, mesh: Mesh, part: Part, candidate: Candidate, *, divides: bool) -> float:
    """REDUCE_GRAD of a stage beside data parallelism: sums over tensor-parallel ranks, and division.

    Args:
        layers, mesh, part, candidate: Of which stage.
        divides: There are several microbatches.
    """
    num_shards = mesh.num_shards if candidate.shards_parameters else 1
    seconds = 0.0
    runs = layers.kinds_in(part.start, part.stop)
    partial = sum(count * layers.partial_elements[i] for i, count in runs) // num_shards
    if partial and candidate.tp > 1:
        seconds += mesh.tensor_s(CollectiveKind.ALL_REDUCE, partial * layers.state.gradient)
    if divides:
        held = ((i, count, layers.held(i, num_shards, tied=part.tied)) for i, count in runs)
        seconds += sum(count * layers.seconds(i, Phase.SCALE, number) for i, count, number in held)
    return seconds
