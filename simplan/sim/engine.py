"""The reference engine: every stream of every rank is a SimPy process that walks its list of operations."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from simpy import Environment, Event
from simpy.events import Timeout

from simplan.program.program import Message, Program
from simplan.program.timeline import Span, Timeline
from simplan.sim.cores import SharedCores

__all__ = ["CoreUse", "Times", "simulate", "timeline"]

_Process = Generator[Event, object, None]


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Cores that the ranks of each node share (processor sharing), for devices that are CPUs.

    Attributes:
        cores_per_node: Cores of a node.
        node: By operation, the node whose cores it uses.
        demand: By operation, the cores it keeps busy when it runs alone; 0 for none.
    """

    cores_per_node: int
    node: Sequence[int]
    demand: Sequence[float]


@dataclass(frozen=True, slots=True)
class Times:
    """When every operation of a Program ran, seconds; indices are those of ``Program.ops``."""

    start_s: list[float]
    end_s: list[float]

    @property
    def step_time_s(self) -> float:
        """The end of the last operation."""
        return max(self.end_s, default=0.0)


def simulate(program: Program, durations_s: Sequence[float], cores: CoreUse | None = None) -> Times:
    """Runs one step.

    An operation starts when its predecessor on the stream and everything it waits for have ended and, if it is part
    of a meeting, when that is true of all members; they end together.

    Args:
        program: What to run.
        durations_s: Time of every operation alone, in the order of ``program.ops``; members of a meeting have equal
            ones.
        cores: Cores shared by ranks, if operations slow each other down; None where a duration is a duration.

    Returns:
        Start and end of every operation.
    """
    run = _Run(program, durations_s, cores)
    for indices in program.streams.values():
        run.env.process(run.stream(indices))
    run.env.run()
    assert len(run.ended) == len(program.ops), "deadlock in a checked Program"
    return Times(run.start_s, run.end_s)


class _Run:
    """State of one simulation."""

    def __init__(self, program: Program, durations_s: Sequence[float], cores: CoreUse | None) -> None:
        num_ops = len(program.ops)
        assert len(durations_s) == num_ops
        self.env = Environment()
        self.durations_s = durations_s
        self.start_s = [0.0] * num_ops
        self.end_s = [0.0] * num_ops
        self.ended: set[int] = set()
        self.awaited: dict[int, Event] = {}
        self.waits = _global_waits(program)
        self.meeting = [op.meeting for op in program.ops]
        self.members = program.meetings
        self.absent = {meeting: len(members) for meeting, members in self.members.items()}
        self.gates: dict[int, Event] = {}
        self.cores = cores
        self.nodes = {node: SharedCores(self.env, cores.cores_per_node) for node in set(cores.node)} if cores else {}

    def stream(self, indices: Sequence[int]) -> _Process:
        """Walks the operations of one stream."""
        env, ended, awaited, durations_s = self.env, self.ended, self.awaited, self.durations_s
        for index in indices:
            for wait in self.waits[index]:
                if wait not in ended:
                    event = awaited.get(wait)
                    if event is None:
                        event = awaited[wait] = Event(env)
                    yield event
            meeting = self.meeting[index]
            members: Sequence[int] = (index,)
            if meeting is not None:
                self.absent[meeting] -= 1
                if self.absent[meeting]:
                    gate = self.gates.get(meeting)
                    if gate is None:
                        gate = self.gates[meeting] = Event(env)
                    yield gate
                    continue
                members = self.members[meeting]
            start_s = env.now
            duration_s = durations_s[index]
            if duration_s > 0.0:
                yield Timeout(env, duration_s) if self.cores is None else self._shared(index, members)
            self._end(members, start_s)
            if meeting is not None and meeting in self.gates:
                self.gates[meeting].succeed()

    def _shared(self, index: int, members: Sequence[int]) -> Event:
        """The operation on cores shared with others; a meeting uses cores for all its members."""
        assert self.cores is not None
        demand = sum(self.cores.demand[member] for member in members)
        return self.nodes[self.cores.node[index]].run(self.durations_s[index], demand)

    def _end(self, members: Sequence[int], start_s: float) -> None:
        now = self.env.now
        for member in members:
            self.start_s[member] = start_s
            self.end_s[member] = now
            self.ended.add(member)
            event = self.awaited.pop(member, None)
            if event is not None:
                event.succeed()


def _global_waits(program: Program) -> list[tuple[int, ...]]:
    waits: list[tuple[int, ...]] = [()] * len(program.ops)
    for indices in program.by_rank.values():
        for index in indices:
            local = program.ops[index].waits
            if local:
                waits[index] = tuple(indices[wait] for wait in local)
    return waits


def timeline(program: Program, times: Times) -> Timeline:
    """The spans of a simulated step; operations that took no time are left out."""
    spans = []
    for op, start_s, end_s in zip(program.ops, times.start_s, times.end_s, strict=True):
        if end_s <= start_s:
            continue
        num_bytes, peer = 0, None
        if isinstance(op.work, Message):
            num_bytes = op.work.num_bytes
            if op.work.kind == "send":
                peer = next(rank for rank in op.work.ranks if rank != op.rank)
        spans.append(Span(op.rank, op.stream, op.name, str(op.action), op.kind, start_s, end_s, num_bytes, peer))
    return Timeline(tuple(spans), len(program.ranks), times.step_time_s)
