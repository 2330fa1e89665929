"""Results of ``simplan check``: records, and their forms as text, JSON, JUnit XML and GitHub annotations."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from xml.etree import ElementTree

from pydantic_core import to_jsonable_python

from simplan.units import counted


class CheckStatus(StrEnum):
    """Outcome of an expectation."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    ERROR = "error"


_WORST_FIRST = (CheckStatus.ERROR, CheckStatus.FAILED, CheckStatus.SKIPPED)


@dataclass(frozen=True, slots=True)
class CheckedCase:
    """One expectation of one scenario, or the scenario itself when it could not be predicted.

    Attributes:
        name: The metric, or ``scenario``.
        status: Outcome.
        message: One line: actual value and rule, the error, or why it was skipped.
        why: Source of the expectation; empty when none is given.
        line: 1-based line in the file; None when unknown.
    """

    name: str
    status: CheckStatus
    message: str
    why: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One scenario file, as named by the user, and its cases in the order of the file."""

    file: str
    cases: tuple[CheckedCase, ...]


def count(files: Iterable[CheckedFile], status: CheckStatus) -> int:
    """Number of cases with a status."""
    return sum(case.status is status for file in files for case in file.cases)


def checks_text(files: Iterable[CheckedFile]) -> str:
    """A line per file, a line per case that did not pass, and the totals."""
    files = tuple(files)
    lines: list[str] = []
    for file in files:
        statuses = {case.status for case in file.cases}
        worst = next((status.upper() for status in _WORST_FIRST if status in statuses), "ok")
        bare = all(case.name == "scenario" and case.status is CheckStatus.PASSED for case in file.cases)
        passed = "predicted, no expectations" if bare else f"{count([file], CheckStatus.PASSED)} passed"
        lines.append(f"{worst:8} {file.file}  {passed}")
        for case in file.cases:
            if case.status is not CheckStatus.PASSED:
                place = f"line {case.line}: " if case.line is not None else ""
                why = f"  ({case.why})" if case.why else ""
                lines.append(f"         {case.status}: {place}{case.message}{why}")
    totals = ", ".join(f"{count(files, status)} {status}" for status in CheckStatus)
    return "\n".join([*lines, f"{counted(len(files), 'scenario')}: {totals.replace('error', 'errors')}"])


def checks_json(files: Iterable[CheckedFile]) -> dict[str, Any]:
    """Checked files and totals per status as a JSON document."""
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

    return "\n".join(["| scenario | expectation | result | detail |", "| --- | --- | --- | --- |", *rows(), ""])


_LEVELS = {CheckStatus.FAILED: "error", CheckStatus.ERROR: "error", CheckStatus.SKIPPED: "notice"}


def github_text(files: Iterable[CheckedFile]) -> str:
    """The annotations, then the text, in which GitHub obeys no line: names of files may have any characters."""
    files, token = tuple(files), secrets.token_hex(16)
    return "\n".join([*github_annotations(files), f"::stop-commands::{token}", checks_text(files), f"::{token}::"])


def github_annotations(files: Iterable[CheckedFile]) -> Iterator[str]:
    """One ``::error file=F,line=N,title=T::message`` for each case that did not pass."""
    for file in files:
        for case in file.cases:
            if case.status not in _LEVELS:
                continue
            properties = {"file": file.file, "line": str(case.line or 1), "title": f"simplan check: {case.name}"}
            listed = ",".join(f"{key}={_escape_property(value)}" for key, value in properties.items())
            why = f" ({case.why})" if case.why else ""
            yield f"::{_LEVELS[case.status]} {listed}::{_escape(case.message + why)}"


def _escape(text: str) -> str:
    """A newline would end the command: GitHub reads percent codes."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")


_TAGS = {CheckStatus.FAILED: "failure", CheckStatus.ERROR: "error", CheckStatus.SKIPPED: "skipped"}
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(files: Iterable[CheckedFile]) -> str:
    """The XML text, as continuous integration services read it."""
    files = tuple(files)
    root = ElementTree.Element("testsuites", {"name": "simplan check"} | _counts(files))
    for file in files:
        suite = ElementTree.SubElement(root, "testsuite", {"name": _clean(file.file)} | _counts((file,)))
        for number, case in enumerate(file.cases, start=1):
            attributes = {"classname": _clean(file.file), "name": f"{number} {_clean(case.name)}"}
            attributes |= {"file": _clean(file.file)} | ({} if case.line is None else {"line": str(case.line)})
            element = ElementTree.SubElement(suite, "testcase", attributes)
            if case.status in _TAGS:
                outcome = ElementTree.SubElement(element, _TAGS[case.status], message=_clean(case.message))
                outcome.text = _clean(case.why or case.message)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(files: tuple[CheckedFile, ...]) -> dict[str, str]:
    return {
        "tests": str(sum(len(file.cases) for file in files)),
        "failures": str(count(files, CheckStatus.FAILED)),
        "errors": str(count(files, CheckStatus.ERROR)),
        "skipped": str(count(files, CheckStatus.SKIPPED)),
    }


def _clean(text: str) -> str:
    """Text without the characters that XML does not allow."""
    return _NOT_XML.sub("?", text)
