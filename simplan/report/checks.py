"""What ``simplan check`` found, as data and as text. JUnit and annotations are made from the same records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import to_jsonable_python

from simplan.units import counted

__all__ = ["CheckStatus", "CheckedCase", "CheckedFile", "checks_json", "checks_text", "count", "markdown_summary"]


class CheckStatus(StrEnum):
    """How an expectation ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CheckedCase:
    """One expectation of one scenario, or the scenario itself when it could not be predicted.

    Attributes:
        name: The metric, or ``scenario``.
        status: How it ended.
        message: One line: actual value and rule, the error, or why it was skipped.
        why: Where the expectation comes from.
        line: 1-based line in the file; None when unknown.
    """

    name: str
    status: CheckStatus
    message: str
    why: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One scenario file.

    Attributes:
        file: As the user named it.
        cases: In the order of the file.
    """

    file: str
    cases: tuple[CheckedCase, ...]


def count(files: Iterable[CheckedFile], status: CheckStatus) -> int:
    """How many cases ended so."""
    return sum(case.status is status for file in files for case in file.cases)


def checks_text(files: Iterable[CheckedFile]) -> str:
    """A line per file, a line per case that did not pass, and the totals."""
    files = tuple(files)
    lines: list[str] = []
    for file in files:
        passed = count([file], CheckStatus.PASSED)
        worst = _worst(file)
        lines.append(f"{worst.upper() if worst is not CheckStatus.PASSED else 'ok':8} {file.file}  {passed} passed")
        for case in file.cases:
            if case.status is not CheckStatus.PASSED:
                place = f"line {case.line}: " if case.line is not None else ""
                why = f"  ({case.why})" if case.why else ""
                lines.append(f"         {case.status}: {place}{case.message}{why}")
    totals = ", ".join(f"{count(files, status)} {status}" for status in CheckStatus)
    return "\n".join([*lines, f"{counted(len(files), 'scenario')}: {totals.replace('error', 'errors')}"])


def checks_json(files: Iterable[CheckedFile]) -> dict[str, Any]:
    """The same as one JSON document."""
    files = tuple(files)
    return {
        "schema_version": 1,
        "kind": "check",
        "totals": {str(status): count(files, status) for status in CheckStatus},
        "files": to_jsonable_python(files),
    }


def markdown_summary(files: Iterable[CheckedFile]) -> str:
    """A table for the summary page of a continuous integration job."""

    def rows() -> Iterator[str]:
        for file in files:
            for case in file.cases:
                cells = (file.file, case.name, str(case.status), case.message)
                yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join(["| scenario | expectation | result | what |", "| --- | --- | --- | --- |", *rows(), ""])


def _worst(file: CheckedFile) -> CheckStatus:
    statuses = {case.status for case in file.cases}
    for status in (CheckStatus.ERROR, CheckStatus.FAILED, CheckStatus.SKIPPED):
        if status in statuses:
            return status
    return CheckStatus.PASSED
