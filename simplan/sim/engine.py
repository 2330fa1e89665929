"""The reference engine: every stream of every rank is a SimPy process that runs its list of operations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy import Environment, Event
from simpy.events import NORMAL

from simplan.program.program import Program, gc_paused
from simplan.program.timeline import Times

if TYPE_CHECKING:
    from simplan.network.running import Segments
    from simplan.network.usage import LinkUse
    from simplan.sim.links import Progress, SharedLinks

_Process = Generator[Event, object, None]


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Cores that the ranks of each node share (processor sharing), for devices that are CPUs.

    Attributes:
        node: Per operation, the node whose cores it uses.
        demand: Per operation, the cores it keeps busy when it runs alone; 0 for none.
        turns: Per operation, a resource that it holds exclusively while it runs, such as the connection of two ranks;
            None for no resource. Empty if no operation has one.
    """

    cores_per_node: int
    node: Sequence[int]
    demand: Sequence[float]
    turns: Sequence[Hashable | None] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedProgram:
    """Step of another job, which is repeated until the simulated step ends.

    Attributes:
        program: Its Program.
        durations_s: ``(num_ops,)`` See ``simulate``.
        usage: ``(num_ops,)`` Usage of each operation, an index into the usages of ``LinkUse``; -1 for an operation that
            crosses no link, or that follows the leader of its meeting.
        offset_s: Seconds for which it has run when the simulated step begins.
    """

    program: Program
    durations_s: Sequence[float] | NDArray[np.float64]
    usage: Sequence[int]
    offset_s: float = 0.0


class Repetitions(NamedTuple):
    """Communications of repeated steps; they follow the constant flows in ``Segments.op``.

    Attributes:
        usage: ``(num_communications,)`` Usage of each communication.
        start_s, end_s: ``(num_communications,)`` Seconds from the start of the simulated step; infinite for the end of
            one that still waits for links when that step ends.
        step_times_s: By job, seconds of each of its steps that lies inside the simulated step.
    """

    usage: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    step_times_s: tuple[tuple[float, ...], ...]

    @classmethod
    def none(cls) -> Repetitions:
        """No other job."""
        return cls(np.zeros(0, np.int64), np.zeros(0), np.zeros(0), ())


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedTimes(Times):
    """Times of the operations of a Program whose communications may share links.

    Attributes:
        segments: Rates of communications over time; None if links are not shared.
        repetitions: Communications of other jobs; None for a step without them.
    """

    segments: Segments | None = None
    repetitions: Repetitions | None = None


@gc_paused()
def simulate(
    program: Program,
    durations_s: Sequence[float] | NDArray[np.float64],
    sharing: CoreUse | None = None,
    links: LinkUse | None = None,
    progress: Progress | None = None,
    others: Sequence[RepeatedProgram] = (),
) -> SimulatedTimes:
    """Simulates one step.

    An operation starts when its predecessor on the stream and all operations that it waits for have ended. The
    operations of a meeting start once this holds for all members, and they end together.

    Args:
        durations_s: Seconds of every operation alone, in the order of ``program.ops``; equal for the members of a
            meeting.
        sharing: Cores that operations share, which may lengthen durations; None for no sharing.
        links: Links that communications share, which may lengthen durations; None for no sharing. A communication that
            keeps cores busy shares these instead.
        progress: Called with the number of ended and of all communications on shared links; None for no calls.
        others: Steps of other jobs on the same links, which need ``links``.

    Returns:
        Start and end of every operation.
    """
    env, shared = Environment(), None
    if links is not None:
        from simplan.sim.links import SharedLinks  # imports numba

        shared = SharedLinks(env, links, progress, max((other.offset_s for other in others), default=0.0))
    usage: Sequence[int] = () if links is None else links.usage.tolist()

    def communicate(completion: _Completion, leader: int, duration_s: float) -> None:
        assert shared is not None, "only operations of links have usages"
        shared.run(completion, leader, usage[leader], duration_s)

    run = _Run(env, program, durations_s, sharing, usage, communicate)
    begin_s, repetitions = 0.0, None
    if others:
        assert links is not None, "other jobs share links"
        assert shared is not None, "other jobs share links"
        begin_s = max(other.offset_s for other in others)
        traffic = _OtherTraffic(env, links, shared, begin_s)
        for number, other in enumerate(others):
            env.process(traffic.repeat(number, other))
        env.run(env.process(_one_step(run, begin_s)))
        repetitions = traffic.repetitions(len(others))
    else:
        run.begin()
        env.run()
    assert not any(run.missing), "deadlock in a checked Program"
    segments = None if shared is None else shared.segments
    if segments is not None and begin_s > 0:
        segments = segments.since(begin_s)
    return SimulatedTimes(np.array(run.start_s) - begin_s, np.array(run.end_s) - begin_s, segments, repetitions)


def _one_step(run: _Run, begin_s: float) -> _Process:
    """Runs one step that begins at ``begin_s``."""
    yield run.env.timeout(begin_s)
    yield run.env.all_of(run.begin())


class _Completion(Event):
    """End of an operation: an event scheduled once its start is known (simpy's Timeout: when it is created)."""

    def after(self, delay_s: float) -> None:
        """Schedules the event ``delay_s`` from now."""
        self._ok = True
        self._value = None
        self.env.schedule(self, NORMAL, delay_s)


class _Run:
    """State of one simulation.

    The first member of a meeting runs the meeting: ``leader`` maps every operation to this member, and an operation
    without a meeting to itself. ``missing`` counts the events that a leader needs before it can start: each member's
    position at the head of its stream, and each operation that a member waits for.

    Args:
        usage: By operation, its usage of links that others use; -1 for none. Empty if links are not shared.
        communicate: Starts an operation with a usage, given its completion, index and seconds.
    """

    def __init__(
        self,
        env: Environment,
        program: Program,
        durations_s: Sequence[float] | NDArray[np.float64],
        sharing: CoreUse | None,
        usage: Sequence[int],
        communicate: Callable[[_Completion, int, float], None],
    ) -> None:
        columns, num_ops = program.columns, len(program)
        assert len(durations_s) == num_ops
        self.env, self.program = env, program
        self.durations_s = np.asarray(durations_s, np.float64).tolist()
        self.usage, self.communicate = usage, communicate
        self.start_s = [0.0] * num_ops
        self.end_s = [0.0] * num_ops
        self.leader = list(range(num_ops))
        self.missing = [0] * num_ops
        self.followers: list[list[int]] = [[] for _ in range(num_ops)]
        self.completion: list[_Completion | None] = [None] * num_ops
        met: dict[int, int] = {}
        waits, first = columns.wait.tolist(), columns.wait_first.tolist()
        for index, meeting in enumerate(columns.meeting.tolist()):
            leader = index if meeting < 0 else met.setdefault(meeting, index)
            self.leader[index] = leader
            self.missing[leader] += 1 + first[index + 1] - first[index]
            for wait in waits[first[index] : first[index + 1]]:
                self.followers[wait].append(leader)
        self.cores = cores = sharing
        self.demand = self._leader_demand() if cores else []
        self.nodes = {node: SharedCores(self.env, cores.cores_per_node) for node in set(cores.node)} if cores else {}
        self.turns = cores.turns if cores else ()
        self.waiting: dict[Hashable, deque[int]] = {}  # by exclusive resource, the operations that wait for it

    def begin(self) -> list[Event]:
        """Begins the step; returns a process for every stream."""
        return [self.env.process(self.stream(indices)) for indices in self.program.streams.values()]

    def stream(self, indices: Sequence[int]) -> _Process:
        """Runs the operations of one stream."""
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
        """Starts a ready operation or meeting, immediately or once its exclusive resource is free."""
        wanted = self.turns[leader] if self.turns else None
        if wanted is None:
            self.run_now(leader)
        elif wanted in self.waiting:
            self.waiting[wanted].append(leader)
        else:
            self.waiting[wanted] = deque()
            self.take_turn(leader, wanted)

    def take_turn(self, leader: int, taken: Hashable) -> None:
        """Runs an operation with its exclusive resource, then the next operation that waits for this resource."""
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
        """Starts the operation or meeting now."""
        self.start_s[leader] = self.env.now
        completion = self.completion[leader]
        assert completion is not None
        duration_s = self.durations_s[leader]
        if self.cores is not None and duration_s > 0.0 and self.demand[leader] > 0.0:
            self.nodes[self.cores.node[leader]].run(completion, duration_s, self.demand[leader])
        elif self.usage and duration_s > 0.0 and self.usage[leader] >= 0:
            self.communicate(completion, leader, duration_s)
        else:
            completion.after(duration_s)

    def _leader_demand(self) -> list[float]:
        """Returns the cores that each operation keeps busy; for a meeting, the sum over its members."""
        assert self.cores is not None
        demand = [0.0] * len(self.leader)
        for index, leader in enumerate(self.leader):
            demand[leader] += self.cores.demand[index]
        return demand


class _OtherTraffic:
    """Steps of other jobs, one after another, and their communications."""

    def __init__(self, env: Environment, use: LinkUse, links: SharedLinks, begin_s: float) -> None:
        self._env, self._use, self._links, self._begin_s = env, use, links, begin_s
        self._can_be_full = (np.diff(use.first) > 0).tolist()
        self._usage: list[int] = []
        self._start_s: list[float] = []
        self._end_s: list[float] = []
        self._step_times_s: list[tuple[int, float]] = []

    def repeat(self, number: int, other: RepeatedProgram) -> _Process:
        """Runs the steps of one job, until the simulation ends."""

        def communicate(completion: _Completion, leader: int, duration_s: float) -> None:
            self._communicate(completion, other.usage[leader], duration_s)

        yield self._env.timeout(self._begin_s - other.offset_s)
        while True:
            since_s = self._env.now
            step = _Run(self._env, other.program, other.durations_s, None, other.usage, communicate)
            yield self._env.all_of(step.begin())
            if since_s >= self._begin_s:
                self._step_times_s.append((number, self._env.now - since_s))

    def _communicate(self, completion: _Completion, usage: int, duration_s: float) -> None:
        """Starts a communication; links that can never be full do not delay it."""
        place, now_s = len(self._usage), self._env.now
        self._usage.append(usage)
        self._start_s.append(now_s)
        self._end_s.append(np.inf)
        if self._can_be_full[usage]:
            assert completion.callbacks is not None
            completion.callbacks.append(lambda _: self._end_s.__setitem__(place, self._env.now))
            self._links.run(completion, self._use.num_entries + place, usage, duration_s)
        else:
            self._end_s[place] = now_s + duration_s
            completion.after(duration_s)

    def repetitions(self, num_jobs: int) -> Repetitions:
        """Communications so far."""
        by_job = [tuple(time_s for job, time_s in self._step_times_s if job == number) for number in range(num_jobs)]
        return Repetitions(
            np.array(self._usage, np.int64),
            np.array(self._start_s) - self._begin_s,
            np.array(self._end_s) - self._begin_s,
            tuple(by_job),
        )


_DONE_S = 1e-15


class SharedCores:
    """Cores that are shared evenly among running work, as by an operating system's scheduler.

    While running work demands at most ``num_cores`` cores, all of it runs at full speed. Beyond that, all work slows
    down equally, by cores / demand.
    """

    def __init__(self, env: Environment, num_cores: int) -> None:
        self._env = env
        self._num_cores = num_cores
        self._remaining_s: dict[Event, float] = {}
        self._demand: dict[Event, float] = {}
        self._updated_at_s = 0.0
        self._version = 0

    def run(self, done: Event, work_s: float, demand: float) -> None:
        """Runs work; ``done`` is triggered at its end.

        Args:
            done: An event not yet triggered.
            work_s: Seconds of the work alone.
            demand: Cores that the work keeps busy.
        """
        self._advance()
        self._remaining_s[done] = work_s
        self._demand[done] = demand
        self._schedule()

    @property
    def _speed(self) -> float:
        demand = sum(self._demand.values())
        return min(1.0, self._num_cores / demand) if demand > 0 else 1.0

    def _advance(self) -> None:
        """Subtracts the work done since the last change."""
        elapsed_s = (self._env.now - self._updated_at_s) * self._speed
        self._updated_at_s = self._env.now
        for event in self._remaining_s:
            self._remaining_s[event] -= elapsed_s

    def _schedule(self) -> None:
        """Sets the alarm for the next completion; older alarms become void."""
        self._version += 1
        if not self._remaining_s:
            return
        version = self._version
        wait_s = max(0.0, min(self._remaining_s.values())) / self._speed
        alarm = self._env.timeout(wait_s)
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: self._complete() if version == self._version else None)

    def _complete(self) -> None:
        self._advance()
        nearest_s = min(self._remaining_s.values())
        for event in [e for e, left in self._remaining_s.items() if left <= nearest_s + _DONE_S]:
            del self._remaining_s[event], self._demand[event]
            event.succeed()
        self._schedule()
