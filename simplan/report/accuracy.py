"""Accuracy report as text: errors per file of published runs, the worst runs, and skipped runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from simplan.accuracy.outcome import RunOutcome, measured_memory_gib
from simplan.accuracy.result import Accuracy, Figures
from simplan.report.table import format_table_text
from simplan.units import counted, format_percent, format_time

__all__ = ["accuracy_head", "accuracy_markdown", "accuracy_text", "run_rows"]

_NUM_WORST = 10
_MOST_IDS = 8
_ALL = "all"

Table = tuple[list[str], list[list[str]]]


def accuracy_text(result: Accuracy, *, every_run: bool = False) -> str:
    """Full accuracy report as text.

    Args:
        result: Accuracy result to print.
        every_run: List every run instead of the worst ones.
    """
    shown = [outcome for outcome in result.outcomes if outcome.predicted is not None]
    parts = [accuracy_head(result)]
    for title, table in _tables(result):
        parts.append(f"{title}\n{format_table_text(*table)}")
    worst = sorted((o for o in shown if o.error is not None), key=lambda o: -abs(o.error or 0))[:_NUM_WORST]
    if every_run and shown:
        parts.append("Every run\n" + format_table_text(*_run_table(shown), words_last=True))
    elif worst:
        parts.append("Furthest off\n" + format_table_text(*_run_table(worst), words_last=True))
    if len(shown) < len(result.outcomes):
        parts.append("Skipped\n" + "\n".join(_skipped(result.outcomes)))
    stand_ins = list(_stand_ins(shown))
    if stand_ins:
        parts.append("Predicted as other software\n" + "\n".join(stand_ins))
    return "\n\n".join(parts)


def accuracy_markdown(result: Accuracy) -> str:
    """The tables by file as Markdown."""
    return "\n\n".join(f"{title}:\n\n{_markdown(table)}" for title, table in _tables(result))


def accuracy_head(result: Accuracy) -> str:
    """Number of predicted runs, their errors and the interval coverage, in one or two lines."""
    overall = result.overall
    found = overall.step_time
    skipped = f", {overall.num_skipped} skipped" if overall.num_skipped else ""
    head = f"{counted(overall.num_runs - overall.num_skipped, 'published run')} predicted{skipped}"
    if found.errors.mape is None or found.errors.median_ape is None:
        return head
    head += (
        f": step times are {format_percent(found.errors.mape)} off on average, "
        f"{format_percent(found.errors.median_ape)} in the median"
    )
    if found.interval_coverage is None or found.median_interval_half_width is None:
        return head
    return (
        f"{head};\n90 % intervals hold {format_percent(found.interval_coverage)} of the measured times "
        f"(+/- {format_percent(found.median_interval_half_width)} in the median)"
    )


def _tables(result: Accuracy) -> Iterator[tuple[str, Table]]:
    """Titles and tables."""
    overall = result.overall
    if overall.step_time.errors.num:
        title = (
            "Step time: errors in percent, beside those of a constant utilization of the devices, fitted to each file\n"
            "(bias: mean with signs; within: measured times in their 90 % intervals; +/-: half the width of these,\n"
            "beside the prediction, in the median)"
        )
        yield title, _step_time_table(result)
    if overall.peak_memory["all"].num or overall.oom.right is not None:
        yield (
            "Peak memory: errors in percent, and verdicts on what fits (right: percent of them)",
            _memory_table(result),
        )
    if overall.choosing.num_groups:
        title = (
            "Choosing among plans for the same training: percent by which the plan predicted to be best is slower\n"
            "than the best (regret), and the order of pairs more than 3 % apart"
        )
        yield title, _choosing_table(result)


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
    headers = ["file", "runs", "skipped", "mean", "median", "p90", "max", "bias", "within", "+/-"]
    headers += ["constant: mean", "median", "p90"]
    rows = []
    for name, figures in _figures(result):
        found, floor = figures.step_time, figures.constant_mfu
        errors = found.errors
        rows.append(
            [
                name,
                str(errors.num),
                str(figures.num_skipped),
                *_percents(errors.mape, errors.median_ape, errors.p90_ape, errors.max_ape),
                _percent(errors.bias, signed=True),
                _percent(found.interval_coverage, digits=0),
                _percent(found.median_interval_half_width),
                *_percents(floor.mape, floor.median_ape, floor.p90_ape),
            ]
        )
    return headers, rows


def _memory_table(result: Accuracy) -> Table:
    headers = ["file", "peaks", "mean", "median", "p90", "max", "bias"]
    headers += ["right", "fit", "oom", "missed", "false alarms"]
    rows = []
    for name, figures in _figures(result):
        errors, oom = figures.peak_memory["all"], figures.oom
        if errors.num or oom.right is not None:
            rows.append(
                [
                    name,
                    str(errors.num),
                    *_percents(errors.mape, errors.median_ape, errors.p90_ape, errors.max_ape),
                    _percent(errors.bias, signed=True),
                    _percent(oom.right, digits=0),
                    *(str(number) for number in (oom.fit, oom.oom, oom.missed, oom.false_alarms)),
                ]
            )
    return headers, rows


def _choosing_table(result: Accuracy) -> Table:
    headers = ["file", "groups", "runs", "median regret", "mean", "max", "pairs", "Kendall's tau"]
    rows = []
    for name, figures in _figures(result):
        found = figures.choosing
        if found.num_groups:
            rows.append(
                [
                    name,
                    str(found.num_groups),
                    str(found.num_runs),
                    *_percents(found.median_regret, found.mean_regret, found.max_regret),
                    str(found.num_pairs),
                    "" if found.kendall_tau is None else f"{found.kendall_tau:.2f}",
                ]
            )
    return headers, rows


def _run_table(outcomes: Sequence[RunOutcome]) -> Table:
    has_memory = any(outcome.predicted is not None and outcome.predicted.memory_gib for outcome in outcomes)
    headers = ["run", "predicted", "measured", "error", *(["peak GiB", "measured", "error"] if has_memory else [])]
    rows = []
    for outcome in outcomes:
        memory = _memory_cells(outcome) if has_memory else []
        rows.append([outcome.run.id, *_time_cells(outcome), *memory, _what(outcome)])
    return [*headers, "what was run"], rows


def _time_cells(outcome: RunOutcome) -> list[str]:
    assert outcome.predicted is not None
    measured = outcome.run.measured
    shown = "" if measured.step_time_s is None else format_time(measured.step_time_s)
    predicted = format_time(outcome.predicted.step_time_s)
    return [predicted, "out of memory" if measured.oom else shown, _signed(outcome.error)]


def _memory_cells(outcome: RunOutcome) -> list[str]:
    assert outcome.predicted is not None
    kind = outcome.memory_kind
    pair = outcome.predicted.memory_gib.get(kind), measured_memory_gib(outcome.run).get(kind)
    return [*("" if gib is None else f"{gib:.1f}" for gib in pair), _signed(outcome.memory_errors.get(kind))]


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


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
    schedule = "" if plan.schedule in ("none", "1f1b", "interleaved_1f1b") else f" {plan.schedule}"
    words = f"{run.model.name}, {run.cluster.num_devices} {run.cluster.device}, {' '.join(degrees)}{schedule}"
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
    """Frameworks of published runs that were predicted with a fallback profile, with the number of runs."""
    counts: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        if outcome.predicted is not None:
            for note in outcome.predicted.notes:
                if note.startswith("software ") and "not in the catalogue" in note:
                    counts[note.removeprefix("software ")] += 1
    for note, number in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"  {counted(number, 'run')}: {note}"


def _figures(result: Accuracy) -> Iterator[tuple[str, Figures]]:
    """By file, then by framework in the catalog or not where there are both, then of all if there are several files."""
    names = result.names
    for file, figures in result.by_file.items():
        yield names[file], figures
    yield from result.by_framework.items()
    if len(names) > 1:
        yield _ALL, result.overall


def _percents(*values: float | None) -> list[str]:
    return [_percent(value) for value in values]


def _percent(value: float | None, *, digits: int = 1, signed: bool = False) -> str:
    """Percentage without the percent sign, which is in the column header."""
    if value is None:
        return ""
    return f"{100 * value:+.{digits}f}" if signed else f"{100 * value:.{digits}f}"


def _markdown(table: Table) -> str:
    headers, rows = table
    aligned = ["---", *["---:"] * (len(headers) - 1)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return "\n".join([line(headers), line(aligned), *(line(row) for row in rows)])
