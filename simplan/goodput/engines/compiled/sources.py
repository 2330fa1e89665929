"""Sources of stops, their random numbers, and the ages at which they stop the job."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, log1p
from typing import Any

from numpy.typing import NDArray

from simplan.goodput.engines.compiled.state import SHRINK, CompiledRun, RunRecord, StopSource
from simplan.goodput.engines.draws import NOTICE, NUM_PURPOSES, WHEN
from simplan.goodput.engines.philox import uniform
from simplan.goodput.setup import CauseSetup, RunSetup
from simplan.jit import jit_inner

_HIDDEN = -1  # in place of a source, for a fault that is found


@jit_inner
def next_uniform(state: RunRecord, row: StopSource, purpose: int) -> float:
    """Next number of a stream of a source, uniform in [0, 1)."""
    index = row.num_drawn[purpose]
    row.num_drawn[purpose] = index + 1
    stream = NUM_PURPOSES * row.source + purpose
    return uniform(state.seed, state.number, stream, index, row.blocks[purpose])


@jit_inner
def next_exponential(state: RunRecord, row: StopSource, purpose: int) -> float:
    """Next number of a stream of a source, exponential with mean 1."""
    return -log1p(-next_uniform(state, row, purpose))


@jit_inner
def age(state: RunRecord) -> float:
    """Age of the units in seconds."""
    return float(state.now_s - state.not_aged_s)


@jit_inner
def look_ahead(state: RunRecord) -> None:
    """Find the time of the next thing that happens."""
    soonest_s = min(state.preemption_at_s, min(state.trace_at_s, state.window_at_s))
    soonest_s = min(soonest_s, min(state.next_move_s, state.next_ready_s))
    if state.aging:
        soonest_s = min(soonest_s, state.next_age_s + state.not_aged_s)
    state.soonest_s = soonest_s


@jit_inner
def look_ahead_in_age(state: RunRecord, sources: NDArray[Any], hidden: list[tuple[float, int, float]]) -> None:
    """Find the next event that comes with age: of a cause, or a fault that is found."""
    state.next_age_s = inf
    for source in range(len(sources)):
        next_age_s = sources[source].next_age_s
        if next_age_s < state.next_age_s:
            state.next_age_s, state.next_source = next_age_s, source
    if len(hidden) and hidden[0][0] < state.next_age_s:
        state.next_age_s, state.next_source = hidden[0][0], _HIDDEN
    look_ahead(state)


@jit_inner
def schedule(state: RunRecord, cause: StopSource, age_s: float) -> None:
    """Draw the age of the next event of a cause."""
    cause.next_age_s = inf
    if cause.mtbf_s < inf:
        cause.next_age_s = _age_of_next(cause, age_s, next_exponential(state, cause, WHEN), state.in_use)


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
def set_in_use(job: CompiledRun, in_use: int) -> None:
    """Change the number of nodes in use, and with it the size of the job and the rates of the causes."""
    state, before, age_s = job.state, job.state.in_use, age(job.state)
    state.in_use = in_use
    if before == in_use:
        return
    index = 0
    while job.sizes[index].num_nodes > in_use and index < len(job.sizes) - 1:
        index += 1
    state.size_step_s, state.advance = job.sizes[index].step_s, job.sizes[index].advance
    state.larger_nodes = job.sizes[index - 1].num_nodes if index and state.policy == SHRINK else 0
    for source in range(len(job.sources)):
        cause = job.sources[source]
        if cause.units_per_node and cause.next_age_s < inf:
            left = max(0.0, _expected(cause, cause.next_age_s) - _expected(cause, age_s)) * _units(cause, before)
            cause.next_age_s = _age_of_next(cause, age_s, left, in_use)
    look_ahead_in_age(state, job.sources, job.hidden)


@jit_inner
def changed(setup: RunSetup, state: RunRecord) -> None:
    """Set the time of the next preemption after a change of the nodes that can be preempted."""
    mtbf_s = setup.preemption_mtbf_s
    state.preemption_at_s = inf
    if mtbf_s < inf:
        expected = state.preemption_nodes * (state.now_s - state.preemption_since_s) / mtbf_s
        state.preemption_left = max(0.0, state.preemption_left - expected)
        state.preemption_nodes, state.preemption_since_s = state.held - state.on_demand, state.now_s
        if state.preemption_nodes > 0:
            state.preemption_at_s = state.now_s + state.preemption_left * mtbf_s / state.preemption_nodes
    look_ahead(state)


@jit_inner
def set_aging(state: RunRecord, aging: bool) -> None:
    """Let units grow older from now on, or not."""
    if state.aging != aging:
        state.aging = aging
        look_ahead(state)


@jit_inner
def happen_in_age(job: CompiledRun) -> None:
    """The next event that comes with age."""
    state, num_sources = job.state, len(job.sources)
    corruption, slow, source, age_s = num_sources - 3, num_sources - 2, state.next_source, state.next_age_s
    if source == _HIDDEN:
        _, source, corrupt_since_s = heappop(job.hidden)
        if source == slow:
            state.num_slow -= 1
        job.stops.append((source, 1, source == slow, 0.0, corrupt_since_s))
    else:
        cause = job.sources[source]
        schedule(state, cause, age_s)
        if source == corruption:
            found_s = job.setup.corruption_found_s * next_exponential(state, cause, NOTICE)
            heappush(job.hidden, (age_s + found_s, source, age_s))
        elif source == slow:
            heappush(job.hidden, (age_s + job.setup.slow_found_s * next_exponential(state, cause, NOTICE), source, inf))
            state.num_slow += 1
            state.cut = True
        else:
            detection_s = _detection_s(job.setup, state, cause)
            job.stops.append((source, cause.num_nodes, cause.planned, detection_s, inf))
    look_ahead_in_age(state, job.sources, job.hidden)


@jit_inner
def _detection_s(setup: RunSetup, state: RunRecord, cause: StopSource) -> float:
    """Seconds until a failure is noticed."""
    noticed = next_uniform(state, cause, NOTICE)
    if noticed < cause.at_once:
        return 0.0
    return float(setup.timeout_s if noticed < cause.at_once + cause.timeout else setup.detection_s)
