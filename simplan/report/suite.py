"""A suite as Markdown: total errors, every case, and failures with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simplan.report.comparison import format_error
from simplan.units import format_bytes, format_percent, format_time
from simplan.validate.suite import MEASURES, Suite, SuiteCase, errors_of

__all__ = ["suite_markdown", "suite_summary"]

_NAMES = {"step_time": "step time", "memory": "peak allocated memory"}


def suite_markdown(suite: Suite) -> str:
    """The whole report."""
    environment = suite.environment
    about = [str(environment[key]) for key in ("device", "system") if environment.get(key)]
    about += [f"{key} {environment[key]}" for key in ("torch", "cuda", "nccl") if environment.get(key)]
    source = "the catalogue" if suite.calibration_file is None else f"the catalogue and `{suite.calibration_file}`"
    parts = [
        "# Predicted against measured on one device",
        f"{', '.join(about)}. Predictions are from {source}. Error = (predicted - measured) / measured.",
        _overall(suite),
    ]
    if runs := [case for case in suite.of_kind("run") if case.failure is None]:
        parts += ["## Runs", _cases(runs)]
    if rehearsals := [case for case in suite.of_kind("rehearsal") if case.failure is None]:
        parts += [
            "## Rehearsals",
            "One rank of a larger job. Its step time is that of the whole job, with the rank's measured computing and "
            "modelled communication.",
            _cases(rehearsals),
        ]
    failed = [f"- `{case.name}`: {case.failure}" for case in suite.cases if case.failure is not None]
    failed += [f"- `{name}`: no time was left; the same command goes on with it" for name in suite.not_reached]
    if failed:
        parts += ["## Not measured", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def suite_summary(suite: Suite) -> str:
    """Mean and worst error per measure, one line each, and the number of missing cases."""
    lines = []
    for kind, what in (("run", "runs"), ("rehearsal", "rehearsals")):
        for measure in MEASURES:
            found = errors_of(suite.of_kind(kind), measure)
            if found is not None:
                mean = f"{_NAMES[measure]} of {found.num} {what}: {format_percent(found.mean_absolute)} off on average"
                lines.append(f"{mean}, worst {format_error(found.worst)} ({found.worst_case})")
    failed = sum(case.failure is not None for case in suite.cases)
    if failed:
        lines.append(f"{failed} failed")
    if suite.not_reached:
        lines.append(f"{len(suite.not_reached)} not reached in time; the same command goes on")
    return "\n".join(lines or ["nothing was measured"])


def _overall(suite: Suite) -> str:
    rows = []
    for kind, what in (("run", "runs"), ("rehearsal", "rehearsals")):
        for measure in MEASURES:
            found = errors_of(suite.of_kind(kind), measure)
            if found is not None:
                numbers = [format_percent(found.mean_absolute), format_error(found.bias), format_error(found.worst)]
                rows.append([f"{_NAMES[measure]}, {what}", str(found.num), *numbers, f"`{found.worst_case}`"])
    return _table(["", "cases", "mean absolute error", "bias", "worst", "of"], rows)


def _cases(cases: Iterable[SuiteCase]) -> str:
    headers = ["scenario", "step time", "predicted", "error", "spread", "MFU", "peak allocated", "predicted", "error"]
    rows = [
        [
            f"`{case.name}`",
            _time(case.measured_step_time_s),
            _time(case.predicted_step_time_s),
            format_error(case.error("step_time")),
            "" if case.spread is None else f"{100 * case.spread:.1f} %",
            "" if case.mfu is None else format_percent(case.mfu),
            _bytes(case.measured_allocated_bytes),
            _bytes(case.predicted_allocated_bytes),
            format_error(case.error("memory")),
        ]
        for case in cases
    ]
    return _table(headers, rows)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_time(seconds)


def _bytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
