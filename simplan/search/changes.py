"""Smallest changes of a request that make a plan feasible, when none is; each change is tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from simplan.base import MAX_DEVICES
from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.rules import violations
from simplan.rules.rule import nearest_multiples
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.explore import first_fit
from simplan.search.fixes import OUTSIDE_OF_SEARCHES, fixes
from simplan.search.result import NearestMiss, RequestChange
from simplan.search.space import SearchSpace, given_ranges, that_it_has
from simplan.units import format_bytes, format_time
from simplan.wording import divisors

_MAX_BYTES = 10**12  # per device, the maximum of DeviceSpec
FirstFit = Callable[..., ParallelPlan | None]
"""``first_fit`` for a job and a space; the arguments that a search has are given."""
_MAX_DOUBLINGS = 10  # a thousand times the devices: beyond that, it is another job


def changes(
    job: Job,
    space: SearchSpace,
    misses: tuple[NearestMiss, ...],
    calibration: Calibration | None,
    workers: WorkerPool,
    on_tried: Callable[[], None] = lambda: None,
) -> tuple[RequestChange, ...]:
    """Find changes that make a plan feasible: per kind, the smallest of those tried.

    Args:
        misses: Near misses of the search, closest first.
        workers: Workers of the search.
        on_tried: Called after each plan that was evaluated.
    """
    for miss in misses:
        if (seconds := miss.step_time_s) is not None:
            words = f"allow max_step_time_s = {_rounded_up(seconds):g}: the fastest plan takes {format_time(seconds)}"
            return (RequestChange(what="max_step_time_s", value=seconds, words=words, plan=miss.plan),)
    tried_changes = [
        _headroom(job, space, misses),
        _memory(job, space, misses),
        *_outside_of_searches(job, space, misses, calibration),
    ]
    first = partial(first_fit, calibration=calibration, workers=workers, on_tried=on_tried)
    tried_changes += [tried(job, space, first) for tried in (_recompute, _ranges, _any_batch, _devices)]
    return tuple(change for change in tried_changes if change is not None)


def _rounded_up(seconds: float) -> float:
    """Round up to four digits, so that the plan meets the deadline.

    >>> _rounded_up(6.14812), _rounded_up(0.25)
    (6.149, 0.25)
    """
    digits = 3 - math.floor(math.log10(seconds))
    near = round(seconds, digits)
    return near if near >= seconds else round(near + 10.0**-digits, digits)


def _headroom(job: Job, space: SearchSpace, misses: tuple[NearestMiss, ...]) -> RequestChange | None:
    """All of the device memory, if the nearest miss fits in it."""
    if not misses or misses[0].device_bytes > (job.cluster.largest_memory_bytes or 0):
        return None
    words = f"max_memory_fraction = 1 instead of {space.max_memory_fraction:g}, which keeps no memory free"
    return RequestChange(what="max_memory_fraction", value=1.0, words=words, plan=misses[0].plan)


def _memory(job: Job, space: SearchSpace, misses: tuple[NearestMiss, ...]) -> RequestChange | None:
    """Devices with the memory that the nearest miss needs."""
    if not misses:
        return None
    miss = misses[0]
    if miss.device_bytes >= _MAX_BYTES * space.max_memory_fraction:
        return None
    needed = math.ceil(miss.device_bytes / space.max_memory_fraction)
    while int(needed * space.max_memory_fraction) < miss.device_bytes:  # int() rounds the capacity down
        needed += 1
    there = job.cluster.largest_memory_bytes
    words = f"devices with {format_bytes(needed)} of memory instead of {format_bytes(there or 0)}"
    return RequestChange(what="memory_bytes", value=needed, words=words, plan=miss.plan)


def _outside_of_searches(
    job: Job, space: SearchSpace, misses: tuple[NearestMiss, ...], calibration: Calibration | None
) -> Iterator[RequestChange]:
    """Settings that no search varies, such as offloading, with which the nearest of the misses fits.

    The last plan is FSDP over all devices with full recomputation: FSDP alone can offload the optimizer.
    """
    devices = job.cluster.num_devices
    plans = [miss.plan for miss in misses if miss.num_devices == devices]
    sharded = ParallelPlan(dp_shard=devices, recompute="full", collectives=job.plan.collectives)
    plans += [] if violations(job.with_plan(sharded)) else [sharded]
    for plan in plans:
        prediction = predict(job.with_plan(plan), calibration=calibration)
        limit = space.max_memory_fraction
        fitting = fixes(prediction, calibration, max_memory_fraction=limit, kinds=OUTSIDE_OF_SEARCHES)
        for fix in fitting:
            what, value = list(fix.changes.items())[-1]
            yield RequestChange(what=what, value=str(value), words=fix.words, plan=fix.job.plan)
        if fitting:
            return


def _recompute(job: Job, space: SearchSpace, first: FirstFit) -> RequestChange | None:
    """Full recomputation, if the space excludes it."""
    if space.recompute is None or "full" in space.recompute:
        return None
    plan = first(job, space.model_copy(update={"recompute": (*space.recompute, "full")}))
    return _change("recompute", "full", "allow recompute = full", plan)


def _ranges(job: Job, space: SearchSpace, first: FirstFit) -> RequestChange | None:
    """The default ranges of the software, if the given ranges are narrower."""
    ranges = given_ranges(job.software, space)
    if not ranges:
        return None
    wider = that_it_has(job.software, space.model_copy(update=dict.fromkeys(ranges)))
    plan = first(job, wider)
    names = ", ".join(ranges)
    return _change("ranges", names, f"leave out the ranges of search ({names})", plan)


def _any_batch(job: Job, space: SearchSpace, first: FirstFit) -> RequestChange | None:
    """The nearest batch that can be divided among all devices, if the requested one cannot; else a smaller one."""
    batch, devices = job.training.global_batch_size, job.cluster.num_devices
    multiples = nearest_multiples(batch, devices) if batch % devices else []
    for near in sorted(multiples, key=lambda size: abs(size - batch)):
        plan = first(replace(job, training=job.training.model_copy(update={"global_batch_size": near})), space)
        if plan is not None:
            words = f"global_batch_size = {near:,} instead of {batch:,}, which {devices:,} devices cannot share evenly"
            return _change("global_batch_size", near, words, plan)
    return _batch(job, space, first)


def _batch(job: Job, space: SearchSpace, first: FirstFit) -> RequestChange | None:
    """A smaller batch, a divisor of the requested one: fewer microbatches are in flight.

    The smallest ones come first: a plan that is too large with one of these is too large with larger ones.
    """
    batch, failed = job.training.global_batch_size, set[ParallelPlan]()

    def fitting(size: int) -> ParallelPlan | None:
        training = job.training.model_copy(update={"global_batch_size": size})
        return first(replace(job, training=training), space, failed=failed)

    sizes = [*_sizes_below(batch)]
    tried = ((size, fitting(size)) for size in reversed(sizes))
    least = next(((size, plan) for size, plan in tried if plan is not None), None)
    if least is None:
        return None
    larger = ((size, fitting(size)) for size in sizes if size > least[0])
    smaller, plan = next(((size, plan) for size, plan in larger if plan is not None), least)
    return _change("global_batch_size", smaller, f"global_batch_size = {smaller:,} instead of {batch:,}", plan)


def _sizes_below(batch: int) -> Iterator[int]:
    """Descending divisors of a batch, each at most half of the previous one."""
    last = batch
    for size in reversed(divisors(batch)):
        if 2 * size <= last:
            yield size
            last = size


def _devices(job: Job, space: SearchSpace, first: FirstFit) -> RequestChange | None:
    """A power of two times the devices; if the batch cannot be split among them, they go to the pipeline."""
    if job.cluster.cores_per_node is not None:
        return None
    there = job.cluster.num_devices
    for doublings in range(1, _MAX_DOUBLINGS + 1):
        more = there * 2**doublings
        if more > MAX_DEVICES:
            return None
        asked = job.with_num_devices(more)
        if asked.cluster.num_nodes > 1 and asked.cluster.inter_link is None:
            return None
        plan = first(asked, space)
        if plan is not None:
            words = f"{more:,} devices instead of {there:,} ({more // 2:,} are too few)"
            return _change("num_devices", more, words if doublings > 1 else words.split(" (")[0], plan)
    return None


def _change(what: str, value: float | str, words: str, plan: ParallelPlan | None) -> RequestChange | None:
    return None if plan is None else RequestChange(what=what, value=value, words=words, plan=plan)
