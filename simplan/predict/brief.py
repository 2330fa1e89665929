"""Time and memory of a step without all that ``predict`` says besides: for hundreds of plans, however long their steps.

Few microbatches are written out and simulated; the others do the same again. Without a pipeline a step is then longer
by as much for each of them; what they add to a pipeline is in ``simplan.predict.pipeline_rest``. Both agree with
``predict``, but for pipelines whose ranks wait for messages (by up to half a percent on published runs; short ones are
written out) or gather parameters beside the first forward. Where neither holds all microbatches are written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.pricing import Pricing
from simplan.job import Job
from simplan.predict.abridged import AbridgedStep
from simplan.predict.simulated import interval_s, moved_durations_s
from simplan.program.program import Program, Work
from simplan.program.uncollected import uncollected

__all__ = ["Brief", "Taken", "Term", "beside_messages_s", "brief_numbers", "brief_terms", "predict_brief"]

_Floats = NDArray[np.float64]
_MOVED = 1e-7  # by so much of itself a price is moved: the longest path stays the longest
_APART = 1e-4
_GOLDEN = 0.6180339887498949  # multiples of it are spread evenly, without repeats
_LEAST_TIMES = 1e-3
_LEAST_BESIDE = 1e-6  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """The numbers of a prediction.

    Attributes:
        step_time_s, step_time_interval_s: As of ``Prediction``.
        allocated_bytes, reserved_bytes, device_bytes: Peaks of the rank that has most of each.
        fits: Whether the device bytes are within the capacity; None where that is unknown.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    fits: bool | None


class Taken(NamedTuple):
    """Part of a device that messages take from what is computed beside them."""


class Term(NamedTuple):
    """A part of a step time.

    Attributes:
        work: What is done, or what messages take of devices.
        seconds: Its price; of what is taken, the part.
        times: How often the step waits for it: the derivative of the step time with respect to its price; of what is
            taken, the seconds that are computed beside messages.
    """

    work: Work | Taken
    seconds: float
    times: float


@uncollected()
def predict_brief(job: Job, *, steps_overlap: bool = False) -> Brief:
    """Predicts time and memory of one optimizer step on devices of their own.

    Args:
        job: What is asked.
        steps_overlap: No rank waits for others at the end of a step, so that a step takes as long as the busiest rank
            is at it; else from the first start to the last end.

    Raises:
        SpecError: As ``predict``.
    """
    step = AbridgedStep(job, moved_durations_s)
    written = step.written(*step.extent(steps_overlap=steps_overlap))
    _, seconds = step.whole(written, steps_overlap=steps_overlap)
    memory = step.memory(written.program, step.added_bytes(written))
    step_time_s, *moved_s = (float(value) for value in seconds)
    device_bytes = max(rank.device_bytes for rank in memory)
    capacity = job.cluster.device.memory_bytes
    return Brief(
        step_time_s=step_time_s,
        step_time_interval_s=interval_s(step_time_s, moved_s),
        allocated_bytes=max(rank.allocated_bytes for rank in memory),
        reserved_bytes=max(rank.reserved_bytes for rank in memory),
        device_bytes=device_bytes,
        fits=None if capacity is None else device_bytes <= capacity,
    )


@uncollected()
def brief_numbers(job: Job, most_bytes: int | None = None) -> tuple[int, float | None]:
    """Device memory of the worst rank, with all that the caching allocator would like, and the step time.

    Args:
        job: As of ``predict_brief``.
        most_bytes: The time of a plan that needs more is None, and costs nothing; None for no limit.
    """
    step = AbridgedStep(job, lambda *_: [])
    written = step.written(*step.extent(steps_overlap=False))
    num_bytes = max(rank.wanted_bytes for rank in step.memory(written.program, step.added_bytes(written)))
    if most_bytes is not None and num_bytes > most_bytes:
        return num_bytes, None
    return num_bytes, float(step.whole(written, steps_overlap=False)[1][0])


@uncollected()
def beside_messages_s(job: Job) -> float:
    """By how much a step is longer since messages take part of devices from what is computed beside them, seconds.

    Args:
        job: As of ``predict_brief``.
    """

    def alone(program: Program, pricing: Pricing) -> list[_Floats]:
        return [np.array([sum(pricing.by_work[work].price.seconds for work in op.work) for op in program.ops])]

    step = AbridgedStep(job, alone)
    slowed_s, alone_s = step.whole(step.written(*step.extent(steps_overlap=False)), steps_overlap=False)[1]
    return float(slowed_s - alone_s)


@uncollected()
def brief_terms(job: Job, *, steps_overlap: bool = False) -> tuple[Term, ...]:
    """The step time as a sum: that of its longest path, which is linear in prices as long as it stays the longest.

    Where stages are alike several paths are as long, and a price may lengthen one of them and not shorten the others.
    So every price is first moved by less than one part in ten thousand, each by another, and one path is the longest.

    Args:
        job, steps_overlap: As of ``predict_brief``.

    Returns:
        What the step waits for; prices, each so many times, add up to the step time, to one part in ten thousand.
    """
    pricings: list[Pricing] = []

    def moved(program: Program, pricing: Pricing) -> list[_Floats]:
        pricings.append(pricing)
        row_of = {work: row for row, work in enumerate(pricings[0].by_work)}
        seconds = np.zeros((len(row_of) + 1, len(program.ops)))
        for index, op in enumerate(program.ops):
            for work in op.work:
                seconds[row_of[work], index] += pricing.by_work[work].price.seconds
        if pricing.taken_share:
            seconds[-1] = np.array(pricing.durations_s) - seconds.sum(axis=0)
        apart_s = (1 + _APART * (np.arange(len(seconds)) * _GOLDEN % 1)) @ seconds
        return [apart_s, *(apart_s + _MOVED * seconds)]

    step = AbridgedStep(job, moved)
    _, seconds = step.whole(step.written(*step.extent(steps_overlap=steps_overlap)), steps_overlap=steps_overlap)
    prices: dict[Work | Taken, float] = {work: term.price.seconds for work, term in pricings[0].by_work.items()}
    prices[Taken()] = max(pricing.taken_share for pricing in pricings)
    terms = (
        Term(work, price, float(moved_s - seconds[1]) / (_MOVED * price))
        for (work, price), moved_s in zip(prices.items(), seconds[2:], strict=True)
        if price > 0
    )
    least_beside_s = _LEAST_BESIDE * float(seconds[0])
    return tuple(t for t in terms if abs(t.times) > (least_beside_s if isinstance(t.work, Taken) else _LEAST_TIMES))
