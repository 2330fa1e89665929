"""Peak memory: a walk over each rank's allocations and frees in host issue order, independent of durations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from simplan.program.action import ActionKind
from simplan.program.program import MemoryCategory, Op, Program, Stream
from simplan.sim.engine import Times

__all__ = [
    "MemoryPeak",
    "MemorySample",
    "coming_and_going_bytes",
    "host_peak_bytes",
    "memory_peak",
    "memory_trace",
    "peak_position",
    "resting_bytes",
    "whole_blocks",
]

_BLOCK_BYTES = 2 * 1024**2


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The worst instant of one rank.

    Attributes:
        rank: Global rank.
        by_category: Bytes at that instant.
        action: The action during which it is, text form.
        activations_in_flight: By stage, most microbatches alive at once over the whole step.
    """

    rank: int
    by_category: dict[MemoryCategory, int]
    action: str
    activations_in_flight: dict[int, int]

    @property
    def total_bytes(self) -> int:
        """Sum over the categories."""
        return sum(self.by_category.values())


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory of a rank from a time on."""

    time_s: float
    by_category: dict[MemoryCategory, int]


def memory_peak(program: Program, rank: int) -> MemoryPeak:
    """Walks one rank's operations.

    Memory is back at what it was when the step ends; anything else is a bug of the lowering. The one moment outside of
    a step that counts is DDP's rebuilding of its buckets.
    """
    resting = _counted(program, program.resting_bytes[rank])
    rebuild_bytes = program.rebuild_bytes[rank]
    ops = [program.ops[index] for index in program.by_rank[rank]]
    worst = peak_position(program, rank)
    by_category = _counted(program, dict.fromkeys(MemoryCategory, 0)) | resting
    if worst < 0:
        by_category[MemoryCategory.BUFFERS] += rebuild_bytes
    for op in ops[: worst + 1]:
        for effect in op.memory:
            if effect.category in by_category:
                by_category[effect.category] += effect.during_bytes if op is ops[worst] else effect.after_bytes
    assert min(by_category.values()) >= 0, by_category
    return MemoryPeak(rank, by_category, str(ops[worst].action) if worst >= 0 else "", _in_flight(program, rank))


def peak_position(program: Program, rank: int) -> int:
    """Where in the rank's list its memory is largest; -1 for the time between steps."""
    # the total alone: it is all that is needed to find the worst instant
    elsewhere = None if program.one_memory else MemoryCategory.HOST
    held_bytes = base_bytes = sum(_counted(program, program.resting_bytes[rank]).values())
    most_bytes, worst = held_bytes + program.rebuild_bytes[rank], -1
    for position, index in enumerate(program.by_rank[rank]):
        during_bytes = after_bytes = 0
        for effect in program.ops[index].memory:
            if effect.category is not elsewhere:
                during_bytes += effect.during_bytes
                after_bytes += effect.after_bytes
        if held_bytes + during_bytes > most_bytes:
            most_bytes, worst = held_bytes + during_bytes, position
        held_bytes += after_bytes
    assert held_bytes == base_bytes, "memory is not back to its base"
    return worst


def resting_bytes(program: Program, rank: int) -> int:
    """What a rank holds between steps."""
    return sum(_counted(program, program.resting_bytes[rank]).values())


def coming_and_going_bytes(program: Program, rank: int) -> tuple[int, int]:
    """Most bytes beside those held between steps: in passes through layers, and while the optimizer runs."""
    elsewhere = None if program.one_memory else MemoryCategory.HOST
    held_bytes = most_bytes = updating_bytes = 0
    for index in program.by_rank[rank]:
        op = program.ops[index]
        effects = [effect for effect in op.memory if effect.category is not elsewhere]
        during_bytes = held_bytes + sum(effect.during_bytes for effect in effects)
        if op.action.kind is ActionKind.OPTIM:
            updating_bytes = max(updating_bytes, during_bytes)
        else:
            most_bytes = max(most_bytes, during_bytes)
        held_bytes += sum(effect.after_bytes for effect in effects)
    return most_bytes, updating_bytes


def host_peak_bytes(program: Program, rank: int) -> int:
    """Most bytes that a rank has in memory of its host, by the same walk."""
    held_bytes = most_bytes = program.resting_bytes[rank].get(MemoryCategory.HOST, 0)
    for index in program.by_rank[rank]:
        for effect in program.ops[index].memory:
            if effect.category is MemoryCategory.HOST:
                most_bytes = max(most_bytes, held_bytes + effect.during_bytes)
                held_bytes += effect.after_bytes
    return most_bytes


def _counted(program: Program, held: dict[MemoryCategory, int]) -> dict[MemoryCategory, int]:
    """What is on the device."""
    return {c: num_bytes for c, num_bytes in held.items() if program.one_memory or c is not MemoryCategory.HOST}


def memory_trace(program: Program, rank: int, times: Times) -> Iterator[MemorySample]:
    """Memory over time, for drawing: a sample when an operation starts and when it ends.

    Host issue order decides what is held; where a later operation starts earlier (another stream) its sample moves to
    the time of its predecessor, so that times never go back.
    """
    held = dict.fromkeys(MemoryCategory, 0) | program.resting_bytes[rank]
    yield MemorySample(0.0, dict(held))
    now_s = 0.0
    for index in program.by_rank[rank]:
        op = program.ops[index]
        if not op.memory:
            continue
        for during, time_s in ((True, times.start_s[index]), (False, times.end_s[index])):
            if op.stream is not Stream.COMPUTE:  # issued and not waited for: it holds its buffer from issue on
                time_s = now_s
            now_s = max(now_s, time_s)
            _add(held, op, during=during)
            yield MemorySample(now_s, dict(held))


def _add(held: dict[MemoryCategory, int], op: Op, *, during: bool) -> None:
    for effect in op.memory:
        held[effect.category] += effect.during_bytes if during else effect.after_bytes - effect.during_bytes


def _in_flight(program: Program, rank: int) -> dict[int, int]:
    """Most microbatches between forward and the end of backward, by stage."""
    alive: Counter[int] = Counter()
    most: Counter[int] = Counter()
    last = None
    for index in program.by_rank[rank]:
        op = program.ops[index]
        action = op.action
        if action is last or op.stream is not Stream.COMPUTE:  # an action is several operations at Level 2
            continue
        last = action
        if action.kind is ActionKind.FORWARD:
            alive[action.stage] += 1
            most[action.stage] = max(most[action.stage], alive[action.stage])
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            alive[action.stage] -= 1
    return dict(most)


def whole_blocks(num_bytes: int) -> int:
    """Bytes that the CUDA caching allocator has of the device for so many: it reserves in blocks of 2 MiB."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
