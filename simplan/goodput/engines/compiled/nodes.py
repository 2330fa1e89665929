"""Nodes that leave and return: spares, repairs, spot nodes, and replica groups of the policy ``continue``."""

from __future__ import annotations

from heapq import heappush
from math import inf
from typing import Any

from numpy.typing import NDArray

from simplan.goodput.engines.checkpoints import ROUNDING
from simplan.goodput.engines.compiled.sources import changed, next_exponential, next_uniform
from simplan.goodput.engines.compiled.state import COMPLETE_AT, CONTINUE, CompiledRun, RunRecord
from simplan.goodput.engines.draws import RETURN, WHEN
from simplan.goodput.setup import RunSetup
from simplan.jit import jit_inner


@jit_inner
def fitting(setup: RunSetup, state: RunRecord, sizes: NDArray[Any], num_nodes: int) -> int:
    """Nodes in use with so many nodes in all; 0 if they are too few."""
    if state.policy == CONTINUE:
        group_nodes = setup.group_nodes
        in_groups = min(num_nodes // group_nodes * group_nodes, sizes[0].num_nodes)
        return int(in_groups if in_groups >= sizes[-1].num_nodes else 0)
    for index in range(len(sizes)):
        if sizes[index].num_nodes <= num_nodes:
            return int(sizes[index].num_nodes)
    return 0


@jit_inner
def can_grow(state: RunRecord) -> bool:
    """True if nodes for a larger size are there."""
    return bool(state.larger_nodes and state.held + state.spares >= state.larger_nodes)


@jit_inner
def _take_away(job: CompiledRun, source: int, num_nodes: int, delay_s: float) -> int:
    """Take nodes from the job until each is a spare; returns the number of those that are spares at once."""
    state, row = job.state, job.sources[source]
    num_nodes = min(num_nodes, state.held)
    state.held -= num_nodes
    is_exponential = source == state.num_sources - 1 or job.setup.repair_is_exponential
    num_back = 0
    for _ in range(num_nodes):
        seconds = row.repair_s * (next_exponential(state, row, RETURN) if is_exponential else 1.0) + delay_s
        if seconds <= 0:
            num_back += 1
        elif seconds < inf:
            heappush(job.moves, (state.now_s + seconds, 0))
            state.next_move_s = job.moves[0][0]
    changed(job.setup, state)
    return num_back


@jit_inner
def release_lost(job: CompiledRun, delay_s: float) -> bool:
    """Send lost nodes away until they are spares again; returns True if spares that are there replace them all."""
    state, before = job.state, job.state.held
    spares = state.spares
    num_back = 0
    for source, num_nodes in job.lost:
        num_back += _take_away(job, source, num_nodes, delay_s)
    job.lost.clear()
    is_hot = state.held < before and state.held + spares >= job.sizes[0].num_nodes
    add_spares(job, num_back)
    return bool(is_hot)


@jit_inner
def add_spares(job: CompiledRun, num: int) -> None:
    """Nodes that have returned."""
    state = job.state
    paid = min(num, state.debt)
    state.debt -= paid
    state.spares += num - paid
    if state.policy == CONTINUE:
        form_groups(job)


# Spot nodes.


@jit_inner
def preempt(job: CompiledRun, num_nodes: int) -> None:
    """Take spot nodes away from the job, or with nodes on demand in their place."""
    state, setup = job.state, job.setup
    if setup.on_demand:
        replace_on_demand(job, num_nodes)
    if num_nodes > 1:
        state.memory[COMPLETE_AT] = -inf
    if state.aging or (state.policy == CONTINUE and not state.is_restarting):
        write_s = setup.blocking_s + setup.write_s
        is_planned = setup.checkpoint_every > 0 and 0.0 < write_s <= setup.notice_s
        num_lost = 0 if setup.on_demand else num_nodes
        job.stops.append((state.num_sources - 1, num_lost, is_planned, setup.detection_s, inf))
    elif not setup.on_demand:
        add_spares(job, _take_away(job, state.num_sources - 1, num_nodes, 0.0))


@jit_inner
def replace_on_demand(job: CompiledRun, change: int) -> None:
    """Put nodes on demand in the place of spot nodes, or with a negative change the other way round."""
    state = job.state
    state.on_demand += change
    if not len(job.trace):
        for _ in range(change):
            seconds = job.setup.spot_wait_s * next_exponential(state, job.sources[-1], RETURN)
            heappush(job.moves, (state.now_s + seconds, -1))
            state.next_move_s = job.moves[0][0]
    changed(job.setup, state)


@jit_inner
def begin_trace(job: CompiledRun) -> None:
    """Begin at a random point of the trace."""
    state, row, num_nodes = job.state, 0, job.sizes[0].num_nodes
    start_s = job.trace[-1, 0] * next_uniform(state, job.sources[-1], WHEN)
    while job.trace[row + 1, 0] <= start_s:
        row += 1
    offered = int(job.trace[row, 1])
    state.trace_row, state.trace_at_s = row, job.trace[row + 1, 0] - start_s
    state.held, state.spares = 0, offered
    if job.setup.on_demand and offered < num_nodes:
        state.held, state.spares, state.on_demand = num_nodes, 0, num_nodes - offered


@jit_inner
def follow_trace(job: CompiledRun) -> None:
    """Spot nodes come or go as the next row of the trace says; after the last one it begins again.

    It takes spares first, then nodes of the job, then nodes in repair.
    """
    state, before = job.state, job.state.trace_row
    if state.now_s > state.limit_s:
        state.is_endless = True
    row = (before + 1) % (len(job.trace) - 1)
    state.trace_row = row
    state.trace_at_s = state.now_s + (job.trace[row + 1, 0] - job.trace[row, 0])
    change = int(job.trace[row, 1] - job.trace[before, 1])
    if change > 0:
        back = min(change, state.on_demand)
        replace_on_demand(job, -back)
        add_spares(job, change - back)
    elif change < 0:
        spares = min(-change, state.spares)
        state.spares -= spares
        num_lost = 0
        for _, num in job.lost:
            num_lost += num
        preempted = max(0, min(-change - spares, state.held - state.on_demand - num_lost))
        if preempted:
            preempt(job, preempted)
        state.debt += -change - spares - preempted


# Replica groups of the policy ``continue``.


@jit_inner
def nodes_of_lost_groups(setup: RunSetup, lost: list[tuple[int, int]]) -> int:
    """Nodes of the groups that leave; with a process that fails its group leaves."""
    num_groups = 0
    for _, num_nodes in lost:
        num_groups += max(1, -(-num_nodes // setup.group_nodes))
    return int(num_groups * setup.group_nodes)


@jit_inner
def form_groups(job: CompiledRun) -> None:
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
    look_for_group(state, job.starting)
    changed(job.setup, job.state)


@jit_inner
def look_for_group(state: RunRecord, starting: list[float]) -> None:
    """Find the time at which the next group is ready."""
    state.next_ready_s = inf
    for ready_s in starting:
        if ready_s > state.now_s + ROUNDING:
            state.next_ready_s = ready_s
            break
