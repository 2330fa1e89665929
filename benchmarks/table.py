"""Rows of the result table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEADER", "BenchmarkRow", "to_markdown"]

HEADER = "| what | goal | found | met |\n|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
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

    def to_markdown(self) -> str:
        """A line of the table."""
        return f"| {self.what} | {self.goal} | {self.found} | {'yes' if self.ok else '**no**'} |"


def to_markdown(rows: list[BenchmarkRow]) -> str:
    """A table of the rows."""
    return "\n".join([HEADER, *(row.to_markdown() for row in rows)])
