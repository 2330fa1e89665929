"""Whole runs in machine code: the twin of ``reference``, equal to it run by run. Importing this module imports numba.

Functions have the names of their twins. Time moves to the next of the things that will happen (``soonest_s``), which
are few; steps and pauses that end before it follow each other in a short loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, floor, inf, log1p
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from simplan.goodput.engines import philox
from simplan.goodput.engines.checkpoints import REPEATED, ROUNDING
from simplan.goodput.engines.draws import NOTICE, NUM_PURPOSES, RETURN, WHEN
from simplan.goodput.setup import WATERFALL, CauseSetup, Runs, RunSetup
from simplan.jit import jit, jit_inner

_POLICIES = ("restart", "shrink", "continue")
_SHRINK, _CONTINUE = 1, 2

# A progress is eight numbers: seconds by part of ``REPEATED``, then three more.
_COMPUTE, _EVALUATION, _CHECKPOINT, _SLOW_DEVICE, _FEWER_NODES, _POSITION, _DUE, _COMPLETE_AT = range(8)
_PROGRESS = 8
_EVALUATION_DUE, _MEMORY_DUE, _STORAGE_DUE = 1, 2, 4  # bits of _DUE

_WASTED = tuple(part for part in WATERFALL if part not in REPEATED)
_LOST_WORK, _DETECTION, _DIAGNOSIS, _WAITING, _RESTART, _MEMBERSHIP, _MAINTENANCE = range(len(_WASTED))
_PARTS = [(*REPEATED, *_WASTED).index(part) for part in WATERFALL]

_WINDOW, _GROWTH = -1, -2  # stops that are no interruptions
_CORRUPTION, _SLOW = 0, 1  # what is found, numbered after the sources

_DTYPES: dict[Any, type] = {int: np.int64, float: np.float64, bool: np.bool_}


class _State:
    """Numbers of a run that change, a record; ``reference._Job`` has most under the same names.

    Attributes:
        seed, number: Key of the random numbers.
        limit_s, max_stops: Time and stops after which the run is endless.
        policy: Index in ``_POLICIES``.
        not_aged_s: Seconds in which units did not grow older: their age is ``now_s - not_aged_s``.
        soonest_s: Time of the next thing that happens.
        next_return_s, next_leave_s, next_ready_s: Time at which the next lost node returns, node on demand leaves, and
            group is ready.
        next_age_s, next_source: Age and source of the next event that comes with age.
        full_step_s, size_step_s, advance: Step of the whole job; step and advance of the size in use.
        larger_nodes: Nodes of the next larger size, for ``shrink``.
        is_due: True if a stop has been posted.
        source, num_nodes, is_planned, detection_s, corrupt_since_s: The last stop.
        waiting_preemptions: Preemptions that stop the job as soon as it goes on.
        preemption_left, preemption_nodes, preemption_since_s: Expected preemptions until the next one, left at a time
            since which so many nodes could be preempted.
        in_flight_at_s: Time at which the checkpoint that is being written counts; infinity for none.
        oldest: Index of the oldest kept checkpoint.
    """

    seed: int
    number: int
    limit_s: float
    max_stops: int
    policy: int
    num_sources: int
    now_s: float
    not_aged_s: float
    soonest_s: float
    next_return_s: float
    next_leave_s: float
    next_ready_s: float
    next_age_s: float
    next_source: int
    aging: bool
    held: int
    in_use: int
    full_step_s: float
    size_step_s: float
    advance: float
    larger_nodes: int
    spares: int
    on_demand: int
    num_slow: int
    is_due: bool
    source: int
    num_nodes: int
    is_planned: bool
    detection_s: float
    corrupt_since_s: float
    waiting_preemptions: int
    preemption_left: float
    preemption_nodes: int
    preemption_since_s: float
    preemption_at_s: float
    is_stopping: bool
    is_restarting: bool
    cut: bool
    window_at_s: float
    window_end_s: float
    in_flight_at_s: float
    oldest: int
    num_written: int
    num_stops: int
    is_endless: bool
    # arrays in the record
    progress: NDArray[np.float64]
    stored: NDArray[np.float64]  # last checkpoint in storage
    memory: NDArray[np.float64]
    in_flight: NDArray[np.float64]
    wasted_s: NDArray[np.float64]
    node_s: NDArray[np.float64]


_ARRAYS = {
    "progress": _PROGRESS,
    "stored": _PROGRESS,
    "memory": _PROGRESS,
    "in_flight": _PROGRESS,
    "wasted_s": len(_WASTED),
    "node_s": 4,
}


class _Source(CauseSetup):
    """A source of stops, a record: the numbers of its cause, and these."""

    source: int
    next_age_s: float
    num_interruptions: int
    num_drawn: NDArray[np.int64]
    blocks: NDArray[np.uint64]


_SOURCE_STATE: list[Any] = [
    ("source", np.int64),
    ("next_age_s", np.float64),
    ("num_interruptions", np.int64),
    ("num_drawn", np.int64, NUM_PURPOSES),
    ("blocks", np.uint64, (NUM_PURPOSES, philox.WORDS)),
]


class _Job(NamedTuple):
    """A run. Numba counts references to its arrays and lists; functions of the inner loop get the two records alone.

    Attributes:
        setup: Numbers of the setup, a record.
        sizes, sources: Its sizes, and its causes with corruption, slow devices and preemptions, one record for each;
            those of sources have the age of the next event and the random numbers drawn.
        history: Progress of the checkpoints in storage, oldest first; empty if nothing can corrupt them.
        slow: Heap of the ages at which slow devices are found.
        corrupt: Heap of (age at which a corruption is found, age since which it is there).
        returns, leaves: Heaps of the times at which lost nodes return and nodes on demand leave.
        starting: Times at which groups are ready, in order.
        lost: (source, nodes) that have been lost and not yet released.
    """

    setup: RunSetup
    state: _State
    sizes: NDArray[Any]
    sources: NDArray[Any]
    history: list[tuple[float, ...]]
    slow: list[float]
    corrupt: list[tuple[float, float]]
    returns: list[float]
    leaves: list[float]
    starting: list[float]
    lost: list[tuple[int, int]]


def why_not_compiled(setup: RunSetup) -> str | None:
    """Returns what a setup has of which only the reference is sure; None for nothing.

    Replica groups that leave, and sizes that change with maintenance or spot nodes, are compiled but not in use: where
    several things happen at one time, the two engines take them in another order (about 1 of 100 runs of the tests).
    """
    if setup.trace_s:
        return "a trace of spot nodes"
    if setup.policy == "continue":
        return "replica groups that leave and join"
    if setup.policy == "shrink" and (np.isfinite(setup.maintenance_every_s) or np.isfinite(setup.preemption_mtbf_s)):
        return "sizes that change with maintenance or spot nodes"
    return None


def simulate(setup: RunSetup, seed: int, numbers: range, *, limit_s: float, max_stops: int) -> Runs | None:
    """Returns the runs with these numbers; None if one of them is endless."""
    num_runs, sources = len(numbers), _table(_causes(setup), _SOURCE_STATE)
    states = np.zeros(num_runs, [*_numbers(_State), *((name, np.float64, size) for name, size in _ARRAYS.items())])
    states["seed"], states["number"] = seed, numbers
    states["limit_s"], states["max_stops"] = limit_s, max_stops
    states["policy"], states["num_sources"] = _POLICIES.index(setup.policy), len(sources)
    sources["source"] = range(len(sources))
    runs = Runs(
        time_s=np.empty(num_runs),
        waterfall_s=np.empty((num_runs, len(WATERFALL))),
        interruptions=np.empty((num_runs, len(sources)), np.int64),
        node_s=np.empty((num_runs, 4)),
        checkpoints=np.empty(num_runs, np.int64),
    )
    if not _simulate(_table([setup]), _table(setup.sizes), sources, states, runs.interruptions):
        return None
    runs.time_s[:], runs.checkpoints[:], runs.node_s[:] = states["now_s"], states["num_written"], states["node_s"]
    parts_s = np.hstack([states["progress"][:, : len(REPEATED)], states["wasted_s"]])
    runs.waterfall_s[:] = parts_s[:, [(*REPEATED, *_WASTED).index(part) for part in WATERFALL]]
    return runs


def _causes(setup: RunSetup) -> list[CauseSetup]:
    """Causes; then corruption, slow devices and preemptions, the last of which do not come with age."""
    devices = setup.devices_per_node
    return [
        *setup.causes,
        CauseSetup(name="", units_per_node=devices, mtbf_s=setup.corruption_mtbf_s, repair_s=setup.repair_s),
        CauseSetup(name="", units_per_node=devices, mtbf_s=setup.slow_mtbf_s, repair_s=setup.repair_s),
        CauseSetup(name="", units_per_node=1, mtbf_s=inf, repair_s=setup.spot_wait_s),
    ]


def _numbers(kind: type) -> list[tuple[str, type]]:
    """Numbers among the attributes of a class, as fields of a record."""
    return [(name, _DTYPES[hint]) for name, hint in get_type_hints(kind).items() if hint in _DTYPES]


def _table(items: Sequence[Any], state: Sequence[Any] = ()) -> NDArray[Any]:
    """One record for each item, with fields for a state that begins at zero."""
    numbers = _numbers(type(items[0]))
    table = np.zeros(len(items), [*numbers, *state])
    for name, _ in numbers:
        table[name] = [getattr(item, name) for item in items]
    return table


@jit
def _simulate(
    setups: NDArray[Any],
    sizes: NDArray[Any],
    sources: NDArray[Any],
    states: NDArray[Any],
    interruptions: NDArray[np.int64],
) -> bool:
    """Carry each state to the end of its run; returns False if a run is endless."""
    for run in range(len(states)):
        job = _Job(
            setup=setups[0],
            state=states[run],
            sizes=sizes,
            sources=sources.copy(),
            history=[(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for _ in range(0)],
            slow=[0.0 for _ in range(0)],
            corrupt=[(0.0, 0.0) for _ in range(0)],
            returns=[0.0 for _ in range(0)],
            leaves=[0.0 for _ in range(0)],
            starting=[0.0 for _ in range(0)],
            lost=[(0, 0) for _ in range(0)],
        )
        _begin(job)
        _train(job)
        if job.state.is_endless:
            return False
        for source in range(len(sources)):
            interruptions[run, source] = job.sources[source].num_interruptions
    return True


@jit_inner
def _begin(job: _Job) -> None:
    """State at the start of a run."""
    setup, state = job.setup, job.state
    state.full_step_s = job.sizes[0].step_s
    state.held = job.sizes[0].num_nodes
    state.spares = setup.spares
    state.in_flight_at_s = state.next_return_s = state.next_leave_s = state.next_ready_s = inf
    state.stored[_COMPLETE_AT] = state.memory[_COMPLETE_AT] = -inf
    state.window_at_s, state.window_end_s = max(0.0, setup.maintenance_every_s - _early_s(setup)), -inf
    if setup.preemption_mtbf_s < inf:
        state.preemption_left = _exponential(state, job.sources[-1], WHEN)
    _set_in_use(job, state.held)
    for source in range(len(job.sources)):
        _schedule(state, job.sources[source], 0.0)
    _changed(setup, state)
    _look_ahead_in_age(job)


@jit_inner
def _early_s(setup: RunSetup) -> float:
    """Seconds before maintenance at which the job stops to write a checkpoint."""
    return float(setup.blocking_s + setup.write_s if setup.checkpoint_every else 0.0)


@jit_inner
def _uniform(state: _State, row: _Source, purpose: int) -> float:
    """Next number of a stream of a source, uniform in [0, 1)."""
    index = row.num_drawn[purpose]
    row.num_drawn[purpose] = index + 1
    stream = NUM_PURPOSES * row.source + purpose
    return philox.uniform(state.seed, state.number, stream, index, row.blocks[purpose])


@jit_inner
def _exponential(state: _State, row: _Source, purpose: int) -> float:
    """Next number of a stream of a source, exponential with mean 1."""
    return -log1p(-_uniform(state, row, purpose))


# The job: steps, pauses, stops.


@jit_inner
def _train(job: _Job) -> None:
    """The run from its first step to its last."""
    while not (_is_done(job.setup, job.state) or job.state.is_endless):
        stopped = _go_on(job)
        while stopped and not job.state.is_endless:
            stopped = _recover(job)


@jit_inner
def _is_done(setup: RunSetup, state: _State) -> bool:
    return bool(not state.progress[_DUE] and state.progress[_POSITION] >= setup.num_steps - ROUNDING)


@jit_inner
def _go_on(job: _Job) -> bool:
    """Continue with a group that joins, or with pauses and steps; returns True if the job stops."""
    state = job.state
    if state.policy == _CONTINUE:
        if state.in_use < job.sizes[-1].num_nodes:
            _wait_for_group(job)
        if len(job.starting) and job.starting[0] <= state.now_s + ROUNDING:
            return _join(job)
    _set_aging(state, True)
    if not _is_stopped(job.setup, state):
        _pass_undisturbed(job.setup, state, job.history)
        if _is_done(job.setup, state):
            return False
    return _pause(job) if state.progress[_DUE] else _steps(job)


@jit_inner
def _pass_undisturbed(setup: RunSetup, state: _State, history: list[tuple[float, ...]]) -> None:
    """Pauses and steps that end before the next thing happens."""
    while not _is_done(setup, state):
        due = _next_due(state)
        num = 0 if due else _steps_until_pause(setup, state)
        seconds = _pause_s(setup, state, history, due) if due else num * _step_s(setup, state)
        start_s, end_s = state.now_s, state.now_s + seconds
        if end_s > state.soonest_s - ROUNDING:
            return
        _advance(setup, state, end_s)
        if due:
            _end_pause(setup, state, history, due, end_s - start_s)
        else:
            _take_steps(setup, state, num, _step_s(setup, state))


@jit_inner
def _steps(job: _Job) -> bool:
    """Steps until the next pause; returns True if the job stops."""
    setup, state = job.setup, job.state
    step_s = _step_s(setup, state)
    num = _steps_until_pause(setup, state)
    state.cut, start_s = False, state.now_s
    stopped = _spend(job, num * step_s, step_s)
    elapsed_s = state.now_s - start_s
    if stopped:
        num = min(num, floor(elapsed_s / step_s + ROUNDING))
        state.wasted_s[_LOST_WORK] += elapsed_s - num * step_s
    elif state.cut:
        num = min(num, round(elapsed_s / step_s))
    if num:
        _take_steps(setup, state, num, step_s)
    return stopped


@jit_inner
def _step_s(setup: RunSetup, state: _State) -> float:
    return float(state.size_step_s * (setup.slow_factor if state.num_slow else 1.0))


@jit_inner
def _steps_until_pause(setup: RunSetup, state: _State) -> int:
    """Steps until the next pause, or until the end of the run."""
    position, end = state.progress[_POSITION], float(setup.num_steps)
    for every in (setup.evaluation_every, setup.memory_every, setup.checkpoint_every):
        if every:
            end = min(end, (floor(position / every + ROUNDING) + 1.0) * every)
    num: int = ceil((end - position) / state.advance - ROUNDING)
    return num


@jit_inner
def _take_steps(setup: RunSetup, state: _State, num: int, step_s: float) -> None:
    """Advance by steps that take ``step_s`` each."""
    progress, full_s = state.progress, state.advance * state.full_step_s
    progress[_COMPUTE] += num * full_s
    progress[_FEWER_NODES] += num * (state.size_step_s - full_s)
    progress[_SLOW_DEVICE] += num * (step_s - state.size_step_s)
    before = progress[_POSITION]
    after = before + num * state.advance
    progress[_POSITION] = after
    progress[_DUE] = (
        _EVALUATION_DUE * _passes(setup.evaluation_every, before, after)
        + _MEMORY_DUE * _passes(setup.memory_every, before, after)
        + _STORAGE_DUE * _passes(setup.checkpoint_every, before, after)
    )


@jit_inner
def _passes(every: int, before: float, after: float) -> int:
    """1 if a multiple of an interval lies between two positions, else 0."""
    return int(every > 0 and floor(after / every + ROUNDING) > floor(before / every + ROUNDING))


@jit_inner
def _pause(job: _Job) -> bool:
    """The pause that is due; returns True if the job stops."""
    setup, state = job.setup, job.state
    due, start_s = _next_due(state), state.now_s
    if _spend(job, _pause_s(setup, state, job.history, due), 0.0):
        state.wasted_s[_LOST_WORK] += state.now_s - start_s
        return True
    _end_pause(setup, state, job.history, due, state.now_s - start_s)
    return False


@jit_inner
def _next_due(state: _State) -> int:
    """Bit of the next pause; 0 for none."""
    due = int(state.progress[_DUE])
    return due & -due


@jit_inner
def _pause_s(setup: RunSetup, state: _State, history: list[tuple[float, ...]], due: int) -> float:
    if due == _EVALUATION_DUE:
        return float(setup.evaluation_s)
    if due == _MEMORY_DUE:
        return float(setup.memory_blocking_s)
    return _in_flight_s(setup, state, history) + setup.blocking_s


@jit_inner
def _end_pause(setup: RunSetup, state: _State, history: list[tuple[float, ...]], due: int, seconds: float) -> None:
    progress = state.progress
    progress[_EVALUATION if due == _EVALUATION_DUE else _CHECKPOINT] += seconds
    progress[_DUE] -= due
    if due == _MEMORY_DUE:
        _copy(progress, state.memory)
        state.memory[_COMPLETE_AT] = _age(state)
    elif due == _STORAGE_DUE:
        _save(setup, state, history, setup.write_s)


@jit_inner
def _recover(job: _Job) -> bool:
    """From a stop until the job trains again, or until the next stop; returns True for the latter."""
    setup, state = job.setup, job.state
    _note(job)
    is_planned, detection_s, corrupt_since_s = state.is_planned, state.detection_s, state.corrupt_since_s
    goes_on, load_s = state.policy == _CONTINUE and _can_go_on(job), 0.0
    if is_planned:
        if setup.checkpoint_every and not state.is_restarting and _write_before_stop(job):
            return True
    else:
        _settle(setup, state, job.history)
        state.in_flight_at_s = inf
    if not goes_on:
        state.is_restarting = True
        load_s = _go_back(setup, state, job.history, corrupt_since_s)
    if not is_planned:
        _idle(job, detection_s, _DETECTION)
    if goes_on:
        return _leave(job, 0.0 if is_planned else setup.diagnosis_s)
    if not is_planned:
        _idle(job, setup.diagnosis_s, _DIAGNOSIS)
    return _restart(job, load_s)


@jit_inner
def _note(job: _Job) -> None:
    state = job.state
    state.num_stops += 1
    if state.num_stops > state.max_stops or state.now_s > state.limit_s:
        state.is_endless = True
    if state.source >= 0:
        job.sources[state.source].num_interruptions += 1
        job.lost.append((state.source, state.num_nodes))
    if state.num_nodes > 1 or state.source == _WINDOW or state.corrupt_since_s < inf:
        state.memory[_COMPLETE_AT] = -inf


@jit_inner
def _write_before_stop(job: _Job) -> bool:
    """A checkpoint, its whole writing time included; returns True if something else stops the job."""
    setup, state = job.setup, job.state
    start_s, progress = state.now_s, state.progress
    state.is_stopping = True
    stopped = _spend(job, _in_flight_s(setup, state, job.history) + setup.blocking_s + setup.write_s, 0.0)
    state.is_stopping = False
    if stopped:
        state.wasted_s[_LOST_WORK] += state.now_s - start_s
        return True
    _settle(setup, state, job.history)
    progress[_CHECKPOINT] += state.now_s - start_s
    if not int(progress[_DUE]) & _EVALUATION_DUE:
        progress[_DUE] = 0.0
    _save(setup, state, job.history, 0.0)
    return False


@jit_inner
def _restart(job: _Job, load_s: float) -> bool:
    """Wait for nodes and for the end of maintenance, then start all ranks; returns True if that is stopped."""
    setup, state = job.setup, job.state
    is_hot = _release_lost(job, 0.0)
    _gather(job)
    while _in_window(state):
        _idle(job, state.window_end_s - state.now_s, _MAINTENANCE)
        _gather(job)
    restart_s = setup.takeover_s if is_hot and setup.takeover_s < inf else setup.restart_s
    start_s = state.now_s
    state.is_restarting = _spend(job, restart_s + load_s, 0.0)
    state.wasted_s[_RESTART] += state.now_s - start_s
    if state.policy == _CONTINUE:
        _form_groups(job)
    return bool(state.is_restarting)


# Checkpoints.


@jit_inner
def _save(setup: RunSetup, state: _State, history: list[tuple[float, ...]], write_s: float) -> None:
    """Write a checkpoint to the storage that counts after ``write_s``."""
    _copy(state.progress, state.in_flight)
    state.in_flight[_COMPLETE_AT] = _age(state)
    state.in_flight_at_s = state.now_s + write_s
    state.num_written += 1
    _settle(setup, state, history)


@jit_inner
def _copy(numbers: NDArray[np.float64], to: NDArray[np.float64]) -> None:
    for index in range(_PROGRESS):
        to[index] = numbers[index]


@jit_inner
def _settle(setup: RunSetup, state: _State, history: list[tuple[float, ...]]) -> None:
    """Store a checkpoint that counts by now."""
    if state.in_flight_at_s > state.now_s + ROUNDING:
        return
    state.in_flight_at_s = inf
    new = state.in_flight
    _copy(new, state.stored)
    if setup.corruption_mtbf_s < inf:
        history.append((new[0], new[1], new[2], new[3], new[4], new[5], new[6], new[7]))
        if setup.keep and len(history) - state.oldest > setup.keep:
            state.oldest += 1
        if 2 * state.oldest > len(history) + 8:
            del history[: state.oldest]
            state.oldest = 0


@jit_inner
def _in_flight_s(setup: RunSetup, state: _State, history: list[tuple[float, ...]]) -> float:
    """Seconds until the checkpoint that is being written counts."""
    _settle(setup, state, history)
    return float(state.in_flight_at_s - state.now_s if state.in_flight_at_s < inf else 0.0)


@jit_inner
def _go_back(setup: RunSetup, state: _State, history: list[tuple[float, ...]], corrupt_since_s: float) -> float:
    """Take the progress of the last checkpoint; returns the seconds to load it."""
    if corrupt_since_s < inf:
        _lose_since(state, history, corrupt_since_s)
    spent_s, load_s = _repeated_s(state.progress), 0.0
    state.progress[:] = 0.0
    if state.stored[_COMPLETE_AT] > -inf:
        _copy(state.stored, state.progress)
        load_s = setup.load_s
    if state.memory[_COMPLETE_AT] > state.stored[_COMPLETE_AT]:
        _copy(state.memory, state.progress)
        load_s = setup.memory_load_s
    state.wasted_s[_LOST_WORK] += spent_s - _repeated_s(state.progress)
    return float(load_s)


@jit_inner
def _lose_since(state: _State, history: list[tuple[float, ...]], age_s: float) -> None:
    """Lose the checkpoints that were complete after an age."""
    while len(history) > state.oldest and history[-1][_COMPLETE_AT] > age_s:
        history.pop()
    state.stored[_COMPLETE_AT] = -inf
    if len(history) > state.oldest:
        last = history[-1]
        for index in range(_PROGRESS):
            state.stored[index] = last[index]


@jit_inner
def _repeated_s(progress: NDArray[np.float64]) -> float:
    """Seconds of a progress."""
    seconds = 0.0
    for part in range(len(REPEATED)):
        seconds += progress[part]
    return seconds


# Time.


@jit_inner
def _age(state: _State) -> float:
    return float(state.now_s - state.not_aged_s)


@jit_inner
def _spend(job: _Job, seconds: float, step_s: float) -> bool:
    """Time in which units grow older, until a stop, or with ``step_s`` until the end of a step that is cut.

    Returns True for a stop.
    """
    state = job.state
    start_s = state.now_s
    end_s = start_s + seconds
    _set_aging(state, True)
    while end_s - state.now_s > ROUNDING:
        if _next_stop(job.setup, state):
            return True
        if state.cut and step_s > 0:
            end_s = min(end_s, start_s + ceil((state.now_s - start_s) / step_s - ROUNDING) * step_s)
            if end_s - state.now_s <= ROUNDING:
                break
        _go_to(job, end_s)
    return False


@jit_inner
def _idle(job: _Job, seconds: float, part: int) -> None:
    """Time in which units do not grow older."""
    state = job.state
    _set_aging(state, False)
    start_s, end_s = state.now_s, state.now_s + seconds
    while end_s - state.now_s > ROUNDING:
        _go_to(job, end_s)
    state.wasted_s[part] += state.now_s - start_s


@jit_inner
def _go_to(job: _Job, end_s: float) -> None:
    """Move to a time, or to the next instant at which something happens before, and let all of that happen."""
    state = job.state
    _advance(job.setup, state, min(end_s, state.soonest_s))
    while state.soonest_s <= state.now_s + ROUNDING:
        _happen(job)


@jit_inner
def _set_aging(state: _State, aging: bool) -> None:
    if state.aging != aging:
        state.aging = aging
        _look_ahead(state)


@jit_inner
def _advance(setup: RunSetup, state: _State, time_s: float) -> None:
    """Move to a time until which nothing happens."""
    node_s = state.node_s
    seconds = max(0.0, time_s - state.now_s)
    in_use = state.in_use if state.aging else 0
    spot = max(0, in_use - state.on_demand) if setup.is_spot else 0
    node_s[0] += (in_use - spot) * seconds
    node_s[1] += spot * seconds
    node_s[2] += (state.held - in_use) * seconds
    node_s[3] += state.spares * seconds
    if not state.aging:
        state.not_aged_s += seconds
    state.now_s = max(state.now_s, time_s)


@jit_inner
def _is_stopped(setup: RunSetup, state: _State) -> bool:
    """True if something stops the job now."""
    return bool(state.is_due or state.waiting_preemptions or _in_window(state) or _can_grow(state))


@jit_inner
def _next_stop(setup: RunSetup, state: _State) -> bool:
    """True if something stops the job now; the state then says what."""
    if not state.is_due and state.waiting_preemptions:
        state.waiting_preemptions -= 1
        _post_preemption(setup, state)
    if not state.is_due and not state.is_stopping:
        if _in_window(state):
            _post(state, _WINDOW, 0, True, 0.0, inf)
        elif _can_grow(state):
            _post(state, _GROWTH, 0, True, 0.0, inf)
    is_due, state.is_due = state.is_due, False
    return bool(is_due)


@jit_inner
def _post(
    state: _State, source: int, num_nodes: int, is_planned: bool, detection_s: float, corrupt_since_s: float
) -> None:
    """Stop the job as soon as it goes on."""
    state.is_due = True
    state.source, state.num_nodes, state.is_planned = source, num_nodes, is_planned
    state.detection_s, state.corrupt_since_s = detection_s, corrupt_since_s


@jit_inner
def _in_window(state: _State) -> bool:
    return bool(state.window_end_s - state.now_s > ROUNDING)


@jit_inner
def _can_grow(state: _State) -> bool:
    return bool(state.larger_nodes and state.held + state.spares >= state.larger_nodes)


# What happens.


@jit_inner
def _look_ahead(state: _State) -> None:
    """Find the time of the next thing that happens."""
    soonest_s = min(state.preemption_at_s, state.window_at_s)
    soonest_s = min(soonest_s, min(state.next_return_s, min(state.next_leave_s, state.next_ready_s)))
    if state.aging:
        soonest_s = min(soonest_s, state.next_age_s + state.not_aged_s)
    state.soonest_s = soonest_s


@jit_inner
def _first(heap: list[float]) -> float:
    """Smallest item; infinity for none."""
    return heap[0] if len(heap) else inf


@jit_inner
def _look_ahead_in_age(job: _Job) -> None:
    """Find the next event that comes with age: of a cause, or a corruption or slow device that is found."""
    state, num_sources = job.state, len(job.sources)
    state.next_age_s = inf
    for source in range(num_sources):
        next_age_s = job.sources[source].next_age_s
        if next_age_s < state.next_age_s:
            state.next_age_s, state.next_source = next_age_s, source
    if len(job.corrupt) and job.corrupt[0][0] < state.next_age_s:
        state.next_age_s, state.next_source = job.corrupt[0][0], num_sources + _CORRUPTION
    if len(job.slow) and job.slow[0] < state.next_age_s:
        state.next_age_s, state.next_source = job.slow[0], num_sources + _SLOW
    _look_ahead(state)


@jit_inner
def _happen(job: _Job) -> None:
    """The first of the events of this instant."""
    state, until_s = job.state, job.state.now_s + ROUNDING
    if state.aging and state.next_age_s + state.not_aged_s <= until_s:
        _happen_in_age(job)
    elif state.next_return_s <= until_s:
        heappop(job.returns)
        state.next_return_s = _first(job.returns)
        _add_spares(job, 1)
    elif state.next_leave_s <= until_s:
        heappop(job.leaves)
        state.next_leave_s = _first(job.leaves)
        state.on_demand -= 1
        _changed(job.setup, state)
    elif state.preemption_at_s <= until_s:
        state.preemption_left = _exponential(state, job.sources[-1], WHEN)
        state.preemption_since_s = state.now_s
        _preempt(job)
        _changed(job.setup, state)
    elif state.window_at_s <= until_s:
        state.window_end_s = state.now_s + _early_s(job.setup) + job.setup.maintenance_s
        state.window_at_s += job.setup.maintenance_every_s
    else:  # a group is ready
        state.cut = True
        _look_for_group(job)
    _look_ahead(state)


@jit_inner
def _happen_in_age(job: _Job) -> None:
    state, num_sources = job.state, len(job.sources)
    corruption, slow, source, age_s = num_sources - 3, num_sources - 2, state.next_source, state.next_age_s
    if source == num_sources + _CORRUPTION:
        _, since_s = heappop(job.corrupt)
        _post(state, corruption, 1, False, 0.0, since_s)
    elif source == num_sources + _SLOW:
        heappop(job.slow)
        state.num_slow -= 1
        _post(state, slow, 1, True, 0.0, inf)
    else:
        cause = job.sources[source]
        _schedule(state, cause, age_s)
        if source == corruption:
            found_s = job.setup.corruption_found_s * _exponential(state, cause, NOTICE)
            heappush(job.corrupt, (age_s + found_s, age_s))
        elif source == slow:
            heappush(job.slow, age_s + job.setup.slow_found_s * _exponential(state, cause, NOTICE))
            state.num_slow += 1
            state.cut = True
        else:
            _fail(job.setup, state, cause)
    _look_ahead_in_age(job)


@jit_inner
def _fail(setup: RunSetup, state: _State, cause: _Source) -> None:
    noticed = _uniform(state, cause, NOTICE)
    if noticed < cause.at_once:
        detection_s = 0.0
    elif noticed < cause.at_once + cause.timeout:
        detection_s = setup.timeout_s
    else:
        detection_s = setup.detection_s
    _post(state, cause.source, cause.num_nodes, cause.planned, detection_s, inf)


@jit_inner
def _schedule(state: _State, cause: _Source, age_s: float) -> None:
    """Draw the age of the next event of a cause."""
    cause.next_age_s = inf
    if cause.mtbf_s < inf:
        cause.next_age_s = _age_of_next(cause, age_s, _exponential(state, cause, WHEN), state.in_use)


@jit_inner
def _expected(cause: CauseSetup, age_s: float) -> float:
    """Expected number of events of one unit up to an age."""
    if cause.shape == 1.0:
        return float(age_s / cause.mtbf_s)
    return float(((age_s + cause.age_s) / cause.mtbf_s) ** cause.shape)


@jit_inner
def _age_of_next(cause: CauseSetup, age_s: float, left: float, in_use: int) -> float:
    """Age until which ``left`` more events of a cause are expected."""
    per_unit = left / _units(cause, in_use)
    if cause.shape == 1.0:
        return float(age_s + per_unit * cause.mtbf_s)
    end_s = cause.mtbf_s * (_expected(cause, age_s) + per_unit) ** (1.0 / cause.shape) - cause.age_s
    return float(max(age_s, end_s))


@jit_inner
def _units(cause: CauseSetup, in_use: int) -> float:
    return float(in_use * cause.units_per_node if cause.units_per_node else 1.0)


@jit_inner
def _set_in_use(job: _Job, in_use: int) -> None:
    """Change the number of nodes in use, and with it the size of the job and the rates of the causes."""
    state, before, age_s = job.state, job.state.in_use, _age(job.state)
    state.in_use = in_use
    if before == in_use:
        return
    index = 0
    while job.sizes[index].num_nodes > in_use and index < len(job.sizes) - 1:
        index += 1
    state.size_step_s, state.advance = job.sizes[index].step_s, job.sizes[index].advance
    state.larger_nodes = job.sizes[index - 1].num_nodes if index and state.policy == _SHRINK else 0
    for source in range(len(job.sources)):
        cause = job.sources[source]
        if cause.units_per_node and cause.next_age_s < inf:
            left = max(0.0, _expected(cause, cause.next_age_s) - _expected(cause, age_s)) * _units(cause, before)
            cause.next_age_s = _age_of_next(cause, age_s, left, in_use)
    _look_ahead_in_age(job)


@jit_inner
def _changed(setup: RunSetup, state: _State) -> None:
    """Set the time of the next preemption after a change of the nodes that can be preempted."""
    mtbf_s = setup.preemption_mtbf_s
    state.preemption_at_s = inf
    if mtbf_s < inf:
        expected = state.preemption_nodes * (state.now_s - state.preemption_since_s) / mtbf_s
        state.preemption_left = max(0.0, state.preemption_left - expected)
        state.preemption_nodes, state.preemption_since_s = state.held - state.on_demand, state.now_s
        if state.preemption_nodes > 0:
            state.preemption_at_s = state.now_s + state.preemption_left * mtbf_s / state.preemption_nodes
    _look_ahead(state)


@jit_inner
def _preempt(job: _Job) -> None:
    """Take a spot node away, or put a node on demand in its place."""
    state, setup = job.state, job.setup
    if setup.on_demand:
        state.on_demand += 1
        heappush(job.leaves, state.now_s + setup.spot_wait_s * _exponential(state, job.sources[-1], RETURN))
        state.next_leave_s = _first(job.leaves)
    if state.aging:
        _post_preemption(setup, state)
    elif state.policy == _CONTINUE and not state.is_restarting:
        state.waiting_preemptions += 1
    elif not setup.on_demand:
        _add_spares(job, _take_away(job, state.num_sources - 1, 1, 0.0))


@jit_inner
def _post_preemption(setup: RunSetup, state: _State) -> None:
    write_s = setup.blocking_s + setup.write_s
    is_planned = setup.checkpoint_every > 0 and 0.0 < write_s <= setup.notice_s
    _post(state, state.num_sources - 1, 0 if setup.on_demand else 1, is_planned, setup.detection_s, inf)


# Nodes.


@jit_inner
def _fitting(job: _Job, num_nodes: int) -> int:
    """Nodes in use with so many nodes in all; 0 if they are too few."""
    if job.state.policy == _CONTINUE:
        group_nodes = job.setup.group_nodes
        fitting = min(num_nodes // group_nodes * group_nodes, job.sizes[0].num_nodes)
        return int(fitting if fitting >= job.sizes[-1].num_nodes else 0)
    for index in range(len(job.sizes)):
        if job.sizes[index].num_nodes <= num_nodes:
            return int(job.sizes[index].num_nodes)
    return 0


@jit_inner
def _gather(job: _Job) -> None:
    """Wait for as many nodes as the job needs, and take spares."""
    state = job.state
    _set_aging(state, False)
    start_s = state.now_s
    while not _fitting(job, state.held + state.spares):
        if state.now_s > state.limit_s or state.soonest_s == inf:
            state.is_endless = True
            return
        _go_to(job, inf)
    state.wasted_s[_WAITING] += state.now_s - start_s
    num_nodes = _fitting(job, state.held + state.spares)
    taken = max(0, num_nodes - state.held)
    state.held, state.spares = state.held + taken, state.spares - taken
    job.starting.clear()
    state.next_ready_s = inf
    _set_in_use(job, num_nodes)
    _changed(job.setup, job.state)


@jit_inner
def _release_lost(job: _Job, delay_s: float) -> bool:
    """Send lost nodes away until they are spares again; returns True if spares that are there replace them all."""
    state, before = job.state, job.state.held
    spares = state.spares
    num_back = 0
    for source, num_nodes in job.lost:
        num_back += _take_away(job, source, num_nodes, delay_s)
    job.lost.clear()
    is_hot = state.held < before and state.held + spares >= job.sizes[0].num_nodes
    _add_spares(job, num_back)
    return bool(is_hot)


@jit_inner
def _take_away(job: _Job, source: int, num_nodes: int, delay_s: float) -> int:
    """Take nodes from the job until each is a spare; returns the number of those that are spares at once."""
    state, row = job.state, job.sources[source]
    num_nodes = min(num_nodes, state.held)
    state.held -= num_nodes
    is_exponential = source == state.num_sources - 1 or job.setup.repair_is_exponential
    num_back = 0
    for _ in range(num_nodes):
        seconds = row.repair_s * (_exponential(state, row, RETURN) if is_exponential else 1.0) + delay_s
        if seconds > 0:
            heappush(job.returns, state.now_s + seconds)
        else:
            num_back += 1
    state.next_return_s = _first(job.returns)
    _changed(job.setup, state)
    return num_back


@jit_inner
def _add_spares(job: _Job, num: int) -> None:
    job.state.spares += num
    if job.state.policy == _CONTINUE:
        _form_groups(job)


# Replica groups of the policy ``continue``.


@jit_inner
def _can_go_on(job: _Job) -> bool:
    """True if groups are left that lose no node, and the stop is not for all."""
    state = job.state
    if state.is_restarting or state.source == _WINDOW or state.corrupt_since_s < inf:
        return False
    return bool(state.in_use > _nodes_of_lost_groups(job))


@jit_inner
def _nodes_of_lost_groups(job: _Job) -> int:
    """Nodes of the groups that leave; with a process that fails its group leaves."""
    num_groups = 0
    for _, num_nodes in job.lost:
        num_groups += max(1, -(-num_nodes // job.setup.group_nodes))
    return int(num_groups * job.setup.group_nodes)


@jit_inner
def _leave(job: _Job, diagnosis_s: float) -> bool:
    """The groups of lost nodes leave, and the others go on; returns True if that is stopped."""
    _set_in_use(job, job.state.in_use - _nodes_of_lost_groups(job))
    _release_lost(job, diagnosis_s)
    _form_groups(job)
    start_s = job.state.now_s
    stopped = _spend(job, job.setup.reconfigure_s, 0.0)
    job.state.wasted_s[_MEMBERSHIP] += job.state.now_s - start_s
    return stopped


@jit_inner
def _form_groups(job: _Job) -> None:
    """Let complete groups start, with the help of spares."""
    state, group_nodes = job.state, job.setup.group_nodes
    while not state.is_restarting:
        placed = state.in_use + len(job.starting) * group_nodes
        taken = max(0, group_nodes - (state.held - placed))
        if placed >= job.sizes[0].num_nodes or taken > state.spares:
            break
        state.held, state.spares = state.held + taken, state.spares - taken
        job.starting.append(state.now_s + job.setup.restart_s)
        state.cut = state.cut or job.setup.restart_s <= ROUNDING  # ready now: nothing else will happen
    _look_for_group(job)
    _changed(job.setup, job.state)


@jit_inner
def _look_for_group(job: _Job) -> None:
    """Find the time at which the next group is ready."""
    job.state.next_ready_s = inf
    for ready_s in job.starting:
        if ready_s > job.state.now_s + ROUNDING:
            job.state.next_ready_s = ready_s
            break


@jit_inner
def _wait_for_group(job: _Job) -> None:
    """Below the smallest size: wait until groups that start are ready."""
    state = job.state
    start_s = state.now_s
    _set_aging(state, False)
    missing = (job.sizes[-1].num_nodes - state.in_use) // job.setup.group_nodes
    while len(job.starting) < missing or job.starting[missing - 1] > state.now_s + ROUNDING:
        if state.now_s > state.limit_s or state.soonest_s == inf:
            state.is_endless = True
            return
        _go_to(job, inf)
    state.wasted_s[_WAITING] += state.now_s - start_s


@jit_inner
def _join(job: _Job) -> bool:
    """All groups that are ready join; returns True if that is stopped."""
    state = job.state
    start_s, num_ready = state.now_s, 0
    while num_ready < len(job.starting) and job.starting[num_ready] <= start_s + ROUNDING:
        num_ready += 1
    stopped = _spend(job, job.setup.join_s, 0.0)
    state.wasted_s[_MEMBERSHIP] += state.now_s - start_s
    if not stopped:
        del job.starting[:num_ready]
        _set_in_use(job, state.in_use + num_ready * job.setup.group_nodes)
        _changed(job.setup, job.state)
    return stopped
