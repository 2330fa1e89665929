"""Finds ranks that compute for longer than others that have the same to do, in the recorded steps of a run."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from executor.profiling.recorder import StepRecord
from executor.profiling.steady import LEAST_STEADY
from simplan.program.measurement import MeasuredCollective, MeasuredSpan, SlowRank
from simplan.program.run_spec import RunSpec
from simplan.spec.plan import RankMapping
from simplan.units import format_time

__all__ = ["LEAST_FACTOR", "compute_s", "find_slow_ranks", "told"]

LEAST_FACTOR = 1.3
"""Times the others' that a rank must take to be told."""

_LEAST_TIME_S = 2.0  # that the steps take together
_MESSAGES = ("send", "recv")
_MOST_NAMED = 4


def find_slow_ranks(job: RunSpec, steps: Sequence[Sequence[StepRecord]], *, cuda: bool) -> tuple[SlowRank, ...]:
    """Ranks that are slow beyond doubt.

    Compared are ranks of the same pipeline place (and the same part of a sequence). A rank is slow when its median is
    at least ``LEAST_FACTOR`` times that of the fastest half of them, and when nine of ten of its steps take longer than
    nine of ten of theirs: so that a loaded machine, where all ranks scatter, has none. Short runs have none either: for
    so long another process may have been in the way.

    Args:
        job: What was run.
        steps: The steady steps: of each, the record of every rank.
        cuda: Ranks compute on CUDA devices.
    """
    if len(steps) < LEAST_STEADY or sum(_time_s(step) for step in steps) < _LEAST_TIME_S:
        return ()
    if job.plan.ep > 1:  # experts have as much to do as is routed to them
        return ()
    mapping = RankMapping.of(job.plan)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(job.plan.num_devices):
        place = mapping.place(rank)
        alike[place.pp, place.cp].append(rank)
    buckets = job.plan.dp > 1 and not job.plan.shards_parameters
    times_s = [[compute_s(record, buckets=buckets, cuda=cuda) for record in step] for step in steps]
    return tuple(slow for ranks in alike.values() for slow in _slow_among(ranks, times_s))


def compute_s(record: StepRecord, *, buckets: bool, cuda: bool) -> float:
    """Seconds in which a rank was seen to compute in a step: its actions without the time they stood still for others.

    On the CPU a collective of gloo returns when all members have come, but for DDP's all-reduces beside backward: there
    the rank stands still from the last of a backward on. On CUDA, where collectives run on streams of their own,
    actions with collectives are left out.

    Args:
        record: The step; messages are between its actions.
        buckets: DDP averages the gradients.
        cuda: The rank computes on a CUDA device.
    """
    collectives = [c for c in record.collectives if c.kind not in _MESSAGES and c.end_s is not None]
    if cuda:
        return sum(span.end_s - span.start_s for span in record.spans if not _inside(span, collectives))
    return sum(_own_s(span, collectives, buckets=buckets) for span in record.spans)


def told(slow: SlowRank) -> str:
    """For people."""
    others = [f"rank {rank}" for rank in slow.compared_with]
    among = others[0] if len(others) == 1 else f"{', '.join(others[:-1])} and {others[-1]}"
    if len(others) > _MOST_NAMED:
        among = f"{len(others)} others"
    same = "which has" if len(others) == 1 else "which have"
    return (
        f"rank {slow.rank} computes {slow.factor:.1f} times as long as {among}, {same} the same to do: "
        f"{format_time(slow.compute_s)} of every step beside {format_time(slow.others_compute_s)}"
    )


def _time_s(step: Sequence[StepRecord]) -> float:
    return max(record.end_s for record in step) - min(record.start_s for record in step)


def _slow_among(ranks: Sequence[int], times_s: Sequence[Sequence[float]]) -> Iterator[SlowRank]:
    """Ranks with the same to do; times by step and rank."""
    of_rank = {rank: sorted(step[rank] for step in times_s) for rank in ranks}
    by_speed = sorted(ranks, key=lambda rank: (statistics.median(of_rank[rank]), rank))
    fast = sorted(by_speed[: len(ranks) // 2])
    theirs = sorted(time_s for rank in fast for time_s in of_rank[rank])
    for rank in ranks:
        if rank in fast or not fast:
            continue
        median_s, others_s = statistics.median(of_rank[rank]), statistics.median(theirs)
        low_s, _ = _without_a_tenth(of_rank[rank])
        _, high_s = _without_a_tenth(theirs)
        if low_s > high_s and median_s >= LEAST_FACTOR * others_s > 0.0:
            yield SlowRank(
                rank=rank,
                factor=median_s / others_s,
                compared_with=tuple(fast),
                compute_s=median_s,
                others_compute_s=others_s,
            )


def _without_a_tenth(ordered: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest, a tenth at either end left out, at least one."""
    left_out = math.ceil(len(ordered) / 10)
    return ordered[left_out], ordered[-1 - left_out]


def _inside(span: MeasuredSpan, collectives: Sequence[MeasuredCollective]) -> list[MeasuredCollective]:
    return [c for c in collectives if span.start_s <= c.start_s <= span.end_s]


def _own_s(span: MeasuredSpan, collectives: Sequence[MeasuredCollective], *, buckets: bool) -> float:
    inside = _inside(span, collectives)
    still = [(c.start_s, c.end_s or c.start_s) for c in inside if not (buckets and c.kind == "all_reduce")]
    averaged = [c for c in inside if buckets and c.kind == "all_reduce"]
    if averaged:
        still.append((max(c.start_s for c in averaged), max(c.end_s or c.start_s for c in averaged)))
    own_s, now_s = 0.0, span.start_s
    for low_s, high_s in sorted(still):
        own_s += max(0.0, min(low_s, span.end_s) - now_s)
        now_s = max(now_s, high_s)
    return own_s + max(0.0, span.end_s - now_s)
