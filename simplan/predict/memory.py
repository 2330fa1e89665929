"""Device memory of a rank: tensors, reserve of the caching allocator, and driver context."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, get_args

from simplan import catalog
from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import StageAssignment
from simplan.predict.simulated import NINE_IN_TEN
from simplan.prediction import MemoryKind, RankMemory
from simplan.program.action import Table
from simplan.program.program import MemoryCategory, Program
from simplan.sim.memory import host_peak_bytes, memory_peak, persistent_bytes, step_peaks, whole_blocks
from simplan.software.loading_peaks import LoadingPeaks, loading_peaks


class RankPeaks(NamedTuple):
    """Tensor bytes of a rank on its device.

    Attributes:
        resting: Persistent bytes between steps.
        rebuild: Additional bytes held once, between the first two steps.
        passes, update: Transient peaks of the passes and of the optimizer; see ``StepPeaks``.
        paged: Part of ``resting`` in managed memory.
    """

    resting: int
    rebuild: int
    passes: int
    update: int
    paged: int = 0

    @property
    def allocated(self) -> int:
        """Allocated bytes at the peak point."""
        return self.resting + max(self.rebuild, self.passes, self.update)


def rank_peaks(program: Program, rank: int) -> RankPeaks:
    """Tensor bytes of one rank of a Level 2 Program."""
    paged = program.paged_bytes.get(rank, 0)
    return RankPeaks(persistent_bytes(program, rank), program.rebuild_bytes[rank], *step_peaks(program, rank), paged)


def rank_memory(program: Program, job: Job, calibration: Calibration | None) -> dict[int, RankMemory]:
    """Memory of every simulated rank of a Level 2 Program at its peak point."""
    context_bytes = _context_bytes(job, calibration)
    intervals = {}
    for rank in program.ranks:
        peak = memory_peak(program, rank)
        intervals[rank] = replace(
            device_memory(rank_peaks(program, rank), job, calibration, rank=rank),
            rank=rank,
            by_category=peak.by_category | {MemoryCategory.CONTEXT: context_bytes},
            peak_action=peak.action,
            activations_in_flight=peak.activations_in_flight,
            host_bytes=host_peak_bytes(program, rank),
        )
    return intervals


def device_memory(peaks: RankPeaks, job: Job, calibration: Calibration | None = None, *, rank: int = 0) -> RankMemory:
    """Device memory of a rank, without categories. The rank matters only if the devices of the cluster differ.

    The caching allocator reserves blocks, and more than is in use, since it cannot move tensors. If the driver has no
    memory left, the allocator frees its unused blocks and retries, and fails only then (torch 2.13,
    c10/cuda/CUDACachingAllocator.cpp, ``malloc``: ``release_cached_blocks``, then ``alloc_block``). So the reserve
    beyond the tensors is optional; ``short_bytes`` is the part for which the device has no memory. Fragmentation inside
    blocks in use is not counted; no measurements of it are public.
    """
    if peaks.paged:
        return _with_pages(peaks, job, calibration, rank)
    software, capacity = job.software, job.memory_bytes_of(rank)
    allocated, context_bytes = peaks.allocated, _context_bytes(job, calibration)
    if job.cluster.device.kind == "cpu":
        memory = RankMemory(0, {}, allocated, allocated, allocated + context_bytes, "", {}, capacity_bytes=capacity)
        return _with_intervals(memory, peaks, job, has_allocator=False)
    reserve = software.allocator_reserve(reshards=job.plan.reshards)
    if software.flat_updates:
        reserved = whole_blocks(int(max(allocated, peaks.resting + (1 + reserve) * peaks.passes + peaks.update)))
    else:
        reserved = whole_blocks(int(allocated + reserve * max(0, allocated - peaks.resting)))
    short = 0
    if capacity is not None:
        short = min(max(0, reserved + context_bytes - capacity), reserved - whole_blocks(allocated))
    memory = RankMemory(
        0,
        {},
        allocated,
        reserved,
        reserved + context_bytes,
        "",
        {},
        short_bytes=short,
        capacity_bytes=capacity,
        is_compared=catalog.has_compared_peaks(software.runtime),
    )
    return _with_intervals(memory, peaks, job, has_allocator=True)


def _with_pages(peaks: RankPeaks, job: Job, calibration: Calibration | None, rank: int) -> RankMemory:
    """Device memory of a rank with states in managed memory, which is outside of torch's allocator.

    They are on the device as far as there is room beside everything else, and on the host otherwise (bitsandbytes,
    ``functional.py``, ``get_paged``: cudaMallocManaged); so they decide nothing about whether the rank fits.
    """
    memory = device_memory(peaks._replace(resting=peaks.resting - peaks.paged, paged=0), job, calibration, rank=rank)
    room = peaks.paged if memory.capacity_bytes is None else max(0, memory.capacity_bytes - memory.device_bytes)
    there = min(peaks.paged, room)
    low, high = memory.interval_bytes["device"]
    intervals = memory.interval_bytes | {"device": (low + there, high + there)}
    return replace(
        memory,
        device_bytes=memory.device_bytes + there,
        interval_bytes=intervals,
        paged_bytes=peaks.paged,
        evicted_bytes=peaks.paged - there,
    )


def _with_intervals(memory: RankMemory, peaks: RankPeaks, job: Job, *, has_allocator: bool) -> RankMemory:
    """Memory of a rank with 90% intervals of its peaks, lognormal as those of step times.

    The relative width is that of the peak with the full allocator reserve. Lower ends start from the peak without the
    part of the reserve that the device has no memory for, upper ends from the peak with it.
    """
    transient_bytes = peaks.allocated - peaks.resting
    spread, finetunes = job.software.memory_spread, job.training.task != "pretrain"
    intervals: dict[MemoryKind, tuple[int, int]] = {}
    for kind in get_args(MemoryKind):
        low, high = memory.measurable_bytes(kind), getattr(memory, f"{kind}_bytes")
        allocated = kind == "allocated" or not has_allocator
        transient = transient_bytes / max(1, high)
        std = spread.relative_std(transient, allocated=allocated, finetunes=finetunes)
        factor = math.exp(NINE_IN_TEN * std)
        intervals[kind] = int(low / factor), int(high * factor)
    return replace(memory, interval_bytes=intervals)


def loading_of(
    job: Job, assignment: StageAssignment, table: Table, calibration: Calibration | None
) -> LoadingPeaks | None:
    """Memory while the model is loaded; None for random weights, and on a CPU, whose memory is that of the host.

    Args:
        assignment, table: Layers of stages, and stages of pipeline ranks.
    """
    software, plan, training = job.software, job.plan, job.training
    if job.cluster.device.kind == "cpu" or not software.loads(training):
        return None
    layers = software.layers_of(job.model, plan, training)
    stages = [
        [layers[place] for stage in sorted({action.stage for action in row}) for place in assignment.layer_range(stage)]
        for row in table
    ]
    peaks = loading_peaks(software, job.model, plan, training, job.cluster.ranks_per_node, stages)
    return None if peaks is None else replace(peaks, device_bytes=peaks.device_bytes + _context_bytes(job, calibration))


def _context_bytes(job: Job, calibration: Calibration | None) -> int:
    """Device bytes of the driver context and libraries."""
    calibrated = None if calibration is None else calibration.context_bytes
    return calibrated or int(job.software.context_bytes.get(job.cluster.device.kind, 0))
