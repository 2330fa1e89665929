"""A whole run as SimPy processes: the definition of what ``setup`` says, and the engine of runs with a timeline.

One process trains; others are the failures of each cause, the return of each lost node, windows of maintenance and the
provider of spot nodes. They set a node aside or post a ``_Stop`` and ring the bell of the process that trains, which
then goes through detection, diagnosis, the change of nodes and the restart. ``_Clock`` keeps the order of what happens
at one instant.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum, auto
from heapq import heappush
from math import ceil, floor, inf
from typing import Any, TypeAlias

from simpy import Environment, Event
from simpy.events import NORMAL, EventPriority

from simplan.goodput.engines.checkpoints import REPEATED, ROUNDING, Checkpoints, Progress
from simplan.goodput.engines.draws import NOTICE, RETURN, WHEN, Draws
from simplan.goodput.setup import WATERFALL, CauseSetup, OneRun, RunSetup, Size, Stretch

_Process: TypeAlias = Generator[Event, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """Something that stops the job.

    Attributes:
        source: Column of ``Runs.interruptions``; None for maintenance and growth, which are no interruptions.
        num_nodes: Nodes that are lost.
        planned: True if a checkpoint is written first.
        detection_s: Seconds until it is noticed.
        corrupt_since_s: Age from which on checkpoints are corrupt.
        is_window: True for a window of maintenance.
    """

    name: str
    source: int | None = None
    num_nodes: int = 0
    planned: bool = True
    detection_s: float = 0.0
    corrupt_since_s: float = inf
    is_window: bool = False


_Waiting: TypeAlias = Generator[Event, Any, _Stop | None]
_GROWTH = _Stop(name="growth")
_WINDOW = _Stop(name="maintenance", is_window=True)


class EndlessRunError(Exception):
    """A run that has not ended after ``limit_s`` or ``max_stops``."""


def run(setup: RunSetup, draws: Draws, *, limit_s: float = inf, max_stops: int = 2**62) -> OneRun:
    """One run.

    Raises:
        EndlessRunError: It has not ended after ``limit_s`` seconds or ``max_stops`` stops.
    """
    job = _Job(setup, draws, limit_s, max_stops)
    job.env.run(until=job.env.process(job.train()))
    return job.result()


class _Order(IntEnum):
    """Order of what happens at one instant, as priorities of SimPy; events that others trigger come between."""

    FAILURE = NORMAL + 1
    FOUND = auto()
    RETURN = auto()
    LEAVE = auto()
    PREEMPTION = auto()
    WINDOW = auto()
    GROUP = auto()
    JOB = auto()


class _Clock(Environment):
    """Environment in which times that are less than ``ROUNDING`` apart are one instant."""

    def __init__(self) -> None:
        super().__init__()
        self._instants: list[float] = []  # times of events to come, in order

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0.0) -> None:
        """Let an event happen after ``delay`` seconds, at its place in the order of that instant."""
        now_s, instants = self.now, self._instants
        del instants[: bisect_right(instants, now_s)]
        time_s = now_s + delay if delay > ROUNDING else now_s
        if time_s > now_s:
            index = bisect_left(instants, time_s - ROUNDING)
            if index < len(instants) and instants[index] <= time_s + ROUNDING:
                time_s = instants[index]
            else:
                instants.insert(index, time_s)
        heappush(self._queue, (time_s, priority, next(self._eid), event))


class _After(Event):
    """Something that happens after so many seconds; a timeout with a place in the order of its instant."""

    def __init__(self, env: Environment, order: _Order, seconds: float) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, EventPriority(order), seconds)


class _Job:
    """State of a run and its processes."""

    def __init__(self, setup: RunSetup, draws: Draws, limit_s: float, max_stops: int) -> None:
        self.env = _Clock()
        self._setup, self._draws, self._limit_s, self._max_stops = setup, draws, limit_s, max_stops
        self._names = [*(cause.name for cause in setup.causes), "silent corruption", "slow device", "preemption"]
        self._corruption, self._slow, self._preemption = range(len(setup.causes), len(self._names))

        self._progress = Progress()
        self._checkpoints = Checkpoints(setup)
        self._wasted_s = dict.fromkeys([part for part in WATERFALL if part not in REPEATED], 0.0)
        self._interruptions = [0] * len(self._names)
        self._num_stops = 0
        self._stretches: list[Stretch] = []
        self._cause = ""  # of the stop that begins the next stretch

        # Nodes of the job are in use, starting as a group, or idle; lost ones are the job's until they are released.
        self._held = self._in_use = setup.num_nodes
        self._spares = setup.spares
        self._starting: list[float] = []  # when each starting group is ready
        self._on_demand = 0
        self._debt = 0  # nodes that a trace takes once they are repaired
        self._lost: list[tuple[int, int]] = []  # (source, nodes)
        self._node_s = [0.0] * 4
        self._counted_until_s = 0.0

        self._aging = False
        self._age_s, self._age_at_s = 0.0, 0.0
        self._change = self.env.event()
        self._bell = self.env.event()
        self._stops: deque[_Stop] = deque()
        self._is_stopping = self._is_restarting = False
        self._num_slow = 0
        self._cut = False  # what holds for the next step has changed
        self._window_end_s = -inf
        self._start_processes()

    def _start_processes(self) -> None:
        setup = self._setup
        for source, cause in enumerate(setup.causes):
            self.env.process(self._failures(source, cause))
        per_device = [
            (self._corruption, setup.corruption_mtbf_s, self._corrupt),
            (self._slow, setup.slow_mtbf_s, self._slow_down),
        ]
        for source, mtbf_s, happen in per_device:
            if mtbf_s < inf:
                cause = CauseSetup(name="", units_per_node=setup.devices_per_node, mtbf_s=mtbf_s)
                self.env.process(self._failures(source, cause, happen))
        if setup.maintenance_every_s < inf:
            self.env.process(self._windows())
        if setup.preemption_mtbf_s < inf:
            self.env.process(self._preemptions())
        if setup.trace_s:
            self.env.process(self._trace(*self._start_of_trace()))

    def result(self) -> OneRun:
        """Times of the run that has ended."""
        self._count_nodes()
        spent_s = self._progress.spent_s | self._wasted_s
        return OneRun(
            time_s=self.env.now,
            waterfall_s={part: spent_s[part] for part in WATERFALL},
            interruptions=tuple(self._interruptions),
            node_s=tuple(self._node_s),
            num_checkpoints=self._checkpoints.num_written,
            stretches=tuple(self._stretches),
        )

    # The job: steps, pauses, stops.

    def train(self) -> _Process:
        """The run from its first step to its last."""
        if self._setup.trace_s:
            self._is_restarting = True
            yield from self._gather()
            self._is_restarting = False
        while self._progress.due or self._progress.position < self._setup.num_steps - ROUNDING:
            stop = yield from self._go_on()
            while stop:
                stop = yield from self._recover(stop)
        self._set_aging(False)

    def _go_on(self) -> _Waiting:
        """Continue with a group that joins, a pause, or steps until the next pause."""
        if self._setup.policy == "continue":
            if self._in_use < self._setup.sizes[-1].num_nodes:
                yield from self._wait_for_group()
            if self._starting and self._starting[0] <= self.env.now + ROUNDING:
                return (yield from self._join())
        if self._progress.due:
            return (yield from self._pause())
        return (yield from self._steps())

    def _steps(self) -> _Waiting:
        size = self._size()
        step_s = size.step_s * (self._setup.slow_factor if self._num_slow else 1.0)
        num = self._progress.steps_until_pause(self._setup, size.advance)
        self._cut, start_s = False, self.env.now
        stop = yield from self._spend(num * step_s, step_s)
        elapsed_s = self.env.now - start_s
        if stop:
            num = min(num, floor(elapsed_s / step_s + ROUNDING))
        elif self._cut:
            num = min(num, round(elapsed_s / step_s))
        if num:
            self._progress.take_steps(self._setup, num, size, step_s)
        kind = "slow_device" if step_s > size.step_s else "fewer_nodes" if size != self._setup.sizes[0] else "compute"
        self._record(kind, start_s, start_s + num * step_s if stop else self.env.now)
        if stop:
            self._lose(elapsed_s - num * step_s)
        return stop

    def _pause(self) -> _Waiting:
        setup, progress, start_s = self._setup, self._progress, self.env.now
        pause, *rest = progress.due
        seconds = {
            "evaluation": setup.evaluation_s,
            "memory": setup.memory_blocking_s,
            "storage": self._checkpoints.wait_s(start_s) + setup.blocking_s,
        }[pause]
        stop = yield from self._spend(seconds)
        if stop:
            self._lose(self.env.now - start_s)
            return stop
        part = "evaluation" if pause == "evaluation" else "checkpoint"
        progress.spent_s[part] += self.env.now - start_s
        progress.due = tuple(rest)
        if pause == "memory":
            self._checkpoints.save_in_memory(progress.copy(self._age()))
        elif pause == "storage":
            self._checkpoints.save(progress.copy(self._age()), self.env.now, setup.write_s)
        self._record(part, start_s)
        return None

    def _recover(self, stop: _Stop) -> _Waiting:
        """From a stop until the job trains again, or until the next stop."""
        self._note(stop)
        goes_on = self._can_go_on_without(stop)
        if stop.planned:
            if self._setup.checkpoint_every and not self._is_restarting:
                another = yield from self._write_before_stop()
                if another:
                    return another
        else:
            self._checkpoints.lose_in_flight(self.env.now)
        if not goes_on:
            self._is_restarting = True
            load_s = self._go_back(stop)
        if not stop.planned:
            yield from self._idle(stop.detection_s, "detection")
        if goes_on:
            return (yield from self._leave(0.0 if stop.planned else self._setup.diagnosis_s))
        if not stop.planned:
            yield from self._idle(self._setup.diagnosis_s, "diagnosis")
        return (yield from self._restart(load_s))

    def _note(self, stop: _Stop) -> None:
        self._cause = stop.name
        self._num_stops += 1
        if self._num_stops > self._max_stops or self.env.now > self._limit_s:
            raise EndlessRunError
        if stop.source is not None:
            self._interruptions[stop.source] += 1
            self._lost.append((stop.source, stop.num_nodes))
        if stop.num_nodes > 1 or stop.is_window or stop.corrupt_since_s < inf:
            self._checkpoints.lose_memory()

    def _write_before_stop(self) -> _Waiting:
        """A checkpoint, its whole writing time included."""
        setup, progress, start_s = self._setup, self._progress, self.env.now
        self._is_stopping = True
        stop = yield from self._spend(self._checkpoints.wait_s(start_s) + setup.blocking_s + setup.write_s)
        self._is_stopping = False
        if stop:
            self._lose(self.env.now - start_s)
            return stop
        self._checkpoints.wait_s(self.env.now)
        progress.spent_s["checkpoint"] += self.env.now - start_s
        progress.due = progress.due if "evaluation" in progress.due else ()
        self._checkpoints.save(progress.copy(self._age()), self.env.now)
        self._record("checkpoint", start_s)
        return None

    def _go_back(self, stop: _Stop) -> float:
        """Take the progress of the last checkpoint; returns the seconds to load it."""
        self._checkpoints.lose_since(stop.corrupt_since_s)
        spent_s = sum(self._progress.spent_s.values())
        self._progress, load_s = self._checkpoints.last()
        self._wasted_s["lost_work"] += spent_s - sum(self._progress.spent_s.values())
        return load_s

    def _restart(self, load_s: float) -> _Waiting:
        """Wait for nodes and for the end of maintenance, then start all ranks."""
        is_hot = self._release_lost()
        yield from self._gather()
        while self._in_window():
            yield from self._idle(self._window_end_s - self.env.now, "maintenance")
            yield from self._gather()
        restart_s = self._setup.takeover_s if is_hot and self._setup.takeover_s < inf else self._setup.restart_s
        start_s = self.env.now
        stop = yield from self._spend(restart_s + load_s)
        self._wasted_s["restart"] += self.env.now - start_s
        self._record("restart", start_s)
        self._is_restarting = stop is not None
        if self._setup.policy == "continue":
            self._form_groups()
        return stop

    def _lose(self, seconds: float) -> None:
        """Count a step or pause in progress as lost work."""
        self._wasted_s["lost_work"] += seconds
        self._record("lost_work", self.env.now - seconds)

    def _next_stop(self) -> _Stop | None:
        if self._stops:
            return self._stops.popleft()
        if self._is_stopping:
            return None
        if self._in_window():
            return _WINDOW
        return _GROWTH if self._can_grow() else None

    def _spend(self, seconds: float, step_s: float = 0.0) -> _Waiting:
        """Time in which units grow older, until a stop, or with ``step_s`` until the end of a step that is cut."""
        start_s = self.env.now
        end_s = start_s + seconds
        self._set_aging(True)
        while end_s - self.env.now > ROUNDING:
            stop = self._next_stop()
            if stop:
                return stop
            if self._cut and step_s:
                end_s = min(end_s, start_s + ceil((self.env.now - start_s) / step_s - ROUNDING) * step_s)
                if end_s - self.env.now <= ROUNDING:
                    break
            yield from self._wait(end_s - self.env.now)
        return None

    def _wait(self, seconds: float = inf) -> _Process:
        """Wait so long, or until the bell rings; the job goes on after all that happens at that instant."""
        self._bell = self.env.event()
        yield self._after(_Order.JOB, seconds) | self._bell
        yield self._after(_Order.JOB, 0.0)

    def _after(self, order: _Order, seconds: float) -> Event:
        """Event after so many seconds, or never after infinitely many."""
        return _After(self.env, order, seconds) if seconds < inf else self.env.event()

    def _idle(self, seconds: float, part: str) -> _Process:
        """Time in which units do not grow older."""
        self._set_aging(False)
        start_s = self.env.now
        if seconds > ROUNDING:
            yield self._after(_Order.JOB, seconds)
        self._wasted_s[part] += self.env.now - start_s
        self._record(part, start_s)

    def _record(self, kind: str, start_s: float, end_s: float | None = None) -> None:
        end_s = self.env.now if end_s is None else end_s
        if end_s > start_s:
            num_nodes, step = self._in_use if self._aging else self._held, self._progress.position
            cause, self._cause = self._cause, ""
            self._stretches.append(
                Stretch(start_s=start_s, end_s=end_s, kind=kind, num_nodes=num_nodes, step=step, cause=cause)
            )

    def _ring(self) -> None:
        if not self._bell.triggered:
            self._bell.succeed()

    # Nodes.

    def _size(self) -> Size:
        """Largest size that the nodes in use allow."""
        return next(size for size in self._setup.sizes if size.num_nodes <= self._in_use)

    def _fitting(self, num_nodes: int) -> int:
        """Nodes in use with so many nodes in all; 0 if they are too few."""
        sizes, group_nodes = self._setup.sizes, self._setup.group_nodes
        if self._setup.policy == "continue":
            num_nodes = min(num_nodes // group_nodes * group_nodes, sizes[0].num_nodes)
            return num_nodes if num_nodes >= sizes[-1].num_nodes else 0
        return next((size.num_nodes for size in sizes if size.num_nodes <= num_nodes), 0)

    def _can_grow(self) -> bool:
        return self._setup.policy == "shrink" and self._fitting(self._held + self._spares) > self._in_use

    def _gather(self) -> _Process:
        """Wait for as many nodes as the job needs, and take spares."""
        self._set_aging(False)
        start_s = self.env.now
        while not self._fitting(self._held + self._spares):
            yield from self._wait()
            if self.env.now > self._limit_s:
                raise EndlessRunError
        self._wasted_s["waiting"] += self.env.now - start_s
        self._record("waiting", start_s)
        self._count_nodes()
        num_nodes = self._fitting(self._held + self._spares)
        taken = max(0, num_nodes - self._held)
        self._held, self._in_use, self._spares = self._held + taken, num_nodes, self._spares - taken
        self._starting.clear()
        self._changed()

    def _release_lost(self, delay_s: float = 0.0) -> bool:
        """Send lost nodes away until they are spares again; returns True if spares that are there replace them all."""
        lost, self._lost = self._lost, []
        returns_s = [seconds for source, num in lost for seconds in self._take_away(source, num)]
        is_hot = bool(returns_s) and self._held + self._spares >= self._setup.num_nodes
        for seconds in returns_s:
            self._send_back(seconds + delay_s)
        return is_hot

    def _take_away(self, source: int, num_nodes: int) -> list[float]:
        """Take nodes from the job; returns the seconds until each is a spare, infinity if a trace says when."""
        setup = self._setup
        self._count_nodes()
        num_nodes = min(num_nodes, self._held)
        self._held -= num_nodes
        self._changed()
        if source == self._preemption:
            mean_s, is_exponential = inf if setup.trace_s else setup.spot_wait_s, True
        else:
            mean_s = setup.causes[source].repair_s if source < len(setup.causes) else setup.repair_s
            is_exponential = setup.repair_is_exponential
        return [mean_s * (self._draws.exponential(source, RETURN) if is_exponential else 1.0) for _ in range(num_nodes)]

    def _send_back(self, seconds: float) -> None:
        if seconds <= 0:
            self._add_spares(1)
        elif seconds < inf:
            self.env.process(self._returning(seconds))

    def _returning(self, seconds: float) -> _Process:
        yield self._after(_Order.RETURN, seconds)
        self._add_spares(1)

    def _add_spares(self, num: int) -> None:
        self._count_nodes()
        paid = min(num, self._debt)
        self._debt -= paid
        self._spares += num - paid
        if self._setup.policy == "continue":
            self._form_groups()
        self._ring()

    def _count_nodes(self) -> None:
        """Add the node-seconds since the last change of nodes."""
        seconds, self._counted_until_s = self.env.now - self._counted_until_s, self.env.now
        in_use = self._in_use if self._aging else 0
        spot = max(0, in_use - self._on_demand) if self._setup.is_spot else 0
        for column, num in enumerate((in_use - spot, spot, self._held - in_use, self._spares)):
            self._node_s[column] += num * seconds

    def _changed(self) -> None:
        """Tell the sources of stops that their rates have changed."""
        self._change, change = self.env.event(), self._change
        change.succeed()

    # Replica groups of the policy ``continue``.

    def _can_go_on_without(self, stop: _Stop) -> bool:
        """True if groups are left that lose no node, and the stop is not for all."""
        if self._setup.policy != "continue" or self._is_restarting:
            return False
        is_for_all = stop.is_window or stop.corrupt_since_s < inf
        return not is_for_all and self._in_use > self._nodes_of_lost_groups()

    def _nodes_of_lost_groups(self) -> int:
        """Nodes of the groups that leave; with a process that fails its group leaves."""
        group_nodes = self._setup.group_nodes
        return sum(max(1, ceil(num / group_nodes)) * group_nodes for _, num in self._lost)

    def _leave(self, diagnosis_s: float) -> _Waiting:
        """The groups of lost nodes leave, and the others go on."""
        start_s = self.env.now
        self._count_nodes()
        self._in_use -= self._nodes_of_lost_groups()
        self._release_lost(diagnosis_s)
        self._form_groups()
        start_s = self.env.now
        stop = yield from self._spend(self._setup.reconfigure_s)
        self._wasted_s["membership"] += self.env.now - start_s
        self._record("membership", start_s)
        return stop

    def _form_groups(self) -> None:
        """Let complete groups start, with the help of spares."""
        if self._is_restarting:
            return
        setup = self._setup
        self._count_nodes()
        while True:
            placed = self._in_use + len(self._starting) * setup.group_nodes
            taken = max(0, setup.group_nodes - (self._held - placed))
            if placed >= setup.num_nodes or taken > self._spares:
                return
            self._held, self._spares = self._held + taken, self._spares - taken
            self._changed()
            self._starting.append(self.env.now + setup.restart_s)
            self.env.process(self._group_is_ready())

    def _group_is_ready(self) -> _Process:
        yield self._after(_Order.GROUP, self._setup.restart_s)
        self._cut = True
        self._ring()

    def _wait_for_group(self) -> _Process:
        """Below the smallest size: wait until groups that start are ready."""
        start_s = self.env.now
        self._set_aging(False)
        missing = (self._setup.sizes[-1].num_nodes - self._in_use) // self._setup.group_nodes
        while len(self._starting) < missing or self._starting[missing - 1] > self.env.now + ROUNDING:
            yield from self._wait()
            if self.env.now > self._limit_s:
                raise EndlessRunError
        self._wasted_s["waiting"] += self.env.now - start_s
        self._record("waiting", start_s)

    def _join(self) -> _Waiting:
        """All groups that are ready join."""
        start_s = self.env.now
        ready = [ready_s for ready_s in self._starting if ready_s <= start_s + ROUNDING]
        stop = yield from self._spend(self._setup.join_s)
        self._wasted_s["membership"] += self.env.now - start_s
        self._record("membership", start_s)
        if not stop:
            self._count_nodes()
            self._in_use += len(ready) * self._setup.group_nodes
            del self._starting[: len(ready)]
            self._changed()
        return stop

    # Sources of stops.

    def _age(self) -> float:
        return self._age_s + (self.env.now - self._age_at_s if self._aging else 0.0)

    def _set_aging(self, aging: bool) -> None:
        if aging != self._aging:
            self._count_nodes()
            self._age_s, self._age_at_s, self._aging = self._age(), self.env.now, aging
            self._changed()

    def _failures(self, source: int, cause: CauseSetup, happen: Any = None) -> _Process:
        """Events of one cause, a power-law process in the age of the units."""

        def expected(age_s: float) -> float:
            return float(((age_s + cause.age_s) / cause.mtbf_s) ** cause.shape)

        while True:
            left = self._draws.exponential(source, WHEN)
            while True:
                age_s, units = self._age(), self._in_use * cause.units_per_node if cause.units_per_node else 1
                wait_s = inf
                if self._aging and units:
                    if cause.shape == 1:
                        wait_s = left * cause.mtbf_s / units
                    else:
                        ended = cause.mtbf_s * (expected(age_s) + left / units) ** (1 / cause.shape)
                        wait_s = max(0.0, ended - cause.age_s - age_s)
                timer = self._after(_Order.FAILURE, wait_s)
                yield timer | self._change
                if timer.processed:
                    break
                if cause.shape == 1:
                    left -= units * (self._age() - age_s) / cause.mtbf_s
                else:
                    left -= units * (expected(self._age()) - expected(age_s))
                left = max(left, 0.0)
            if happen:
                happen()
            else:
                self._fail(source, cause)

    def _fail(self, source: int, cause: CauseSetup) -> None:
        noticed = self._draws.uniform(source, NOTICE)
        if noticed < cause.at_once:
            detection_s = 0.0
        elif noticed < cause.at_once + cause.timeout:
            detection_s = self._setup.timeout_s
        else:
            detection_s = self._setup.detection_s
        self._post(
            _Stop(
                name=cause.name,
                source=source,
                num_nodes=cause.num_nodes,
                planned=cause.planned,
                detection_s=detection_s,
            )
        )

    def _post(self, stop: _Stop) -> None:
        self._stops.append(stop)
        self._ring()

    def _corrupt(self) -> None:
        name = self._names[self._corruption]
        stop = _Stop(name=name, source=self._corruption, num_nodes=1, planned=False, corrupt_since_s=self._age())
        self.env.process(self._found(self._corruption, self._setup.corruption_found_s, stop))

    def _slow_down(self) -> None:
        self._num_slow += 1
        self._cut = True
        self._ring()
        stop = _Stop(name=self._names[self._slow], source=self._slow, num_nodes=1)
        self.env.process(self._found(self._slow, self._setup.slow_found_s, stop))

    def _found(self, source: int, mean_s: float, stop: _Stop) -> _Process:
        """A fault that is found after an exponential time in age."""
        left_s = mean_s * self._draws.exponential(source, NOTICE)
        while True:
            age_s = self._age()
            timer = self._after(_Order.FOUND, left_s if self._aging else inf)
            yield timer | self._change
            if timer.processed:
                break
            left_s = max(0.0, left_s - (self._age() - age_s))
        if source == self._slow:
            self._num_slow -= 1
        self._post(stop)

    def _in_window(self) -> bool:
        return self._window_end_s - self.env.now > ROUNDING

    def _windows(self) -> _Process:
        """Windows of maintenance; the job stops early enough for its checkpoint."""
        setup = self._setup
        early_s = setup.blocking_s + setup.write_s if setup.checkpoint_every else 0.0
        yield self._after(_Order.WINDOW, max(0.0, setup.maintenance_every_s - early_s))
        while True:
            self._window_end_s = self.env.now + early_s + setup.maintenance_s
            self._ring()
            yield self._after(_Order.WINDOW, setup.maintenance_every_s)

    def _preemptions(self) -> _Process:
        """Preemptions of spot nodes of the job, a Poisson process of each."""
        mtbf_s = self._setup.preemption_mtbf_s
        while True:
            left = self._draws.exponential(self._preemption, WHEN)
            while True:
                num_nodes, since_s = self._held - self._on_demand, self.env.now
                timer = self._after(_Order.PREEMPTION, left * mtbf_s / num_nodes if num_nodes > 0 else inf)
                yield timer | self._change
                if timer.processed:
                    break
                left = max(0.0, left - num_nodes * (self.env.now - since_s) / mtbf_s)
            self._preempt(1)

    def _preempt(self, num_nodes: int) -> None:
        """Take spot nodes away from the job, or with nodes on demand in their place."""
        setup = self._setup
        if setup.on_demand:
            self._replace_on_demand(num_nodes)
        if num_nodes > 1:
            self._checkpoints.lose_memory()
        if self._aging or (setup.policy == "continue" and not self._is_restarting):
            write_s = setup.blocking_s + setup.write_s
            self._post(
                _Stop(
                    name=self._names[self._preemption],
                    source=self._preemption,
                    num_nodes=0 if setup.on_demand else num_nodes,
                    planned=bool(setup.checkpoint_every) and 0 < write_s <= setup.notice_s,
                    detection_s=setup.detection_s,
                )
            )
        elif not setup.on_demand:
            for seconds in self._take_away(self._preemption, num_nodes):
                self._send_back(seconds)

    def _replace_on_demand(self, change: int) -> None:
        """Put nodes on demand in the place of spot nodes, or with a negative change the other way round."""
        self._count_nodes()
        self._on_demand += change
        self._changed()
        if change > 0 and not self._setup.trace_s:
            for _ in range(change):
                self.env.process(self._leave_on_demand())

    def _leave_on_demand(self) -> _Process:
        yield self._after(_Order.LEAVE, self._setup.spot_wait_s * self._draws.exponential(self._preemption, RETURN))
        self._replace_on_demand(-1)

    def _start_of_trace(self) -> tuple[int, float]:
        """Begin at a random point of the trace; returns its row and the seconds until the next one."""
        setup = self._setup
        start_s = setup.trace_s[-1] * self._draws.uniform(self._preemption, WHEN)
        row = bisect_right(setup.trace_s, start_s) - 1
        offered = self._offered(row)
        self._held = self._in_use = 0
        self._spares = offered
        if setup.on_demand and offered < setup.num_nodes:
            self._held, self._spares, self._on_demand = setup.num_nodes, 0, setup.num_nodes - offered
        return row, setup.trace_s[row + 1] - start_s

    def _offered(self, row: int) -> int:
        """Nodes that the job takes of those that a row of the trace offers."""
        return min(self._setup.trace_nodes[row], self._setup.num_nodes + self._setup.spares)

    def _trace(self, row: int, wait_s: float) -> _Process:
        """Spot nodes come and go as a trace says, again and again."""
        times_s = self._setup.trace_s
        while True:
            yield self._after(_Order.PREEMPTION, wait_s)
            if self.env.now > self._limit_s:
                raise EndlessRunError
            before, row = row, (row + 1) % (len(times_s) - 1)
            wait_s = times_s[row + 1] - times_s[row]
            change = self._offered(row) - self._offered(before)
            if change > 0:
                back = min(change, self._on_demand)
                self._replace_on_demand(-back)
                self._add_spares(change - back)
            elif change < 0:
                self._withdraw(-change)

    def _withdraw(self, num_nodes: int) -> None:
        """Take nodes away, spares first, then nodes of the job, then nodes in repair."""
        self._count_nodes()
        spares = min(num_nodes, self._spares)
        self._spares -= spares
        preempted = min(num_nodes - spares, self._held - self._on_demand - sum(num for _, num in self._lost))
        if preempted > 0:
            self._preempt(preempted)
        self._debt += num_nodes - spares - max(preempted, 0)
