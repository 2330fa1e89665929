"""Slowdown of compute that overlaps communication.

Overlapped compute loses a fraction of its throughput. The overlap time is taken once, from a step without the slowdown.
That is exact if the communication ends before the compute it overlaps. If the communication takes longer, the step
waits for the communication anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simplan.cost.model import CostEstimate, CostPart, Limit
from simplan.cost.program_costs import CostTerm, ProgramCosts, computing_part
from simplan.program.program import Program
from simplan.program.timeline import SpanKind
from simplan.sim.engine import Times
from simplan.sim.overlap import ComputeCommOverlap
from simplan.units import format_percent, format_time

_Floats = npt.NDArray[np.float64]


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
    beside = ComputeCommOverlap.of(program) if program_costs.overlap_slowdown else None
    if beside is None or not beside.of_rank:
        return program_costs
    times = run(program_costs.durations_s)
    beside_s = beside.seconds(times.start_s, times.end_s)
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
    one = program.works[program.columns.work[beside_s.argmax()]][0]
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
    provenance = program_costs.by_work[one].cost_estimate.provenance
    cost_estimate = CostEstimate.of(part, provenance, float((relative * beside_s).sum()) / total_s)
    return CostTerm("overlap slowdown of compute", SpanKind.COMPUTE, cost_estimate, num_ranks)


def overlap_words(slowdown: float, beside_s: float) -> str:
    """Returns the formula of the overlap slowdown of some seconds."""
    overlapped = format_time(beside_s, digits=4)
    return f"{format_percent(slowdown, digits=2)} of the device x {overlapped} of overlapped communication"
