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
_MIN_CERTAINTY = 2.6  # standard deviations: a chance of 0.005
_P2P = ("send", "recv")


def steady_from(times_s: Sequence[float]) -> int:
    """Index of the first steady step.

    MSER (White 1997, "An effective truncation heuristic for bias reduction in simulation output"): first steps are
    removed as long as that reduces the standard error of the mean of the others, up to half of the steps. A slow step
    in the second half is not removed.
    """
    times = np.asarray(times_s)
    max_left_out = max(0, min(len(times) // 2, len(times) - MIN_STEADY_STEPS))
    if not max_left_out:
        return 0
    return int(np.argmin([times[begin:].var() / (len(times) - begin) for begin in range(max_left_out + 1)]))


def find_slow_ranks(job: RunSpec, steps: Sequence[Sequence[StepRecord]], *, cuda: bool) -> tuple[SlowRank, ...]:
    """Finds ranks that are slow throughout a run.

    Peers are ranks of the same pipeline stage and the same part of a sequence. In each step a rank is compared with the
    median of the fastest half of its peers, so that a load on the whole machine concerns both. A slow rank takes at
    least ``MIN_SLOWDOWN`` times as long in the median step of either half of the run, since another process may slow a
    rank for a while. And equal ranks differ as much by chance in fewer than one of 200 runs, by Wilcoxon's signed-rank
    test. So a loaded machine, where the times of all ranks scatter, has no slow rank, nor has a run of under 9 steps.

    Args:
        steps: Records of all ranks in every steady step.
    """
    total_s = sum(max(r.end_s for r in step) - min(r.start_s for r in step) for step in steps)
    if len(steps) < MIN_STEADY_STEPS or total_s < _MIN_TIME_S:
        return ()
    if job.plan.ep > 1:  # the work of experts depends on the routing
        return ()
    if job.training.backup_workers:  # a late replica leaves its passes; arrivals tell how late it was
        return ()
    mapping = RankMapping.of(job.plan)
    peers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(job.plan.num_devices):
        place = mapping.place(rank)
        peers[place.pp, place.cp].append(rank)
    buckets = job.plan.num_averaging > 1 and not job.plan.shards_parameters
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
    medians_s = {rank: statistics.median(step[rank] for step in times_s) for rank in ranks}
    by_speed = sorted(ranks, key=lambda rank: (medians_s[rank], rank))
    fast = sorted(by_speed[: len(ranks) // 2])
    if not fast:
        return
    fast_s = [statistics.median(step[rank] for rank in fast) for step in times_s]
    for rank in sorted(set(ranks).difference(fast)):
        ratios = [step[rank] / others_s for step, others_s in zip(times_s, fast_s, strict=True) if others_s > 0.0]
        if _is_slow(ratios):
            yield SlowRank(
                rank=rank,
                factor=statistics.median(ratios),
                compared_with=tuple(fast),
                compute_s=medians_s[rank],
                others_compute_s=statistics.median(fast_s),
            )


def _is_slow(ratios: Sequence[float]) -> bool:
    """True if ratios of compute times, by step, are above 1 throughout the run, and by more than chance.

    Source: Wilcoxon 1945, "Individual comparisons by ranking methods", with the normal approximation.
    """
    num, middle = len(ratios), len(ratios) // 2
    if num < MIN_STEADY_STEPS or min(ratios) <= 0.0:
        return False
    logs = np.log(ratios)
    places = np.abs(logs).argsort().argsort() + 1
    deviation = math.sqrt(num * (num + 1) * (2 * num + 1) / 24)
    certainty = (places[logs > 0.0].sum() - num * (num + 1) / 4) / deviation
    halves = (logs[:middle], logs[middle:])
    return bool(certainty >= _MIN_CERTAINTY) and all(np.median(half) >= math.log(MIN_SLOWDOWN) for half in halves)


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
