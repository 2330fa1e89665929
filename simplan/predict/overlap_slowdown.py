"""Slowdown of compute that overlaps communication.

Overlapped compute loses a fraction of its throughput. The overlap time is taken once, from a step without the slowdown.
That is exact if the communication ends before the compute it overlaps. If the communication takes longer, the step
waits for the communication anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simplan.cost.model import CostEstimate, CostPart, Limit
from simplan.cost.program_costs import CostTerm, ProgramCosts, computing_part
from simplan.program.program import ACTION_KINDS, Program, Stream
from simplan.program.timeline import COMPUTING, SpanKind, Times
from simplan.units import format_percent, format_time

_Floats = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]
_TAKING = (Stream.DATA, Stream.SHARD, Stream.REPLICATE, Stream.EXPERT_DATA)
"""Streams whose communication overlaps with compute and slows it down.

Tensor-parallel collectives next to chunks of a GEMM run on copy engines or few SMs; the cost of splitting the GEMM
includes them (``KernelRates.gemm_split_overhead_s``). ``OverlapRemainder`` has the slowdown by expert all-to-all. The
slowdown by context-parallel communication is unknown (no public data)."""
_LAYER_COLLECTIVE_STREAMS = (Stream.TENSOR, Stream.CONTEXT, Stream.EXPERT)
_WITHIN = (Stream.COMPUTE, *_LAYER_COLLECTIVE_STREAMS)


class _OfRank(NamedTuple):
    """Compute and communication of one rank, as indices into ``Program.ops``.

    Attributes:
        group: ``(computing,)`` Group of each compute operation.
        member: Members of groups: compute operations, and collectives that they wait for.
        member_group: ``(member,)`` Group of each member.
    """

    moving: _Indices
    computing: _Indices
    group: _Indices
    member: _Indices
    member_group: _Indices


@dataclass(frozen=True, slots=True, eq=False)
class ComputeCommOverlap:
    """Compute operations of a Program that may overlap with communication of their own rank.

    Consecutive operations of an action form a group. A group ends where communication waits for one of them or is
    waited for, except collectives inside layers. All operations of a group overlap with communication by the same
    fraction. Their order inside the group is therefore irrelevant, and layers may be merged, with their collectives at
    the end.

    Attributes:
        of_rank: Entries for the ranks with both compute and communication.
    """

    num_ops: int
    of_rank: Sequence[_OfRank]

    @classmethod
    def of(cls, program: Program) -> ComputeCommOverlap:
        """Returns the overlap candidates of a Program."""
        columns = program.columns
        computing = program.on_stream(Stream.COMPUTE) & program.of_kind(*COMPUTING)
        moving = program.on_stream(*_TAKING) & program.of_kind(SpanKind.COMMUNICATION)
        # by operation, the last compute operation of its rank up to and including itself
        order = np.concatenate([program.rank_indices[rank] for rank in program.ranks])
        last = np.maximum.accumulate(np.where(computing[order], np.arange(len(order)), -1))
        outside = ~program.on_stream(*_WITHIN)
        waiting = np.repeat(np.arange(len(program)), np.diff(columns.wait_first))
        begins_others = np.zeros(len(program), np.bool_)
        begins_others[columns.wait[outside[waiting]]] = True
        # only the first compute operation that waits for communication outside of layers really waits
        awaits = np.zeros(len(program), np.bool_)
        is_wait = computing[waiting] & outside[columns.wait]
        _, first = np.unique(columns.wait[is_wait], return_index=True)
        awaits[waiting[is_wait][first]] = True
        action = (
            columns.stage.astype(np.int64) * (1 + columns.microbatch.max(initial=0) + 1) + columns.microbatch
        ) * len(ACTION_KINDS) + columns.action
        computes = order[computing[order]]
        before = np.concatenate([computes[:1], computes[:-1]])
        new = begins_others[before] | awaits[computes] | (action[before] != action[computes])
        new |= columns.rank[before] != columns.rank[computes]
        group = np.full(len(program), -1)
        group[computes] = np.cumsum(new)
        # collectives that follow a compute operation of the same action are part of its group
        leader = np.where(last >= 0, order[last], 0)
        collectives = program.on_stream(*_LAYER_COLLECTIVE_STREAMS)[order] & (last >= 0)
        collectives &= (action[leader] == action[order]) & (columns.rank[leader] == columns.rank[order])
        group[order[collectives]] = group[leader[collectives]]
        of_ranks = []
        for indices in program.rank_indices.values():
            moves, computes = indices[moving[indices]], indices[computing[indices]]
            if len(moves) and len(computes):
                members = indices[group[indices] >= 0]
                base = group[computes[0]]
                of_ranks.append(_OfRank(moves, computes, group[computes] - base, members, group[members] - base))
        return cls(len(program), of_ranks)

    def seconds(self, start_s: _Floats, end_s: _Floats) -> _Floats:
        """Returns the seconds for which each operation computes while communication of its rank is in progress.

        The value is 0 for operations that do not compute.

        Args:
            start_s, end_s: ``(num_ops,)`` Start and end of operations, in seconds.
        """
        overlapped_s = np.zeros(self.num_ops)
        for moving, computing, group, member, member_group in self.of_rank:
            first_s, last_s = _joined(start_s[moving], end_s[moving])
            if len(first_s):
                began_s, ended_s = np.full(1 + group.max(), np.inf), np.zeros(1 + group.max())
                np.minimum.at(began_s, member_group, start_s[member])
                np.maximum.at(ended_s, member_group, end_s[member])
                moved_s = _moved_until(ended_s, first_s, last_s) - _moved_until(began_s, first_s, last_s)
                own_s, whole_s = end_s[computing] - start_s[computing], (ended_s - began_s)[group]
                part = np.divide(own_s, whole_s, out=np.zeros_like(own_s), where=whole_s > 0)
                overlapped_s[computing] = moved_s[group] * part
        return overlapped_s


def _joined(start_s: _Floats, end_s: _Floats) -> tuple[_Floats, _Floats]:
    """Returns intervals in order, with overlapping ones merged and empty ones removed."""
    order = np.argsort(start_s, kind="stable")
    order = order[end_s[order] > start_s[order]]
    if not len(order):
        return start_s[:0], end_s[:0]
    start_s, latest_s = start_s[order], np.maximum.accumulate(end_s[order])
    begins = np.concatenate([[True], start_s[1:] > latest_s[:-1]])
    return start_s[begins], latest_s[np.concatenate([begins[1:], [True]])]


def _moved_until(now_s: _Floats, first_s: _Floats, last_s: _Floats) -> _Floats:
    """Returns the seconds of disjoint intervals before each of the given times."""
    whole_s = np.concatenate([[0.0], np.cumsum(last_s - first_s)])
    place = np.searchsorted(first_s, now_s, side="right")
    latest = np.maximum(place - 1, 0)
    part_s = np.clip(now_s - first_s[latest], 0.0, last_s[latest] - first_s[latest])
    return np.where(place > 0, whole_s[latest] + part_s, 0.0)


def apply_overlap_slowdown(
    program: Program, program_costs: ProgramCosts, run: Callable[[_Floats], Times]
) -> ProgramCosts:
    """Apply the overlap slowdown to the cost estimates of a Program.

    Args:
        program, program_costs: Program, and its estimates without overlap slowdown.
        run: Simulator: durations to start and end of every operation.

    Returns:
        Estimates with longer durations and deviations of overlapped compute; ``program_costs`` if nothing overlaps.
    """
    overlap = ComputeCommOverlap.of(program) if program_costs.overlap_slowdown else None
    if overlap is None or not overlap.of_rank:
        return program_costs
    times = run(program_costs.durations_s)
    beside_s = overlap.seconds(times.start_s, times.end_s)
    if not beside_s.any():
        return program_costs
    works = program.columns.work
    parts = np.zeros(len(program.works))  # by work, which all microbatches share
    for work in np.unique(works[beside_s > 0]).tolist():
        parts[work] = computing_part(program.works[work], program_costs)
    beside_s *= parts[works]
    more_s = program_costs.overlap_slowdown * beside_s
    longer = np.divide(
        more_s, program_costs.durations_s, out=np.zeros_like(more_s), where=program_costs.durations_s > 0
    )
    return replace(
        program_costs,
        durations_s=program_costs.durations_s + more_s,
        deviations_s=program_costs.deviations_s * (1 + longer),
        beside=_term(program, program_costs, beside_s),
    )


def _term(program: Program, program_costs: ProgramCosts, beside_s: _Floats) -> CostTerm:
    """Cost term of the overlap slowdown, mean over ranks."""
    beside_s = beside_s * program.num_represented[program.columns.rank]
    num_ranks, total_s = len(program.stands_for), float(beside_s.sum())
    work = program.works[program.columns.work[beside_s.argmax()]][0]
    relative = np.divide(
        program_costs.deviations_s, program_costs.durations_s, out=np.zeros_like(beside_s), where=beside_s > 0
    )
    mean_s = total_s / num_ranks
    numbers = program_costs.overlap_slowdown, mean_s
    part = CostPart(
        "communication that overlaps compute",
        program_costs.overlap_slowdown * mean_s,
        Limit.BANDWIDTH,
        overlap_words,
        numbers,
    )
    provenance = program_costs.by_work[work].cost_estimate.provenance
    cost_estimate = CostEstimate.of(part, provenance, float((relative * beside_s).sum()) / total_s)
    return CostTerm("overlap slowdown of compute", SpanKind.COMPUTE, cost_estimate, num_ranks)


def overlap_words(slowdown: float, beside_s: float) -> str:
    """Returns the formula of the overlap slowdown of some seconds."""
    overlapped = format_time(beside_s, digits=4)
    return f"{format_percent(slowdown, digits=2)} of the device x {overlapped} of overlapped communication"
