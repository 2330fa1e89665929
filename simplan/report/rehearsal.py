"""Report of a dry run of one rank as text: predicted next to measured values, memory first."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.predict.rehearsal import Rehearsed
from simplan.report.comparison import format_error, format_spread
from simplan.report.table import format_table_text
from simplan.report.text import split_parts
from simplan.units import format_bytes, format_percent, format_time
from simplan.validate.rehearsal import MemoryRow, RehearsalComparison

__all__ = ["rehearsal_text"]

_MIN_SHARE = 0.005  # of the peak: errors of smaller parts are not shown


def rehearsal_text(comparison: RehearsalComparison) -> str:
    """Memory, then time by action, then the step of the whole job."""
    parts = [_memory(comparison)]
    if comparison.rehearsed is not None:
        parts += [_actions(comparison.rehearsed), "\n".join(_step(comparison, comparison.rehearsed))]
    notes = ["error = (predicted - measured) / measured", *comparison.notes]
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def _memory(comparison: RehearsalComparison) -> str:
    most_bytes = max(row.measured_bytes for row in comparison.peaks)

    def cells(row: MemoryRow) -> list[str]:
        counts = max(row.predicted_bytes, row.measured_bytes) > _MIN_SHARE * most_bytes
        return [
            row.name.replace("_", " "),
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            format_error(row.signed_error, "") if counts else "",
        ]

    predicted, measured = (
        f"in {action}" if action else "between steps"
        for action in (comparison.predicted_action, comparison.measured_action)
    )
    rows = [cells(row) for row in comparison.peaks]
    rows += [["  " + first, *others] for first, *others in map(cells, comparison.categories)]
    return f"Peak memory of rank {comparison.rank}: predicted {predicted}, measured {measured}\n" + format_table_text(
        ["", "predicted", "measured", "error"], rows
    )


def _actions(rehearsed: Rehearsed) -> str:
    rows = [
        [
            f"{time.kind.value} of stage {time.stage}",
            format_time(time.predicted_s),
            format_time(time.measured_s),
            format_error((time.predicted_s - time.measured_s) / time.measured_s if time.measured_s > 0 else None, ""),
            format_spread(time.relative_std),
        ]
        for time in rehearsed.kinds
        if time.predicted_s > 0 or time.measured_s > 0
    ]
    return "Compute, by action\n" + format_table_text(["", "predicted", "measured", "error", "std"], rows)


def _step(comparison: RehearsalComparison, rehearsed: Rehearsed) -> Iterator[str]:
    low_s, high_s = rehearsed.step_time_interval_s
    yield "Step of the whole job"
    yield (
        f"  rehearsed  {format_time(rehearsed.step_time_s)}  "
        f"(90 % interval {format_time(low_s)} to {format_time(high_s)}): "
        f"{format_percent(rehearsed.measured_share)} of its compute measured, communication modeled"
    )
    yield f"  predicted  {format_time(comparison.predicted_step_time_s)}"
    parts = split_parts(rehearsed.split)
    shown = ", ".join(f"{name} {format_time(part_s)}" for name, part_s in parts.items() if part_s > 0)
    yield f"  of rank {comparison.rank}: {shown}"
