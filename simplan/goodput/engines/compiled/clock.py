"""Time of a run, and what happens in it at each instant, in the order of ``setup``."""

from __future__ import annotations

from heapq import heappop
from math import ceil, inf

from simplan.goodput.engines.checkpoints import ROUNDING
from simplan.goodput.engines.compiled.nodes import (
    add_spares,
    can_grow,
    follow_trace,
    look_for_group,
    preempt,
    replace_on_demand,
)
from simplan.goodput.engines.compiled.sources import (
    changed,
    happen_in_age,
    look_ahead,
    next_exponential,
    set_aging,
)
from simplan.goodput.engines.compiled.state import GROWTH, WINDOW, CompiledRun, RunRecord
from simplan.goodput.engines.draws import WHEN
from simplan.goodput.setup import RunSetup
from simplan.jit import jit_inner


@jit_inner
def early_s(setup: RunSetup) -> float:
    """Seconds before maintenance at which the job stops to write a checkpoint."""
    return float(setup.blocking_s + setup.write_s if setup.checkpoint_every else 0.0)


@jit_inner
def in_window(state: RunRecord) -> bool:
    """True in a window of maintenance."""
    return bool(state.window_end_s - state.now_s > ROUNDING)


@jit_inner
def _happen(job: CompiledRun) -> None:
    """The first of the events of this instant."""
    state, until_s = job.state, job.state.now_s + ROUNDING
    if state.aging and state.next_age_s + state.not_aged_s <= until_s:
        happen_in_age(job)
    elif state.next_move_s <= until_s:
        _, change = heappop(job.moves)
        state.next_move_s = job.moves[0][0] if len(job.moves) else inf
        if change:
            replace_on_demand(job, change)
        else:
            add_spares(job, 1)
    elif state.preemption_at_s <= until_s:
        state.preemption_left = next_exponential(state, job.sources[-1], WHEN)
        state.preemption_since_s = state.now_s
        preempt(job, 1)
        changed(job.setup, state)
    elif state.trace_at_s <= until_s:
        follow_trace(job)
    elif state.window_at_s <= until_s:
        state.window_end_s = state.now_s + early_s(job.setup) + job.setup.maintenance_s
        state.window_at_s += job.setup.maintenance_every_s
    else:  # a group is ready
        state.cut = True
        look_for_group(state, job.starting)
    look_ahead(state)


@jit_inner
def advance(setup: RunSetup, state: RunRecord, time_s: float) -> None:
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
def go_to(job: CompiledRun, end_s: float) -> None:
    """Move to a time, or to the next instant at which something happens before, and let all of that happen."""
    state = job.state
    advance(job.setup, state, min(end_s, state.soonest_s))
    while state.soonest_s <= state.now_s + ROUNDING:
        _happen(job)


@jit_inner
def is_stopped(state: RunRecord, stops: list[tuple[int, int, bool, float, float]]) -> bool:
    """True if something stops the job now."""
    return bool(len(stops) or in_window(state) or can_grow(state))


@jit_inner
def _next_stop(state: RunRecord, stops: list[tuple[int, int, bool, float, float]]) -> bool:
    """True if something stops the job now; the state then says what."""
    if not len(stops):
        if state.is_stopping or not is_stopped(state, stops):
            return False
        stops.append((WINDOW if in_window(state) else GROWTH, 0, True, 0.0, inf))
    state.source, state.num_nodes, state.is_planned, state.detection_s, state.corrupt_since_s = stops.pop(0)
    return True


@jit_inner
def spend(job: CompiledRun, seconds: float, step_s: float) -> bool:
    """Time in which units grow older, until a stop, or with ``step_s`` until the end of a step that is cut.

    Returns True for a stop.
    """
    state = job.state
    start_s = state.now_s
    end_s = start_s + seconds
    set_aging(state, True)
    while end_s - state.now_s > ROUNDING:
        if _next_stop(state, job.stops):
            return True
        if state.cut and step_s > 0:
            end_s = min(end_s, start_s + ceil((state.now_s - start_s) / step_s - ROUNDING) * step_s)
            if end_s - state.now_s <= ROUNDING:
                break
        go_to(job, end_s)
    return False


@jit_inner
def idle(job: CompiledRun, seconds: float, part: int) -> None:
    """Time in which units do not grow older."""
    state = job.state
    set_aging(state, False)
    start_s, end_s = state.now_s, state.now_s + seconds
    while end_s - state.now_s > ROUNDING:
        go_to(job, end_s)
    state.wasted_s[part] += state.now_s - start_s
