"""Predictions beside published measurements, in words: tables by file, the worst runs, what was skipped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

from simplan.accuracy.outcome import RunOutcome, measured_memory_gib
from simplan.accuracy.result import Accuracy, Figures
from simplan.report.table import format_table_text
from simplan.units import counted, format_percent, format_time

__all__ = ["accuracy_markdown", "accuracy_text", "run_rows"]

_NUM_WORST = 10
_MOST_IDS = 8
_ALL = "all files"

Table = tuple[list[str], list[list[str]]]


def accuracy_text(result: Accuracy, *, every_run: bool = False) -> str:
    """The whole report.

    Args:
        result: What to print.
        every_run: List every run.
    """
    shown = [outcome for outcome in result.outcomes if outcome.predicted is not None]
    num_skipped = len(result.outcomes) - len(shown)
    errors = result.overall.step_time.errors
    head = f"{counted(len(shown), 'published run')} predicted"
    if num_skipped:
        head += f", {num_skipped} skipped"
    if errors.num:
        head += (
            f": step times are {format_percent(errors.mape or 0)} off on average, "
            f"{format_percent(errors.median_ape or 0)} in the median"
        )
    parts = [head]
    if errors.num:
        words = "Errors of step times (predicted / measured - 1), and of a constant utilization fitted to each file"
        parts.append(f"{words}\n{_text(_step_time_table(result))}")
    if result.overall.peak_memory["all"].num or _has_verdicts(result.overall):
        parts.append(f"Errors of peak memory, and verdicts on what fits\n{_text(_memory_table(result))}")
    if result.overall.choosing.num_groups:
        words = "Choosing among plans for the same training: how much slower the choice is than the best, and the order"
        parts.append(f"{words}\n{_text(_choosing_table(result))}")
    worst = sorted((o for o in shown if o.error is not None), key=lambda o: -abs(o.error or 0))[:_NUM_WORST]
    if every_run and shown:
        parts.append("Every run\n" + _text(_run_table(shown), words_last=True))
    elif worst:
        parts.append("Furthest off\n" + _text(_run_table(worst), words_last=True))
    if num_skipped:
        parts.append("Skipped\n" + "\n".join(_skipped(result.outcomes)))
    stand_ins = list(_stand_ins(shown))
    if stand_ins:
        parts.append("Predicted as other software\n" + "\n".join(stand_ins))
    return "\n\n".join(parts)


def accuracy_markdown(result: Accuracy) -> str:
    """The tables by file as Markdown."""
    tables = [("Step time", _step_time_table(result)), ("Peak memory", _memory_table(result))]
    if result.overall.choosing.num_groups:
        tables.append(("Choosing among plans", _choosing_table(result)))
    return "\n\n".join(f"### {title}\n\n{_markdown(table)}" for title, table in tables)


def run_rows(result: Accuracy) -> list[dict[str, str | int | float | bool | None]]:
    """Every run as a flat row, for a CSV file."""
    rows = []
    for outcome in result.outcomes:
        row = outcome.to_json()
        low_s, high_s = row.pop("step_time_interval_s") or (None, None)
        memory = row.pop("predicted_memory_gib") or {}
        row.pop("peak_memory_errors")
        row["notes"] = "; ".join(row["notes"])
        run = outcome.run
        rows.append(
            row
            | {"step_time_low_s": low_s, "step_time_high_s": high_s}
            | {f"predicted_{kind}_gib": memory.get(kind) for kind in ("allocated", "reserved", "device")}
            | {"framework": run.software.framework, "version": run.software.version, "model": run.model.name}
            | {f"model_{key}": value for key, value in run.model.model_dump(exclude={"name", "moe", "mla"}).items()}
            | run.cluster.model_dump()
            | run.plan.model_dump(exclude={"stage_layers"})
        )
    return rows


def _step_time_table(result: Accuracy) -> Table:
    headers = [
        "file",
        "runs",
        "skipped",
        "mean",
        "median",
        "90th pct",
        "largest",
        "bias",
        "in interval",
        "half width",
        "constant util.",
        "median",
        "90th pct",
    ]
    rows = []
    for name, figures in _figures(result):
        found, floor = figures.step_time, figures.constant_utilization
        rows.append(
            [
                name,
                str(found.errors.num),
                str(figures.num_skipped),
                *(
                    _percent(value)
                    for value in (
                        found.errors.mape,
                        found.errors.median_ape,
                        found.errors.p90_ape,
                        found.errors.max_ape,
                    )
                ),
                _percent(found.errors.bias, signed=True),
                _percent(found.interval_coverage, digits=0),
                _percent(found.median_interval_half_width),
                *(_percent(value) for value in (floor.mape, floor.median_ape, floor.p90_ape)),
            ]
        )
    return headers, rows


def _memory_table(result: Accuracy) -> Table:
    headers = ["file", "with a peak", "mean", "median", "90th pct", "largest", "bias"]
    headers += ["verdicts right", "fit", "out of memory", "missed", "false alarms"]
    rows = []
    for name, figures in _figures(result):
        errors, oom = figures.peak_memory["all"], figures.oom
        if not errors.num and not _has_verdicts(figures):
            continue
        rows.append(
            [
                name,
                str(errors.num),
                *(_percent(v) for v in (errors.mape, errors.median_ape, errors.p90_ape, errors.max_ape)),
                _percent(errors.bias, signed=True),
                _percent(oom.right, digits=0),
                *(str(number) for number in (oom.fit, oom.oom, oom.missed, oom.false_alarms)),
            ]
        )
    return headers, rows


def _choosing_table(result: Accuracy) -> Table:
    headers = ["file", "groups", "runs", "median regret", "mean", "largest", "pairs", "Kendall's tau"]
    rows = []
    for name, figures in _figures(result):
        found = figures.choosing
        if found.num_groups:
            rows.append(
                [
                    name,
                    str(found.num_groups),
                    str(found.num_runs),
                    *(_percent(v) for v in (found.median_regret, found.mean_regret, found.max_regret)),
                    str(found.num_pairs),
                    "" if found.kendall_tau is None else f"{found.kendall_tau:.2f}",
                ]
            )
    return headers, rows


def _run_table(outcomes: Iterable[RunOutcome]) -> Table:
    headers = ["run", "predicted", "measured", "error", "peak GiB", "measured", "error", "what was run"]
    return headers, [_run_row(outcome) for outcome in outcomes]


def _run_row(outcome: RunOutcome) -> list[str]:
    run, predicted = outcome.run, outcome.predicted
    assert predicted is not None
    measured_s = run.measured.step_time_s
    memory_gib, peak_gib = measured_memory_gib(run), predicted.memory_gib.get(outcome.memory_kind)
    kind = outcome.memory_kind
    measured = "" if measured_s is None else format_time(measured_s)
    return [
        run.id,
        format_time(predicted.step_time_s),
        "out of memory" if run.measured.oom else measured,
        _percent(outcome.error, signed=True),
        "" if peak_gib is None else f"{peak_gib:.1f}",
        f"{memory_gib[kind]:.1f}" if kind in memory_gib else "",
        _percent(outcome.memory_errors.get(kind), signed=True),
        _what(outcome),
    ]


def _what(outcome: RunOutcome) -> str:
    """The run in a few words."""
    run, plan = outcome.run, outcome.run.plan
    degrees = [
        f"{name} {value}"
        for name, value in (
            ("dp", plan.dp_replicate * plan.dp_shard),
            ("tp", plan.tp),
            ("pp", plan.pp),
            ("v", plan.virtual_stages),
            ("cp", plan.cp),
            ("ep", plan.ep),
        )
        if value > 1
    ]
    batch = f"{plan.num_microbatches} x {plan.microbatch_size}"
    recompute = "" if plan.recompute == "none" else f", recompute {plan.recompute}"
    words = f"{run.model.name}, {run.cluster.num_devices} {run.cluster.device}, {' '.join(degrees) or 'one device'}"
    return f"{words}, {batch}, {plan.precision}{recompute}"


def _skipped(outcomes: Iterable[RunOutcome]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.predicted is None:
            by_reason[outcome.reason or ""].append(outcome.run.id)
    for reason, ids in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
        yield f"  {', '.join(ids[:_MOST_IDS])}{more}: {reason}"


def _stand_ins(outcomes: Iterable[RunOutcome]) -> Iterator[str]:
    """Which software profiles stand for what, where one is not in the catalogue."""
    counts: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        if outcome.predicted is not None:
            for note in outcome.predicted.notes:
                if note.startswith("software ") and "not in the catalogue" in note:
                    counts[note.removeprefix("software ")] += 1
    for note, number in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"  {counted(number, 'run')}: {note}"


def _figures(result: Accuracy) -> Iterator[tuple[str, Figures]]:
    """By file, then of all if they are several."""
    by_file = result.by_file
    stems = [PurePath(file).stem for file in by_file]
    for file, figures in by_file.items():
        stem = PurePath(file).stem
        yield stem if stems.count(stem) == 1 else file, figures
    if len(by_file) > 1:
        yield _ALL, result.overall


def _has_verdicts(figures: Figures) -> bool:
    return figures.oom.right is not None


def _percent(value: float | None, *, digits: int = 1, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:+.{digits}f} %" if signed else format_percent(value, digits)


def _text(table: Table, *, words_last: bool = False) -> str:
    return format_table_text(*table, words_last=words_last)


def _markdown(table: Table) -> str:
    headers, rows = table
    aligned = ["---", *["---:"] * (len(headers) - 1)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return "\n".join([line(headers), line(aligned), *(line(row) for row in rows)])
