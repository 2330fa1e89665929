"""Prices a whole Program: a duration for every operation, and the list of what was priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simplan.cost.base import CostModel, Price, Provenance
from simplan.model.layer import CollectiveKind
from simplan.program.program import (
    SPAN_KINDS,
    Excess,
    HostCalls,
    HostCopy,
    HostWait,
    LayerWork,
    Program,
    Work,
)
from simplan.program.timeline import SpanKind
from simplan.units import format_percent, format_time

__all__ = ["PricedTerm", "Pricing", "host_calls_price", "price_program"]


@dataclass(slots=True)
class PricedTerm:
    """One kind of work that occurs in a Program.

    Attributes:
        name: E.g. ``block forward``.
        kind: What its time counts as.
        price: Price of one occurrence.
        count: Occurrences over all ranks of the Program.
    """

    name: str
    kind: SpanKind
    price: Price
    count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """Durations of a Program's operations and where they come from.

    Attributes:
        durations_s: (num_ops,) Seconds of operations.
        deviations_s: (num_ops,) One standard deviation of each.
        by_work: What was priced, in order of first occurrence.
        taken_share: Part of a device that messages take from what is computed beside them.
        beside: What that lengthens durations by, mean over ranks; None where they are as of what is done alone.
    """

    durations_s: NDArray[np.float64]
    deviations_s: NDArray[np.float64]
    by_work: Mapping[Work, PricedTerm]
    taken_share: float
    beside: PricedTerm | None = None

    @property
    def terms(self) -> tuple[PricedTerm, ...]:
        """What was priced."""
        return (*self.by_work.values(), *(() if self.beside is None else (self.beside,)))


def price_program(program: Program, cost: CostModel) -> Pricing:
    """Asks the cost model for every kind of work once and adds up.

    Layers of one operation are as wrong together as alone (their prices share a source), so deviations add. All is
    priced as if it was done alone.
    """
    columns = program.columns
    used, first, counts = np.unique(columns.work, return_index=True, return_counts=True)
    duration_s, deviation_s = np.zeros(len(program.works)), np.zeros(len(program.works))
    terms: dict[Work, PricedTerm] = {}
    for place in np.argsort(first).tolist():
        entry, kind = int(used[place]), SPAN_KINDS[columns.kind[first[place]]]
        for part in program.works[entry]:
            term = terms.get(part)
            if term is None:
                term = terms[part] = _term(part, kind, cost)
            duration_s[entry] += term.price.seconds
            deviation_s[entry] += term.price.seconds * term.price.relative_std
            term.count += int(counts[place])
    return Pricing(duration_s[columns.work], deviation_s[columns.work], terms, cost.taken_share)


def _term(part: Work, kind: SpanKind, cost: CostModel) -> PricedTerm:
    if isinstance(part, LayerWork):
        return PricedTerm(_name(part), kind, cost.compute(part))
    if isinstance(part, HostCopy):
        return PricedTerm(f"copy {'to' if part.to_host else 'from'} host", kind, cost.host_copy(part))
    if isinstance(part, HostCalls):
        how = "copied" if part.copies else "listed"
        return PricedTerm(f"parts of matrices, {how} by the host", kind, host_calls_price(part))
    if isinstance(part, HostWait):
        name = "host, once a step" if part.reason == "step" else "host, the batch of a forward"
        return PricedTerm(name, kind, cost.host_wait(part))
    if isinstance(part, Excess):
        names = " and ".join(dict.fromkeys(message.kind for message in part.messages))
        return PricedTerm(f"{names} beyond {_name(part.beside)}", kind, _excess(part, cost))
    alone = part.kind is CollectiveKind.SEND
    return PricedTerm(part.kind if alone else f"{part.kind} over {len(part.ranks)} ranks", kind, cost.message(part))


def _excess(part: Excess, cost: CostModel) -> Price:
    messages = [cost.message(message) for message in part.messages]
    beside = cost.compute(part.beside)
    moving_s = sum(price.seconds for price in messages)
    formula = f"what is left of {format_time(moving_s)} beside {format_time(beside.seconds)} of products"
    if part.taken:
        formula += f", which have {format_percent(part.taken)} less of the device meanwhile"
    surest = max(messages, key=lambda price: price.relative_std)
    # products that have the rest of the device meanwhile end after the messages, or before them
    seconds = max(moving_s - beside.seconds, part.taken * moving_s)
    return Price(seconds, surest.provenance, surest.relative_std, formula)


def _name(work: LayerWork) -> str:
    """``block forward``, or with some of the kernels only ``block forward: norm2 to down``."""
    whole = f"{work.layer.title} {work.phase}{' on the host' if work.on_host else ''}"
    if work.kernels is None:
        return whole
    first, last = (work.layer.kernels[index].name for index in (work.kernels[0], work.kernels[-1]))
    return f"{whole}: {first}" if len(work.kernels) == 1 else f"{whole}: {first} to {last}"


_VIEW_S = 18e-6
"""Python makes a view of one tensor of a list and asks for its own rank: 14 to 22 us on a busy server (AMD EPYC, torch
2.13, tensors on the CPU). Not fitted."""
_COPY_S = 8.5e-6
"""Torch checks it and copies it from or to one buffer for all: 5 to 12 us there; on a GPU each copy is a launch
besides. Not fitted."""
_RELATIVE_STD = 0.3


def host_calls_price(calls: HostCalls) -> Price:
    """Price on any host."""
    call_s = _COPY_S if calls.copies else _VIEW_S
    formula = f"{calls.num_calls} x {format_time(call_s)} of the host"
    return Price(calls.num_calls * call_s, Provenance.DATASHEET, _RELATIVE_STD, formula)
