"""Terms of an explanation, and the exposed part of communication."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simplan.cost.model import CostEstimate
from simplan.units import format_bytes, format_number, format_time

_WHOLE = 1e-6


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """A kernel of a compute term, or transfers of one size of a communication term.

    Attributes:
        name: Name of the kernel or transfer.
        limit: What bounds its time; see ``simplan.cost.model.Limit``.
        value: Seconds in the step, alone.
        formula: The formula with numbers filled in; its value is ``value``.
    """

    name: str
    limit: str
    value: float
    formula: str


@dataclass(frozen=True, slots=True)
class ExplainedTerm:
    """A term of a sum, or a figure.

    Attributes:
        group: Group of the term, e.g. ``compute`` or ``activations``.
        name: Name of the term.
        value: Value in ``unit``.
        unit: ``s``, ``bytes``, or empty.
        formula: The formula with numbers filled in; its value is ``value``. Parentheses that begin with a letter are
            remarks.
        note: What the formula does not say; empty for nothing.
        provenance: Source of the cost estimate; None if the term has none.
        relative_std: Relative standard deviation of the cost estimate; None if the term has none.
        parts: Kernels of a compute term, which sum to it; transfers of a communication term, which sum to the time of
            all of them, overlapped or not.
    """

    group: str
    name: str
    value: float
    unit: str
    formula: str
    note: str = ""
    provenance: str | None = None
    relative_std: float | None = None
    parts: tuple[ExplainedPart, ...] = ()

    def __repr__(self) -> str:
        """Group, name, value and formula, in one line."""
        value = {"s": format_time, "bytes": format_bytes}.get(self.unit, format_number)(self.value)
        return f"ExplainedTerm({self.group}: {self.name}, {value} = {self.formula})"


def remainder_words(whole_s: float, part_s: float, what: str = "") -> str:
    """Formula of a difference of two times, with enough digits for its value; ``what`` is said of the second one."""
    digits = 4
    if whole_s > part_s > 0:
        digits += max(0, math.ceil(math.log10(whole_s / (whole_s - part_s))))
    return f"{format_time(whole_s, digits=digits)} - {format_time(part_s, digits=digits)}{what and f' {what}'}"


def parts_of(estimate: CostEstimate, count: float) -> Iterator[ExplainedPart]:
    """Yield the parts of a cost estimate for all its occurrences."""
    for part in estimate.parts:
        yield ExplainedPart(part.name, str(part.limit), count * part.seconds, counted_formula(count, part.formula))


def occurrences(times: float) -> float:
    """Occurrences of work in a step: a whole number, except in the mean over the steps of a round."""
    return round(times) if abs(times - round(times)) < _WHOLE else times


def counted_formula(count: float, formula: str) -> str:
    """Formula of several occurrences."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:.4g}"
    return formula if count == 1 else f"{number} x ({formula})"


def exposed_s(
    computing_s: NDArray[np.float64], moving_s: NDArray[np.float64], labels: NDArray[np.integer], num_labels: int
) -> NDArray[np.float64]:
    """``(num_labels,)`` Exposed seconds by label; concurrent communication shares exposed time equally.

    Args:
        computing_s: ``(2, intervals)`` Starts and ends of what the rank computes.
        moving_s: ``(2, communications)`` Starts and ends of collectives and P2P sends.
        labels: ``(communications,)`` Label of each communication, 0 to ``num_labels - 1``.
    """
    times_s = np.concatenate([*computing_s, *moving_s])
    num_computing, num_moving = computing_s.shape[1], moving_s.shape[1]
    change = np.repeat([1, -1, 1, -1], [num_computing, num_computing, num_moving, num_moving])
    label = np.concatenate([np.full(2 * num_computing, -1), labels, labels])
    order = np.argsort(times_s, kind="stable")
    change, label, lengths_s = change[order], label[order], np.diff(times_s[order])

    def active(counts: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.cumsum(change * counts)[:-1]

    moving = active(label >= 0)
    exposed = (moving > 0) & (active(label < 0) == 0)
    each_s = lengths_s[exposed] / moving[exposed]
    return np.array([active(label == number)[exposed] @ each_s for number in range(num_labels)])
