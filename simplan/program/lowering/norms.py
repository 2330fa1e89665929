"""Norms at the start of OPTIM: of all gradients, which are clipped by it, and those that LARS and LAMB take."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.model.layer import CollectiveKind
from simplan.program.action import Action
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates
from simplan.program.program import Message, Phase, Stream
from simplan.training.optimizer import OPTIMIZERS

__all__ = ["clip_gradients", "norms_of_parameters"]

_NORM_BYTES = 4  # in fp32, as gradients and states are


def clip_gradients(action: Action, stages: Stages, states: RankStates, writer: RankWriter) -> None:
    """Squares of all gradients of the rank, summed over ranks with other parts of the model, then all are scaled.

    What several ranks hold alike one of them counts. As in torchtitan each axis of the mesh has one all-reduce of a
    number, the pipeline's last.

    Args:
        action: The OPTIM.
        stages: Facts about the stages.
        states: Of the rank.
        writer: Takes the operations.
    """
    if stages.training.clip_grad_norm is None:
        return
    mine = stages.stages_of(stages.mapping.place(writer.rank).pp)
    ended = writer.compute(
        action, "gradient norm", tuple(work for stage in mine for work in states.work(stage, Phase.NORM))
    )
    pipeline = (Stream.PIPELINE, stages.mapping.pp_group(writer.rank))
    for stream, group in (*_groups_with_parts(stages, writer.rank), pipeline):
        if len(group) > 1:
            ended = _summed(action, stream, group, _NORM_BYTES, ended, writer)
    writer.block_on(ended)
    writer.compute(action, "clip gradients", tuple(work for stage in mine for work in states.work(stage, Phase.SCALE)))


def norms_of_parameters(action: Action, stages: Stages, states: RankStates, writer: RankWriter) -> None:
    """Sums over ranks for the norms of the optimizer, of all parameters that the rank updates at once.

    Their own passes over memory are part of the update; arguments as above.
    """
    num_norms = OPTIMIZERS[stages.training.optimizer].num_norms
    num_bytes = num_norms * states.num_updated_tensors * _NORM_BYTES if num_norms else 0
    if not num_bytes:
        return
    ended = writer.last_compute
    for stream, group in _groups_with_parts(stages, writer.rank):
        if len(group) > 1:
            ended = _summed(action, stream, group, num_bytes, ended, writer)
    writer.block_on(ended)


def _groups_with_parts(stages: Stages, rank: int) -> Iterator[tuple[Stream, tuple[int, ...]]]:
    """Ranks that have other parts of the same tensors."""
    if stages.plan.shards_parameters:
        yield Stream.SHARD, stages.mapping.shard_group(rank)
    yield Stream.TENSOR, stages.mapping.tp_group(rank)


def _summed(
    action: Action, stream: Stream, group: tuple[int, ...], num_bytes: int, after: int | None, writer: RankWriter
) -> int:
    message = Message(CollectiveKind.ALL_REDUCE, num_bytes, group)
    return writer.collective(action, stream, "all_reduce norms", message, (*writer.blocking, after))
