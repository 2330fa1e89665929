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
from typing import NamedTuple

from simplan.program.action import Action, Table
from simplan.program.timeline import SpanKind
from simplan.spec.layer import LayerSpec

__all__ = ["COMPUTE_STREAM", "LayerWork", "MemoryCategory", "MemoryEffect", "Message", "Op", "Phase", "Program"]

COMPUTE_STREAM = "compute"


class Phase(StrEnum):
    """What is done to a layer."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SCALE = "scale"
    OPTIMIZER = "optimizer"


class LayerWork(NamedTuple):
    """One phase of one layer for one microbatch.

    Attributes:
        layer: The layer.
        phase: Forward, backward, dividing its gradients, or updating its parameters.
        microbatch_size: Sequences (no matter to SCALE and OPTIMIZER).
        num_parameters: Elements that SCALE and OPTIMIZER touch; a tied weight that another layer of the rank owns is
            not among them.
    """

    layer: LayerSpec
    phase: Phase
    microbatch_size: int
    num_parameters: int


class Message(NamedTuple):
    """Bytes that move.

    Attributes:
        kind: ``all_reduce`` or ``send``.
        num_bytes: Bytes of the buffer on each rank.
        ranks: Global ranks of the group; source and destination of a send.
    """

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]


class MemoryCategory(StrEnum):
    """What memory holds."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer_states"
    ACTIVATIONS = "activations"
    BUFFERS = "communication_buffers"
    LOGITS = "logits"
    WORKSPACE = "workspace"
    CONTEXT = "context"


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
        stream: Name of the rank's stream it runs on.
        name: For people, e.g. ``0F1``, ``block 3``, ``bucket 0``.
        action: The Level 1 action it is part of.
        kind: What its time counts as.
        work: Layer phases to compute, or a message; an empty tuple takes no time.
        waits: Indices into ``Program.ops`` of operations of the same rank that must end first, besides its predecessor
            on the stream.
        meeting: Key shared with the operations of other ranks that start together with this one, or None.
        memory: Changes of memory.
    """

    rank: int
    stream: str
    name: str
    action: Action
    kind: SpanKind
    work: tuple[LayerWork, ...] | Message
    waits: tuple[int, ...] = ()
    meeting: Hashable | None = None
    memory: tuple[MemoryEffect, ...] = ()


@dataclass(frozen=True)
class Program:
    """One step of one plan.

    Attributes:
        level: 1 or 2.
        table: The Level 1 table, one row per pipeline rank.
        ops: All operations; those of one rank stand in host issue order.
        ranks: The ranks that have operations, ascending. With ``num_replicas`` above 1 only those of one replica.
        num_replicas: Data-parallel replicas that do exactly the same, of which one is written out.
        resting_bytes: Per rank, memory held between steps by category.
        rebuild_bytes: Per rank, buffers held once beside that, when DDP rebuilds its buckets before the second step:
            the old and the new ones are alive together.
    """

    level: int
    table: Table
    ops: tuple[Op, ...]
    ranks: tuple[int, ...]
    num_replicas: int
    resting_bytes: dict[int, dict[MemoryCategory, int]]
    rebuild_bytes: dict[int, int]

    @cached_property
    def by_rank(self) -> dict[int, tuple[int, ...]]:
        """Rank -> indices of its operations in host issue order."""
        found: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for index, op in enumerate(self.ops):
            found[op.rank].append(index)
        return {rank: tuple(indices) for rank, indices in found.items()}

    @cached_property
    def streams(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """(rank, stream) -> indices of its operations in order."""
        found: dict[tuple[int, str], list[int]] = defaultdict(list)
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
