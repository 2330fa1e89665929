"""The Program: who does what, in what order, with what work. It holds no seconds.

A Program is a list of operations. Each belongs to a rank and one of the rank's streams and names the Level 1 action it
is part of. Order on a stream is the order of issue; across the streams of a rank ``waits`` says what must have ended;
across ranks the members of one ``meeting`` start together once all of them can. Level 1 has one operation per action
(plus its gradient reduction); Level 2 expands forward and backward into layers and the reduction into buckets.

Operations are columns of numpy arrays: a step of a thousand microbatches has a million of them. An ``Op`` is a view of
one row, for people and tests; engines, prices and memory read the columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from simplan.model.layer import CollectiveKind, ExpertDraw, LayerSpec
from simplan.program.action import Action, ActionKind, Table
from simplan.program.timeline import SpanKind

__all__ = [
    "ACTION_KINDS",
    "SPAN_KINDS",
    "STREAMS",
    "Excess",
    "HostCalls",
    "HostCopy",
    "HostWait",
    "LayerWork",
    "MemoryCategory",
    "MemoryEffect",
    "Message",
    "Op",
    "OpColumns",
    "Phase",
    "Program",
    "Stream",
    "Work",
]


class Stream(StrEnum):
    """Queues of a rank. What is on one of them runs in order of issue, one after the other.

    Collectives of one process group share a queue, as NCCL's do. Messages have one for each kind; where those between
    two ranks hold each other up, they wait for each other (``RankWriter``).
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
    """What is done to a layer."""

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


class LayerWork(NamedTuple):
    """One phase of one layer for one microbatch.

    Attributes:
        layer: The layer, as one rank has it.
        phase: Forward, forward again, backward or one of its parts (gradients of activations, gradients of weights),
            what FSDP does around gathering its parameters or around reducing its gradients (copies, mostly), adding
            its gradients to those of microbatches before, dividing them, summing up their squares, or updating its
            parameters.
        microbatch_size: Sequences (no matter to what is done to parameters and gradients only).
        num_parameters: Elements that phases of parameters and gradients touch; a tied weight that another layer of the
            rank owns is not among them.
        kernels: Indices into ``layer.kernels`` of those that run; None for all. Exchanges among them take no part.
        cuts: Exchanges for which they are cut into parts, to run beside them.
        on_host: The CPU does it, in memory of the host; of phases of parameters and gradients.
    """

    layer: LayerSpec
    phase: Phase
    microbatch_size: int
    num_parameters: int
    kernels: tuple[int, ...] | None = None
    cuts: int = 0
    on_host: bool = False


class Message(NamedTuple):
    """Bytes that move.

    Attributes:
        kind: How.
        num_bytes: How many; see ``CollectiveKind`` for what counts.
        ranks: Global ranks of the group; of a broadcast the root first; source and destination of a send.
        draw: As of ``Exchange``.
    """

    kind: CollectiveKind
    num_bytes: int
    ranks: tuple[int, ...]
    draw: ExpertDraw | None = None


class HostCopy(NamedTuple):
    """Bytes that move between a device and memory of its host; the link carries both directions at once.

    Attributes:
        num_bytes: How many.
        to_host: From the device to the host, or back.
    """

    num_bytes: int
    to_host: bool


class HostCalls(NamedTuple):
    """Tensors that the host handles one by one, while the device waits.

    Attributes:
        num_calls: How many.
        copies: Each is copied from or to one buffer for all; else a view is made of it.
    """

    num_calls: int
    copies: bool


class HostWait(NamedTuple):
    """What the device waits for its host for.

    Attributes:
        reason: Once a ``step`` a trainer takes the next batch, reads the loss and norms back and logs. Before a forward
            a stage takes its ``batch``, whose sizes are read back from the device.
    """

    reason: Literal["step", "batch"]


class Excess(NamedTuple):
    """What messages take beyond the work that they run beside, where neither is written out alone.

    Attributes:
        messages: One after the other.
        beside: What is computed meanwhile, which is counted where it is computed.
        taken: Part of the device's multiprocessors that messages run on: what is computed meanwhile takes longer by
            such a part of the time that they run beside it.
    """

    messages: tuple[Message, ...]
    beside: LayerWork
    taken: float = 0.0


Work = LayerWork | Message | HostCopy | HostCalls | HostWait | Excess


class MemoryCategory(StrEnum):
    """What memory holds; the host pool is in memory of the host, which is the device's own where that is a CPU."""

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
    """How an operation changes one category of memory.

    Attributes:
        category: Which.
        during_bytes: Bytes more than before while it runs.
        after_bytes: Bytes more than before once it is done; negative when it frees.
    """

    category: MemoryCategory
    during_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank.

    Attributes:
        rank: Global rank.
        stream: The rank's stream it runs on.
        name: For people, e.g. ``0F1``, ``block 3``, ``bucket 0``.
        action: The Level 1 action it is part of.
        kind: What its time counts as.
        work: What is done, one after the other: layer phases, a message, a copy to or from the host, or calls of the
            host; nothing takes no time. Messages among others, of operations that are not written out in full, are
            waited for on the spot.
        waits: Indices into ``Program.ops`` of operations of the same rank that must end first, besides its predecessor
            on the stream.
        meeting: Key shared with the operations of other ranks that start together with this one, or None.
        memory: Changes of memory.
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
    def message(self) -> Message | None:
        """The message of an operation that is one."""
        alone = len(self.work) == 1 or self.meeting is not None  # a part that is sent is gathered in the same operation
        if self.stream is not Stream.COMPUTE and alone and isinstance(self.work[0], Message):
            return self.work[0]
        return None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The message of an operation that is one, and those of the same kind that follow upon it."""
        first = self.message
        if first is None:
            return ()
        return tuple(part for part in self.work if isinstance(part, Message) and part.kind is first.kind)


STREAMS = tuple(Stream)
SPAN_KINDS = tuple(SpanKind)
ACTION_KINDS = tuple(ActionKind)
_STREAM_CODE = {stream: code for code, stream in enumerate(STREAMS)}
_SPAN_CODE = {kind: code for code, kind in enumerate(SPAN_KINDS)}
_ACTION_CODE = {kind: code for code, kind in enumerate(ACTION_KINDS)}


class OpColumns(NamedTuple):
    """Operations as columns, ``(num_ops,)`` each unless said otherwise.

    Attributes:
        rank: Global rank.
        stream: Index into ``STREAMS``.
        kind: Index into ``SPAN_KINDS``.
        name: Index into ``Program.names``.
        stage: Stage of the action.
        action: Index into ``ACTION_KINDS``.
        microbatch: Microbatch of the action; -1 for none.
        work: Index into ``Program.works``.
        memory: Index into ``Program.effects``.
        meeting: Number shared by the members of a meeting, -1 for none.
        wait_first: ``(num_ops + 1,)`` Where the waits of each operation begin in ``wait``.
        wait: Indices of operations that must have ended.
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
    """One step of one plan.

    Attributes:
        level: 1 or 2.
        table: The Level 1 table, one row per pipeline rank.
        columns: All operations; those of one rank stand in host issue order.
        names: Names of operations, as formats: ``{action}`` is the action, ``{3}`` layer 3 of its stage.
        works: Work of operations. Equal work of one rank is one entry.
        effects: What operations do to memory; the first entry is nothing.
        ranks: The ranks that are written out, ascending.
        stands_for: By rank of the job, the rank that is written out in its place (see ``simplan.program.folding``).
        resting_bytes: Per rank, memory held between steps by category.
        rebuild_bytes: Per rank, buffers held once beside that, when DDP rebuilds its buckets before the second step:
            the old and the new ones are alive together.
        one_memory: Host and device are one memory (a CPU), so that what is offloaded counts as well.
        layer_names: By stage, the names of its layers.
        all_written_out: At Level 2, every rank and every layer has operations of its own.
    """

    level: int
    table: Table
    columns: OpColumns
    names: Sequence[str]
    works: Sequence[tuple[Work, ...]]
    effects: Sequence[tuple[MemoryEffect, ...]]
    ranks: tuple[int, ...]
    stands_for: tuple[int, ...]
    resting_bytes: dict[int, dict[MemoryCategory, int]]
    rebuild_bytes: dict[int, int]
    one_memory: bool = False
    layer_names: Mapping[int, Sequence[str]] = field(default_factory=dict)
    all_written_out: bool = False

    @classmethod
    def from_ops(
        cls,
        level: int,
        table: Table,
        ops: Sequence[Op],
        ranks: tuple[int, ...],
        stands_for: tuple[int, ...],
        resting_bytes: dict[int, dict[MemoryCategory, int]],
        rebuild_bytes: dict[int, int],
        *,
        one_memory: bool = False,
    ) -> Program:
        """A Program of operations written by hand, as in tests; arguments as of the class."""
        names: dict[str, int] = {}
        works: dict[int, int] = {}
        effects: dict[tuple[MemoryEffect, ...], int] = {(): 0}
        meetings: dict[Hashable, int] = {}
        kept = [op.work for op in ops]
        columns = OpColumns(
            np.array([op.rank for op in ops], np.int32),
            np.array([_STREAM_CODE[op.stream] for op in ops], np.int8),
            np.array([_SPAN_CODE[op.kind] for op in ops], np.int8),
            np.array([names.setdefault(op.name.replace("{", "{{"), len(names)) for op in ops], np.int32),
            np.array([op.action.stage for op in ops], np.int32),
            np.array([_ACTION_CODE[op.action.kind] for op in ops], np.int8),
            np.array([-1 if op.action.microbatch is None else op.action.microbatch for op in ops], np.int32),
            np.array([works.setdefault(id(work), len(works)) for work in kept], np.int32),
            np.array([effects.setdefault(op.memory, len(effects)) for op in ops], np.int32),
            np.array(
                [-1 if op.meeting is None else meetings.setdefault(op.meeting, len(meetings)) for op in ops], np.int64
            ),
            np.cumsum([0, *(len(op.waits) for op in ops)]),
            np.array([wait for op in ops for wait in op.waits], np.int32),
        )
        by_id = {id(work): work for work in kept}
        return cls(
            level,
            table,
            columns,
            tuple(names),
            tuple(by_id[each] for each in works),
            tuple(effects),
            ranks,
            stands_for,
            resting_bytes,
            rebuild_bytes,
            one_memory,
        )

    def __len__(self) -> int:
        """Operations."""
        return len(self.columns.rank)

    @property
    def ops(self) -> Sequence[Op]:
        """The operations as objects, made when they are asked for."""
        return _Ops(self)

    def op(self, index: int) -> Op:
        """One operation as an object."""
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

    def on_stream(self, *streams: Stream) -> NDArray[np.bool_]:
        """``(num_ops,)`` Whether operations are on one of some streams."""
        chosen = np.array([stream in streams for stream in STREAMS])
        return np.asarray(chosen[self.columns.stream])

    def of_kind(self, *kinds: SpanKind) -> NDArray[np.bool_]:
        """``(num_ops,)`` Whether the time of operations counts as one of some kinds."""
        chosen = np.array([kind in kinds for kind in SPAN_KINDS])
        return np.asarray(chosen[self.columns.kind])

    def of_action(self, *kinds: ActionKind) -> NDArray[np.bool_]:
        """``(num_ops,)`` Whether operations are part of an action of one of some kinds."""
        chosen = np.array([kind in kinds for kind in ACTION_KINDS])
        return np.asarray(chosen[self.columns.action])

    @cached_property
    def effect_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``(num_effects, num_categories)`` Bytes more while an operation runs, and once it is done."""
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

    @cached_property
    def meetings(self) -> dict[int, tuple[int, ...]]:
        """Meeting -> indices of its operations."""
        return {meeting: indices for meeting, indices in _grouped(self.columns.meeting).items() if meeting >= 0}


def _grouped(values: NDArray[np.int64]) -> dict[int, tuple[int, ...]]:
    """Value -> indices where it is, ascending; values in the order in which they first come."""
    order = np.argsort(values, kind="stable")
    begins = np.flatnonzero(np.diff(values[order], prepend=values.min(initial=0) - 1))
    parts = np.split(order, begins[1:])
    found = sorted((part.tolist() for part in parts if len(part)), key=lambda part: part[0])
    return {int(values[part[0]]): tuple(part) for part in found}


class _Ops(Sequence[Op]):
    """The operations of a Program as a sequence of objects."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def __len__(self) -> int:
        return len(self._program)

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Op, ...]: ...
    def __getitem__(self, index: int | slice) -> Op | tuple[Op, ...]:
        if isinstance(index, slice):
            return tuple(self._program.op(each) for each in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._program.op(index % len(self))

    def __iter__(self) -> Iterator[Op]:
        return map(self._program.op, range(len(self)))
