"""Steps and other values that a reader finds in a log, and their ``LoggedRun``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from simplan.units import counted
from simplan.validate.logged_run import LoggedRun
from simplan.validate.steady import steady_steps

Quantity = Literal["step_times_s", "tokens_per_s_per_device", "samples_per_s"]
"""Field of ``LoggedRun`` for the number that a log prints for every step."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_INTERRUPTIONS = {
    "checkpoint": re.compile(r"sav(?:e|ed|ing)[^\n]{0,60}checkpoint|checkpoint[^\n]{0,60}sav(?:e|ed|ing)", re.I),
    "evaluation": re.compile(r"validat|evaluat|eval_loss|val_loss", re.I),
}
_MAX_GAP = 20_000  # characters before a step that are searched for interruptions
_MAX_LINE = 1500  # characters of a line before, and after, the text that it is found by


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step, or the mean of the steps since the previous line, as a log prints it.

    Attributes:
        number: Number of the step.
        value: Number in the unit of the reader's ``Quantity``.
        start, end: Span of characters of the log.
    """

    number: int
    value: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LogReading:
    """Findings of one reader in a log.

    Attributes:
        title: Program that wrote the log.
        lines: Lines that were read, in words.
        quantity: Field of ``LoggedRun`` that ``steps`` are of.
        steps: Steps in order, each number once.
        others: Further fields of ``LoggedRun``.
        notes: Remarks on what the numbers contain.
    """

    title: str
    lines: str
    quantity: Quantity = "step_times_s"
    steps: Sequence[LoggedStep] = ()
    others: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has_time(self) -> bool:
        """True if the reading gives a step time."""
        return bool(self.steps) or "step_time_s" in self.others or "samples_per_s" in self.others

    def run(self, text: str) -> LoggedRun:
        """The run, with what the log did before the steps that are left out."""
        fields: dict[str, Any] = dict(self.others)
        source = f"{self.lines} of {self.title}"
        if self.steps:
            fields[self.quantity] = tuple(step.value for step in self.steps)
            fields["step_numbers"] = tuple(step.number for step in self.steps)
            fields["interruptions"] = self._interruptions(text)
            source = f"{counted(len(self.steps), 'line')} with {source}"
        return LoggedRun(program=self.title, source=source, notes=self.notes, **fields)

    def _interruptions(self, text: str) -> dict[int, str]:
        """Interruptions by the number of the step after them: ``checkpoint``, ``evaluation`` or both."""
        is_time = self.quantity == "step_times_s"
        causes_of = {}
        for index in steady_steps([step.value if is_time else 1 / step.value for step in self.steps]).outliers:
            before, step = self.steps[index - 1], self.steps[index]
            between = text[max(before.end, step.start - _MAX_GAP) : step.start]
            causes = [cause for cause, pattern in _INTERRUPTIONS.items() if pattern.search(between)]
            if index and causes:
                causes_of[step.number] = " and ".join(causes)
        return causes_of


def lines_with(text: str, literal: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of the lines that contain a text; long lines are cut around it.

    Patterns are searched for in these lines only, so that their time stays linear in the size of a log.
    """
    at = text.find(literal)
    while at >= 0:
        cut = max(0, at - _MAX_LINE)
        start = max(cut, text.rfind("\n", cut, at) + 1)
        end = text.find("\n", at, at + _MAX_LINE)
        end = min(len(text), at + _MAX_LINE) if end < 0 else end
        yield start, end
        at = text.find(literal, end)


def plain_text(text: str) -> str:
    """Text of a log without colors, and with a line for every state of a progress bar."""
    return _ESCAPES.sub("", text).replace("\r", "\n")


def each_once(steps: Sequence[LoggedStep]) -> tuple[LoggedStep, ...]:
    """Steps without those that other ranks print as well, or that are positive numbers in no sense."""
    first: dict[int, LoggedStep] = {}
    for step in steps:
        if 0 < step.value < 1e18:
            first.setdefault(step.number, step)
    return tuple(first.values())


def typical(values: Sequence[float]) -> float | None:
    """Median of positive values; None without any."""
    positive = [value for value in values if 0 < value < 1e18]
    return statistics.median(positive) if positive else None


def number(text: str) -> float:
    """Number as logs print it, with commas between thousands; 0 for none.

    >>> number("5,762"), number("1.2.3")
    (5762.0, 0.0)
    """
    try:
        return float(text.replace(",", "")) if len(text) < 40 else 0.0
    except ValueError:
        return 0.0
