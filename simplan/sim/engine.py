"""The reference engine: every stream of every rank is a SimPy process that walks its list of operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass

from simpy import Environment, Event
from simpy.events import NORMAL

from simplan.program.program import Program
from simplan.program.timeline import Span, Timeline
from simplan.program.uncollected import uncollected
from simplan.sim.cores import SharedCores
from simplan.spec.layer import CollectiveKind

__all__ = ["CoreUse", "Times", "simulate", "timeline"]

_Process = Generator[Event, object, None]


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Cores that the ranks of each node share (processor sharing), for devices that are CPUs.

    Attributes:
        cores_per_node: Cores of a node.
        node: By operation, the node whose cores it uses.
        demand: By operation, the cores it keeps busy when it runs alone; 0 for none.
        turns: By operation, what it has for itself while it runs, such as the connection of two ranks; None for
            nothing. Empty where no operation has anything.
    """

    cores_per_node: int
    node: Sequence[int]
    demand: Sequence[float]
    turns: Sequence[Hashable | None] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """When every operation of a Program ran, seconds; indices are those of ``Program.ops``."""

    start_s: list[float]
    end_s: list[float]

    @property
    def step_time_s(self) -> float:
        """The end of the last operation."""
        return max(self.end_s, default=0.0)


@uncollected()
def simulate(program: Program, durations_s: Sequence[float], sharing: CoreUse | None = None) -> Times:
    """Runs one step.

    An operation starts when its predecessor on the stream and everything it waits for have ended and, if it is part
    of a meeting, when that is true of all members; they end together.

    Args:
        program: What to run.
        durations_s: Time of every operation alone, in the order of ``program.ops``; members of a meeting have equal
            ones.
        sharing: Cores that operations share, so that they may take longer; None where a duration is a duration.

    Returns:
        Start and end of every operation.
    """
    run = _Run(program, durations_s, sharing)
    for indices in program.streams.values():
        run.env.process(run.stream(indices))
    run.env.run()
    assert not any(run.missing), "deadlock in a checked Program"
    return Times(run.start_s, run.end_s)


class _Completion(Event):
    """The end of an operation: an event that is scheduled once its start is known, as simpy's Timeout is at once."""

    def after(self, delay_s: float) -> None:
        """Happens ``delay_s`` from now."""
        self._ok = True
        self._value = None
        self.env.schedule(self, NORMAL, delay_s)


class _Run:
    """State of one simulation.

    A meeting is run by the first of its members: ``leader`` maps every operation to the one that stands for it, itself
    when it meets nobody. ``missing`` counts what a leader still lacks before it can start: each member's turn on its
    stream and each operation that a member waits for.
    """

    def __init__(self, program: Program, durations_s: Sequence[float], sharing: CoreUse | None) -> None:
        ops = program.ops
        assert len(durations_s) == len(ops)
        self.env = Environment()
        self.durations_s = durations_s
        self.start_s = [0.0] * len(ops)
        self.end_s = [0.0] * len(ops)
        self.leader = list(range(len(ops)))
        self.missing = [0] * len(ops)
        self.followers: list[list[int]] = [[] for _ in ops]
        self.completion: list[_Completion | None] = [None] * len(ops)
        met: dict[Hashable, int] = {}
        for index, op in enumerate(ops):
            leader = index if op.meeting is None else met.setdefault(op.meeting, index)
            self.leader[index] = leader
            self.missing[leader] += 1 + len(op.waits)
            for wait in op.waits:
                self.followers[wait].append(leader)
        self.cores = cores = sharing
        self.demand = self._leader_demand() if cores else []
        self.nodes = {node: SharedCores(self.env, cores.cores_per_node) for node in set(cores.node)} if cores else {}
        self.turns = cores.turns if cores else ()
        self.waiting: dict[Hashable, deque[int]] = {}  # by what is taken, who comes next

    def stream(self, indices: Sequence[int]) -> _Process:
        """Walks the operations of one stream."""
        env, missing, completions, followers = self.env, self.missing, self.completion, self.followers
        start_s, end_s = self.start_s, self.end_s
        for index in indices:
            leader = self.leader[index]
            completion = completions[leader]
            if completion is None:
                completion = completions[leader] = _Completion(env)
            missing[leader] -= 1
            if not missing[leader]:
                self.start(leader)
            yield completion
            start_s[index] = start_s[leader]
            end_s[index] = env.now
            for follower in followers[index]:
                missing[follower] -= 1
                if not missing[follower]:
                    self.start(follower)

    def start(self, leader: int) -> None:
        """Everything is there: the operation, or the meeting, runs from now, or from its turn on."""
        wanted = self.turns[leader] if self.turns else None
        if wanted is None:
            self.run_now(leader)
        elif wanted in self.waiting:
            self.waiting[wanted].append(leader)
        else:
            self.waiting[wanted] = deque()
            self.take_turn(leader, wanted)

    def take_turn(self, leader: int, taken: Hashable) -> None:
        """Runs an operation that has something for itself, and then who waits for that."""
        completion = self.completion[leader]
        assert completion is not None
        assert completion.callbacks is not None

        def ended(event: Event) -> None:
            if self.waiting[taken]:
                self.take_turn(self.waiting[taken].popleft(), taken)
            else:
                del self.waiting[taken]

        completion.callbacks.append(ended)
        self.run_now(leader)

    def run_now(self, leader: int) -> None:
        """The operation, or the meeting, runs from now."""
        self.start_s[leader] = self.env.now
        completion = self.completion[leader]
        assert completion is not None
        duration_s = self.durations_s[leader]
        if self.cores is None or duration_s <= 0.0 or self.demand[leader] <= 0.0:
            completion.after(duration_s)
        else:
            self.nodes[self.cores.node[leader]].run(completion, duration_s, self.demand[leader])

    def _leader_demand(self) -> list[float]:
        """Cores that an operation keeps busy; a meeting's are those of all its members."""
        assert self.cores is not None
        demand = [0.0] * len(self.leader)
        for index, leader in enumerate(self.leader):
            demand[leader] += self.cores.demand[index]
        return demand


def timeline(program: Program, times: Times) -> Timeline:
    """The spans of a simulated step; operations that took no time are left out."""
    spans = []
    for op, start_s, end_s in zip(program.ops, times.start_s, times.end_s, strict=True):
        if end_s <= start_s:
            continue
        num_bytes, peer = 0, None
        message = op.message
        if message is not None:
            num_bytes = message.num_bytes
            if message.kind is CollectiveKind.SEND:
                peer = next(rank for rank in message.ranks if rank != op.rank)
        spans.append(Span(op.rank, op.stream, op.name, str(op.action), op.kind, start_s, end_s, num_bytes, peer))
    return Timeline(tuple(spans), len(program.ranks), times.step_time_s)
