"""Analysis of recorded steps: the beginning of the steady state, and ranks that compute slower than their peers."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from executor.profiling.recorder import StepRecord
from simplan.plan.plan import RankMapping
from simplan.runs.measurement import MeasuredCollective, MeasuredSpan, SlowRank
from simplan.runs.run_spec import RunSpec

MIN_STEADY_STEPS = 5
"""Last steps of a run, which always count as steady."""

MIN_SLOWDOWN = 1.3
"""Smallest reported ratio of a rank's compute time to that of its peers."""

_MIN_TIME_S = 2.0  # of all steps together
_P2P = ("send", "recv")


def steady_from(times_s: Sequence[float]) -> int:
    """Index of the first steady step.

    MSER (White 1997, "An effective truncation heuristic for bias reduction in simulation output"): first steps are
    removed as long as that reduces the standard error of the mean of the others, up to half of the steps. A slow step
    in the second half is not removed.
    """
    times = np.asarray(times_s)
    most = max(0, min(len(times) // 2, len(times) - MIN_STEADY_STEPS))
    if not most:
        return 0
    return int(np.argmin([times[begin:].var() / (len(times) - begin) for begin in range(most + 1)]))


def find_slow_ranks(job: RunSpec, steps: Sequence[Sequence[StepRecord]], *, cuda: bool) -> tuple[SlowRank, ...]:
    """Finds ranks that are slow beyond doubt.

    Peers are ranks of the same pipeline stage and the same part of a sequence. A slow rank meets two conditions. Its
    median is at least ``MIN_SLOWDOWN`` times that of the fastest half of its peers. Its 10th percentile exceeds that
    half's 90th percentile. So a loaded machine, where the times of all ranks scatter, has no slow rank. Nor has a short
    run, in which another process may have slowed a rank.

    Args:
        steps: Records of all ranks in every steady step.
    """
    total_s = sum(max(r.end_s for r in step) - min(r.start_s for r in step) for step in steps)
    if len(steps) < MIN_STEADY_STEPS or total_s < _MIN_TIME_S:
        return ()
    if job.plan.ep > 1:  # the work of experts depends on the routing
        return ()
    mapping = RankMapping.of(job.plan)
    peers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(job.plan.num_devices):
        place = mapping.place(rank)
        peers[place.pp, place.cp].append(rank)
    buckets = job.plan.dp > 1 and not job.plan.shards_parameters
    times_s = [[compute_s(record, buckets=buckets, cuda=cuda) for record in step] for step in steps]
    return tuple(slow for ranks in peers.values() for slow in _slow_among(ranks, times_s))


def compute_s(record: StepRecord, *, buckets: bool, cuda: bool) -> float:
    """Compute time of a rank in a step: its actions without their waits for other ranks.

    On the CPU a collective of gloo returns when all members have entered it, except DDP's all-reduces, which overlap
    backward: for these the rank waits from the last one of a backward on. On CUDA collectives run on separate streams,
    and actions with collectives are left out.

    Args:
        record: The step; P2P sends are between its actions.
        buckets: DDP averages the gradients.
    """
    collectives = [c for c in record.collectives if c.kind not in _P2P and c.end_s is not None]
    if cuda:
        return sum(span.end_s - span.start_s for span in record.spans if not _inside(span, collectives))
    return sum(_without_waits_s(span, collectives, buckets=buckets) for span in record.spans)


def _slow_among(ranks: Sequence[int], times_s: Sequence[Sequence[float]]) -> Iterator[SlowRank]:
    """Slow ranks among peers; times by step and rank."""
    of_rank = {rank: sorted(step[rank] for step in times_s) for rank in ranks}
    by_speed = sorted(ranks, key=lambda rank: (statistics.median(of_rank[rank]), rank))
    fast = sorted(by_speed[: len(ranks) // 2])
    fast_s = sorted(time_s for rank in fast for time_s in of_rank[rank])
    for rank in ranks:
        if rank in fast or not fast:
            continue
        median_s, others_s = statistics.median(of_rank[rank]), statistics.median(fast_s)
        low_s = of_rank[rank][math.ceil(len(of_rank[rank]) / 10)]
        high_s = fast_s[-1 - math.ceil(len(fast_s) / 10)]
        if low_s > high_s and median_s >= MIN_SLOWDOWN * others_s > 0.0:
            yield SlowRank(
                rank=rank,
                factor=median_s / others_s,
                compared_with=tuple(fast),
                compute_s=median_s,
                others_compute_s=others_s,
            )


def _inside(span: MeasuredSpan, collectives: Sequence[MeasuredCollective]) -> list[MeasuredCollective]:
    return [c for c in collectives if span.start_s <= c.start_s <= span.end_s]


def _without_waits_s(span: MeasuredSpan, collectives: Sequence[MeasuredCollective], *, buckets: bool) -> float:
    inside = _inside(span, collectives)
    waits = [(c.start_s, c.end_s or c.start_s) for c in inside if not (buckets and c.kind == "all_reduce")]
    averaged = [c for c in inside if buckets and c.kind == "all_reduce"]
    if averaged:
        waits.append((max(c.start_s for c in averaged), max(c.end_s or c.start_s for c in averaged)))
    computed_s, now_s = 0.0, span.start_s
    for low_s, high_s in sorted(waits):
        computed_s += max(0.0, min(low_s, span.end_s) - now_s)
        now_s = max(now_s, high_s)
    return computed_s + max(0.0, span.end_s - now_s)
