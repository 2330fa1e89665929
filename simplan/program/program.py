"""The Program: who does what, in what order, with what work. It holds no seconds.

A Program is a list of operations. Each belongs to a rank and one of the rank's streams and names the Level 1 action it
is part of. Order on a stream is the order of issue; across the streams of a rank ``waits`` says what must have ended;
across ranks the members of one ``meeting`` start together once all of them can. Level 1 has one operation per action
(plus its gradient reduction); Level 2 expands forward and backward into layers and the reduction into buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from simplan.program.action import Action, Table
from simplan.program.timeline import SpanKind
from simplan.spec.layer import CollectiveKind, ExpertDraw, LayerSpec

__all__ = [
    "Excess",
    "HostCalls",
    "HostCopy",
    "HostWait",
    "LayerWork",
    "MemoryCategory",
    "MemoryEffect",
    "Message",
    "Op",
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
    SCALE = "scale"
    NORM = "norm"
    OPTIMIZER = "optimizer"


class LayerWork(NamedTuple):
    """One phase of one layer for one microbatch.

    Attributes:
        layer: The layer, as one rank has it.
        phase: Forward, forward again, backward or one of its parts (gradients of activations, gradients of weights),
            what FSDP does around gathering its parameters or around reducing its gradients (copies, mostly), dividing
            its gradients, summing up their squares, or updating its parameters.
        microbatch_size: Sequences (no matter to what is done to parameters and gradients only).
        num_parameters: Elements that phases of parameters and gradients touch; a tied weight that another layer of the
            rank owns is not among them.
        kernels: Indices into ``layer.kernels`` of those that run; None for all. Exchanges among them take no part.
        cuts: Exchanges for which they are cut into parts, to run beside them.
    """

    layer: LayerSpec
    phase: Phase
    microbatch_size: int
    num_parameters: int
    kernels: tuple[int, ...] | None = None
    cuts: int = 0


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


@dataclass(frozen=True)
class Program:
    """One step of one plan.

    Attributes:
        level: 1 or 2.
        table: The Level 1 table, one row per pipeline rank.
        ops: All operations; those of one rank stand in host issue order.
        ranks: The ranks that are written out, ascending.
        stands_for: By rank of the job, the rank that is written out in its place (see ``simplan.program.folding``).
        resting_bytes: Per rank, memory held between steps by category.
        rebuild_bytes: Per rank, buffers held once beside that, when DDP rebuilds its buckets before the second step:
            the old and the new ones are alive together.
        one_memory: Host and device are one memory (a CPU), so that what is offloaded counts as well.
    """

    level: int
    table: Table
    ops: tuple[Op, ...]
    ranks: tuple[int, ...]
    stands_for: tuple[int, ...]
    resting_bytes: dict[int, dict[MemoryCategory, int]]
    rebuild_bytes: dict[int, int]
    one_memory: bool = False

    @cached_property
    def by_rank(self) -> dict[int, tuple[int, ...]]:
        """Rank -> indices of its operations in host issue order."""
        found: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for index, op in enumerate(self.ops):
            found[op.rank].append(index)
        return {rank: tuple(indices) for rank, indices in found.items()}

    @cached_property
    def streams(self) -> dict[tuple[int, Stream], tuple[int, ...]]:
        """(rank, stream) -> indices of its operations in order."""
        found: dict[tuple[int, Stream], list[int]] = defaultdict(list)
        for index, op in enumerate(self.ops):
            found[op.rank, op.stream].append(index)
        return {key: tuple(indices) for key, indices in found.items()}

    @cached_property
    def meetings(self) -> dict[Hashable, tuple[int, ...]]:
        """Meeting -> indices of its operations."""
        found: dict[Hashable, list[int]] = defaultdict(list)
        for index, op in enumerate(self.ops):
            if op.meeting is not None:
                found[op.meeting].append(index)
        return {key: tuple(indices) for key, indices in found.items()}
