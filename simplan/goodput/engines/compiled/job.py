"""The job: steps, pauses, and the recovery after a stop."""

from __future__ import annotations

from math import floor, inf

from simplan.goodput.engines.checkpoints import ROUNDING
from simplan.goodput.engines.compiled.checkpoints import (
    end_pause,
    go_back,
    in_flight_s,
    next_due,
    pause_s,
    save,
    settle,
    steps_until_pause,
    take_steps,
)
from simplan.goodput.engines.compiled.clock import advance, early_s, go_to, idle, in_window, is_stopped, spend
from simplan.goodput.engines.compiled.nodes import begin_trace, fitting, form_groups, nodes_of_lost_groups, release_lost
from simplan.goodput.engines.compiled.sources import (
    changed,
    look_ahead_in_age,
    next_exponential,
    schedule,
    set_aging,
    set_in_use,
)
from simplan.goodput.engines.compiled.state import (
    CHECKPOINT,
    COMPLETE_AT,
    CONTINUE,
    DETECTION,
    DIAGNOSIS,
    DUE,
    EVALUATION_DUE,
    LOST_WORK,
    MAINTENANCE,
    MEMBERSHIP,
    POSITION,
    RESTART,
    WAITING,
    WINDOW,
    CompiledRun,
    RunRecord,
)
from simplan.goodput.engines.draws import WHEN
from simplan.goodput.setup import RunSetup
from simplan.jit import jit_inner


@jit_inner
def begin(job: CompiledRun) -> None:
    """State at the start of a run."""
    setup, state = job.setup, job.state
    state.full_step_s = job.sizes[0].step_s
    state.held = job.sizes[0].num_nodes
    state.spares = setup.spares
    state.in_flight_at_s = state.next_move_s = state.next_ready_s = state.trace_at_s = inf
    state.stored[COMPLETE_AT] = state.memory[COMPLETE_AT] = -inf
    state.window_at_s, state.window_end_s = max(0.0, setup.maintenance_every_s - early_s(setup)), -inf
    if len(job.trace):
        begin_trace(job)
    if setup.preemption_mtbf_s < inf:
        state.preemption_left = next_exponential(state, job.sources[-1], WHEN)
    set_in_use(job, job.sizes[0].num_nodes)
    for source in range(len(job.sources)):
        schedule(state, job.sources[source], 0.0)
    changed(setup, state)
    look_ahead_in_age(state, job.sources, job.hidden)


@jit_inner
def train(job: CompiledRun) -> None:
    """The run from its first step to its last."""
    if len(job.trace):
        job.state.is_restarting = True
        _gather(job)
        job.state.is_restarting = False
    while not (_is_done(job.setup, job.state) or job.state.is_endless):
        stopped = _go_on(job)
        while stopped and not job.state.is_endless:
            stopped = _recover(job)


@jit_inner
def _is_done(setup: RunSetup, state: RunRecord) -> bool:
    return bool(not state.progress[DUE] and state.progress[POSITION] >= setup.num_steps - ROUNDING)


@jit_inner
def _go_on(job: CompiledRun) -> bool:
    """Continue with a group that joins, or with pauses and steps; returns True if the job stops."""
    state = job.state
    if state.policy == CONTINUE:
        if state.in_use < job.sizes[-1].num_nodes:
            _wait_for_group(job)
        if len(job.starting) and job.starting[0] <= state.now_s + ROUNDING:
            return _join(job)
    set_aging(state, True)
    if not is_stopped(state, job.stops):
        _pass_undisturbed(job.setup, state, job.history)
        if _is_done(job.setup, state):
            return False
    return _pause(job) if state.progress[DUE] else _steps(job)


@jit_inner
def _pass_undisturbed(setup: RunSetup, state: RunRecord, history: list[tuple[float, ...]]) -> None:
    """Pauses and steps that end before the next thing happens."""
    while not _is_done(setup, state):
        due = next_due(state)
        num = 0 if due else steps_until_pause(setup, state)
        seconds = pause_s(setup, state, history, due) if due else num * _step_s(setup, state)
        start_s, end_s = state.now_s, state.now_s + seconds
        if end_s > state.soonest_s - ROUNDING:
            return
        advance(setup, state, end_s)
        if due:
            end_pause(setup, state, history, due, end_s - start_s)
        else:
            take_steps(setup, state, num, _step_s(setup, state))


@jit_inner
def _steps(job: CompiledRun) -> bool:
    """Steps until the next pause; returns True if the job stops."""
    setup, state = job.setup, job.state
    step_s = _step_s(setup, state)
    num = steps_until_pause(setup, state)
    state.cut, start_s = False, state.now_s
    stopped = spend(job, num * step_s, step_s)
    elapsed_s = state.now_s - start_s
    if stopped:
        num = min(num, floor(elapsed_s / step_s + ROUNDING))
        state.wasted_s[LOST_WORK] += elapsed_s - num * step_s
    elif state.cut:
        num = min(num, round(elapsed_s / step_s))
    if num:
        take_steps(setup, state, num, step_s)
    return stopped


@jit_inner
def _step_s(setup: RunSetup, state: RunRecord) -> float:
    return float(state.size_step_s * (setup.slow_factor if state.num_slow else 1.0))


@jit_inner
def _pause(job: CompiledRun) -> bool:
    """The pause that is due; returns True if the job stops."""
    setup, state = job.setup, job.state
    due, start_s = next_due(state), state.now_s
    if spend(job, pause_s(setup, state, job.history, due), 0.0):
        state.wasted_s[LOST_WORK] += state.now_s - start_s
        return True
    end_pause(setup, state, job.history, due, state.now_s - start_s)
    return False


@jit_inner
def _recover(job: CompiledRun) -> bool:
    """From a stop until the job trains again, or until the next stop; returns True for the latter."""
    setup, state = job.setup, job.state
    _note(job)
    is_planned, detection_s, corrupt_since_s = state.is_planned, state.detection_s, state.corrupt_since_s
    goes_on, load_s = state.policy == CONTINUE and _can_go_on(job), 0.0
    if is_planned:
        if setup.checkpoint_every and not state.is_restarting and _write_before_stop(job):
            return True
    else:
        settle(setup, state, job.history)
        state.in_flight_at_s = inf
    if not goes_on:
        state.is_restarting = True
        load_s = go_back(setup, state, job.history, corrupt_since_s)
    if not is_planned:
        idle(job, detection_s, DETECTION)
    if goes_on:
        return _leave(job, 0.0 if is_planned else setup.diagnosis_s)
    if not is_planned:
        idle(job, setup.diagnosis_s, DIAGNOSIS)
    return _restart(job, load_s)


@jit_inner
def _note(job: CompiledRun) -> None:
    state = job.state
    state.num_stops += 1
    if state.num_stops > state.max_stops or state.now_s > state.limit_s:
        state.is_endless = True
    if state.source >= 0:
        job.sources[state.source].num_interruptions += 1
        job.lost.append((state.source, state.num_nodes))
    if state.num_nodes > 1 or state.source == WINDOW or state.corrupt_since_s < inf:
        state.memory[COMPLETE_AT] = -inf


@jit_inner
def _can_go_on(job: CompiledRun) -> bool:
    """True if groups are left that lose no node, and the stop is not for all."""
    state = job.state
    if state.is_restarting or state.source == WINDOW or state.corrupt_since_s < inf:
        return False
    return bool(state.in_use > nodes_of_lost_groups(job.setup, job.lost))


@jit_inner
def _write_before_stop(job: CompiledRun) -> bool:
    """A checkpoint, its whole writing time included; returns True if something else stops the job."""
    setup, state = job.setup, job.state
    start_s, progress = state.now_s, state.progress
    state.is_stopping = True
    stopped = spend(job, in_flight_s(setup, state, job.history) + setup.blocking_s + setup.write_s, 0.0)
    state.is_stopping = False
    if stopped:
        state.wasted_s[LOST_WORK] += state.now_s - start_s
        return True
    settle(setup, state, job.history)
    progress[CHECKPOINT] += state.now_s - start_s
    if not int(progress[DUE]) & EVALUATION_DUE:
        progress[DUE] = 0.0
    save(setup, state, job.history, 0.0)
    return False


@jit_inner
def _restart(job: CompiledRun, load_s: float) -> bool:
    """Wait for nodes and for the end of maintenance, then start all ranks; returns True if that is stopped."""
    setup, state = job.setup, job.state
    is_hot = release_lost(job, 0.0)
    _gather(job)
    while in_window(state):
        idle(job, state.window_end_s - state.now_s, MAINTENANCE)
        _gather(job)
    restart_s = setup.takeover_s if is_hot and setup.takeover_s < inf else setup.restart_s
    start_s = state.now_s
    state.is_restarting = spend(job, restart_s + load_s, 0.0)
    state.wasted_s[RESTART] += state.now_s - start_s
    if state.policy == CONTINUE:
        form_groups(job)
    return bool(state.is_restarting)


@jit_inner
def _gather(job: CompiledRun) -> None:
    """Wait for as many nodes as the job needs, and take spares."""
    state = job.state
    set_aging(state, False)
    start_s = state.now_s
    while not fitting(job.setup, state, job.sizes, state.held + state.spares):
        if state.now_s > state.limit_s or state.soonest_s == inf:
            state.is_endless = True
            return
        go_to(job, inf)
    state.wasted_s[WAITING] += state.now_s - start_s
    num_nodes = fitting(job.setup, state, job.sizes, state.held + state.spares)
    taken = max(0, num_nodes - state.held)
    state.held, state.spares = state.held + taken, state.spares - taken
    job.starting.clear()
    state.next_ready_s = inf
    set_in_use(job, num_nodes)
    changed(job.setup, job.state)


@jit_inner
def _leave(job: CompiledRun, diagnosis_s: float) -> bool:
    """The groups of lost nodes leave, and the others go on; returns True if that is stopped."""
    set_in_use(job, job.state.in_use - nodes_of_lost_groups(job.setup, job.lost))
    release_lost(job, diagnosis_s)
    form_groups(job)
    start_s = job.state.now_s
    stopped = spend(job, job.setup.reconfigure_s, 0.0)
    job.state.wasted_s[MEMBERSHIP] += job.state.now_s - start_s
    return stopped


@jit_inner
def _wait_for_group(job: CompiledRun) -> None:
    """Below the smallest size: wait until groups that start are ready."""
    state = job.state
    start_s = state.now_s
    set_aging(state, False)
    missing = (job.sizes[-1].num_nodes - state.in_use) // job.setup.group_nodes
    while len(job.starting) < missing or job.starting[missing - 1] > state.now_s + ROUNDING:
        if state.now_s > state.limit_s or state.soonest_s == inf:
            state.is_endless = True
            return
        go_to(job, inf)
    state.wasted_s[WAITING] += state.now_s - start_s


@jit_inner
def _join(job: CompiledRun) -> bool:
    """All groups that are ready join; returns True if that is stopped."""
    state = job.state
    start_s, num_ready = state.now_s, 0
    while num_ready < len(job.starting) and job.starting[num_ready] <= start_s + ROUNDING:
        num_ready += 1
    stopped = spend(job, job.setup.join_s, 0.0)
    state.wasted_s[MEMBERSHIP] += state.now_s - start_s
    if not stopped:
        del job.starting[:num_ready]
        set_in_use(job, state.in_use + num_ready * job.setup.group_nodes)
        changed(job.setup, job.state)
    return stopped
