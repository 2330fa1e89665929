"""Progress of a run, and the checkpoints to which it can go back: twin of ``engines.checkpoints``."""

from __future__ import annotations

from math import ceil, floor, inf

import numpy as np
from numpy.typing import NDArray

from simplan.goodput.engines.checkpoints import REPEATED, ROUNDING
from simplan.goodput.engines.compiled.sources import age
from simplan.goodput.engines.compiled.state import (
    CHECKPOINT,
    COMPLETE_AT,
    COMPUTE,
    DUE,
    EVALUATION,
    EVALUATION_DUE,
    FEWER_NODES,
    LOST_WORK,
    MEMORY_DUE,
    POSITION,
    PROGRESS,
    SLOW_DEVICE,
    STORAGE_DUE,
    RunRecord,
)
from simplan.goodput.setup import RunSetup
from simplan.jit import jit_inner


@jit_inner
def steps_until_pause(setup: RunSetup, state: RunRecord) -> int:
    """Steps until the next pause, or until the end of the run."""
    position, end = state.progress[POSITION], float(setup.num_steps)
    for every in (setup.evaluation_every, setup.memory_every, setup.checkpoint_every):
        if every:
            end = min(end, (floor(position / every + ROUNDING) + 1.0) * every)
    num: int = ceil((end - position) / state.advance - ROUNDING)
    return num


@jit_inner
def take_steps(setup: RunSetup, state: RunRecord, num: int, step_s: float) -> None:
    """Advance by steps that take ``step_s`` each."""
    progress, full_s = state.progress, state.advance * state.full_step_s
    progress[COMPUTE] += num * full_s
    progress[FEWER_NODES] += num * (state.size_step_s - full_s)
    progress[SLOW_DEVICE] += num * (step_s - state.size_step_s)
    before = progress[POSITION]
    after = before + num * state.advance
    progress[POSITION] = after
    progress[DUE] = (
        EVALUATION_DUE * _passes(setup.evaluation_every, before, after)
        + MEMORY_DUE * _passes(setup.memory_every, before, after)
        + STORAGE_DUE * _passes(setup.checkpoint_every, before, after)
    )


@jit_inner
def _passes(every: int, before: float, after: float) -> int:
    """1 if a multiple of an interval lies between two positions, else 0."""
    return int(every > 0 and floor(after / every + ROUNDING) > floor(before / every + ROUNDING))


@jit_inner
def next_due(state: RunRecord) -> int:
    """Bit of the next pause; 0 for none."""
    due = int(state.progress[DUE])
    return due & -due


@jit_inner
def pause_s(setup: RunSetup, state: RunRecord, history: list[tuple[float, ...]], due: int) -> float:
    """Seconds of a pause that begins now."""
    if due == EVALUATION_DUE:
        return float(setup.evaluation_s)
    if due == MEMORY_DUE:
        return float(setup.memory_blocking_s)
    return in_flight_s(setup, state, history) + setup.blocking_s


@jit_inner
def end_pause(setup: RunSetup, state: RunRecord, history: list[tuple[float, ...]], due: int, seconds: float) -> None:
    """Count a pause that has taken so many seconds, and keep its checkpoint."""
    progress = state.progress
    progress[EVALUATION if due == EVALUATION_DUE else CHECKPOINT] += seconds
    progress[DUE] -= due
    if due == MEMORY_DUE:
        _copy(progress, state.memory)
        state.memory[COMPLETE_AT] = age(state)
    elif due == STORAGE_DUE:
        save(setup, state, history, setup.write_s)


@jit_inner
def save(setup: RunSetup, state: RunRecord, history: list[tuple[float, ...]], write_s: float) -> None:
    """Write a checkpoint to the storage that counts after ``write_s``."""
    _copy(state.progress, state.in_flight)
    state.in_flight[COMPLETE_AT] = age(state)
    state.in_flight_at_s = state.now_s + write_s
    state.num_written += 1
    settle(setup, state, history)


@jit_inner
def _copy(numbers: NDArray[np.float64], to: NDArray[np.float64]) -> None:
    for index in range(PROGRESS):
        to[index] = numbers[index]


@jit_inner
def settle(setup: RunSetup, state: RunRecord, history: list[tuple[float, ...]]) -> None:
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
def in_flight_s(setup: RunSetup, state: RunRecord, history: list[tuple[float, ...]]) -> float:
    """Seconds until the checkpoint that is being written counts."""
    settle(setup, state, history)
    return float(state.in_flight_at_s - state.now_s if state.in_flight_at_s < inf else 0.0)


@jit_inner
def go_back(setup: RunSetup, state: RunRecord, history: list[tuple[float, ...]], corrupt_since_s: float) -> float:
    """Take the progress of the last checkpoint; returns the seconds to load it."""
    if corrupt_since_s < inf:
        _lose_since(state, history, corrupt_since_s)
    spent_s, load_s = _repeated_s(state.progress), 0.0
    state.progress[:] = 0.0
    if state.stored[COMPLETE_AT] > -inf:
        _copy(state.stored, state.progress)
        load_s = setup.load_s
    if state.memory[COMPLETE_AT] > state.stored[COMPLETE_AT]:
        _copy(state.memory, state.progress)
        load_s = setup.memory_load_s
    state.wasted_s[LOST_WORK] += spent_s - _repeated_s(state.progress)
    return float(load_s)


@jit_inner
def _lose_since(state: RunRecord, history: list[tuple[float, ...]], age_s: float) -> None:
    """Lose the checkpoints that were complete after an age."""
    while len(history) > state.oldest and history[-1][COMPLETE_AT] > age_s:
        history.pop()
    state.stored[COMPLETE_AT] = -inf
    if len(history) > state.oldest:
        last = history[-1]
        for index in range(PROGRESS):
            state.stored[index] = last[index]


@jit_inner
def _repeated_s(progress: NDArray[np.float64]) -> float:
    """Seconds of a progress."""
    seconds = 0.0
    for part in range(len(REPEATED)):
        seconds += progress[part]
    return seconds
