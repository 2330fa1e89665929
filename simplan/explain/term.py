"""Terms of an explanation, and the exposed part of communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExplainedTerm:
    """A term of a sum, or a figure.

    Attributes:
        group: Group of the term, e.g. ``compute`` or ``activations``.
        name: Name of the term.
        value: Value in ``unit``.
        unit: ``s``, ``bytes``, or empty.
        formula: The formula with numbers filled in.
        provenance: Source of the cost estimate; None if the term has none.
        relative_std: Relative standard deviation of the cost estimate; None if the term has none.
    """

    group: str
    name: str
    value: float
    unit: str
    formula: str
    provenance: str | None = None
    relative_std: float | None = None


Interval = tuple[float, float]


def exposed_s(computing: Iterable[Interval], moving: Sequence[tuple[str, Interval]]) -> dict[str, float]:
    """Exposed seconds by label; concurrent communication shares exposed time equally.

    Args:
        computing: Intervals in which the rank computes.
        moving: Label and interval of every collective or P2P send.
    """
    found = dict.fromkeys((label for label, _ in moving), 0.0)
    events: list[tuple[float, int, str]] = []  # time, change, label; no label for computing
    for start, end in computing:
        events += [(start, 1, ""), (end, -1, "")]
    for label, (start, end) in moving:
        events += [(start, 1, label), (end, -1, label)]
    events.sort(key=lambda event: event[0])
    busy, before = 0, 0.0
    active: dict[str, int] = {}
    for now, change, label in events:
        num_active = sum(active.values())
        if num_active and not busy:
            for moved, count in active.items():
                found[moved] += (now - before) * count / num_active
        before = now
        if label:
            active[label] = active.get(label, 0) + change
        else:
            busy += change
    return found
