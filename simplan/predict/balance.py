"""Microbatch sizes of data-parallel ranks on unequal devices, in proportion to their speed and within their memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import cache, partial

from simplan.cost.calibration.format import Calibration
from simplan.cost.model import CostModel
from simplan.job import Job
from simplan.plan.plan import RankMapping
from simplan.predict.build import cost_model, folding_of, layer_times_s
from simplan.predict.memory import device_memory
from simplan.predict.truncated import TruncatedStep, extent_of

_MAX_ATTEMPTS = 16


def balanced(job: Job, calibration: Calibration | None = None) -> Job:
    """The job with a size for every data-parallel rank instead of ``plan.microbatch_sizes = balanced``.

    Sizes minimize the compute time of a microbatch on the slowest rank. If that exceeds the memory of a device, ranks
    on such devices get fewer sequences, as far as others have room for them.
    """
    plan = job.plan
    if plan.microbatch_sizes != "balanced":
        return job
    cost, groups = cost_model(job, calibration), groups_of_replicas(job)
    if len(set(groups)) == 1:
        return job.with_plan(plan.model_copy(update={"microbatch_sizes": plan.sizes_of_ranks}))
    total = plan.sequences_per_microbatch

    @cache
    def seconds(of_replica: tuple[int, ...], size: int) -> float:
        return max(sum(layer_times_s(job, cost, size, group)) for group in of_replica)

    most = [total] * plan.dp
    while True:
        sizes = balanced_sizes(total, [partial(seconds, of) for of in groups], most)
        sized = job.with_plan(plan.model_copy(update={"microbatch_sizes": sizes, "microbatch_size": max(sizes)}))
        if plan.dp == total:
            return sized
        over = _over_memory(sized, cost, calibration)
        fewer = [
            min(limit, size - 1) if place in over else limit
            for place, (limit, size) in enumerate(zip(most, sizes, strict=True))
        ]
        if not over or min(fewer) < 1 or sum(fewer) < total:
            return sized
        most = fewer


def balanced_sizes(
    total: int, seconds: Sequence[Callable[[int], float]], most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Sizes of at least 1 that add up to ``total`` and whose slowest rank is fastest.

    Sequences are handed out one by one, to the rank that is then the fastest. That is exact for times that grow with
    the size.

    Args:
        total: Sequences of all ranks; at least the number of ranks.
        seconds: By rank, time of a number of sequences.
        most: By rank, the largest size, together at least ``total``; None for no limit.

    >>> balanced_sizes(8, [lambda size: size / 3, lambda size: size / 1])
    (6, 2)
    """
    sizes = [1] * len(seconds)
    limits = [total] * len(seconds) if most is None else most
    queue = [(of(2), rank) for rank, of in enumerate(seconds) if limits[rank] > 1]
    heapq.heapify(queue)
    for _ in range(total - len(seconds)):
        _, rank = heapq.heappop(queue)
        sizes[rank] += 1
        if sizes[rank] < limits[rank]:
            heapq.heappush(queue, (seconds[rank](sizes[rank] + 1), rank))
    return tuple(sizes)


def groups_of_replicas(job: Job) -> list[tuple[int, ...]]:
    """By data-parallel rank, the node groups of its pipeline, tensor- and context-parallel ranks."""
    mapping, node_groups = RankMapping.of(job.plan), [set[int]() for _ in range(job.plan.dp)]
    for rank in range(mapping.world_size):
        node_groups[mapping.dp_rank(rank)].add(job.group_of(rank) or 0)
    return [tuple(sorted(groups)) for groups in node_groups]


def _over_memory(job: Job, cost: CostModel, calibration: Calibration | None) -> set[int]:
    """Data-parallel ranks that do not fit their devices."""
    mapping, folding = RankMapping.of(job.plan), folding_of(job, dealt_alike=True)
    step = TruncatedStep(job, extent_of(job), calibration, folding=folding)
    vars(step).update(cost=cost)
    full = set()
    for rank, peaks in step.peaks().items():
        memory = device_memory(peaks, job, calibration, rank=rank)
        if memory.fits is False:
            full.add(rank)
    return {mapping.dp_rank(rank) for rank, other in enumerate(folding.stands_for) if other in full}
