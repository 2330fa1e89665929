"""Rows of the result table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row", "to_markdown"]


@dataclass(frozen=True, slots=True)
class Row:
    """One number.

    Attributes:
        what: What is measured.
        goal: What it must be.
        found: What it is, with its spread.
        ok: Whether the goal is met.
    """

    what: str
    goal: str
    found: str
    ok: bool


def to_markdown(rows: list[Row]) -> str:
    """A table of the rows."""
    lines = ["| what | goal | found | met |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.goal} | {row.found} | {'yes' if row.ok else '**no**'} |" for row in rows]
    return "\n".join(lines)
