"""Data-parallel replicas that a lower bound has to look at: one, unless devices differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

from simplan.job import Job
from simplan.plan.placement import Placement
from simplan.plan.plan import RankMapping
from simplan.predict.balance import balanced_sizes
from simplan.predict.build import cost_model, layer_times_s

_ROUNDING = 1 - 1e-9  # sums of times in another order


class Replica(NamedTuple):
    """One pipeline of a data-parallel replica.

    Attributes:
        devices: Device of each pipeline rank.
        microbatch_size: Sequences per microbatch.
    """

    devices: tuple[int, ...]
    microbatch_size: int


def replicas_of(job: Job) -> tuple[Replica, ...]:
    """Replicas of a plan that differ in their devices; the first one for a cluster of equal nodes.

    With equal microbatches, a step takes as long as that of the slowest replica. Balanced microbatches depend on speed
    and memory. However sequences are divided, one replica takes at least the time of the slowest one in the best
    division. Replicas then have the smallest microbatch size with that time, and a step takes as long as that of one of
    them. Replicas that are never that slow are left out.
    """
    plan, cluster = job.plan, job.cluster
    pipelines = _pipelines(RankMapping.of(plan), job.placement, 1 if not cluster.is_mixed else plan.dp)
    if not cluster.is_mixed:
        return (Replica(pipelines[0], plan.microbatch_size),)
    groups = [tuple(map(cluster.group_of, devices)) for devices in pipelines]
    sizes = dict.fromkeys(groups, plan.microbatch_size)
    if plan.microbatch_sizes is not None:
        sizes = _least_sizes(job, groups)
    devices = dict(zip(groups, pipelines, strict=True))
    return tuple(Replica(devices[of], size) for of, size in sizes.items())


@lru_cache(maxsize=1024)
def _pipelines(mapping: RankMapping, placement: Placement | None, number: int) -> tuple[tuple[int, ...], ...]:
    """Devices of one pipeline of each of the first data-parallel ranks."""
    pipelines = (mapping.group("pp", mapping.tp * mapping.cp * place) for place in range(number))
    return tuple(ranks if placement is None else placement.devices_of(ranks) for ranks in pipelines)


def _least_sizes(job: Job, groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """By node groups of a pipeline, the smallest microbatch size with the time of the slowest replica.

    Args:
        groups: By data-parallel rank, the node groups of its pipeline.
    """
    cost, total = cost_model(job, None), job.plan.sequences_per_microbatch

    @cache
    def seconds(of_pipeline: tuple[int, ...], size: int) -> float:
        return max(sum(layer_times_s(job, cost, size, group)) for group in {*of_pipeline})

    times = [partial(seconds, of) for of in groups]
    best = balanced_sizes(total, times)
    slowest_s = _ROUNDING * max(of(size) for of, size in zip(times, best, strict=True))
    sizes = {}
    for of in dict.fromkeys(groups):
        size = next((size for size in range(1, total + 1) if seconds(of, size) >= slowest_s), None)
        if size is not None:
            sizes[of] = size
    return sizes
