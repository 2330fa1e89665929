"""OPTIM: what is left to sum, the norms, the update, and what becomes of sharded updates."""

from __future__ import annotations

from collections.abc import Sequence

from simplan.model.layer import CollectiveKind
from simplan.program.action import Action
from simplan.program.lowering.norms import clip_gradients, norms_of_parameters
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates
from simplan.program.program import MemoryCategory, MemoryEffect, Message, Stream
from simplan.program.timeline import SpanKind

__all__ = ["step_optimizer"]


def step_optimizer(
    action: Action,
    stages: Stages,
    states: RankStates,
    writer: RankWriter,
    release: Sequence[MemoryEffect],
) -> None:
    """Writes the step of a rank's optimizer.

    Gradients of embeddings that are tied and sit on two ranks are summed, gradients clipped, parameters updated.
    Updates that were dealt out to ranks whole go round, those that were shared evenly are gathered.

    Args:
        action: The OPTIM.
        stages: Facts about the stages.
        states: Of the rank.
        writer: Takes the operations.
        release: What the update lets go of.
    """
    mapping = stages.mapping
    place = mapping.place(writer.rank)
    if stages.tied_ends and place.pp in stages.tied_ends:
        ends = tuple(mapping.rank(place._replace(pp=end)) for end in stages.tied_ends)
        message = Message(CollectiveKind.ALL_REDUCE, stages.tied_bytes, ends)
        waits = [*writer.blocking, writer.last_compute]
        writer.block_on(writer.collective(action, Stream.TIED, "all_reduce tied embedding", message, waits))
    clip_gradients(action, stages, states, writer)
    norms_of_parameters(action, stages, states, writer)
    effects = (*release, *_temporaries(stages, states))
    work = tuple(item for stage in stages.stages_of(place.pp) for item in states.updates(stage))
    updated = writer.compute(action, "{action}", work, effects, SpanKind.OPTIMIZER)
    group = mapping.shard_group(writer.rank) if stages.plan.shards_optimizer_only else ()
    broadcasts = states.broadcasts()
    if broadcasts:
        writer.collectives(action, Stream.SHARD, "broadcast parameters", group, broadcasts, [updated])
    for members, num_bytes in states.gathers():
        message = Message(CollectiveKind.ALL_GATHER, num_bytes, members)
        stream = Stream.SHARD if members == group else Stream.EXPERT_DATA
        writer.collective(action, stream, "all_gather parameters", message, [updated])


def _temporaries(stages: Stages, states: RankStates) -> tuple[MemoryEffect, ...]:
    """Copies in other precisions, and what the optimizer's own kernels need; gradients on the host go."""
    copied = states.trained_elements * stages.state.widened_bytes + states.temporary_bytes
    if stages.state.narrowed_bytes and stages.plan.dp * stages.plan.cp > 1:
        copied += states.gradient_elements * stages.state.narrowed_bytes
    if stages.plan.offload_optimizer:
        return (MemoryEffect(MemoryCategory.HOST, copied, -states.gradient_elements * stages.state.gradient),)
    return (MemoryEffect(MemoryCategory.WORKSPACE, copied, 0),) if copied else ()
