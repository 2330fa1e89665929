"""The Program: the lowered operation list of one training step. It has no times.

Each operation belongs to one rank and one of the rank's streams, and names the action it is part of. Operations of a
stream run in the order of issue. Across the streams of a rank, ``waits`` lists the operations that must end first.
Across ranks, the members of one ``meeting`` (a collective, or a send and its receive) start together once all are
ready. Level 1 (action level) has one operation per action plus its gradient reduction. Level 2 (kernel level) expands
forward and backward into layers and the reduction into buckets.

Operations are columns of numpy arrays: a step of a thousand microbatches has a million of them. An ``Op`` is a view of
one row for tests and display; engines, cost estimates and memory tracking read the columns.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.model.layer import CollectiveKind, ExpertDraw, LayerSpec
from simplan.program.action import Action, ActionKind, Table
from simplan.program.timeline import LazySequence, SpanKind

_ALL = slice(None)


class Stream(StrEnum):
    """Streams of a rank. Operations of one stream run sequentially, in the order of issue.

    Collectives of one process group share a stream, as in NCCL. P2P sends and receives have one stream per kind and
    direction. Where P2P transfers between two ranks block each other, explicit waits order them (``RankWriter``).
    """

    COMPUTE = "compute"
    DATA = "data_parallel"
    SHARD = "shard"
    REPLICATE = "replicate"
    TENSOR = "tensor_parallel"
    CONTEXT = "context_parallel"
    EXPERT = "expert_parallel"
    EXPERT_DATA = "expert_data_parallel"
    TIED = "tied"
    PIPELINE = "pipeline_parallel"
    SEND_F = "send_f"
    RECV_F = "recv_f"
    SEND_B = "send_b"
    RECV_B = "recv_b"
    TO_HOST = "to_host"
    FROM_HOST = "from_host"


class Phase(StrEnum):
    """Phases of a layer's work in a step."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    GATHER_COPY = "gather_copy"
    REDUCE_COPY = "reduce_copy"
    ACCUMULATE = "accumulate"
    SCALE = "scale"
    NORM = "norm"
    OPTIMIZER = "optimizer"


class TensorUpdates(NamedTuple):
    """An update that goes from tensor to tensor, of one layer on one rank.

    Attributes:
        num_bytes: Bytes that it reads and writes.
        num_tensors: Tensors, each updated by kernels of its own.
        products: Matmuls as (rows, columns, depth), each with its number.
    """

    num_bytes: int
    num_tensors: int
    products: tuple[tuple[tuple[int, int, int], int], ...] = ()


class LayerWork(NamedTuple):
    """One phase of one layer for one microbatch.

    Attributes:
        layer: The layer, as sharded for one rank.
        phase: Forward, recompute, full or split backward, copies around an FSDP unshard (``GATHER_COPY``) or
            reduce-scatter (``REDUCE_COPY``), gradient accumulation, gradient division (``SCALE``), sum of squared
            gradients (``NORM``) or optimizer update.
        microbatch_size: Sequences per microbatch; ignored by phases that only touch parameters and gradients.
        num_parameters: Elements touched by phases of parameters and gradients. A tied weight that another layer of the
            rank owns is not counted.
        kernels: Indices into ``layer.kernels`` of the kernels that run; None for all. Collectives among them are
            ignored.
        cuts: Number of collectives for which the kernels are split into chunks that overlap with communication.
        on_host: True if the CPU does the work in host memory (only phases of parameters and gradients).
        group: Node group of the device that does it (``ClusterSpec.node_groups``); None for the only or fastest one.
        updates: Work of an optimizer whose update depends on the shapes of tensors; None for equal bytes per parameter.
    """

    layer: LayerSpec
    phase: Phase
    microbatch_size: int
    num_parameters: int
    kernels: tuple[int, ...] | None = None
    cuts: int = 0
    on_host: bool = False
    group: int | None = None
    updates: TensorUpdates | None = None


class Communication(NamedTuple):
    """One communication: a collective or a P2P transfer.

    Attributes:
        num_bytes: Size in bytes; ``CollectiveKind`` defines it per kind.
        ranks: Global ranks of the group. A broadcast lists its root first; a send lists source and destination.
        draw: Distribution of tokens over experts, as in ``LayerCollective``; None for other communication.
    """

    kind: CollectiveKind
    num_bytes: int
    ranks: tuple[int, ...]
    draw: ExpertDraw | None = None


class HostCopy(NamedTuple):
    """A copy between a device and its host memory; the link carries both directions simultaneously.

    Attributes:
        to_host: True for a copy from device to host, False for one from host to device.
        group: See ``LayerWork``.
    """

    num_bytes: int
    to_host: bool
    group: int | None = None


class HostCalls(NamedTuple):
    """Tensors that the host handles individually while the device waits.

    Attributes:
        copies: True if each tensor is copied from or to one common buffer, False if only a view of it is created.
    """

    num_calls: int
    copies: bool


class HostWait(NamedTuple):
    """A wait of the device for its host.

    Attributes:
        reason: ``step``: once per step, a trainer fetches the next batch, reads back the loss and norms, and logs.
            ``batch``: before a forward, a stage fetches its batch, whose sizes are read back from the device.
        group: See ``LayerWork``.
    """

    reason: Literal["step", "batch"]
    group: int | None = None


class OverlapRemainder(NamedTuple):
    """Communication time beyond the overlapped compute, where neither has a separate operation.

    Attributes:
        communications: Collectives or P2P transfers, executed sequentially.
        beside: Compute that overlaps with them; its own time is counted in its own operation.
        sm_fraction: Fraction of the device's SMs that communication occupies. Overlapped compute takes longer by this
            fraction of the overlap time.
    """

    communications: tuple[Communication, ...]
    beside: LayerWork
    sm_fraction: float = 0.0


class BucketWork(NamedTuple):
    """Kernels that compress or decompress a bucket of gradients.

    Attributes:
        name: Compression and step, e.g. ``top_k: compress``.
        streamed: Division of gradients that reads and writes as many bytes as the memory-bound kernels.
        num_kernels: Number of kernels.
        flops: FP32 FLOPs of matmuls with a few columns.
        num_selected: Elements of which the largest are selected, or that are permuted.
    """

    name: str
    streamed: LayerWork
    num_kernels: int
    flops: int = 0
    num_selected: int = 0


Work = LayerWork | Communication | HostCopy | HostCalls | HostWait | OverlapRemainder | BucketWork


class MemoryCategory(StrEnum):
    """Categories of memory. ``HOST`` is the pool in host memory, which is the device's own memory on a CPU."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer_states"
    ACTIVATIONS = "activations"
    GATHERED = "gathered_parameters"
    BUFFERS = "communication_buffers"
    LOGITS = "logits"
    WORKSPACE = "workspace"
    CONTEXT = "context"
    HOST = "host_pool"


class MemoryEffect(NamedTuple):
    """Change of one memory category by an operation.

    Attributes:
        during_bytes: Change while the operation runs, in bytes, relative to before.
        after_bytes: Change once the operation has ended, in bytes, relative to before; negative if it frees memory.
    """

    category: MemoryCategory
    during_bytes: int
    after_bytes: int

    @classmethod
    def freeing(cls, category: MemoryCategory, num_bytes: int) -> MemoryEffect:
        """Returns an effect that frees memory before anything else happens."""
        return cls(category, -num_bytes, -num_bytes)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank.

    Attributes:
        name: Display name, e.g. ``0F1``, ``block 3``, ``bucket 0``.
        action: The action that the operation is part of.
        kind: Category of the operation's time.
        work: Work items, executed sequentially: layer phases, a communication, a copy to or from the host, or host
            calls. Empty work takes no time. Communication among other items, in operations that are not expanded, is
            blocking.
        waits: Indices into ``Program.ops`` of operations of the same rank that must end first, in addition to the
            predecessor on the stream.
        meeting: Key shared with the operations of other ranks that start together with this one; None for no such
            ranks.
    """

    rank: int
    stream: Stream
    name: str
    action: Action
    kind: SpanKind
    work: tuple[Work, ...]
    waits: tuple[int, ...] = ()
    meeting: Hashable | None = None
    memory: tuple[MemoryEffect, ...] = ()

    @property
    def communication(self) -> Communication | None:
        """The collective or P2P transfer of an operation that is exactly one; None otherwise."""
        alone = len(self.work) == 1 or self.meeting is not None  # sent parts are all-gathered in the same operation
        if self.stream is not Stream.COMPUTE and alone and isinstance(self.work[0], Communication):
            return self.work[0]
        return None

    @property
    def communications(self) -> tuple[Communication, ...]:
        """All collectives or transfers of an operation that have the kind of the first; empty for compute."""
        first = self.communication
        if first is None:
            return ()
        return tuple(part for part in self.work if isinstance(part, Communication) and part.kind is first.kind)


STREAMS = tuple(Stream)
SPAN_KINDS = tuple(SpanKind)
ACTION_KINDS = tuple(ActionKind)


class OpColumns(NamedTuple):
    """Operations as columns, each of shape ``(num_ops,)`` unless noted.

    Attributes:
        stream: Index into ``STREAMS``.
        kind: Index into ``SPAN_KINDS``.
        name: Index into ``Program.names``.
        stage: Stage of the action.
        action: Index into ``ACTION_KINDS``.
        microbatch: Microbatch of the action; -1 for none.
        work: Index into ``Program.works``.
        memory: Index into ``Program.effects``.
        meeting: Number shared by the members of a meeting; -1 for none.
        wait_first: ``(num_ops + 1,)`` Offsets into ``wait`` at which the waits of each operation begin.
        wait: Indices of the operations that must have ended.
    """

    rank: NDArray[np.int32]
    stream: NDArray[np.int8]
    kind: NDArray[np.int8]
    name: NDArray[np.int32]
    stage: NDArray[np.int32]
    action: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    work: NDArray[np.int32]
    memory: NDArray[np.int32]
    meeting: NDArray[np.int64]
    wait_first: NDArray[np.int64]
    wait: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Program:
    """The operations of one step of a plan.

    Attributes:
        level: 1 (one operation per action) or 2 (operations per layer and bucket).
        table: The action table, one row per pipeline rank.
        columns: All operations; those of one rank are in host issue order.
        names: Names of operations, as formats: ``{action}`` is the action, ``{3}`` layer 3 of its stage.
        works: Work of operations. Equal work of one rank is one entry.
        effects: Memory changes of operations; the first entry is empty.
        ranks: Simulated ranks, ascending.
        stands_for: Per rank of the job, the simulated rank that represents it (see ``simplan.program.folding``).
        persistent_bytes: Per rank, persistent memory between steps by category, in bytes.
        rebuild_bytes: Per rank, bytes of additional buffers when DDP rebuilds its buckets before the second step: the
            old and the new buckets are resident together.
        paged_bytes: Per rank with states in managed memory, bytes of these.
        one_memory: True if host and device share one memory (a CPU), so that offloaded bytes count as well.
        all_written_out: True if, at Level 2, every rank and every layer has separate operations.
    """

    level: int
    table: Table
    columns: OpColumns
    names: Sequence[str]
    works: Sequence[tuple[Work, ...]]
    effects: Sequence[tuple[MemoryEffect, ...]]
    ranks: tuple[int, ...]
    stands_for: tuple[int, ...]
    persistent_bytes: dict[int, dict[MemoryCategory, int]]
    rebuild_bytes: dict[int, int]
    one_memory: bool = False
    paged_bytes: Mapping[int, int] = field(default_factory=dict)
    layer_names: Mapping[int, Sequence[str]] = field(default_factory=dict)
    all_written_out: bool = False

    def __len__(self) -> int:
        """Number of operations."""
        return len(self.columns.rank)

    @cached_property
    def num_represented(self) -> NDArray[np.int64]:
        """``(world_size,)`` Number of ranks that each simulated rank represents, itself included; 0 for others."""
        return np.bincount(self.stands_for, minlength=len(self.stands_for))

    @property
    def ops(self) -> Sequence[Op]:
        """The operations as objects, created on access."""
        return LazySequence(range(len(self)), self.op)

    def op(self, index: int) -> Op:
        """Returns one operation as an object."""
        c = self.columns
        microbatch = int(c.microbatch[index])
        action = Action(int(c.stage[index]), ACTION_KINDS[c.action[index]], microbatch if microbatch >= 0 else None)
        name, meeting = self.names[c.name[index]], int(c.meeting[index])
        return Op(
            rank=int(c.rank[index]),
            stream=STREAMS[c.stream[index]],
            name=name.format(*self.layer_names.get(action.stage, ()), action=action) if "{" in name else name,
            action=action,
            kind=SPAN_KINDS[c.kind[index]],
            work=self.works[c.work[index]],
            waits=tuple(c.wait[c.wait_first[index] : c.wait_first[index + 1]].tolist()),
            meeting=None if meeting < 0 else meeting,
            memory=self.effects[c.memory[index]],
        )

    def on_stream(self, *streams: Stream, indices: NDArray[np.integer] | slice = _ALL) -> NDArray[np.bool_]:
        """``(num_indices,)`` Returns True for operations, by default all, on any of the given streams."""
        chosen = np.array([stream in streams for stream in STREAMS])
        return np.asarray(chosen[self.columns.stream[indices]])

    def of_kind(self, *kinds: SpanKind, indices: NDArray[np.integer] | slice = _ALL) -> NDArray[np.bool_]:
        """``(num_indices,)`` Returns True for operations, by default all, whose time counts as any given kind."""
        chosen = np.array([kind in kinds for kind in SPAN_KINDS])
        return np.asarray(chosen[self.columns.kind[indices]])

    def of_action(self, *kinds: ActionKind, indices: NDArray[np.integer] | slice = _ALL) -> NDArray[np.bool_]:
        """``(num_indices,)`` Returns True for operations, by default all, of an action of any of the given kinds."""
        chosen = np.array([kind in kinds for kind in ACTION_KINDS])
        return np.asarray(chosen[self.columns.action[indices]])

    @cached_property
    def effect_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``(num_effects, num_categories)`` Change in bytes while an operation runs, and after its end."""
        categories = {category: column for column, category in enumerate(MemoryCategory)}
        during, after = (np.zeros((len(self.effects), len(categories)), np.int64) for _ in range(2))
        for row, effects in enumerate(self.effects):
            for effect in effects:
                during[row, categories[effect.category]] += effect.during_bytes
                after[row, categories[effect.category]] += effect.after_bytes
        return during, after

    @cached_property
    def rank_indices(self) -> dict[int, NDArray[np.int64]]:
        """Rank -> indices of its operations in host issue order."""
        order = np.argsort(self.columns.rank, kind="stable")
        ordered = self.columns.rank[order]
        begins, ends = (np.searchsorted(ordered, self.ranks, side) for side in ("left", "right"))
        return {
            rank: order[begin:end] for rank, begin, end in zip(self.ranks, begins.tolist(), ends.tolist(), strict=True)
        }

    @cached_property
    def by_rank(self) -> dict[int, tuple[int, ...]]:
        """Rank -> indices of its operations in host issue order."""
        return {rank: tuple(indices.tolist()) for rank, indices in self.rank_indices.items()}

    @cached_property
    def streams(self) -> dict[tuple[int, Stream], tuple[int, ...]]:
        """(rank, stream) -> indices of its operations in order."""
        codes = self.columns.rank.astype(np.int64) * len(STREAMS) + self.columns.stream
        return {
            (code // len(STREAMS), STREAMS[code % len(STREAMS)]): indices for code, indices in _grouped(codes).items()
        }


def magnitude_bytes(program: Program) -> float:
    """Returns the order of magnitude of the bytes of a rank at its peak, as sums in 64 bits would not be able to.

    The sum of all allocations is larger than any peak, and costs little. If that is too much to count, the peaks are
    found in floating point.
    """
    counts = np.bincount(program.columns.memory).tolist()
    effects = [*program.effects][: len(counts)]
    resting = max(sum(by_category.values()) for by_category in program.persistent_bytes.values())
    during = [sum(abs(effect.during_bytes) for effect in each) for each in effects]
    after = [sum(abs(effect.after_bytes) for effect in each) for each in effects]
    total = resting + sum(count * (a + b) for count, a, b in zip(counts, during, after, strict=True))
    if total < 2**62:
        return float(total)
    change = np.array([float(sum(effect.after_bytes for effect in each)) for each in effects])
    passing = np.array(during, np.float64)
    peaks = [
        (change[own].cumsum().max(initial=0.0) + passing[own].max(initial=0.0))
        for own in (program.columns.memory[indices] for indices in program.rank_indices.values())
    ]
    return float(resting + max(peaks))


def _grouped(values: NDArray[np.int64]) -> dict[int, tuple[int, ...]]:
    """Returns value -> ascending indices at which it occurs; values are in order of first occurrence."""
    order = np.argsort(values, kind="stable")
    begins = np.flatnonzero(np.diff(values[order], prepend=values.min(initial=0) - 1))
    parts = np.split(order, begins[1:])
    found = sorted((part.tolist() for part in parts if len(part)), key=lambda part: part[0])
    return {int(values[part[0]]): tuple(part) for part in found}


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the collector, as a context manager or as a decorator.

    The collector would traverse all objects repeatedly as their number grows, and find nothing: operations, events and
    spans form no cycles that outlive their use. Half of the time of a large simulation went into these traversals.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
