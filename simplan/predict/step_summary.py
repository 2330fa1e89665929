"""Fast evaluation of hundreds of plans: time and memory of a truncated step, without the rest of a prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from simplan.cost.calibration.format import Calibration
from simplan.cost.program_costs import ProgramCosts
from simplan.job import Job
from simplan.predict.background import background_steps
from simplan.predict.balance import balanced
from simplan.predict.build import folding_of
from simplan.predict.memory import device_memory, loading_of
from simplan.predict.simulated import error_sources, interval_s, moved_durations_s
from simplan.predict.truncated import Extent, TruncatedStep, extent_of, predicted_extent
from simplan.prediction import MemoryKind, RankMemory, busiest_host_bytes, job_fits
from simplan.program.program import Program, Work, gc_paused
from simplan.program.size import refuse_many_actions
from simplan.rules import check_job

_Floats = NDArray[np.float64]
_MOVED = 1e-7  # relative shift of a cost; small enough to keep the longest path
_APART = 1e-4
_GOLDEN = 0.6180339887498949  # multiples of it are spread evenly, without repeats
_MIN_TIMES = 1e-3
_MIN_OVERLAP = 1e-6  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Time and memory of a prediction.

    Attributes:
        step_time_s, step_time_interval_s: See ``Prediction``.
        peak_bytes: By kind of peak, the largest over ranks, each on its own.
        measurable_bytes: ``peak_bytes`` without the reserve for which the device has no memory.
        peak_interval_bytes: 90% intervals of ``peak_bytes``.
        fits: See ``Prediction``.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    peak_bytes: Mapping[MemoryKind, int]
    measurable_bytes: Mapping[MemoryKind, int]
    peak_interval_bytes: Mapping[MemoryKind, tuple[int, int]]
    fits: bool | None


class OverlapSlowdown(NamedTuple):
    """Marker for the overlap slowdown: the fraction of compute throughput lost while communication overlaps."""


class StepTerm(NamedTuple):
    """A term of the step time.

    Attributes:
        work: Work, or the overlap slowdown.
        seconds: Seconds of the work; for the overlap slowdown, the fraction lost.
        times: Derivative of the step time with respect to ``seconds``: occurrences on the longest path. For the overlap
            slowdown, seconds of overlapped compute.
    """

    work: Work | OverlapSlowdown
    seconds: float
    times: float


@gc_paused()
def summarize_step(job: Job, *, steps_overlap: bool = False) -> StepSummary:
    """Predict time and memory of one optimizer step like ``predict``; ranks must not share cores.

    Args:
        job: The job.
        steps_overlap: See ``TruncatedStep.seconds``.
    """
    step = summarized_step(job, steps_overlap=steps_overlap)
    moved = partial(moved_durations_s, sources=error_sources(step.programs[0]))
    step_time_s, *moved_s = step.seconds(moved, steps_overlap=steps_overlap).tolist()
    memory = [device_memory(peaks, job, rank=rank) for rank, peaks in step.peaks().items()]
    kinds = get_args(MemoryKind)
    loading = loading_of(job, step.assignment, step.tables[0], None)
    worst = {kind: max(memory, key=lambda rank: getattr(rank, f"{kind}_bytes")) for kind in kinds}
    return StepSummary(
        step_time_s=step_time_s,
        step_time_interval_s=interval_s(step_time_s, moved_s),
        peak_bytes={kind: getattr(rank, f"{kind}_bytes") for kind, rank in worst.items()},
        measurable_bytes={kind: rank.measurable_bytes(kind) for kind, rank in worst.items()},
        peak_interval_bytes={kind: rank.interval_bytes[kind] for kind, rank in worst.items()},
        fits=job_fits(job, _with_hosts(step) or memory, loading),
    )


@gc_paused()
def evaluate_step(
    job: Job, calibration: Calibration | None = None, max_bytes: int | None = None, *, whole: bool = False
) -> tuple[int, float | None]:
    """Device bytes of the worst rank with the full allocator reserve, and the step time in seconds.

    Hosts that lack memory count as a device that lacks as large a part, so that one limit is that of both.

    Args:
        job, calibration: See ``TruncatedStep``.
        max_bytes: Memory limit; the time of a plan that needs more is None and is not simulated. None for no limit. If
            devices differ, it is that of the largest, and bytes on the others are scaled to it.
        whole: True to simulate to the extent of ``predict``. False truncates the step, and folds ranks to which ZeRO-1
            assigns unequal parameters.
    """
    job = balanced(job, calibration)
    folding = folding_of(job, dealt_alike=not whole)
    simulates_all = whole or job.cluster.cores_per_node is not None
    extent = predicted_extent(job, folding) if simulates_all else extent_of(job)
    refuse_many_actions(job, len(folding.ranks), extent.simulated)
    step = TruncatedStep(job, extent, calibration, folding=folding, background=background_steps(job.cluster))
    if job.cluster.is_mixed:
        num_bytes = max(
            _as_of_largest(device_memory(of_rank, job, rank=rank), job) for rank, of_rank in step.peaks().items()
        )
    else:
        peaks = set(step.peaks().values())
        num_bytes = max(device_memory(of_rank, job, calibration).device_bytes for of_rank in peaks)
    num_bytes = max(num_bytes, _as_of_host(step))
    if max_bytes is not None and num_bytes > max_bytes:
        return num_bytes, None
    return num_bytes, float(step.seconds()[0])


def _with_hosts(step: TruncatedStep) -> tuple[RankMemory, ...]:
    """Memory of every rank of a job that offloads to hosts of known memory; empty for any other."""
    plan = step.job.plan
    offloads = plan.offload_optimizer or plan.offload_activations or step.asynchronous is not None
    return step.memory() if offloads and step.job.cluster.host_memory_bytes is not None else ()


def _as_of_host(step: TruncatedStep) -> int:
    """Device bytes, more than a device has, that lack as large a part as the host bytes do; 0 if these fit."""
    host, device = step.job.cluster.host_memory_bytes, step.job.cluster.largest_memory_bytes
    on_host = busiest_host_bytes(step.job, _with_hosts(step))
    return 0 if host is None or device is None or on_host <= host else math.ceil(device * on_host / host)


def _as_of_largest(memory: RankMemory, job: Job) -> int:
    """Bytes that a rank wants, as the same fraction of the largest device, so that one limit is that of all ranks."""
    largest, capacity = job.cluster.largest_memory_bytes, memory.capacity_bytes
    if largest is None or capacity is None or largest == capacity:
        return memory.device_bytes
    return math.ceil(memory.device_bytes * largest / capacity)


@gc_paused()
def step_terms(job: Job, *, steps_overlap: bool = False) -> tuple[StepTerm, ...]:
    """Decompose the step time into terms of its longest path, which is locally linear in costs.

    Equal stages make several paths equally long, and a cost may occur on only some of them. So every cost is first
    shifted by a different amount, below 1e-4 of itself, which makes one path the longest. The sum of ``seconds`` x
    ``times`` is the step time, within 1e-4.
    """
    all_costs: list[ProgramCosts] = []

    def moved(program: Program, program_costs: ProgramCosts) -> list[_Floats]:
        all_costs.append(program_costs)
        row_of = {work: row for row, work in enumerate(all_costs[0].by_work)}
        by_entry = np.zeros((len(row_of) + 1, len(program.works)))
        for entry in np.unique(program.columns.work).tolist():
            for work in program.works[entry]:
                by_entry[row_of[work], entry] += program_costs.by_work[work].cost_estimate.seconds
        seconds = by_entry[:, program.columns.work]
        if program_costs.overlap_slowdown:
            seconds[-1] = program_costs.durations_s - seconds.sum(axis=0)
        apart_s = (1 + _APART * (np.arange(len(seconds)) * _GOLDEN % 1)) @ seconds
        return [apart_s, *(apart_s + _MOVED * seconds)]

    seconds = summarized_step(job, steps_overlap=steps_overlap).seconds(moved, steps_overlap=steps_overlap)
    costs: dict[Work | OverlapSlowdown, float] = {
        work: term.cost_estimate.seconds for work, term in all_costs[0].by_work.items()
    }
    costs[OverlapSlowdown()] = max(program_costs.overlap_slowdown for program_costs in all_costs)
    terms = (
        StepTerm(work, cost_s, float(moved_s - seconds[1]) / (_MOVED * cost_s))
        for (work, cost_s), moved_s in zip(costs.items(), seconds[2:], strict=True)
        if cost_s > 0
    )
    least_s = _MIN_OVERLAP * float(seconds[0])
    return tuple(t for t in terms if abs(t.times) > (least_s if isinstance(t.work, OverlapSlowdown) else _MIN_TIMES))


def summarized_step(job: Job, *, steps_overlap: bool) -> TruncatedStep:
    """Truncated step of a summary; for arguments see ``summarize_step``."""
    assert job.cluster.cores_per_node is None, "ranks that share cores are simulated as a whole"
    check_job(job)
    job = balanced(job)
    whole = job.num_microbatches
    folding = folding_of(job, dealt_alike=True)
    extent = Extent(whole, 0, whole) if steps_overlap else extent_of(job)
    return TruncatedStep(job, extent, folding=folding, background=background_steps(job.cluster))
