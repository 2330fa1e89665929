"""Check results as workflow commands that GitHub shows beside the lines of the scenario files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simplan.report.checks import CheckedFile, CheckStatus

__all__ = ["github_annotations"]

_LEVELS = {CheckStatus.FAILED: "error", CheckStatus.ERROR: "error", CheckStatus.SKIPPED: "notice"}


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
