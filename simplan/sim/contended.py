"""The compiled engine of shared links: one step whose communications slow each other down.

It does what SimPy does with ``simplan.sim.links``, event by event in the same order, so times are equal to the last
bit. SimPy is the reference, and runs what this engine does not: cores that ranks share, and steps of other jobs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from simplan.network.max_min import (
    DONE,
    NEEDS_ROOM,
    NOW_S,
    NUM_COUNTS,
    NUM_TIMES,
    OPS_ENDED,
    advance,
    arrive,
    begin,
    run_step,
)
from simplan.network.running import Flaps, LinkLists, Paths, Running, Segments, StepOps, StepState
from simplan.network.usage import LinkUse
from simplan.program.program import STREAMS, Program
from simplan.sim.compiled import leaders_of
from simplan.sim.engine import SimulatedTimes

Progress = Callable[[int, int], None]
_NEVER = 2**62
_Floats = npt.NDArray[np.float64]


def contended_times(
    program: Program, durations_s: _Floats, use: LinkUse, progress: Progress | None = None
) -> SimulatedTimes:
    """Returns start and end of every operation, as ``simplan.sim.engine.simulate`` does.

    Args:
        program, durations_s, progress: See ``simulate``.
        use: Links that communications share.
    """
    leaders = leaders_of(program)
    ops, heads = _ops_of(program, leaders, durations_s, use)
    paths = Paths.of(use.first, use.link, use.seconds, use.connections, use.transfer_s)
    lists, capacity = LinkLists.empty(use.num_links, paths), np.ones(use.num_links)
    share, first_s, slow_s, period_s = (np.array([flap[column] for flap in use.flaps], float) for column in range(1, 5))
    of_link = np.array([flap.link for flap in use.flaps], np.int32)
    flaps = Flaps(of_link, share, first_s, slow_s, period_s, np.zeros(len(use.flaps), np.int64))
    num_slots = 1 << (_most_moving(program, use) + len(use.always)).bit_length()
    running, segments, num_segments = Running.empty(num_slots), Segments.empty(num_slots), 0
    state = _beginning(program, leaders, len(heads), num_slots)
    for usage in use.always:
        begin(running, state, len(use.usage) + usage - use.num_usages_of_ops, usage, 1.0, np.inf)
    for op in heads:
        arrive(running, ops, state, op)
    num_all = int((use.usage >= 0).sum())
    reason = NEEDS_ROOM
    while reason != DONE:
        report = _NEVER if progress is None else _next_report(int(state.counts[OPS_ENDED]), num_all)
        reason, num_segments = run_step(
            paths, running, lists, capacity, flaps, ops, state, segments, num_segments, report
        )
        if reason == NEEDS_ROOM:
            segments = segments.doubled()
        elif reason != DONE and progress is not None:
            progress(int(state.counts[OPS_ENDED]), num_all)
    assert not state.missing.any(), "deadlock in a checked Program"
    always = np.arange(len(use.always), dtype=np.int32)
    if num_segments + len(always) > len(segments.op):
        segments = segments.doubled()
    num_segments = advance(running, always, float(state.times_s[NOW_S]), segments, num_segments)
    segments = Segments._make(column[:num_segments].copy() for column in segments)
    return SimulatedTimes(state.start_s[leaders], state.end_s[leaders], segments)


def _next_report(num_ended: int, num_all: int) -> int:
    """Number of ended communications at which the next hundredth is complete."""
    return -(-num_all * (100 * num_ended // num_all + 1) // 100)


def _ops_of(
    program: Program, leaders: npt.NDArray[np.int64], durations_s: _Floats, use: LinkUse
) -> tuple[StepOps, npt.NDArray[np.int32]]:
    """Operations of a Program, and the first of each stream in order of occurrence."""
    columns, num_ops = program.columns, len(program)
    place = columns.rank.astype(np.int64) * len(STREAMS) + columns.stream
    order = np.argsort(place, kind="stable")
    follows = np.flatnonzero(np.diff(place[order]) == 0)
    next_op = np.full(num_ops, -1, np.int32)
    next_op[order[follows]] = order[follows + 1]
    heads = np.sort(order[np.diff(place[order], prepend=-1) != 0]).astype(np.int32)
    first = np.zeros(num_ops + 1, np.int64)
    np.cumsum(np.bincount(columns.wait, minlength=num_ops), out=first[1:])
    waiting = np.repeat(leaders, np.diff(columns.wait_first))
    follower = waiting[np.argsort(columns.wait, kind="stable")].astype(np.int32)
    ops = StepOps(
        leaders.astype(np.int32),
        next_op,
        first,
        follower,
        np.ascontiguousarray(durations_s, np.float64),
        use.usage,
        use.fixed_share,
        use.sequence_s,
        use.following,
        use.num_flows,
    )
    return ops, heads


def _most_moving(program: Program, use: LinkUse) -> int:
    """Upper bound on the usages that run at the same time: each stream runs its largest phase."""
    place = program.columns.rank.astype(np.int64) * len(STREAMS) + program.columns.stream
    of_sequence = np.ones(len(use.head) + 1, np.int64)  # the last for operations without a usage
    np.maximum.at(of_sequence, use.head, use.num_flows)
    most = np.zeros(1 + int(place.max(initial=0)), np.int64)
    np.maximum.at(most, place, of_sequence[use.usage])
    return int(most.sum())


def _beginning(program: Program, leaders: npt.NDArray[np.int64], num_streams: int, num_slots: int) -> StepState:
    """State in which no operation is at the head of its stream."""
    num_ops, needs = len(program), 1 + np.diff(program.columns.wait_first)
    missing = np.bincount(leaders, needs, num_ops).astype(np.int32)
    last, following, moving = (np.full(num_ops, fill, np.int32) for fill in (-1, -1, 0))
    start_s, end_s, event_s = np.zeros(num_ops), np.zeros(num_ops), np.zeros(num_streams + 1)
    numbers, events = np.zeros(num_streams + 1, np.int64), np.zeros(num_streams + 1, np.int32)
    begun, free, ended, ends_next = (np.zeros(num_slots, np.int32) for _ in range(4))
    counts, times_s = np.zeros(NUM_COUNTS, np.int64), np.zeros(NUM_TIMES)
    times_s[1:] = np.inf
    return StepState(
        missing=missing,
        last_arrival=last,
        next_arrival=following,
        moving=moving,
        start_s=start_s,
        end_s=end_s,
        event_s=event_s,
        event_number=numbers,
        event=events,
        begun=begun,
        free=free,
        ended=ended,
        ends_next=ends_next,
        counts=counts,
        times_s=times_s,
    )
