"""Rows of the result table."""

from __future__ import annotations

from dataclasses import dataclass

HEADER = "| what | goal | found | met |\n|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One benchmark result.

    Attributes:
        what: Name of the measured quantity.
        goal: Required value, as text.
        measured: Measured value with its spread, as text.
        ok: True if the goal is met.
    """

    what: str
    goal: str
    measured: str
    ok: bool

    def to_markdown(self) -> str:
        """Row of the Markdown table."""
        return f"| {self.what} | {self.goal} | {self.measured} | {'yes' if self.ok else '**no**'} |"


def to_markdown(rows: list[BenchmarkRow]) -> str:
    """Markdown table of the rows."""
    return "\n".join([HEADER, *(row.to_markdown() for row in rows)])
