"""Writes the operations of one rank in host issue order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from simplan.model.layer import CollectiveKind
from simplan.program.action import Action
from simplan.program.folding import Folding
from simplan.program.lowering.stamping import Meeting, OpIndex, ProgramBuilder, TemplateRow
from simplan.program.program import (
    ACTION_KINDS,
    SPAN_KINDS,
    STREAMS,
    HostCopy,
    MemoryEffect,
    Message,
    Stream,
    Work,
)
from simplan.program.timeline import SpanKind

__all__ = ["RankWriter"]

_STREAM = {stream: code for code, stream in enumerate(STREAMS)}
_KIND = {kind: code for code, kind in enumerate(SPAN_KINDS)}
_ACTION = {kind: code for code, kind in enumerate(ACTION_KINDS)}


class RankWriter:
    """Operations of one action of one rank, in the making; indices are relative to the action's first one.

    Args:
        rank: Global rank.
        builder: Takes names, work and effects.
        folding: Which other ranks are written out.
        ordered_messages: Messages between two ranks, of either direction, pass one after the other in order of issue,
            since they share a communicator and its stream (NCCL).
        receives_ahead: As of ``SoftwareSpec``: only those of one way and sender do so, and what is received waits for
            no computation of the rank.

    Attributes:
        stage: Of the action that is lowered.
        last_compute: The last computation, if there was any.
        blocking: What the next computation waits for, and messages before it.
    """

    STATE: ClassVar = ("last_compute", "blocking", "_sending", "_last_message")

    def __init__(
        self,
        rank: int,
        builder: ProgramBuilder,
        folding: Folding,
        *,
        ordered_messages: bool = True,
        receives_ahead: bool = False,
    ) -> None:
        self.rank, self.stage = rank, 0
        self._builder = builder
        self._ordered = ordered_messages
        self._ahead = receives_ahead
        self._last_message: dict[tuple[int, bool, bool], int] = {}  # by peer, way and whether it is received
        self._rows: list[TemplateRow] = []
        self.last_compute: int | None = None
        self._folding = folding
        self.blocking: list[int] = []
        self._sending: list[int] = []  # what the next computation waits for, but no message
        self._works: dict[Work | tuple[Work, ...], tuple[Work, ...]] = {}
        self._members: dict[tuple[int, ...], tuple[int, ...]] = {}

    def take_rows(self) -> list[TemplateRow]:
        """What was written since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def block_on(self, *indices: int | None) -> None:
        """The next computation waits for these operations."""
        self.blocking.extend(index for index in indices if index is not None)

    def send_first(self, index: int) -> None:
        """The next computation waits for a message that others may pass."""
        self._sending.append(index)

    def compute(
        self,
        action: Action,
        name: str,
        work: tuple[Work, ...] = (),
        memory: Sequence[MemoryEffect] = (),
        kind: SpanKind = SpanKind.COMPUTE,
    ) -> int:
        """Something on the compute stream; gives its index."""
        waits = (*self.blocking, *self._sending)
        self.last_compute = self._add(action, Stream.COMPUTE, name, kind, work, waits, None, memory)
        self.blocking.clear()
        self._sending.clear()
        return self.last_compute

    def collective(
        self,
        action: Action,
        stream: Stream,
        name: str,
        message: Message,
        waits: Sequence[int | None],
        memory: Sequence[MemoryEffect] = (),
    ) -> int:
        """A collective of the rank's group; gives its index. Members meet in the order of issue on their stream."""
        members = self._members.get(message.ranks)
        if members is None:
            members = self._members[message.ranks] = self._folding.members(message.ranks)
        meeting = Meeting(stream, members) if len(members) > 1 else None
        return self._add(
            action, stream, name, SpanKind.COMMUNICATION, self._one(message), _known(waits), meeting, memory
        )

    def collectives(
        self,
        action: Action,
        stream: Stream,
        name: str,
        group: tuple[int, ...],
        messages: tuple[Work, ...],
        waits: Sequence[int | None],
    ) -> int:
        """Collectives of one group that follow upon each other, as one operation: all members meet once."""
        members = self._folding.members(group)
        meeting = Meeting(stream, members) if len(members) > 1 else None
        return self._add(action, stream, name, SpanKind.COMMUNICATION, messages, _known(waits), meeting, ())

    def exposed(self, action: Action, stream: Stream, name: str, messages: tuple[Work, ...]) -> None:
        """Messages among equal ranks, one after the other, that the next computation waits for."""
        waits = (*self.blocking, self.last_compute)
        self.blocking.clear()
        self.block_on(self._add(action, stream, name, SpanKind.COMMUNICATION, messages, _known(waits), None, ()))

    def send(
        self,
        action: Action,
        stream: Stream,
        num_bytes: int,
        ends: tuple[int, int],
        memory: Sequence[MemoryEffect] = (),
        *,
        number: int = 0,
        gathered: Message | None = None,
    ) -> int:
        """One end of a message to or from another stage, issued when the host gets to it; gives its index.

        Args:
            action: The SEND or RECV.
            stream: Which.
            num_bytes: Size.
            ends: Sending and receiving rank.
            memory: What it holds.
            number: Of the message among those of the action.
            gathered: What follows it at once, where the message is a part of a tensor.
        """
        forward = stream in (Stream.SEND_F, Stream.RECV_F)
        meeting = Meeting((forward, number), ends, sends=True)  # and the microbatch, and the stage it comes from
        message = Message(CollectiveKind.SEND, num_bytes, ends)
        peer = ends[1] if ends[0] == self.rank else ends[0]
        received = self._ahead and ends[1] == self.rank
        way = peer, self._ahead and forward, received
        waits = [] if received else [*self.blocking, self.last_compute]
        if self._ordered:
            waits.append(self._last_message.get(way))
        work = (
            self._one(message) if gathered is None else self._works.setdefault((message, gathered), (message, gathered))
        )
        index = self._add(action, stream, "{action}", SpanKind.COMMUNICATION, work, _known(waits), meeting, memory)
        self._last_message[way] = index
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
        """A copy between the device and its host; gives its index."""
        stream = Stream.TO_HOST if to_host else Stream.FROM_HOST
        work = self._one(HostCopy(num_bytes, to_host))
        return self._add(action, stream, name, SpanKind.COMMUNICATION, work, _known(waits), None, memory)

    def _one(self, message: Message | HostCopy) -> tuple[Work, ...]:
        """The message as work; equal messages share one object, by which what follows tells equal work."""
        return self._works.setdefault(message, (message,))

    def _add(
        self,
        action: Action,
        stream: Stream,
        name: str,
        kind: SpanKind,
        work: tuple[Work, ...],
        waits: tuple[int, ...],
        meeting: Meeting | None,
        memory: Sequence[MemoryEffect],
    ) -> int:
        builder = self._builder
        self._rows.append(
            TemplateRow(
                _STREAM[stream],
                _KIND[kind],
                builder.name(name),
                action.stage - self.stage,
                _ACTION[action.kind],
                action.microbatch is not None,
                builder.work(work),
                builder.memory(tuple(memory)) if memory else 0,
                -1 if meeting is None else builder.meeting(meeting),
                waits,
            )
        )
        return OpIndex(len(self._rows) - 1)


def _known(waits: Sequence[int | None]) -> tuple[int, ...]:
    return tuple([wait for wait in waits if wait is not None])
