"""A suite as Markdown: total errors, every case, and failures with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simplan.report.comparison import format_error
from simplan.report.table import format_table_markdown
from simplan.units import format_bytes, format_percent, format_time
from simplan.validate.suite import MEASURES, Errors, Suite, SuiteCase, errors_of

_NAMES = {"step_time": "step time", "memory": "peak allocated memory"}


def suite_markdown(suite: Suite) -> str:
    """Full report."""
    environment = suite.environment
    about = [str(environment[key]) for key in ("device", "system") if environment.get(key)]
    about += [f"{key} {environment[key]}" for key in ("torch", "cuda", "nccl") if environment.get(key)]
    source = "the catalog" if suite.calibration_file is None else f"the catalog and `{suite.calibration_file}`"
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
            "One rank of a larger job. The step time is that of the job, from the measured compute of the rank and "
            "modeled communication.",
            _cases(rehearsals),
        ]
    failed = [f"- `{case.name}`: {case.failure}" for case in suite.cases if case.failure is not None]
    failed += [f"- `{name}`: no time was left; the same command continues" for name in suite.not_reached]
    if failed:
        parts += ["## Not measured", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def suite_summary(suite: Suite) -> str:
    """Mean and worst error per measure, one line each, and the number of missing cases."""
    lines = [
        f"{name} of {errors.num} {kind}s: mean absolute error {format_percent(errors.mean_absolute)}, "
        f"worst {format_error(errors.worst)} ({errors.worst_case})"
        for name, kind, errors in _errors(suite)
    ]
    failed = sum(case.failure is not None for case in suite.cases)
    if failed:
        lines.append(f"{failed} failed")
    if suite.not_reached:
        lines.append(f"{len(suite.not_reached)} not reached in time; the same command continues")
    return "\n".join(lines or ["nothing was measured"])


def _errors(suite: Suite) -> Iterator[tuple[str, str, Errors]]:
    """Name of the measure, kind of the cases, and errors, where there are any."""
    for kind in ("run", "rehearsal"):
        for measure in MEASURES:
            errors = errors_of(suite.of_kind(kind), measure)
            if errors is not None:
                yield _NAMES[measure], kind, errors


def _overall(suite: Suite) -> str:
    rows = [
        [
            f"{name}, {kind}s",
            str(errors.num),
            format_percent(errors.mean_absolute),
            format_error(errors.bias),
            format_error(errors.worst),
            f"`{errors.worst_case}`",
        ]
        for name, kind, errors in _errors(suite)
    ]
    return format_table_markdown(["", "cases", "mean absolute error", "bias", "worst", "of"], rows)


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
    return format_table_markdown(headers, rows)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_time(seconds)


def _bytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)
