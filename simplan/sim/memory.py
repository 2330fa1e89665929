"""Peak memory: a pass over each rank's allocations and frees in host issue order, independent of durations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.action import ActionKind
from simplan.program.program import MemoryCategory, Program, Stream
from simplan.program.timeline import Times

_BLOCK_BYTES = 2 * 1024**2
_CATEGORIES = tuple(MemoryCategory)
_Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Memory of one rank at its peak point.

    Attributes:
        by_category: Bytes by category at the peak point.
        action: Action at the peak point, text form; empty between steps.
        activations_in_flight: Stage -> maximum number of microbatches in flight during the step.
    """

    rank: int
    by_category: dict[MemoryCategory, int]
    action: str
    activations_in_flight: dict[int, int]

    @property
    def total_bytes(self) -> int:
        """Sum over the categories, in bytes."""
        return sum(self.by_category.values())


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory of a rank from a point in time on."""

    time_s: float
    by_category: dict[MemoryCategory, int]


class StepPeaks(NamedTuple):
    """Peak transient bytes of one rank, in addition to its persistent memory between steps.

    Attributes:
        passes: Peak during passes through layers and gradient reductions.
        update: Peak during the optimizer step.
    """

    passes: int
    update: int


def memory_peak(program: Program, rank: int) -> MemoryPeak:
    """Computes the peak memory of a rank from its operations.

    At the end of a step, memory must return to its initial value; otherwise the lowering has a bug. The only point
    outside of a step that counts is DDP's rebuilding of its buckets.
    """
    on_device = _on_device(program)
    held = _resting(program, rank) * on_device
    worst = peak_position(program, rank)
    if worst < 0:
        held[_CATEGORIES.index(MemoryCategory.BUFFERS)] += program.rebuild_bytes[rank]
        action = ""
    else:
        indices = program.rank_indices[rank]
        effects = program.columns.memory[indices]
        during, after = program.effect_bytes
        held += (after[effects[:worst]].sum(axis=0) + during[effects[worst]]) * on_device
        action = str(program.op(int(indices[worst])).action)
    by_category = {
        category: num_bytes
        for category, num_bytes, counts in zip(_CATEGORIES, held.tolist(), on_device.tolist(), strict=True)
        if counts
    }
    assert min(by_category.values()) >= 0, by_category
    return MemoryPeak(rank, by_category, action, _in_flight(program, rank))


def peak_position(program: Program, rank: int) -> int:
    """Returns the position of the peak in the rank's list of operations; -1 for a peak between steps."""
    during, after = _device_effects(program, rank)
    held = np.cumsum(after) - after
    assert not after.sum(), "memory is not back to its base"
    totals = held + during
    worst = int(totals.argmax()) if len(totals) else -1
    return worst if worst >= 0 and totals[worst] > program.rebuild_bytes[rank] else -1


def persistent_bytes(program: Program, rank: int) -> int:
    """Returns the persistent bytes of a rank between steps."""
    return int((_resting(program, rank) * _on_device(program)).sum())


def step_peaks(program: Program, rank: int) -> StepPeaks:
    """Returns the peak transient bytes of a rank in a step."""
    during, after = _device_effects(program, rank)
    totals = np.cumsum(after) - after + during
    updates = program.of_action(ActionKind.OPTIM, indices=program.rank_indices[rank])
    return StepPeaks(int(totals[~updates].max(initial=0)), int(totals[updates].max(initial=0)))


def host_peak_bytes(program: Program, rank: int) -> int:
    """Returns the peak bytes of a rank in host memory."""
    host = _CATEGORIES.index(MemoryCategory.HOST)
    during, after = (
        effect[:, host][program.columns.memory[program.rank_indices[rank]]] for effect in program.effect_bytes
    )
    resting = program.persistent_bytes[rank].get(MemoryCategory.HOST, 0)
    return resting + int((np.cumsum(after) - after + during).max(initial=0))


def _on_device(program: Program) -> _Bytes:
    """``(num_categories,)`` Returns 1 for categories in device memory, 0 for others."""
    return np.array([program.one_memory or category is not MemoryCategory.HOST for category in _CATEGORIES], np.int64)


def _resting(program: Program, rank: int) -> _Bytes:
    held = program.persistent_bytes[rank]
    return np.array([held.get(category, 0) for category in _CATEGORIES], np.int64)


def _device_effects(program: Program, rank: int) -> tuple[_Bytes, _Bytes]:
    """``(num_ops of the rank,)`` Returns the change of device bytes while each operation runs, and after its end."""
    effects = program.columns.memory[program.rank_indices[rank]]
    on_device = _on_device(program)
    during, after = ((effect @ on_device)[effects] for effect in program.effect_bytes)
    return during, after


def memory_trace(program: Program, rank: int, times: Times) -> Iterator[MemorySample]:
    """Yields the samples of ``memory_curve``, for plots."""
    times_s, held = memory_curve(program, rank, times)
    for time_s, by_category in zip(times_s.tolist(), held.tolist(), strict=True):
        yield MemorySample(time_s, dict(zip(_CATEGORIES, by_category, strict=True)))


def memory_curve(program: Program, rank: int, times: Times) -> tuple[NDArray[np.float64], _Bytes]:
    """``(samples,)`` Returns seconds, ascending, and ``(samples, categories)`` the bytes from then on.

    There is a sample at the start and at the end of each operation. Host issue order decides which memory is held. If a
    later operation starts earlier (on another stream), its sample moves to the time of its predecessor.
    """
    ops = program.rank_indices[rank]
    ops = ops[np.array([bool(effects) for effects in program.effects])[program.columns.memory[ops]]]
    during, after = (effect[program.columns.memory[ops]] for effect in program.effect_bytes)
    changes = np.stack([during, after - during], axis=1).reshape(-1, len(_CATEGORIES))
    asynchronous = ~program.on_stream(Stream.COMPUTE, indices=ops)[:, np.newaxis]  # held from issue on
    issued_s = np.where(asynchronous, 0.0, np.stack([times.start_s[ops], times.end_s[ops]], axis=1)).reshape(-1)
    held = np.concatenate([_resting(program, rank)[np.newaxis], changes]).cumsum(axis=0)
    return np.maximum.accumulate(np.concatenate([[0.0], issued_s])), held


def _in_flight(program: Program, rank: int) -> dict[int, int]:
    """Returns, per stage, the maximum number of microbatches between forward and the end of backward."""
    c, indices = program.columns, program.rank_indices[rank]
    indices = indices[program.on_stream(Stream.COMPUTE, indices=indices)]
    stage, action, microbatch = c.stage[indices], c.action[indices].astype(np.int64), c.microbatch[indices]
    # an action is several operations at Level 2; it counts once
    begins = np.ones(len(indices), np.bool_)
    begins[1:] = (np.diff(stage) != 0) | (np.diff(action) != 0) | (np.diff(microbatch) != 0)
    forward = program.of_action(ActionKind.FORWARD, indices=indices) & begins
    backward = program.of_action(ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT, indices=indices) & begins
    change = forward.astype(np.int64) - backward
    return {
        int(number): int(np.cumsum(change[stage == number]).max()) for number in dict.fromkeys(stage[forward].tolist())
    }


def whole_blocks(num_bytes: int) -> int:
    """Returns the device bytes that the CUDA caching allocator reserves: whole blocks of 2 MiB."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
