"""Prices a whole Program: a duration for every operation, and the list of what was priced."""

from __future__ import annotations

from dataclasses import dataclass

from simplan.cost.base import CostModel, Price
from simplan.program.program import LayerWork, Message, Op, Program
from simplan.program.timeline import SpanKind

__all__ = ["PricedTerm", "Pricing", "price_program"]


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


@dataclass(frozen=True, slots=True)
class Pricing:
    """Durations of a Program's operations and where they come from.

    Attributes:
        durations_s: By operation, in the order of ``Program.ops``.
        deviations_s: One standard deviation of each.
        terms: What was priced, in order of first occurrence.
    """

    durations_s: tuple[float, ...]
    deviations_s: tuple[float, ...]
    terms: tuple[PricedTerm, ...]


def price_program(program: Program, cost: CostModel) -> Pricing:
    """Asks the cost model for every kind of work once and adds up.

    Layers of one operation are as wrong together as alone (their prices share a source), so deviations add.
    """
    terms: dict[LayerWork | Message, PricedTerm] = {}
    sums: dict[Message | int, _Sum] = {}
    durations_s, deviations_s = [], []
    for op in program.ops:
        # the work of many layers is long to hash, and all microbatches share one tuple of it
        key = op.work if isinstance(op.work, Message) else id(op.work)
        found = sums.get(key)
        if found is None:
            parts = (op.work,) if isinstance(op.work, Message) else op.work
            for part in parts:
                if part not in terms:
                    terms[part] = _term(part, op, cost)
            prices = [terms[part].price for part in parts]
            found = sums[key] = _Sum(
                parts,
                sum(price.seconds for price in prices),
                sum(price.seconds * price.relative_std for price in prices),
            )
        durations_s.append(found.duration_s)
        deviations_s.append(found.deviation_s)
        found.count += 1
    for total in sums.values():
        for part in total.parts:
            terms[part].count += total.count
    return Pricing(tuple(durations_s), tuple(deviations_s), tuple(terms.values()))


@dataclass(slots=True)
class _Sum:
    """The parts of an operation's work, added up, and how many operations do it."""

    parts: tuple[LayerWork | Message, ...]
    duration_s: float
    deviation_s: float
    count: int = 0


def _term(part: LayerWork | Message, op: Op, cost: CostModel) -> PricedTerm:
    if isinstance(part, Message):
        name = part.kind if part.kind == "send" else f"{part.kind} over {len(part.ranks)} ranks"
        return PricedTerm(name, op.kind, cost.message(part))
    return PricedTerm(f"{part.layer.kind} {part.phase}", op.kind, cost.compute(part))
