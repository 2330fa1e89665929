"""OPTIM and the end of REDUCE_GRAD: remaining reductions, norms, the update, and communication of sharded updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from simplan.model.layer import CollectiveKind
from simplan.optimizers import OPTIMIZERS
from simplan.plan.plan import RankGroup
from simplan.program.action import Action
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates
from simplan.program.program import Communication, LayerWork, MemoryCategory, MemoryEffect, Phase, Stream
from simplan.program.timeline import SpanKind


def step_optimizer(action: Action, states: RankStates, writer: RankWriter, release: Sequence[MemoryEffect]) -> None:
    """Writes the optimizer step of a rank.

    Gradients of an embedding tied across two ranks are all-reduced, gradients are clipped, and parameters are updated.
    Tensors of which a shard is not enough are all-gathered before. Updates of whole parameters owned by single ranks
    are broadcast; evenly sharded updates are all-gathered. Nothing is left of it where backward has updated.
    """
    stages, mapping = states.stages, states.stages.mapping
    place = mapping.place(writer.rank)
    if stages.updates_in_backward:
        writer.compute(action, "{action}", (), release)
        return
    if stages.tied_ends and place.pp in stages.tied_ends:
        ends = RankGroup.of("ends", (mapping.rank(place._replace(pp=end)) for end in stages.tied_ends))
        communication = Communication(CollectiveKind.ALL_REDUCE, stages.tied_bytes, ends)
        waits = [*writer.blocking, writer.last_compute]
        writer.block_on(writer.collective(action, Stream.TIED, "all_reduce tied embedding", communication, waits))
    clip_gradients(action, states, writer)
    _reduce_parameter_norms(action, states, writer)
    gathered = states.whole_gathers()
    if gathered:
        waits = [*writer.blocking, writer.last_compute]
        writer.block_on(writer.collective(action, Stream.SHARD, "all_gather whole tensors", gathered, waits))
    effects = (*release, *_temporaries(states))
    work = tuple(item for stage in stages.stages_of(place.pp) for item in states.updates(stage))
    updated = writer.compute(action, "{action}", work, effects, SpanKind.OPTIMIZER)
    broadcasts = states.broadcasts()
    if broadcasts:
        writer.collective(action, Stream.SHARD, "broadcast parameters", broadcasts, [updated])
    for members, num_bytes in states.gathers():
        communication = Communication(CollectiveKind.ALL_GATHER, num_bytes, members)
        stream = Stream.SHARD if members.kind == "shard" else Stream.EXPERT_DATA
        writer.collective(action, stream, "all_gather parameters", communication, [updated])


def _temporaries(states: RankStates) -> tuple[MemoryEffect, ...]:
    """Returns the memory of casts and of the optimizer's kernels; offloaded gradients are freed after the update."""
    plan, state = states.stages.plan, states.stages.state
    copied = states.trained_elements * state.widened_bytes + states.temporary_bytes
    if state.narrowed_bytes and plan.num_averaging > 1:
        copied += states.elements.trained * state.narrowed_bytes
    if plan.offload_optimizer:
        return (MemoryEffect(MemoryCategory.HOST, copied, -states.elements.trained * state.gradient),)
    whole = states.other_shards_elements * state.gathered if states.stages.software.holds_whole_weights(plan) else 0
    each = ((MemoryCategory.WORKSPACE, copied), (MemoryCategory.GATHERED, whole))
    return tuple(MemoryEffect(category, num_bytes, 0) for category, num_bytes in each if num_bytes)


NORM_BYTES = 4
"""Bytes of one norm: in FP32, as gradients and states are."""


def clip_gradients(action: Action, states: RankStates, writer: RankWriter) -> None:
    """Computes the global gradient norm of the model, then scales all gradients.

    One rank counts gradients that several ranks hold. As in torchtitan, each axis of the mesh all-reduces one number,
    the pipeline axis last. Where every rank updates an equal part of flat buffers, it reads and scales the gradients of
    that part only (Megatron Core, optimizer/clip_grads.py; DeepSpeed, runtime/zero/stage_1_and_2.py).
    """
    mapping = states.stages.mapping
    if states.stages.training.clip_grad_norm is None:
        return
    mine = states.stages.stages_of(mapping.place(writer.rank).pp)
    works = states.updated_work if states.shares_evenly else states.work
    norm, scale = (tuple(work for stage in mine for work in works(stage, phase)) for phase in (Phase.NORM, Phase.SCALE))
    writer.compute(action, "gradient norm", norm)
    groups = (*_groups_with_parts(states, writer.rank), (Stream.PIPELINE, mapping.group("pp", writer.rank)))
    _reduce_norms(action, groups, NORM_BYTES, writer)
    writer.compute(action, "clip gradients", scale)


def _reduce_parameter_norms(action: Action, states: RankStates, writer: RankWriter) -> None:
    """All-reduces norms that the optimizer needs, for all parameters that the rank updates, once per group.

    Memory passes for the norms are part of the update.
    """
    num_norms = OPTIMIZERS[states.stages.training.optimizer].num_norms
    num_bytes = num_norms * states.num_updated_tensors * NORM_BYTES if num_norms else 0
    if num_bytes:
        _reduce_norms(action, _groups_with_parts(states, writer.rank), num_bytes, writer)


def _groups_with_parts(states: RankStates, rank: int) -> Iterator[tuple[Stream, tuple[int, ...]]]:
    """Yields the groups whose ranks hold different parts of the same tensors, with their streams."""
    plan, mapping = states.stages.plan, states.stages.mapping
    if plan.shards_parameters or states.shares_evenly:
        yield Stream.SHARD, mapping.group("shard", rank)
    if plan.ep > 1:
        yield Stream.EXPERT, mapping.group("ep", rank)
    yield Stream.TENSOR, mapping.group("tp", rank)


def _reduce_norms(
    action: Action, groups: Iterable[tuple[Stream, tuple[int, ...]]], num_bytes: int, writer: RankWriter
) -> None:
    """All-reduces norms over each group in turn; the next compute waits for the last all-reduce."""
    ended = writer.last_compute
    for stream, group in groups:
        if len(group) > 1:
            communication = Communication(CollectiveKind.ALL_REDUCE, num_bytes, group)
            ended = writer.collective(action, stream, "all_reduce norms", communication, (*writer.blocking, ended))
    writer.block_on(ended)


def complete_gradients(action: Action, states: RankStates, writer: RankWriter) -> None:
    """Completes the gradients of a stage; divides them by the number of microbatches unless the loss was divided."""
    stages, partial = states.stages, states.partial_elements(action.stage)
    if partial:
        group = stages.mapping.group("tp", writer.rank)
        communication = Communication(CollectiveKind.ALL_REDUCE, partial * stages.state.gradient, group)
        waits = [writer.last_compute, *writer.blocking]
        writer.block_on(writer.collective(action, Stream.TENSOR, "all_reduce partial gradients", communication, waits))
    _average_experts(action, states, writer)
    divides = stages.num_microbatches > 1 and stages.software.runtime != "megatron"
    writer.compute(action, "{action}", states.work(action.stage, Phase.SCALE) if divides else ())


def _average_experts(action: Action, states: RankStates, writer: RankWriter) -> None:
    """Divides gradients of experts by the number of averaging ranks, and reduces them over ranks with the same experts.

    Tokens of other expert-parallel ranks already contribute to these gradients; those of tensor-parallel ranks are
    summed.
    """
    stages, plan, elements = states.stages, states.stages.plan, states.expert_gradients(action.stage)
    if not elements:
        return
    own = zip(stages.layers[action.stage], stages.experts[action.stage], strict=True)
    work = tuple(LayerWork(layer, Phase.SCALE, plan.microbatch_size, number) for layer, number in own if number)
    divided = writer.compute(action, "divide experts", work if plan.num_averaging > 1 else ())
    group = stages.mapping.group("expert", writer.rank)
    if len(group) == 1:
        return
    kind = CollectiveKind.REDUCE_SCATTER if states.shares_evenly else CollectiveKind.ALL_REDUCE
    for number in elements:
        communication = Communication(kind, number * stages.state.reduced, group)
        writer.block_on(writer.collective(action, Stream.EXPERT_DATA, f"{kind} experts", communication, (divided,)))
