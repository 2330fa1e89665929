"""Writes the operations of one rank in host issue order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from simplan.model.layer import CollectiveKind
from simplan.plan.plan import GroupKind, RankGroup
from simplan.program.action import Action
from simplan.program.folding import Folding
from simplan.program.lowering.stamping import OpIndex, ProgramBuilder, RendezvousPoint, TemplateRow
from simplan.program.program import (
    ACTION_KINDS,
    SPAN_KINDS,
    STREAMS,
    BucketWork,
    Communication,
    HostCopy,
    HostWait,
    LayerWork,
    MemoryEffect,
    OverlapRemainder,
    Stream,
    Work,
)
from simplan.program.timeline import SpanKind


class RankWriter:
    """Writer of the operations of one action of one rank; indices are relative to the action's first operation.

    Args:
        builder: Receives names, work and effects.
        ordered_communications: True if P2P transfers between two ranks, in either direction, run in order of issue,
            because they share a communicator and its stream (NCCL).
        prefetch_receive_schedules: See ``SoftwareSpec``. If True, only transfers of one direction and sender are
            ordered, and a receive waits for no compute of the rank.
        group: Node group of the rank's device; None for a cluster of equal nodes.

    Attributes:
        stage: Stage of the action being lowered.
        last_compute: Last operation on the compute stream; None for none yet.
        blocking: Operations that the next compute, and sends or receives before it, wait for.
    """

    STATE: ClassVar = ("last_compute", "blocking", "_sending", "_last_communication")

    def __init__(
        self,
        rank: int,
        builder: ProgramBuilder,
        folding: Folding,
        *,
        ordered_communications: bool,
        prefetch_receive_schedules: bool,
        group: int | None = None,
    ) -> None:
        self.rank, self.stage = rank, 0
        self._group = group
        self._in_group: dict[int, tuple[tuple[Work, ...], tuple[Work, ...]]] = {}  # by identity of work, which is kept
        self._builder, self._folding = builder, folding
        self._ordered, self._ahead = ordered_communications, prefetch_receive_schedules
        self._last_communication: dict[
            tuple[int, bool, bool], int
        ] = {}  # by peer, direction and whether it is received
        self._rows: list[TemplateRow] = []
        self.last_compute: int | None = None
        self.blocking: list[int] = []
        self._sending: list[int] = []  # operations that the next compute waits for, but no P2P transfer
        self._works: dict[tuple[Work, ...], tuple[Work, ...]] = {}
        self._members: dict[tuple[GroupKind, RankGroup], RankGroup] = {}

    def take_rows(self) -> list[TemplateRow]:
        """Returns the operations written since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def block_on(self, *indices: int | None) -> None:
        """Makes the next compute wait for these operations."""
        self.blocking.extend(index for index in indices if index is not None)

    def send_first(self, index: int) -> None:
        """Makes the next compute wait for a P2P transfer that other transfers may overtake."""
        self._sending.append(index)

    def compute(
        self,
        action: Action,
        name: str,
        work: tuple[Work, ...] = (),
        memory: Sequence[MemoryEffect] = (),
        kind: SpanKind = SpanKind.COMPUTE,
    ) -> int:
        """Writes an operation on the compute stream; returns its index."""
        waits = (*self.blocking, *self._sending)
        self.last_compute = self._add(action, Stream.COMPUTE, name, work, waits, None, memory, kind)
        self.blocking.clear()
        self._sending.clear()
        return self.last_compute

    def collective(
        self,
        action: Action,
        stream: Stream,
        name: str,
        communications: Communication | Sequence[Communication],
        waits: Sequence[int | None],
        memory: Sequence[MemoryEffect] = (),
    ) -> int:
        """Writes a collective of the rank's group, or consecutive ones as one operation; returns its index.

        Members match in order of issue per stream.
        """
        ranks = (communications if isinstance(communications, Communication) else communications[0]).ranks
        assert isinstance(ranks, RankGroup), "groups of a Program have a kind"
        members = self._members.get((ranks.kind, ranks))
        if members is None:
            members = RankGroup.of(ranks.kind, self._folding.members(ranks))
            self._members[ranks.kind, ranks] = members
        meeting = RendezvousPoint(stream, members) if len(members) > 1 else None
        work = self._shared(communications) if isinstance(communications, Communication) else tuple(communications)
        return self._add(action, stream, name, work, waits, meeting, memory)

    def apart(
        self,
        action: Action,
        stream: Stream,
        name: str,
        communication: Communication,
        waits: Sequence[int | None],
    ) -> int:
        """Writes a transfer to or from a process that is none of the Program's ranks; returns its index."""
        return self._add(action, stream, name, self._shared(communication), waits)

    def callback(
        self,
        action: Action,
        stream: Stream,
        name: str,
        work: tuple[Work, ...],
        waits: Sequence[int | None],
        memory: Sequence[MemoryEffect] = (),
        kind: SpanKind = SpanKind.COMPUTE,
    ) -> int:
        """Writes compute that follows a collective on its stream, next to the rank's compute; returns its index."""
        return self._add(action, stream, name, work, waits, None, memory, kind)

    def exposed(self, action: Action, stream: Stream, name: str, communications: tuple[Work, ...]) -> None:
        """Writes sequential collectives among equal ranks, for which the next compute waits."""
        waits = (*self.blocking, self.last_compute)
        self.blocking.clear()
        self.block_on(self._add(action, stream, name, communications, waits))

    def send(
        self,
        action: Action,
        stream: Stream,
        num_bytes: int,
        ends: RankGroup,
        memory: Sequence[MemoryEffect],
        *,
        number: int,
        gathered: Communication | None,
    ) -> int:
        """Writes one end of a P2P transfer to or from another stage; returns its index.

        Args:
            ends: Sending and receiving rank.
            number: Number of the transfer among those of the action.
            gathered: All-gather that follows if only a part of a tensor is transferred; None for none.
        """
        forward = stream in (Stream.SEND_F, Stream.RECV_F)
        meeting = RendezvousPoint((forward, number), ends)  # and the microbatch, and the stage it comes from
        communication = Communication(CollectiveKind.SEND, num_bytes, ends)
        peer = ends[1] if ends[0] == self.rank else ends[0]
        received = self._ahead and ends[1] == self.rank
        way = peer, self._ahead and forward, received
        waits = [] if received else [*self.blocking, self.last_compute]
        if self._ordered:
            waits.append(self._last_communication.get(way))
        work = self._shared(communication) if gathered is None else self._shared(communication, gathered)
        index = self._add(action, stream, "{action}", work, waits, meeting, memory)
        self._last_communication[way] = index
        return index

    def host_copy(
        self,
        action: Action,
        name: str,
        num_bytes: int,
        waits: Sequence[int | None],
        memory: Sequence[MemoryEffect],
        *,
        to_host: bool,
    ) -> int:
        """Writes a copy between the device and its host; returns its index."""
        stream = Stream.TO_HOST if to_host else Stream.FROM_HOST
        work = self._shared(HostCopy(num_bytes, to_host))
        return self._add(action, stream, name, work, waits, None, memory)

    def _shared(self, *work: Work) -> tuple[Work, ...]:
        """Returns the communication as work; equal ones share one object, by which later passes recognize them."""
        return self._works.setdefault(work, work)

    def _of_group(self, work: tuple[Work, ...], group: int) -> tuple[Work, ...]:
        """Returns work on a device of the rank's node group; the same object for the same work."""
        found = self._in_group.get(id(work))
        if found is None:
            parts = tuple(_in_group(part, group) for part in work)
            found = self._in_group[id(work)] = work, work if parts == work else parts
        return found[1]

    def _add(
        self,
        action: Action,
        stream: Stream,
        name: str,
        work: tuple[Work, ...],
        waits: Sequence[int | None],
        meeting: RendezvousPoint | None = None,
        memory: Sequence[MemoryEffect] = (),
        kind: SpanKind = SpanKind.COMMUNICATION,
    ) -> int:
        builder = self._builder
        self._rows.append(
            TemplateRow(
                STREAMS.index(stream),
                SPAN_KINDS.index(kind),
                builder.names[name],
                action.stage - self.stage,
                ACTION_KINDS.index(action.kind),
                action.microbatch is not None,
                builder.work(work if self._group is None else self._of_group(work, self._group)),
                builder.effects[tuple(memory)],
                -1 if meeting is None else builder.meeting(meeting),
                tuple([wait for wait in waits if wait is not None]),
            )
        )
        return OpIndex(len(self._rows) - 1)


def _in_group(part: Work, group: int) -> Work:
    """Returns work of a device or its host as done in a node group; communication unchanged."""
    if isinstance(part, OverlapRemainder):
        return part._replace(beside=part.beside._replace(group=group))
    if isinstance(part, BucketWork):
        return part._replace(streamed=part.streamed._replace(group=group))
    return part._replace(group=group) if isinstance(part, LayerWork | HostCopy | HostWait) else part
