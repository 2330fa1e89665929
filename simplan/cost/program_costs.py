"""Costs of a whole Program: durations of operations, the estimated terms, and the time of a pass through layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simplan.cost.mixed import MixedCost
from simplan.cost.model import CostEstimate, CostModel, CostPart, Limit, Provenance
from simplan.model.layer import CollectiveKind
from simplan.program.lowering.script import Segment
from simplan.program.program import (
    SPAN_KINDS,
    STREAMS,
    BucketWork,
    Communication,
    HostCalls,
    HostCopy,
    HostWait,
    LayerWork,
    OverlapRemainder,
    Phase,
    Program,
    Stream,
    Work,
)
from simplan.program.timeline import SpanKind
from simplan.units import counted, format_flops, format_percent, format_time

# Kernels of gradient compression.
_BYTES_PER_SCALED = 8  # read and written by the division of a gradient
_THIN_FLOPS_PER_BYTE = 10.0
"""FP32 FLOPs of a matmul with few columns in the time of one byte: 10 on an A100 (19.5 TFLOP/s, 2.0 TB/s), 20 on an
H100, 5 to 10 on a core of a CPU. Not fitted."""
_BUCKET_KERNEL_S = 5e-6
"""Seconds of a kernel besides its bytes: a launch of eager torch, on a GPU as on a CPU. Not fitted."""
_SELECTED_BYTES = 60.0
"""Bytes in whose time a GPU selects or permutes one element: a radix selection passes over values 4 times, with copies
of what is left. Not fitted."""
_SELECTED_ON_CPU_S = 15e-9
"""Seconds in which a core selects or permutes one element, whatever its memory: one core of a server (AMD EPYC, torch
2.13) took 9 to 22 ns for a selection, and 6 to 29 ns for a permutation. Not fitted."""
_BUCKET_RELATIVE_STD = 0.5


@dataclass(slots=True)
class CostTerm:
    """One kind of work in a Program, with its cost estimate.

    Attributes:
        name: Name, e.g. ``block forward``.
        cost_estimate: Cost estimate of one occurrence.
        count: Occurrences over all ranks of the job, those that are not simulated included.
        stream: Stream of a collective; None for other work, and for collectives merged into a compute operation.
    """

    name: str
    kind: SpanKind
    cost_estimate: CostEstimate
    count: int = 0
    stream: Stream | None = None

    @property
    def title(self) -> str:
        """Name, of a collective with its axis: ``all_gather over 8 ranks (shard)``."""
        return self.name if self.stream is None else f"{self.name} ({self.stream})"


@dataclass(frozen=True, slots=True, eq=False)
class ProgramCosts:
    """Estimated durations of a Program's operations, and their sources.

    Attributes:
        durations_s: ``(num_ops,)`` Seconds per operation.
        deviations_s: ``(num_ops,)`` Standard deviation of each duration, in seconds.
        least_s: ``(num_ops,)`` Seconds that the bytes of a transfer need at datasheet bandwidth; 0 for compute.
        by_work: Estimates by work, in order of first occurrence.
        overlap_slowdown: See ``CostModel``.
        beside: Time that the overlap slowdown adds, mean over ranks; None if durations do not include it.
        uncontended_s: ``(num_ops,)`` Durations without contention on the links of a topology; None without a topology.
        without_background_s: ``(num_ops,)`` Durations if no other job used these links; None without other jobs.
    """

    durations_s: NDArray[np.float64]
    deviations_s: NDArray[np.float64]
    least_s: NDArray[np.float64]
    by_work: Mapping[Work, CostTerm]
    overlap_slowdown: float
    beside: CostTerm | None = None
    uncontended_s: NDArray[np.float64] | None = None
    without_background_s: NDArray[np.float64] | None = None

    @property
    def terms(self) -> tuple[CostTerm, ...]:
        """All estimates."""
        return (*self.by_work.values(), *(() if self.beside is None else (self.beside,)))


def estimate_program(program: Program, cost: CostModel) -> ProgramCosts:
    """Estimates every kind of work once with the cost model, and sums the work of each operation.

    Errors of the layers of one operation share a source, so deviations add linearly. All work is estimated as if it ran
    alone.
    """
    columns = program.columns
    used, first = np.unique(columns.work, return_index=True)
    counts = np.bincount(columns.work, program.num_represented[columns.rank], len(program.works))
    duration_s, deviation_s, least_s = np.zeros((3, len(program.works)))
    terms: dict[Work, CostTerm] = {}
    for place in np.argsort(first).tolist():
        entry, kind = int(used[place]), SPAN_KINDS[columns.kind[first[place]]]
        for part in program.works[entry]:
            term = terms.get(part)
            if term is None:
                term = terms[part] = _term(part, kind, cost, on_cpu=program.one_memory)
                if isinstance(part, Communication) and part.kind is not CollectiveKind.SEND:
                    stream = STREAMS[columns.stream[first[place]]]
                    term.stream = None if stream is Stream.COMPUTE else stream
                group = getattr(part, "group", None)
                if group is not None and isinstance(cost, MixedCost):
                    term.name = f"{term.name} on {cost.devices[group]}"
            duration_s[entry] += term.cost_estimate.seconds
            deviation_s[entry] += term.cost_estimate.seconds * term.cost_estimate.relative_std
            least_s[entry] += term.cost_estimate.least_s
            term.count += int(counts[entry])
    by_op = (duration_s[columns.work], deviation_s[columns.work], least_s[columns.work])
    return ProgramCosts(*by_op, terms, cost.overlap_slowdown)


def _term(part: Work, kind: SpanKind, cost: CostModel, *, on_cpu: bool) -> CostTerm:
    match part:
        case LayerWork():
            name, cost_estimate = _name(part), cost.compute(part)
        case HostCopy():
            name, cost_estimate = f"copy {'to' if part.to_host else 'from'} host", cost.host_copy(part)
        case HostCalls():
            how = "copied" if part.copies else "listed"
            name, cost_estimate = f"parts of matrices, {how} by the host", host_calls_cost(part)
        case HostWait():
            name = "host, once a step" if part.reason == "step" else "host, the batch of a forward"
            cost_estimate = cost.host_wait(part)
        case BucketWork():
            name, cost_estimate = part.name, bucket_cost(part, cost, on_cpu=on_cpu)
        case OverlapRemainder():
            names = " and ".join(dict.fromkeys(communication.kind for communication in part.communications))
            name, cost_estimate = f"{names} beyond {_name(part.beside)}", _excess(part, cost)
        case Communication():
            is_send = part.kind is CollectiveKind.SEND
            name = str(part.kind) if is_send else f"{part.kind} over {len(part.ranks)} ranks"
            cost_estimate = cost.communication(part)
    return CostTerm(name, kind, cost_estimate)


def computing_part(work: tuple[Work, ...], program_costs: ProgramCosts) -> float:
    """Returns the compute fraction of an operation's time; the rest is communication merged into the operation."""
    seconds = [
        (program_costs.by_work[part].cost_estimate.seconds, isinstance(part, LayerWork | BucketWork)) for part in work
    ]
    total_s = sum(own_s for own_s, _ in seconds)
    return sum(own_s for own_s, computes in seconds if computes) / total_s if total_s else 0.0


def _excess(part: OverlapRemainder, cost: CostModel) -> CostEstimate:
    communications = [cost.communication(communication) for communication in part.communications]
    beside = cost.compute(part.beside)
    moving_s = sum(cost_estimate.seconds for cost_estimate in communications)
    surest = max(communications, key=lambda cost_estimate: cost_estimate.relative_std)
    # GEMMs with the remaining SMs end after the communication, or before it
    seconds = max(moving_s - beside.seconds, part.sm_fraction * moving_s)
    numbers = moving_s, beside.seconds, part.sm_fraction
    remainder = CostPart("beyond overlapped GEMMs", seconds, Limit.BANDWIDTH, _excess_words, numbers)
    return CostEstimate.of(remainder, surest.provenance, surest.relative_std)


def _excess_words(moving_s: float, beside_s: float, sm_fraction: float) -> str:
    moving, gemms = format_time(moving_s, digits=4), format_time(beside_s, digits=4)
    if moving_s - beside_s >= sm_fraction * moving_s:
        return f"{moving} of communication - {gemms} of overlapped GEMMs"
    share = format_percent(sm_fraction, digits=2)
    return f"{share} of the throughput of overlapped GEMMs x {moving} of communication"


def _name(work: LayerWork) -> str:
    """Returns ``block forward``, or with a subset of the kernels ``block forward: norm2 to down``."""
    chunks = work.layer.loss_chunks
    with_gradients = work.phase is Phase.FORWARD and chunks is not None and chunks.in_forward
    more = " on the host" if work.on_host else " with gradients" if with_gradients else ""
    whole = f"{work.layer.title} {work.phase}{more}"
    if work.kernels is None:
        return whole
    first, last = (work.layer.kernels[index].name for index in (work.kernels[0], work.kernels[-1]))
    return f"{whole}: {first}" if len(work.kernels) == 1 else f"{whole}: {first} to {last}"


_VIEW_S = 18e-6
"""Seconds for Python to create a view of one tensor of a list and to look up its own rank: 14 to 22 us on a busy server
(AMD EPYC, torch 2.13, tensors on the CPU). Not fitted."""
_COPY_S = 8.5e-6
"""Seconds for torch to check one tensor and to copy it from or to a common buffer: 5 to 12 us on the same server. On a
GPU each copy is an additional launch. Not fitted."""
_RELATIVE_STD = 0.3


def host_calls_cost(calls: HostCalls) -> CostEstimate:
    """Estimates the time of host calls on any host."""
    call_s = _COPY_S if calls.copies else _VIEW_S
    numbers = calls.num_calls, call_s
    part = CostPart("calls of the host", calls.num_calls * call_s, Limit.HOST, calls_words, numbers)
    return CostEstimate.of(part, Provenance.DATASHEET, _RELATIVE_STD)


def calls_words(num_calls: int, call_s: float) -> str:
    """Returns the formula of calls of the host."""
    return f"{counted(num_calls, 'call')} x {format_time(call_s, digits=4)} of the host"


def bucket_cost(work: BucketWork, cost: CostModel, *, on_cpu: bool) -> CostEstimate:
    """Estimates memory-bound kernels, thin matmuls and selections from the time to divide gradients.

    Args:
        work: The kernels.
        cost: Gives the time of ``BucketWork.streamed``.
        on_cpu: True if they run on a CPU.
    """
    streamed = work.streamed
    estimate = cost.compute(streamed)
    byte_s = estimate.seconds / (_BYTES_PER_SCALED * max(1, streamed.num_parameters))
    multiplied_s = max(0.0, work.flops / _THIN_FLOPS_PER_BYTE * byte_s - estimate.seconds)
    selected_s = work.num_selected * (_SELECTED_ON_CPU_S if on_cpu else _SELECTED_BYTES * byte_s)
    kernels = work.num_kernels, _BUCKET_KERNEL_S
    parts = [
        *estimate.parts,
        CostPart("kernels", work.num_kernels * _BUCKET_KERNEL_S, Limit.LAUNCH, _bucket_kernels_words, kernels),
        CostPart("thin matmuls", multiplied_s, Limit.COMPUTE, _thin_matmul_words, (work.flops, multiplied_s)),
        CostPart("selection", selected_s, Limit.MEMORY, _selection_words, (work.num_selected, selected_s)),
    ]
    found = tuple(part for part in parts if part.seconds)
    return CostEstimate(found, estimate.provenance, max(estimate.relative_std, _BUCKET_RELATIVE_STD))


def _bucket_kernels_words(number: int, kernel_s: float) -> str:
    return f"{counted(number, 'kernel')} x {format_time(kernel_s, digits=4)}"


def _thin_matmul_words(flops: int, seconds: float) -> str:
    return f"{format_time(seconds, digits=4)} of {format_flops(flops)} beyond the bytes"


def _selection_words(number: int, seconds: float) -> str:
    return f"{format_time(seconds, digits=4)} for {number:,} elements"


def pass_time_s(
    segments: Iterable[Segment],
    groups: Mapping[str, tuple[int, ...]],
    work_s: Callable[[LayerWork], float],
    communication_s: Callable[[Communication], float],
    free: Set[str] = frozenset(),
) -> float:
    """Returns the seconds of all compute, and of collectives beyond the GEMMs with which they overlap.

    Args:
        segments: Segments in order.
        groups: Axis -> ranks of its collectives.
        work_s, communication_s: Cost estimates in seconds.
        free: Axes whose collectives count as zero-cost.
    """
    total_s = hidden_s = 0.0
    for segment in segments:
        total_s += sum(map(work_s, segment.work))
        collective = segment.collective
        if collective is None or collective.axis in free:
            continue
        if segment.beside is not None or not collective.beside:
            hidden_s = 0.0 if segment.beside is None else work_s(segment.beside)
        collective_s = communication_s(collective.among(groups[collective.axis]))
        total_s += max(0.0, collective_s - hidden_s)
        hidden_s = max(0.0, hidden_s - collective_s)
    return total_s
