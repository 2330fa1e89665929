"""When no plan is within the limits: the smallest changes of the question with which there is one, each tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from simplan.search.candidate import Candidate
from simplan.search.feasible import capacity_bytes, first_fit
from simplan.search.question import Question
from simplan.search.result import Change, NearestMiss
from simplan.search.space import SearchSpace, given_ranges, that_it_has
from simplan.spec.numbers import divisors
from simplan.units import format_bytes, format_time

__all__ = ["changes"]

_MOST_BYTES = 10**12  # of a device, as in DeviceSpec: no device that could be described has more
_MOST_DOUBLINGS = 10  # a thousand times the devices: beyond that, it is another question


def changes(question: Question, space: SearchSpace, misses: tuple[NearestMiss, ...]) -> tuple[Change, ...]:
    """Changes that make a plan, one of each kind, the least of its kind among those tried.

    Args:
        question: What has no plan.
        space: The ranges it has none in.
        misses: The nearest of its plans.
    """
    late = [miss for miss in misses if miss.step_time_s is not None]
    if late:
        seconds = late[0].step_time_s
        assert seconds is not None
        words = f"allow max_step_time_s = {_rounded_up(seconds):g}: the fastest plan takes {format_time(seconds)}"
        return (Change(what="max_step_time_s", value=seconds, words=words, plan=late[0].plan),)
    found = (_memory(question, space, misses), _recompute(question, space), _ranges(question, space))
    searched = (_batch(question, space), _devices(question, space))
    return tuple(change for change in (*found, *searched) if change is not None)


def _rounded_up(seconds: float) -> float:
    """To four digits, so that a plan that takes so long is within it.

    >>> _rounded_up(6.14812), _rounded_up(0.25)
    (6.149, 0.25)
    """
    digits = 3 - math.floor(math.log10(seconds))
    near = round(seconds, digits)
    return near if near >= seconds else round(near + 10.0**-digits, digits)


def _memory(question: Question, space: SearchSpace, misses: tuple[NearestMiss, ...]) -> Change | None:
    """Devices with as much memory as the nearest miss needs."""
    if not misses:
        return None
    miss = misses[0]
    needed = math.ceil(miss.device_bytes / space.max_memory_fraction)
    if needed >= _MOST_BYTES:
        return None
    richer = question.cluster.device.model_copy(update={"memory_bytes": needed})
    asked = replace(question, cluster=question.cluster.model_copy(update={"device": richer}))
    capacity = capacity_bytes(asked, space)
    while capacity is not None and capacity < miss.device_bytes:  # a fraction of a byte was cut off
        needed += 1
        capacity = int(needed * space.max_memory_fraction)
    there = question.cluster.device.memory_bytes
    words = f"devices with {format_bytes(needed)} of memory instead of {format_bytes(there or 0)}"
    return Change(what="memory_bytes", value=needed, words=words, plan=miss.plan)


def _recompute(question: Question, space: SearchSpace) -> Change | None:
    """Recomputation, where the space leaves it out."""
    if space.recompute is None or "full" in space.recompute:
        return None
    candidate = first_fit(question, space.model_copy(update={"recompute": (*space.recompute, "full")}))
    return _change("recompute", "full", "allow recompute = full", candidate)


def _ranges(question: Question, space: SearchSpace) -> Change | None:
    """The whole default space of the software, where the ranges are narrower."""
    given = given_ranges(question.software, space)
    if not given:
        return None
    wider = that_it_has(question.software, space.model_copy(update=dict.fromkeys(given)))
    candidate = first_fit(question, wider)
    names = ", ".join(given)
    return _change("ranges", names, f"leave out the ranges of search ({names})", candidate)


def _batch(question: Question, space: SearchSpace) -> Change | None:
    """The largest divisor of the batch with which there is a plan: fewer microbatches are in flight."""
    batch = question.training.global_batch_size
    for smaller in _sizes_below(batch):
        training = question.training.model_copy(update={"global_batch_size": smaller})
        candidate = first_fit(replace(question, training=training), space)
        if candidate is not None:
            words = f"global_batch_size = {smaller:,} instead of {batch:,}"
            return _change("global_batch_size", smaller, words, candidate)
    return None


def _sizes_below(batch: int) -> Iterator[int]:
    """Divisors, from the largest, each at most half of the one before."""
    last = batch
    for size in reversed(divisors(batch)):
        if 2 * size <= last:
            yield size
            last = size


def _devices(question: Question, space: SearchSpace) -> Change | None:
    """Twice, four times ... as many devices; where the batch cannot be dealt out to them, they are in the pipeline."""
    if question.cluster.cores_per_node is not None:
        return None
    there = question.cluster.num_devices
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        more = there * 2**doublings
        asked = question.with_devices(more)
        if asked.cluster.num_nodes > 1 and asked.cluster.inter_link is None:
            return None
        candidate = first_fit(asked, space)
        if candidate is not None:
            words = f"{more:,} devices instead of {there:,} ({more // 2:,} are too few)"
            return _change("num_devices", more, words if doublings > 1 else words.split(" (")[0], candidate)
    return None


def _change(what: str, value: float | str, words: str, candidate: Candidate | None) -> Change | None:
    return None if candidate is None else Change(what=what, value=value, words=words, plan=candidate.plan())
