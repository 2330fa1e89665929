"""Hooks of data parallelism around the layers of a rank: none, or DDP's bucketed gradient reduction.

FSDP's hooks are in ``simplan.program.lowering.fsdp``; ``simplan.program.lowering.lower`` selects the hooks of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from simplan.model.layer import CollectiveKind, LayerKind, LayerSpec
from simplan.program.action import Action, ActionKind
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.writer import RankWriter
from simplan.program.program import (
    BucketWork,
    Communication,
    LayerWork,
    MemoryCategory,
    MemoryEffect,
    Phase,
    Stream,
)
from simplan.program.timeline import SpanKind
from simplan.units import MIB

if TYPE_CHECKING:
    from simplan.program.memory.states import RankStates

_ENDLESS = 2**62
_GRADIENTS = MemoryCategory.GRADIENTS
_FLAT = MemoryCategory.BUFFERS
_BROADCAST_BYTES = 250 * MIB
_BYTES_PER_ELEMENT = 4  # that a division of gradients reads, and writes


class Hooks:
    """Base hooks, without data parallelism: calls made around layers and actions.

    Gradients that torch frees after every update are held from the first backward of their layer on. Where hooks of
    gradients update the weights, a gradient lives no longer than the backward of its operator and its update.

    Attributes:
        states: Parameters and states of the rank.
        is_first_forward: True if the action being lowered is the first forward of its stage.
        is_last_backward: True if the action being lowered completes the gradients of its stage.
        computed: Stages of the pass being lowered.
        repeats_forward: The weights have passes in forward alone next to the one that is trained.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    STAGE_STATE: ClassVar[tuple[str, ...]] = ("_made",)

    def __init__(self, stages: Stages, writer: RankWriter, level: int) -> None:
        self.stages, self.writer, self.level = stages, writer, level
        self.is_first_forward = self.is_last_backward = False
        self.states: RankStates
        self._updates = stages.updates_in_backward
        self._works: dict[int, tuple[LayerWork, ...]] = {}  # of the optimizer, by stage
        self._drops = stages.software.drops_gradients and not self._updates
        self._made: set[int] = set()  # layers of the stage with gradients
        self.computed = stages
        self.repeats_forward = False

    @contextmanager
    def passing(self, stages: Stages) -> Iterator[None]:
        """Context of a pass in forward alone over the same weights: its layers make no gradients."""
        self.computed = stages
        yield
        self.computed = self.stages

    def expands(self, action: Action) -> bool:
        """Returns True if the action must be lowered layer by layer, because hooks act between layers."""
        if self._updates and action.kind is not ActionKind.FORWARD:
            return True
        is_first_backward = len(self._made) < len(self.stages.layers[action.stage])
        return self._drops and action.kind is not ActionKind.FORWARD and is_first_backward

    def before_forward(self, action: Action, part: range) -> None:
        """Runs before the forward of some layers."""
        if self._drops and self.makes_gradients(action.stage, part[-1]):
            self._hold_new_gradients(action, part[-1:])

    def after_forward(self, action: Action, part: range) -> None:
        """Runs after the forward of some layers."""

    def before_backward(self, action: Action, part: range) -> None:
        """Runs before the backward of some layers."""

    def makes_gradients(self, stage: int, layer: int) -> bool:
        """Returns True if the forward of a layer adds gradients of its weights to the accumulated ones."""
        chunks = self.computed.layers[stage][layer].loss_chunks
        return chunks is not None and chunks.in_place

    def scaling(self, action: Action, part: range) -> tuple[LayerWork, ...]:
        """Returns gradient divisions that belong to these layers' backward."""
        del action, part
        return ()

    def after_backward(self, action: Action, part: range, phase: Phase) -> None:
        """Runs after the backward of some layers, full or split."""
        if self._drops and phase is not Phase.BACKWARD_INPUT:
            self._hold_new_gradients(action, part)
        if self._updates and (work := self.update_work(action.stage, part)):
            self.writer.compute(action, f"update {{{part[0]}}}", work, kind=SpanKind.OPTIMIZER)

    def update_work(self, stage: int, layers: Iterable[int]) -> tuple[LayerWork, ...]:
        """Returns the optimizer's work on some layers in backward."""
        if stage not in self._works:
            self._works[stage] = self.states.updates(stage)
        works = self._works[stage]
        return tuple(works[layer] for layer in layers if works[layer].num_parameters)

    def _hold_new_gradients(self, action: Action, part: range) -> None:
        """Holds new gradients of some layers."""
        new = {*part} - self._made
        self._made |= new
        self._change_gradients(action, sum(self.stages.trained[action.stage][layer] for layer in new))

    def _change_gradients(self, action: Action, elements: int) -> None:
        """Holds more gradients, or frees some, between two layers."""
        if elements:
            change = elements * self.stages.state.gradient
            self.writer.compute(action, "hold gradients", memory=[MemoryEffect(_GRADIENTS, change, change)])

    def end_of_backward(self, action: Action) -> None:
        """Runs at the end of a backward action."""

    def unshard(self, action: Action) -> None:
        """Runs at UNSHARD."""

    def reshard(self, action: Action) -> None:
        """Runs at RESHARD."""

    def reduce(self, action: Action) -> None:
        """Runs at REDUCE_GRAD, before gradients are divided."""

    def dropped_gradients(self) -> int:
        """Returns bytes of gradients that are freed after the update."""
        stages = self.stages
        mine = stages.stages_of(stages.mapping.place(self.writer.rank).pp) if self._drops else ()
        return sum(map(self._dropped_elements, mine)) * stages.state.gradient

    def _dropped_elements(self, stage: int) -> int:
        """Returns the elements of gradients of a stage that are freed after the update."""
        return sum(self.stages.trained[stage])

    def persistent_bytes(self) -> int:
        """Returns bytes of buffers of the hooks that live between steps, gradients excluded."""
        return 0


class DdpHooks(Hooks):
    """DDP hooks: gradients are divided, then reduced in buckets as backward completes them (DistributedDataParallel).

    torch broadcasts buffers of modules before a forward if the forward before it was one whose backward reduces: before
    the first one of a step. In pipelines there is no such forward, as all run under ``no_sync``.

    Where optimizer states are sharded evenly, buckets are reduce-scattered over the shard group. Replicas of the shard
    group then all-reduce the resulting part.

    With backup workers, one bucket has all gradients: which replicas are dropped is known only when the others have
    ended their backward. Each of these has buffers for a part that it receives, and for a part that it sends to late
    replicas.

    Buckets are made once. Gradients outside of them stay until the update, or until they become views of the buckets in
    the reduction.
    """

    STATE: ClassVar = ("_reducing", "_ended")
    STAGE_STATE: ClassVar = ("_made", "_outside")

    def __init__(self, stages: Stages, writer: RankWriter, level: int) -> None:
        super().__init__(stages, writer, level)
        software, plan = stages.software, stages.plan
        shares = plan.shards_optimizer_only and software.optimizer_shards == "elements"
        self._group, self._kind = stages.mapping.group(plan.gradient_group, writer.rank), CollectiveKind.ALL_REDUCE
        self._replicas: tuple[int, ...] = ()
        if shares:
            self._group, self._kind = stages.mapping.group("shard", writer.rank), CollectiveKind.REDUCE_SCATTER
            self._replicas = () if plan.replicas_apart else stages.mapping.group("replicate", writer.rank)
        if level == 1 or not software.grad_overlap or stages.training.backup_workers:
            self._limits = (_ENDLESS, _ENDLESS)
        elif plan.bucket_bytes is not None:
            self._limits = (plan.bucket_bytes, plan.bucket_bytes)
        else:
            self._limits = (software.bucket_bytes, software.first_bucket_bytes)
        self._waits_late = software.waits_for_gradients == "step" and not plan.reduces_every_microbatch
        self._overlaps = software.grad_overlap
        self._reducing: list[int] = []  # pending reductions of the last stage
        self._gathers = shares and software.overlap_param_gather
        self._gathering: dict[int, int] = {}  # by layer of the stage, the all-gather that it waits for
        self._ended: dict[int, int | None] = {}
        self._broadcasts = software.runtime == "torch" and software.broadcast_buffers and plan.pp == 1
        self._copies = software.ddp_copies_gradients
        self._outside: set[int] = set()  # of these, layers with gradients outside of the buckets

    def expands(self, action: Action) -> bool:
        """Returns True where buckets are reduced, or all-gathered, or gradients allocated, between layers."""
        return self._reduces or (self._gathers and self.is_first_forward) or super().expands(action)

    def before_forward(self, action: Action, part: range) -> None:
        """Broadcasts buffers; all-gathers the parameters updated by the previous step, the first layer's first."""
        if (
            self._broadcasts
            and part.start == 0
            and (self.is_first_forward or self.stages.plan.reduces_every_microbatch)
        ):
            self._broadcast_buffers(action)
        super().before_forward(action, part)
        if not (self._gathers and self.is_first_forward):
            return
        if part.start == 0:
            self._gathering = self._gather(action)
        waited = [self._gathering.pop(layer, None) for layer in part]
        self.writer.block_on(*dict.fromkeys(waited))

    def _broadcast_buffers(self, action: Action) -> None:
        """Broadcasts the buffers of the first rank, one flat tensor after the other, from which they are then set."""
        stages, writer, buckets = self.stages, self.writer, buffer_buckets(self.stages.buffers_by_dtype(action.stage))
        if not buckets or stages.training.backup_workers:
            return
        group = stages.mapping.group(stages.plan.gradient_group, writer.rank)
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        layer, size = stages.layers[action.stage][0], stages.plan.microbatch_size
        streamed = LayerWork(layer, Phase.SCALE, size, -(-num_bytes // _BYTES_PER_ELEMENT))
        flatten = BucketWork("buffers: flatten", streamed, len(buckets))
        index = writer.compute(action, "flatten buffers", (flatten,), [MemoryEffect(_FLAT, num_bytes, num_bytes)])
        for bucket in buckets:
            communication = Communication(CollectiveKind.BROADCAST, bucket.num_bytes, group)
            index = writer.collective(action, Stream.DATA, "broadcast buffers", communication, (index,))
        writer.block_on(index)
        set_all = BucketWork("buffers: set", streamed, sum(bucket.num_tensors for bucket in buckets))
        writer.compute(action, "set buffers", (set_all,), [MemoryEffect(_FLAT, 0, -num_bytes)])

    def _gather(self, action: Action) -> dict[int, int]:
        """All-gathers the parameters of a stage in buckets; returns, per layer, the all-gather that it waits for."""
        stages = self.stages
        found: dict[int, int] = {}
        limit = self._limits[0] // stages.state.reduced
        bucket: list[int] = []
        filled = 0
        trained, experts = stages.trained[action.stage], stages.experts[action.stage]
        for layer, elements in enumerate(trained):
            bucket.append(layer)
            filled += elements - experts[layer]
            if (filled < limit and layer + 1 < len(trained)) or not filled:
                continue
            communication = Communication(CollectiveKind.ALL_GATHER, filled * stages.state.parameter, self._group)
            index = self.writer.collective(action, Stream.SHARD, "all_gather parameters", communication, ())
            found |= dict.fromkeys(bucket, index)
            bucket, filled = [], 0
        return found

    def scaling(self, action: Action, part: range) -> tuple[LayerWork, ...]:
        """Returns the division of gradients by the number of data-parallel ranks, before the reduction."""
        return self.stages.work(action.stage, part, Phase.SCALE, of="rest") if self._reduces else ()

    def after_backward(self, action: Action, part: range, phase: Phase) -> None:
        """Records when gradients that this backward reduces are complete."""
        super().after_backward(action, part, phase)
        if self._reduces and phase is not Phase.BACKWARD_INPUT:
            self._ended.update(dict.fromkeys(part, self.writer.last_compute))

    def _hold_new_gradients(self, action: Action, part: range) -> None:
        """Holds new gradients outside of the buckets; frees those that become views of a reduced bucket."""
        stage, experts = self.stages.trained[action.stage], self.stages.experts[action.stage]
        new = {*part} - self._made
        outside = set() if self._reduces and not self._copies else {*part} - (self._made - self._outside)
        held = sum(experts[layer] for layer in new)
        held += sum(stage[layer] - experts[layer] for layer in outside - self._outside)
        held -= sum(stage[layer] - experts[layer] for layer in self._outside.intersection(part) - outside)
        self._made |= new
        self._outside = (self._outside - {*part}) | outside
        self._change_gradients(action, held)

    def _dropped_elements(self, stage: int) -> int:
        """Returns the elements of gradients outside of the buckets: others are views of the buckets by then."""
        return sum((self.stages.trained if self._copies else self.stages.experts)[stage])

    def end_of_backward(self, action: Action) -> None:
        """Reduces the stage's gradients, each bucket once its gradients are complete, and usually waits for them."""
        if not self._reduces or (self._waits_late and not self._overlaps):
            return
        reduced = self._reductions(action)
        if self._waits_late:
            self._reducing = reduced
        else:
            self._wait(action, reduced)

    def reduce(self, action: Action) -> None:
        """Waits for reductions, if backward did not; reductions that do not overlap with backward start here."""
        if self._waits_late:
            self._wait(action, self._reducing or self._reductions(action))
            self._reducing = []

    def _reductions(self, action: Action) -> list[int]:
        """Reduces all gradients of the stage in buckets; returns the operations to wait for."""
        stages, writer = self.stages, self.writer
        buckets = ddp_buckets(
            stages.layers[action.stage],
            stages.state.reduced,
            *self._limits,
            min(stages.state.frozen, stages.state.reduced),
        )
        reduced = []
        for number, bucket in enumerate(buckets):
            name = f"bucket {number}" if self.level == 2 else str(self._kind)
            communication = Communication(self._kind, bucket.num_bytes, self._group)
            waits, memory = (self._ended[bucket.ready_layer],), list[MemoryEffect]()
            if num_dropped := stages.training.backup_workers:
                part_bytes = -(-bucket.num_bytes // (len(self._group) - num_dropped))
                memory.append(MemoryEffect(MemoryCategory.BUFFERS, 2 * part_bytes, 0))
            index = writer.collective(action, Stream.DATA, name, communication, waits, memory)
            if len(self._replicas) > 1:
                part_bytes = -(-bucket.num_bytes // len(self._group))
                communication = Communication(CollectiveKind.ALL_REDUCE, part_bytes, self._replicas)
                index = writer.collective(action, Stream.REPLICATE, f"{name} of replicas", communication, (index,))
            reduced.append(index)
        self._ended = {}
        return reduced

    def _wait(self, action: Action, reduced: Sequence[int]) -> None:
        self.writer.block_on(*reduced)
        self.writer.compute(action, "wait for gradients")

    @property
    def _reduces(self) -> bool:
        return self.is_last_backward or self.stages.plan.reduces_every_microbatch


class BufferBucket(NamedTuple):
    """Buffers that are broadcast together."""

    num_bytes: int
    num_tensors: int


def buffer_buckets(by_dtype: Iterable[Iterable[int]]) -> tuple[BufferBucket, ...]:
    """Returns the flat tensors in which DDP broadcasts buffers: one per dtype, closed at 250 MiB.

    From torch/csrc/distributed/c10d/comm.cpp, ``broadcast_coalesced``, with the limit of ``broadcast_bucket_size``. Of
    several for one dtype, here all follow each other; in torch, in the order of their first buffers.

    Args:
        by_dtype: Bytes of each buffer, those of one dtype together.
    """
    found: list[BufferBucket] = []
    for sizes in by_dtype:
        filled = number = 0
        for num_bytes in sizes:
            filled, number = filled + num_bytes, number + 1
            if filled >= _BROADCAST_BYTES:
                found.append(BufferBucket(filled, number))
                filled = number = 0
        if number:
            found.append(BufferBucket(filled, number))
    return tuple(found)


class Bucket(NamedTuple):
    """A bucket of gradients that are reduced together.

    Attributes:
        ready_layer: Position, in the given list of layers, of the layer whose backward completes the bucket.
        shapes: Shapes of the gradients.
    """

    num_bytes: int
    ready_layer: int
    shapes: tuple[tuple[int, ...], ...]


def ddp_buckets(
    layers: Iterable[LayerSpec], gradient_bytes: int, bucket_bytes: int, first_bucket_bytes: int, copy_bytes: int = 0
) -> tuple[Bucket, ...]:
    """Returns the buckets in the order in which DDP reduces them from the second step on.

    After the first step DDP rebuilds its buckets in the order in which gradients became ready: a bucket takes gradients
    until it holds at least its limit; the first bucket's limit is small so that reduction starts early
    (torch/csrc/distributed/c10d/reducer.cpp, ``compute_bucket_assignment_by_size``). A weight tied to the embedding of
    the same list is ready only with the embedding. Expert-parallel parameters are excluded, as are frozen weights,
    which ``gradient_order`` does not list.

    Args:
        layers: The stage's layers in forward order.
        gradient_bytes: Bytes of one gradient element.
        bucket_bytes: Size limit of all buckets except the first, in bytes.
        first_bucket_bytes: Size limit of the first bucket, in bytes.
        copy_bytes: Bytes of one gradient element of a trained copy of a frozen weight; 0 for ``gradient_bytes``.
    """
    stage = list(layers)
    holds_embedding = any(layer.kind is LayerKind.EMBEDDING for layer in stage)
    buckets: list[Bucket] = []
    limit, filled = first_bucket_bytes, 0
    ready_layer, shapes = 0, list[tuple[int, ...]]()
    for position in reversed(range(len(stage))):
        layer = stage[position]
        for index in layer.gradient_order:
            parameter = layer.parameters[index]
            if parameter.expert or (holds_embedding and parameter.name in layer.tied):
                continue
            filled += parameter.num_elements * (copy_bytes if parameter.is_copy and copy_bytes else gradient_bytes)
            ready_layer = position
            shapes.append(parameter.shape)
            if filled >= limit:
                buckets.append(Bucket(filled, position, tuple(shapes)))
                limit, filled = bucket_bytes, 0
                shapes.clear()
    if filled:
        buckets.append(Bucket(filled, ready_layer, tuple(shapes)))
    return tuple(buckets)
