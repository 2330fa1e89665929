"""One term of an explanation."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExplainedTerm"]


@dataclass(frozen=True, slots=True)
class ExplainedTerm:
    """A part of a whole, or a figure.

    Attributes:
        group: What it is a part of, e.g. ``compute`` or ``activations``.
        name: What it is.
        value: In ``unit``.
        unit: ``s``, ``bytes``, or empty.
        formula: The formula with numbers filled in.
        provenance: Where its price comes from; None when it has none of its own.
        relative_std: How sure that price is.
    """

    group: str
    name: str
    value: float
    unit: str
    formula: str
    provenance: str | None = None
    relative_std: float | None = None
