"""Whole runs in machine code: the twin of ``reference``, equal to it run by run. Importing this module imports numba.

Functions have the names of their twins. Time moves to the next of the things that will happen (``soonest_s``), which
are few; between them steps and pauses follow each other without looking at anything else.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from math import ceil, floor, inf
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from simplan.goodput import philox
from simplan.goodput.checkpoints import REPEATED, ROUNDING
from simplan.goodput.draws import NOTICE, RETURN, WHEN
from simplan.goodput.philox import exponential, uniform
from simplan.goodput.setup import WATERFALL, CauseSetup, Runs, RunSetup, Size
from simplan.jit import jit

_DTYPES = {int: np.int64, float: np.float64, bool: np.bool_}
_POLICIES = ("restart", "shrink", "continue")
_SHRINK, _CONTINUE = 1, 2

# A progress is eight numbers: seconds by part of ``REPEATED``, then these.
_COMPUTE, _EVALUATION, _CHECKPOINT, _SLOW_DEVICE, _FEWER_NODES, _POSITION, _DUE, _COMPLETE_AT = range(8)
_NUMBERS = 8
_EVALUATION_DUE, _MEMORY_DUE, _STORAGE_DUE = 1, 2, 4  # bits of _DUE

_WASTED = tuple(part for part in WATERFALL if part not in REPEATED)
_LOST_WORK, _DETECTION, _DIAGNOSIS, _WAITING, _RESTART, _MEMBERSHIP, _MAINTENANCE = range(len(_WASTED))
_PARTS = [(*REPEATED, *_WASTED).index(part) for part in WATERFALL]

_WINDOW, _GROWTH = -1, -2  # stops that are no interruptions


class _State:
    """Scalars of a run; ``reference._Job`` has them under the same names.

    Attributes:
        not_aged_s: Seconds in which units did not grow older: their age is ``now_s - not_aged_s``.
        soonest_s: Time of the next thing that happens.
        next_age_s, next_source: Age and source of the next event that comes with age.
        is_due: True if a stop has been posted.
        source, num_nodes, is_planned, detection_s, corrupt_since_s: The last stop.
        waiting_preemptions: Preemptions that stop the job as soon as it goes on.
        preemption_left, preemption_nodes, preemption_since_s: Expected preemptions until the next one, left at a time
            since which so many nodes could be preempted.
        in_flight_at_s: Time at which the checkpoint that is being written counts; infinity for none.
        oldest: Index of the oldest kept checkpoint.
    """

    now_s: float
    not_aged_s: float
    soonest_s: float
    next_age_s: float
    next_source: int
    aging: bool
    held: int
    in_use: int
    spares: int
    on_demand: int
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


class _Rows(NamedTuple):
    """Numbers of a setup: one row of its scalars, its causes with corruption and slow devices, its sizes."""

    setup: NDArray[Any]
    causes: NDArray[Any]
    sizes: NDArray[Any]
    policy: int
    limit_s: float
    max_stops: int


class _Job(NamedTuple):
    """A run.

    Attributes:
        next_ages: Age of the next event of each cause.
        progress, memory, in_flight: Progress now, of the checkpoint in memory, and of the one that is being written.
        stored: Progress of the checkpoints in storage.
        slow: Heap of the ages at which slow devices are found.
        corrupt: Heap of (age at which a corruption is found, age since which it is there).
        returns, leaves: Heaps of the times at which lost nodes return and nodes on demand leave.
        starting: Times at which groups are ready, in order.
        lost: (source, nodes) that have been lost and not yet released.
    """

    setup: RunSetup
    causes: NDArray[Any]
    sizes: NDArray[Any]
    policy: int
    limit_s: float
    max_stops: int
    draws: philox.Streams
    state: _State
    next_ages: NDArray[np.float64]
    progress: NDArray[np.float64]
    memory: NDArray[np.float64]
    in_flight: NDArray[np.float64]
    stored: list[tuple[float, ...]]
    wasted_s: NDArray[np.float64]
    interruptions: NDArray[np.int64]
    node_s: NDArray[np.float64]
    slow: list[float]
    corrupt: list[tuple[float, float]]
    returns: list[float]
    leaves: list[float]
    starting: list[float]
    lost: list[tuple[int, int]]


def why_not_compiled(setup: RunSetup) -> str | None:
    """Returns what a setup has that only the reference knows; None for nothing."""
    return "a trace of spot nodes" if setup.trace_s else None


def simulate(setup: RunSetup, seed: int, numbers: range, *, limit_s: float, max_stops: int) -> Runs | None:
    """Returns the runs with these numbers; None if one of them is endless."""
    causes = [
        *setup.causes,
        CauseSetup(name="", units_per_node=setup.devices_per_node, mtbf_s=setup.corruption_mtbf_s),
        CauseSetup(name="", units_per_node=setup.devices_per_node, mtbf_s=setup.slow_mtbf_s),
    ]
    rows = _Rows(
        setup=_table(RunSetup, [setup]),
        causes=_table(CauseSetup, causes),
        sizes=_table(Size, setup.sizes),
        policy=_POLICIES.index(setup.policy),
        limit_s=limit_s,
        max_stops=max_stops,
    )
    num_runs = len(numbers)
    runs = Runs(
        time_s=np.empty(num_runs),
        waterfall_s=np.empty((num_runs, len(WATERFALL))),
        interruptions=np.zeros((num_runs, len(causes) + 1), np.int64),
        node_s=np.zeros((num_runs, 4)),
        checkpoints=np.empty(num_runs, np.int64),
    )
    finished = _simulate(
        rows,
        np.zeros(num_runs, _dtype(_State)),
        seed,
        numbers.start,
        runs.time_s,
        runs.waterfall_s,
        runs.interruptions,
        runs.node_s,
        runs.checkpoints,
    )
    return replace(runs, waterfall_s=runs.waterfall_s[:, _PARTS]) if finished else None


def _dtype(kind: type) -> np.dtype[Any]:
    """Numbers among the attributes of a class as fields of a record."""
    hints = get_type_hints(kind).items()
    return np.dtype([(name, _DTYPES[hint]) for name, hint in hints if hint in _DTYPES])


def _table(kind: type, items: Any) -> NDArray[Any]:
    dtype = _dtype(kind)
    return np.array([tuple(getattr(item, name) for name in dtype.names or ()) for item in items], dtype)


@jit
def _simulate(
    rows: _Rows,
    states: NDArray[Any],
    seed: int,
    first: int,
    time_s: NDArray[np.float64],
    waterfall_s: NDArray[np.float64],
    interruptions: NDArray[np.int64],
    node_s: NDArray[np.float64],
    checkpoints: NDArray[np.int64],
) -> bool:
    """Runs from the number ``first`` on, one for each row of the results; returns False if one is endless."""
    num_causes = len(rows.causes)
    for run in range(len(time_s)):
        job = _Job(
            setup=rows.setup[0],
            causes=rows.causes,
            sizes=rows.sizes,
            policy=rows.policy,
            limit_s=rows.limit_s,
            max_stops=rows.max_stops,
            draws=philox.streams(seed, first + run, num_causes + 1),
            state=states[run],
            next_ages=np.zeros(num_causes),
            progress=np.zeros(_NUMBERS),
            memory=np.zeros(_NUMBERS),
            in_flight=np.zeros(_NUMBERS),
            stored=[(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for _ in range(0)],
            wasted_s=np.zeros(len(_WASTED)),
            interruptions=interruptions[run],
            node_s=node_s[run],
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
        time_s[run], checkpoints[run] = job.state.now_s, job.state.num_written
        waterfall_s[run, : len(REPEATED)] = job.progress[: len(REPEATED)]
        waterfall_s[run, len(REPEATED) :] = job.wasted_s
    return True


@jit
def _begin(job: _Job) -> None:
    """State at the start of a run."""
    setup, state, num_causes = job.setup, job.state, len(job.causes)
    state.held = state.in_use = job.sizes[0].num_nodes
    state.spares = setup.spares
    state.in_flight_at_s, job.memory[_COMPLETE_AT] = inf, -inf
    state.window_at_s, state.window_end_s = max(0.0, setup.maintenance_every_s - _early_s(job)), -inf
    if setup.preemption_mtbf_s < inf:
        state.preemption_left = exponential(job.draws, num_causes, WHEN)
    for source in range(num_causes):
        _schedule(job, source, 0.0)
    _changed(job)


@jit
def _early_s(job: _Job) -> float:
    """Seconds before maintenance at which the job stops to write a checkpoint."""
    return float(job.setup.blocking_s + job.setup.write_s if job.setup.checkpoint_every else 0.0)


# The job: steps, pauses, stops.


@jit
def _train(job: _Job) -> None:
    """The run from its first step to its last."""
    while (job.progress[_DUE] or job.progress[_POSITION] < job.setup.num_steps - ROUNDING) and not job.state.is_endless:
        stopped = _go_on(job)
        while stopped and not job.state.is_endless:
            stopped = _recover(job)
    _set_aging(job, False)


@jit
def _go_on(job: _Job) -> bool:
    """What comes next: a group that joins, a pause, or steps until the next pause; returns True if the job stops."""
    if job.policy == _CONTINUE:
        if job.state.in_use < job.sizes[-1].num_nodes:
            _wait_for_group(job)
        if len(job.starting) and job.starting[0] <= job.state.now_s + ROUNDING:
            return _join(job)
    if job.progress[_DUE]:
        return _pause(job)
    return _steps(job)


@jit
def _steps(job: _Job) -> bool:
    state, size = job.state, job.sizes[_size(job)]
    step_s = size.step_s * (job.setup.slow_factor if len(job.slow) else 1.0)
    num = _steps_until_pause(job, size.advance)
    state.cut, start_s = False, state.now_s
    stopped = _spend(job, num * step_s, step_s)
    elapsed_s = state.now_s - start_s
    if stopped:
        num = min(num, int(floor(elapsed_s / step_s + ROUNDING)))
        job.wasted_s[_LOST_WORK] += elapsed_s - num * step_s
    elif state.cut:
        num = min(num, int(round(elapsed_s / step_s)))
    if num:
        _take_steps(job, num, size.step_s, size.advance, step_s)
    return stopped


@jit
def _steps_until_pause(job: _Job, advance: float) -> int:
    """Steps until the next pause, or until the end of the run."""
    position, setup = job.progress[_POSITION], job.setup
    end = float(setup.num_steps)
    for every in (setup.evaluation_every, setup.memory_every, setup.checkpoint_every):
        if every:
            end = min(end, (floor(position / every + ROUNDING) + 1.0) * every)
    return int(ceil((end - position) / advance - ROUNDING))


@jit
def _take_steps(job: _Job, num: int, size_step_s: float, advance: float, step_s: float) -> None:
    """Advance by steps that take ``step_s`` each."""
    progress, setup = job.progress, job.setup
    full_s = advance * job.sizes[0].step_s
    progress[_COMPUTE] += num * full_s
    progress[_FEWER_NODES] += num * (size_step_s - full_s)
    progress[_SLOW_DEVICE] += num * (step_s - size_step_s)
    before = progress[_POSITION]
    after = progress[_POSITION] = before + num * advance
    progress[_DUE] = (
        _EVALUATION_DUE * _passes(setup.evaluation_every, before, after)
        + _MEMORY_DUE * _passes(setup.memory_every, before, after)
        + _STORAGE_DUE * _passes(setup.checkpoint_every, before, after)
    )


@jit
def _passes(every: int, before: float, after: float) -> int:
    """1 if a multiple of an interval lies between two positions, else 0."""
    return int(every > 0 and floor(after / every + ROUNDING) > floor(before / every + ROUNDING))


@jit
def _pause(job: _Job) -> bool:
    setup, progress, state = job.setup, job.progress, job.state
    due, start_s = int(progress[_DUE]), job.state.now_s
    if due & _EVALUATION_DUE:
        pause, seconds, part = _EVALUATION_DUE, setup.evaluation_s, _EVALUATION
    elif due & _MEMORY_DUE:
        pause, seconds, part = _MEMORY_DUE, setup.memory_blocking_s, _CHECKPOINT
    else:
        pause, seconds, part = _STORAGE_DUE, _in_flight_s(job) + setup.blocking_s, _CHECKPOINT
    if _spend(job, seconds, 0.0):
        job.wasted_s[_LOST_WORK] += state.now_s - start_s
        return True
    progress[part] += state.now_s - start_s
    progress[_DUE] = due - pause
    if pause == _MEMORY_DUE:
        job.memory[:] = progress
        job.memory[_COMPLETE_AT] = _age(job)
    elif pause == _STORAGE_DUE:
        _save(job, setup.write_s)
    return False


@jit
def _recover(job: _Job) -> bool:
    """From a stop until the job trains again, or until the next stop; returns True for the latter."""
    setup, state = job.setup, job.state
    _note(job)
    is_planned, detection_s = state.is_planned, state.detection_s
    goes_on = _can_go_on(job)
    corrupt_since_s = state.corrupt_since_s
    load_s = 0.0
    if is_planned:
        if setup.checkpoint_every and not state.is_restarting and _write_before_stop(job):
            return True
    else:
        _settle(job)
        state.in_flight_at_s = inf
    if not goes_on:
        state.is_restarting = True
        load_s = _go_back(job, corrupt_since_s)
    if not is_planned:
        _idle(job, detection_s, _DETECTION)
    if goes_on:
        return _leave(job, 0.0 if is_planned else setup.diagnosis_s)
    if not is_planned:
        _idle(job, setup.diagnosis_s, _DIAGNOSIS)
    return _restart(job, load_s)


@jit
def _note(job: _Job) -> None:
    state = job.state
    state.num_stops += 1
    if state.num_stops > job.max_stops or state.now_s > job.limit_s:
        state.is_endless = True
    if state.source >= 0:
        job.interruptions[state.source] += 1
        job.lost.append((state.source, state.num_nodes))
    if state.num_nodes > 1 or state.source == _WINDOW or state.corrupt_since_s < inf:
        job.memory[_COMPLETE_AT] = -inf


@jit
def _write_before_stop(job: _Job) -> bool:
    """A checkpoint, its whole writing time included; returns True if something else stops the job."""
    setup, progress, state = job.setup, job.progress, job.state
    start_s = state.now_s
    state.is_stopping = True
    stopped = _spend(job, _in_flight_s(job) + setup.blocking_s + setup.write_s, 0.0)
    state.is_stopping = False
    if stopped:
        job.wasted_s[_LOST_WORK] += state.now_s - start_s
        return True
    _settle(job)
    progress[_CHECKPOINT] += state.now_s - start_s
    if not int(progress[_DUE]) & _EVALUATION_DUE:
        progress[_DUE] = 0.0
    _save(job, 0.0)
    return False


@jit
def _go_back(job: _Job, corrupt_since_s: float) -> float:
    """Take the progress of the last checkpoint; returns the seconds to load it."""
    progress, stored = job.progress, job.stored
    while len(stored) > job.state.oldest and stored[-1][_COMPLETE_AT] > corrupt_since_s:
        stored.pop()
    spent_s = progress[: len(REPEATED)].sum()
    complete_at_s, load_s = -inf, 0.0
    progress[:] = 0.0
    if len(stored) > job.state.oldest:
        last = stored[-1]
        for index in range(len(progress)):
            progress[index] = last[index]
        complete_at_s, load_s = progress[_COMPLETE_AT], job.setup.load_s
    if job.memory[_COMPLETE_AT] > complete_at_s:
        progress[:] = job.memory
        load_s = job.setup.memory_load_s
    job.wasted_s[_LOST_WORK] += spent_s - progress[: len(REPEATED)].sum()
    return load_s


@jit
def _restart(job: _Job, load_s: float) -> bool:
    """Wait for nodes and for the end of maintenance, then start all ranks; returns True if that is stopped."""
    setup, state = job.setup, job.state
    is_hot = _release_lost(job, 0.0)
    _gather(job)
    while _in_window(job):
        _idle(job, state.window_end_s - state.now_s, _MAINTENANCE)
        _gather(job)
    restart_s = setup.takeover_s if is_hot and setup.takeover_s < inf else setup.restart_s
    start_s = state.now_s
    state.is_restarting = _spend(job, restart_s + load_s, 0.0)
    job.wasted_s[_RESTART] += state.now_s - start_s
    if job.policy == _CONTINUE:
        _form_groups(job)
    return state.is_restarting


# Checkpoints.


@jit
def _save(job: _Job, write_s: float) -> None:
    """Write a checkpoint to the storage that counts after ``write_s``."""
    job.in_flight[:] = job.progress
    job.in_flight[_COMPLETE_AT] = _age(job)
    job.state.in_flight_at_s = job.state.now_s + write_s
    job.state.num_written += 1
    _settle(job)


@jit
def _settle(job: _Job) -> None:
    """Store a checkpoint that counts by now; without corruption only the last one matters."""
    state, stored, new = job.state, job.stored, job.in_flight
    if state.in_flight_at_s > state.now_s + ROUNDING:
        return
    state.in_flight_at_s = inf
    if job.setup.corruption_mtbf_s == inf:
        stored.clear()
    stored.append((new[0], new[1], new[2], new[3], new[4], new[5], new[6], new[7]))
    if job.setup.keep and len(stored) - state.oldest > job.setup.keep:
        state.oldest += 1
        if 2 * state.oldest > len(stored) + 8:
            del stored[: state.oldest]
            state.oldest = 0


@jit
def _in_flight_s(job: _Job) -> float:
    """Seconds until the checkpoint that is being written counts."""
    _settle(job)
    return job.state.in_flight_at_s - job.state.now_s if job.state.in_flight_at_s < inf else 0.0


# Time.


@jit
def _age(job: _Job) -> float:
    return job.state.now_s - job.state.not_aged_s


@jit
def _spend(job: _Job, seconds: float, step_s: float) -> bool:
    """Time in which units grow older, until a stop, or with ``step_s`` until the end of a step that is cut.

    Returns True for a stop.
    """
    state = job.state
    start_s = state.now_s
    end_s = start_s + seconds
    _set_aging(job, True)
    while end_s - state.now_s > ROUNDING:
        if _next_stop(job):
            return True
        if state.cut and step_s > 0:
            end_s = min(end_s, start_s + ceil((state.now_s - start_s) / step_s - ROUNDING) * step_s)
            if end_s - state.now_s <= ROUNDING:
                break
        if state.soonest_s < end_s:
            _advance(job, state.soonest_s)
            _happen(job)
        else:
            _advance(job, end_s)
    return False


@jit
def _idle(job: _Job, seconds: float, part: int) -> None:
    """Time in which units do not grow older."""
    state = job.state
    _set_aging(job, False)
    start_s, end_s = state.now_s, state.now_s + seconds
    while state.soonest_s < end_s:
        _advance(job, state.soonest_s)
        _happen(job)
    _advance(job, end_s)
    job.wasted_s[part] += state.now_s - start_s


@jit
def _set_aging(job: _Job, aging: bool) -> None:
    if job.state.aging != aging:
        job.state.aging = aging
        _look_ahead(job)


@jit
def _advance(job: _Job, time_s: float) -> None:
    """Move to a time until which nothing happens."""
    state, node_s = job.state, job.node_s
    seconds = max(0.0, time_s - state.now_s)
    in_use = state.in_use if state.aging else 0
    spot = max(0, in_use - state.on_demand) if job.setup.is_spot else 0
    node_s[0] += (in_use - spot) * seconds
    node_s[1] += spot * seconds
    node_s[2] += (state.held - in_use) * seconds
    node_s[3] += state.spares * seconds
    if not state.aging:
        state.not_aged_s += seconds
    state.now_s = max(state.now_s, time_s)


@jit
def _next_stop(job: _Job) -> bool:
    """True if something stops the job now; the state then says what."""
    state = job.state
    if state.waiting_preemptions:
        state.waiting_preemptions -= 1
        _post_preemption(job)
    if state.is_due:
        state.is_due = False
        return True
    if state.is_stopping:
        return False
    if _in_window(job):
        _post(job, _WINDOW, 0, True, 0.0, inf)
    elif job.policy == _SHRINK and _fitting(job, state.held + state.spares) > state.in_use:
        _post(job, _GROWTH, 0, True, 0.0, inf)
    else:
        return False
    state.is_due = False
    return True


@jit
def _post(job: _Job, source: int, num_nodes: int, is_planned: bool, detection_s: float, corrupt_since_s: float) -> None:
    """Stop the job as soon as it goes on."""
    state = job.state
    state.is_due = True
    state.source, state.num_nodes, state.is_planned = source, num_nodes, is_planned
    state.detection_s, state.corrupt_since_s = detection_s, corrupt_since_s


@jit
def _in_window(job: _Job) -> bool:
    return bool(job.state.window_end_s - job.state.now_s > ROUNDING)


# What happens.


@jit
def _look_ahead(job: _Job) -> None:
    """Find the time of the next thing that happens."""
    state = job.state
    soonest_s = min(state.preemption_at_s, state.window_at_s)
    if state.aging:
        soonest_s = min(soonest_s, state.next_age_s + state.not_aged_s)
    if len(job.returns):
        soonest_s = min(soonest_s, job.returns[0])
    if len(job.leaves):
        soonest_s = min(soonest_s, job.leaves[0])
    for ready_s in job.starting:
        if ready_s > state.now_s:
            soonest_s = min(soonest_s, ready_s)
            break
    state.soonest_s = soonest_s


@jit
def _look_ahead_in_age(job: _Job) -> None:
    """Find the next event that comes with age: of a cause, or a corruption or slow device that is found."""
    state, corruption, slow = job.state, len(job.causes) - 2, len(job.causes) - 1
    state.next_source = job.next_ages.argmin()
    state.next_age_s = job.next_ages[state.next_source]
    if len(job.corrupt) and job.corrupt[0][0] < state.next_age_s:
        state.next_age_s, state.next_source = job.corrupt[0][0], len(job.causes) + corruption
    if len(job.slow) and job.slow[0] < state.next_age_s:
        state.next_age_s, state.next_source = job.slow[0], len(job.causes) + slow
    _look_ahead(job)


@jit
def _happen(job: _Job) -> None:
    """What happens at this time, one thing at a time."""
    state = job.state
    if state.aging and state.next_age_s + state.not_aged_s <= state.now_s:
        _happen_in_age(job)
    elif len(job.returns) and job.returns[0] <= state.now_s:
        heappop(job.returns)
        _add_spare(job)
    elif len(job.leaves) and job.leaves[0] <= state.now_s:
        heappop(job.leaves)
        state.on_demand -= 1
        _changed(job)
    elif state.preemption_at_s <= state.now_s:
        state.preemption_left = exponential(job.draws, len(job.causes), WHEN)
        state.preemption_since_s = state.now_s
        _preempt(job)
        _changed(job)
    elif state.window_at_s <= state.now_s:
        state.window_end_s = state.now_s + _early_s(job) + job.setup.maintenance_s
        state.window_at_s += job.setup.maintenance_every_s
    else:  # a group is ready
        state.cut = True
    _look_ahead(job)


@jit
def _happen_in_age(job: _Job) -> None:
    state, num_causes, age_s = job.state, len(job.causes), job.state.next_age_s
    corruption, slow, source = num_causes - 2, num_causes - 1, job.state.next_source
    if source == num_causes + corruption:
        _, since_s = heappop(job.corrupt)
        _post(job, corruption, 1, False, 0.0, since_s)
    elif source == num_causes + slow:
        heappop(job.slow)
        _post(job, slow, 1, True, 0.0, inf)
    else:
        _schedule(job, source, age_s)
        if source == corruption:
            found_s = job.setup.corruption_found_s * exponential(job.draws, source, NOTICE)
            heappush(job.corrupt, (age_s + found_s, age_s))
        elif source == slow:
            heappush(job.slow, age_s + job.setup.slow_found_s * exponential(job.draws, source, NOTICE))
            state.cut = True
        else:
            _fail(job, source)
    _look_ahead_in_age(job)


@jit
def _fail(job: _Job, source: int) -> None:
    cause = job.causes[source]
    noticed = uniform(job.draws, source, NOTICE)
    if noticed < cause.at_once:
        detection_s = 0.0
    elif noticed < cause.at_once + cause.timeout:
        detection_s = job.setup.timeout_s
    else:
        detection_s = job.setup.detection_s
    _post(job, source, cause.num_nodes, cause.planned, detection_s, inf)


@jit
def _schedule(job: _Job, source: int, age_s: float) -> None:
    """Draw the age of the next event of a cause."""
    left = exponential(job.draws, source, WHEN)
    job.next_ages[source] = _age_of_next(job, source, age_s, left, job.state.in_use)


@jit
def _expected(job: _Job, source: int, age_s: float) -> float:
    """Expected number of events of one unit up to an age."""
    cause = job.causes[source]
    if cause.shape == 1.0:
        return float(age_s / cause.mtbf_s)
    return float(((age_s + cause.age_s) / cause.mtbf_s) ** cause.shape)


@jit
def _age_of_next(job: _Job, source: int, age_s: float, left: float, in_use: int) -> float:
    """Age until which ``left`` more events of a cause are expected."""
    cause = job.causes[source]
    per_unit = left / _units(job, source, in_use)
    if cause.shape == 1.0:
        return float(age_s + per_unit * cause.mtbf_s)
    end_s = cause.mtbf_s * (_expected(job, source, age_s) + per_unit) ** (1.0 / cause.shape) - cause.age_s
    return float(max(age_s, end_s))


@jit
def _units(job: _Job, source: int, in_use: int) -> float:
    per_node = job.causes[source].units_per_node
    return float(in_use * per_node if per_node else 1.0)


@jit
def _set_in_use(job: _Job, in_use: int) -> None:
    """Change the number of nodes in use, and with it the rates of the causes."""
    before, job.state.in_use = job.state.in_use, in_use
    if before == in_use:
        return
    age_s = _age(job)
    for source in range(len(job.causes)):
        if job.causes[source].units_per_node and job.next_ages[source] < inf:
            left = _expected(job, source, job.next_ages[source]) - _expected(job, source, age_s)
            left = max(0.0, left) * _units(job, source, before)
            job.next_ages[source] = _age_of_next(job, source, age_s, left, in_use)
    _look_ahead_in_age(job)


@jit
def _changed(job: _Job) -> None:
    """Set the time of the next preemption after a change of the nodes that can be preempted."""
    state, mtbf_s = job.state, job.setup.preemption_mtbf_s
    state.preemption_at_s = inf
    if mtbf_s < inf:
        expected = state.preemption_nodes * (state.now_s - state.preemption_since_s) / mtbf_s
        state.preemption_left = max(0.0, state.preemption_left - expected)
        state.preemption_nodes, state.preemption_since_s = state.held - state.on_demand, state.now_s
        if state.preemption_nodes > 0:
            state.preemption_at_s = state.now_s + state.preemption_left * mtbf_s / state.preemption_nodes
    _look_ahead_in_age(job)


@jit
def _preempt(job: _Job) -> None:
    """Take a spot node away, or put a node on demand in its place."""
    state, setup, preemption = job.state, job.setup, len(job.causes)
    if setup.on_demand:
        state.on_demand += 1
        heappush(job.leaves, state.now_s + setup.spot_wait_s * exponential(job.draws, preemption, RETURN))
    if state.aging:
        _post_preemption(job)
    elif job.policy == _CONTINUE and not state.is_restarting:
        state.waiting_preemptions += 1
    elif not setup.on_demand:
        _take_away(job, preemption, 1, 0.0)


@jit
def _post_preemption(job: _Job) -> None:
    setup = job.setup
    write_s = setup.blocking_s + setup.write_s
    is_planned = setup.checkpoint_every > 0 and 0.0 < write_s <= setup.notice_s
    _post(job, len(job.causes), 0 if setup.on_demand else 1, is_planned, setup.detection_s, inf)


# Nodes.


@jit
def _size(job: _Job) -> int:
    """Index of the largest size that the nodes in use allow."""
    index = 0
    while job.sizes[index].num_nodes > job.state.in_use:
        index += 1
    return index


@jit
def _fitting(job: _Job, num_nodes: int) -> int:
    """Nodes in use with so many nodes in all; 0 if they are too few."""
    if job.policy == _CONTINUE:
        group_nodes = job.setup.group_nodes
        fitting = min(num_nodes // group_nodes * group_nodes, job.sizes[0].num_nodes)
        return int(fitting if fitting >= job.sizes[-1].num_nodes else 0)
    for index in range(len(job.sizes)):
        if job.sizes[index].num_nodes <= num_nodes:
            return int(job.sizes[index].num_nodes)
    return 0


@jit
def _gather(job: _Job) -> None:
    """Wait for as many nodes as the job needs, and take spares."""
    state = job.state
    _set_aging(job, False)
    start_s = state.now_s
    while not _fitting(job, state.held + state.spares):
        if state.now_s > job.limit_s or state.soonest_s == inf:
            state.is_endless = True
            return
        _advance(job, state.soonest_s)
        _happen(job)
    job.wasted_s[_WAITING] += state.now_s - start_s
    num_nodes = _fitting(job, state.held + state.spares)
    taken = max(0, num_nodes - state.held)
    state.held, state.spares = state.held + taken, state.spares - taken
    job.starting.clear()
    _set_in_use(job, num_nodes)
    _changed(job)


@jit
def _release_lost(job: _Job, delay_s: float) -> bool:
    """Send lost nodes away until they are spares again; returns True if spares that are there replace them all."""
    state, before = job.state, job.state.held
    spares = state.spares
    for source, num_nodes in job.lost:
        _take_away(job, source, num_nodes, delay_s)
    job.lost.clear()
    return bool(state.held < before and state.held + spares >= job.sizes[0].num_nodes)


@jit
def _take_away(job: _Job, source: int, num_nodes: int, delay_s: float) -> None:
    """Take nodes from the job until each is a spare."""
    setup, state, is_preemption = job.setup, job.state, source == len(job.causes)
    mean_s = setup.repair_s
    if is_preemption:
        mean_s = setup.spot_wait_s
    elif source < len(job.causes) - 2:
        mean_s = job.causes[source].repair_s
    num_nodes = min(num_nodes, state.held)
    state.held -= num_nodes
    for _ in range(num_nodes):
        is_exponential = is_preemption or setup.repair_is_exponential
        seconds = mean_s * (exponential(job.draws, source, RETURN) if is_exponential else 1.0) + delay_s
        if seconds > 0:
            heappush(job.returns, state.now_s + seconds)
        else:
            _add_spare(job)
    _changed(job)


@jit
def _add_spare(job: _Job) -> None:
    job.state.spares += 1
    if job.policy == _CONTINUE:
        _form_groups(job)


# Replica groups of the policy ``continue``.


@jit
def _can_go_on(job: _Job) -> bool:
    """True if groups are left that lose no node, and the stop is not for all."""
    state = job.state
    if job.policy != _CONTINUE or state.is_restarting or state.source == _WINDOW or state.corrupt_since_s < inf:
        return False
    return bool(state.in_use > _nodes_of_lost_groups(job))


@jit
def _nodes_of_lost_groups(job: _Job) -> int:
    """Nodes of the groups that leave; with a process that fails its group leaves."""
    num_groups = 0
    for _, num_nodes in job.lost:
        num_groups += max(1, -(-num_nodes // job.setup.group_nodes))
    return int(num_groups * job.setup.group_nodes)


@jit
def _leave(job: _Job, diagnosis_s: float) -> bool:
    """The groups of lost nodes leave, and the others go on; returns True if that is stopped."""
    _set_in_use(job, job.state.in_use - _nodes_of_lost_groups(job))
    _release_lost(job, diagnosis_s)
    _form_groups(job)
    start_s = job.state.now_s
    stopped = _spend(job, job.setup.reconfigure_s, 0.0)
    job.wasted_s[_MEMBERSHIP] += job.state.now_s - start_s
    return stopped


@jit
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
    _changed(job)


@jit
def _wait_for_group(job: _Job) -> None:
    """Below the smallest size: wait until groups that start are ready."""
    state = job.state
    start_s = state.now_s
    _set_aging(job, False)
    missing = (job.sizes[-1].num_nodes - state.in_use) // job.setup.group_nodes
    while len(job.starting) < missing or job.starting[missing - 1] > state.now_s:
        if state.now_s > job.limit_s or state.soonest_s == inf:
            state.is_endless = True
            return
        _advance(job, state.soonest_s)
        _happen(job)
    job.wasted_s[_WAITING] += state.now_s - start_s


@jit
def _join(job: _Job) -> bool:
    """All groups that are ready join; returns True if that is stopped."""
    state = job.state
    start_s, num_ready = state.now_s, 0
    while num_ready < len(job.starting) and job.starting[num_ready] <= start_s + ROUNDING:
        num_ready += 1
    stopped = _spend(job, job.setup.join_s, 0.0)
    job.wasted_s[_MEMBERSHIP] += state.now_s - start_s
    if not stopped:
        del job.starting[:num_ready]
        _set_in_use(job, state.in_use + num_ready * job.setup.group_nodes)
        _changed(job)
    return stopped
