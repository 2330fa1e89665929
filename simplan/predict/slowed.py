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

from simplan.cost.base import Price
from simplan.cost.pricing import PricedTerm, Pricing
from simplan.program.program import LayerWork, Program, Work
from simplan.program.timeline import SpanKind
from simplan.sim.beside import Beside
from simplan.sim.engine import Times
from simplan.units import format_percent, format_time

__all__ = ["slowed"]

_Floats = npt.NDArray[np.float64]


def slowed(program: Program, pricing: Pricing, run: Callable[[_Floats], Times]) -> Pricing:
    """Apply the overlap slowdown to the cost estimates of a Program.

    Args:
        program: Program of the estimates.
        pricing: Estimates without overlap slowdown.
        run: Simulator: durations to start and end of every operation.

    Returns:
        Estimates with longer durations and deviations of overlapped compute; ``pricing`` if nothing overlaps.
    """
    beside = Beside.of(program) if pricing.taken_share else None
    if beside is None or not beside.of_rank:
        return pricing
    times = run(pricing.durations_s)
    beside_s = beside.seconds(times.start_s, times.end_s)
    if not beside_s.any():
        return pricing
    works = program.columns.work
    parts = np.zeros(len(program.works))  # by work, which all microbatches share
    for work in np.unique(works[beside_s > 0]).tolist():
        parts[work] = _computing_part(program.works[work], pricing)
    beside_s *= parts[works]
    more_s = pricing.taken_share * beside_s
    longer = np.divide(more_s, pricing.durations_s, out=np.zeros_like(more_s), where=pricing.durations_s > 0)
    return replace(
        pricing,
        durations_s=pricing.durations_s + more_s,
        deviations_s=pricing.deviations_s * (1 + longer),
        beside=_term(program, pricing, beside_s),
    )


def _computing_part(work: tuple[Work, ...], pricing: Pricing) -> float:
    """Compute fraction of an operation's time; the rest is communication merged into the operation."""
    seconds = [(pricing.by_work[part].price.seconds, isinstance(part, LayerWork)) for part in work]
    return sum(own_s for own_s, computes in seconds if computes) / sum(own_s for own_s, _ in seconds)


def _term(program: Program, pricing: Pricing, beside_s: _Floats) -> PricedTerm:
    """Cost term of the overlap slowdown, mean over ranks."""
    num_ranks, total_s = len(program.ranks), float(beside_s.sum())
    one = program.works[program.columns.work[beside_s.argmax()]][0]
    relative = np.divide(pricing.deviations_s, pricing.durations_s, out=np.zeros_like(beside_s), where=beside_s > 0)
    price = Price(
        pricing.taken_share * total_s / num_ranks,
        pricing.by_work[one].price.provenance,
        float((relative * beside_s).sum()) / total_s,
        f"{format_percent(pricing.taken_share)} of {format_time(total_s / num_ranks)} in which messages move beside it",
    )
    return PricedTerm("computing beside messages", SpanKind.COMPUTE, price, num_ranks)
