"""One term of an explanation."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExplainedTerm"]


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
