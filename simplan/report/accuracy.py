"""Accuracy report as text: errors per file of published runs, the worst runs, and skipped runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.plan_ranking import Choices
from simplan.accuracy.result import Accuracy, Figures, LeftOutFigures
from simplan.accuracy.statistics import ErrorFigures, IntervalFigures
from simplan.job import Job
from simplan.report.comparison import format_error
from simplan.report.table import format_table_markdown, format_table_text
from simplan.units import counted, format_percent, format_time

_NUM_WORST = 10
_MAX_IDS = 8
_LARGE_REGRET = 0.05

Table = tuple[list[str], list[list[str]]]


def accuracy_text(result: Accuracy, *, every_run: bool = False) -> str:
    """Full accuracy report as text, with every run or with the largest errors."""
    shown = [outcome for outcome in result.outcomes if outcome.predicted is not None]
    parts = [accuracy_head(result)]
    for title, table in _tables(result):
        parts.append(f"{title}\n{format_table_text(*table)}")
    worst = sorted((o for o in shown if o.error is not None), key=lambda o: -abs(o.error or 0))[:_NUM_WORST]
    if every_run and shown:
        parts.append("Every run\n" + format_table_text(*_run_table(shown), words_last=True))
    elif worst:
        parts.append("Largest errors\n" + format_table_text(*_run_table(worst), words_last=True))
    if len(shown) < len(result.outcomes):
        parts.append("Skipped\n" + "\n".join(_skipped(result.outcomes)))
    fallbacks = list(_fallbacks(shown))
    if fallbacks:
        parts.append("Predicted with a fallback profile\n" + "\n".join(fallbacks))
    return "\n\n".join(parts)


def runs_text(result: Accuracy) -> str:
    """Head and table of a few runs, and the reasons for runs that are skipped."""
    shown = [outcome for outcome in result.outcomes if outcome.predicted is not None]
    parts = [accuracy_head(result)]
    if shown:
        parts.append(format_table_text(*_run_table(shown), words_last=True))
    if len(shown) < len(result.outcomes):
        parts.append("Skipped\n" + "\n".join(_skipped(result.outcomes)))
    return "\n\n".join(parts)


def accuracy_markdown(result: Accuracy) -> str:
    """The tables by file as Markdown."""
    return "\n\n".join(f"{title}:\n\n{format_table_markdown(*table)}" for title, table in _tables(result))


def accuracy_head(result: Accuracy) -> str:
    """Number of predicted runs, their errors and the interval coverage, in one or two lines."""
    overall = result.overall
    figures = overall.step_time
    skipped = f", {overall.num_skipped} skipped" if overall.num_skipped else ""
    head = f"{counted(overall.num_runs - overall.num_skipped, 'published run')} predicted{skipped}"
    if figures.errors.mape is None or figures.errors.median_ape is None:
        return head
    head += (
        f": mean absolute error of step times {format_percent(figures.errors.mape)}, "
        f"median {format_percent(figures.errors.median_ape)}"
    )
    if figures.interval_coverage is None or figures.median_interval_half_width is None:
        return head
    return (
        f"{head};\n90 % intervals contain {format_percent(figures.interval_coverage)} of the measured times "
        f"(median half width {format_percent(figures.median_interval_half_width)})"
    )


def _tables(result: Accuracy) -> Iterator[tuple[str, Table]]:
    """Titles and tables, without those that would be empty."""
    overall = result.overall
    if overall.step_time.errors.num:
        title = (
            "Step time: errors in percent, and errors of a constant-MFU baseline that is fitted to each file\n"
            "(bias: mean signed error; coverage: measured times inside the 90 % interval; +/-: median half width of\n"
            "the interval, relative to the prediction)"
        )
        headers = ["file", "runs", "skipped", "mean", "median", "p90", "max", "bias", "coverage", "+/-"]
        rows = [[name, *_step_time_cells(figures)] for name, figures in _figures(result)]
        yield title, ([*headers, "constant MFU: mean", "median", "p90"], rows)
    if overall.peak_memory["all"].errors.num or overall.oom.right is not None:
        title = (
            "Peak memory: errors in percent, coverage and half width of 90 % intervals as above, and verdicts fits or\n"
            "does not fit (right: percent of the verdicts)"
        )
        headers = ["file", "peaks", "mean", "median", "p90", "max", "bias", "coverage", "+/-"]
        rows = [
            [name, *_memory_cells(figures)]
            for name, figures in _figures(result)
            if figures.peak_memory["all"].errors.num or figures.oom.right is not None
        ]
        yield title, ([*headers, "right", "fit", "oom", "missed", "false alarms"], rows)
    if overall.choosing.num_groups:
        title = (
            "Plan choice for the same training: percent by which the plan predicted to be best is slower than the\n"
            "best plan (regret), and the order of pairs more than 3 % apart"
        )
        rows = [
            [name, *_choice_cells(figures.choosing)]
            for name, figures in _figures(result)
            if figures.choosing.num_groups
        ]
        yield title, (["file", *_OF_CHOICES], rows)
    if rows := _wrong(result):
        title = f"Choices that cost more than {format_percent(_LARGE_REGRET)}"
        yield title, (["file", "model", "devices", "runs", "predicted best", "measured best", "regret"], rows)
    if any(figures.source_left_out for _, figures in _figures(result)):
        title = (
            "The whole source left out: runs that constants are fitted on, predicted with constants of the other\n"
            "sources; errors, intervals and choices as above"
        )
        headers = ["file", "runs", "mean", "median", "p90", "max", "bias", "coverage", "+/-", *_OF_CHOICES]
        rows = [
            [name, *_left_out_cells(figures.source_left_out)]
            for name, figures in _figures(result)
            if figures.source_left_out is not None
        ]
        yield title, (headers, rows)


def _step_time_cells(figures: Figures) -> list[str]:
    errors, baseline = figures.step_time, figures.constant_mfu
    return [
        str(errors.errors.num),
        str(figures.num_skipped),
        *_error_cells(errors.errors),
        *_interval_cells(errors),
        *map(_percent, (baseline.mape, baseline.median_ape, baseline.p90_ape)),
    ]


def _memory_cells(figures: Figures) -> list[str]:
    peaks, oom = figures.peak_memory["all"], figures.oom
    return [
        str(peaks.errors.num),
        *_error_cells(peaks.errors),
        *_interval_cells(peaks),
        _percent(oom.right, digits=0),
        *map(str, (oom.fit, oom.oom, oom.missed, oom.false_alarms)),
    ]


_OF_CHOICES = ["groups", "runs", "best chosen", "median regret", "mean", "max", "pairs", "Kendall's tau"]


def _choice_cells(choosing: Choices) -> list[str]:
    return [
        str(choosing.num_groups),
        str(choosing.num_runs),
        str(choosing.num_best),
        *map(_percent, (choosing.median_regret, choosing.mean_regret, choosing.max_regret)),
        str(choosing.num_pairs),
        "" if choosing.kendall_tau is None else f"{choosing.kendall_tau:.2f}",
    ]


def _left_out_cells(left: LeftOutFigures) -> list[str]:
    errors = left.step_time
    choosing = _choice_cells(left.choosing) if left.choosing.num_groups else [""] * len(_OF_CHOICES)
    return [str(errors.errors.num), *_error_cells(errors.errors), *_interval_cells(errors), *choosing]


def _wrong(result: Accuracy) -> list[list[str]]:
    """Rows of choices with a large regret."""
    return [
        [
            result.names[choice.file],
            choice.model,
            choice.devices,
            str(choice.num_runs),
            choice.chosen,
            choice.best,
            format_percent(choice.regret),
        ]
        for choice in result.overall.choosing.wrong
        if choice.regret > _LARGE_REGRET
    ]


def _interval_cells(figures: IntervalFigures) -> list[str]:
    """Coverage, and median half width."""
    return [_percent(figures.interval_coverage, digits=0), _percent(figures.median_interval_half_width)]


def _error_cells(errors: ErrorFigures) -> list[str]:
    """Mean, median, 90th percentile and maximum of absolute errors, and mean signed error."""
    absolute = (errors.mape, errors.median_ape, errors.p90_ape, errors.max_ape)
    return [*map(_percent, absolute), _percent(errors.bias, signed=True)]


def run_rows(result: Accuracy) -> list[dict[str, str | int | float | bool | None]]:
    """Every run as a flat row, for a CSV file."""
    rows = []
    for outcome in result.outcomes:
        row = outcome.to_json()
        low_s, high_s = row.pop("step_time_interval_s") or (None, None)
        low_gib, high_gib = row.pop("peak_memory_interval_gib") or (None, None)
        memory = row.pop("predicted_memory_gib") or {}
        row.pop("peak_memory_errors")
        row["notes"] = "; ".join(row["notes"])
        rows.append(
            row
            | {"step_time_low_s": low_s, "step_time_high_s": high_s}
            | {"peak_memory_low_gib": low_gib, "peak_memory_high_gib": high_gib}
            | {f"predicted_{kind}_gib": memory.get(kind) for kind in ("allocated", "reserved", "device")}
            | {"framework": outcome.run.fallback_for or row["software"], "version": outcome.run.measured.version}
            | _job_row(outcome.run.job)
        )
    return rows


_OF_MODEL = (
    "family", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "seq_len", "gated_mlp", "tied_embeddings", "num_experts", "top_k",
    "moe_intermediate_size", "lora_rank",
)  # fmt: skip
_OF_TRAINING = (
    "task",
    "global_batch_size",
    "precision",
    "fp8_recipe",
    "optimizer",
    "fused_optimizer",
    "clip_grad_norm",
)
_OF_PLAN = (
    "dp_replicate", "dp_shard", "zero_stage", "tp", "sequence_parallel", "pp", "virtual_stages", "cp", "cp_comm", "ep",
    "etp", "schedule", "microbatch_size", "recompute", "recompute_layers", "grad_dtype",
)  # fmt: skip


def _job_row(job: Job | None) -> dict[str, str | int | float | bool | None]:
    """Settings of a job as columns, which are empty without a job."""
    model, training, plan = getattr(job, "model", None), getattr(job, "training", None), getattr(job, "plan", None)
    return {
        "model": None if job is None else job.model.name,
        **{f"model_{key}": getattr(model, key, None) for key in _OF_MODEL},
        "device": None if job is None else job.cluster.device.id,
        "num_devices": None if job is None else job.cluster.num_devices,
        "devices_per_node": None if job is None else job.cluster.devices_per_node,
        **{key: getattr(training, key, None) for key in _OF_TRAINING},
        **{key: getattr(plan, key, None) for key in _OF_PLAN},
        "num_microbatches": None if job is None else job.num_microbatches,
    }


def _run_table(outcomes: Sequence[RunOutcome]) -> Table:
    has_memory = any(outcome.predicted is not None and outcome.predicted.memory_gib for outcome in outcomes)
    headers = ["run", "predicted", "measured", "error", *(["peak GiB", "measured", "error"] if has_memory else [])]
    rows = []
    for outcome in outcomes:
        assert outcome.predicted is not None
        measured, kind = outcome.run.measured, outcome.memory_kind
        step_time = "" if measured.step_time_s is None else format_time(measured.step_time_s)
        cells = [
            outcome.run.id,
            format_time(outcome.predicted.step_time_s),
            "out of memory" if measured.oom else step_time,
            format_error(outcome.error, ""),
        ]
        if has_memory:
            pair = outcome.predicted.memory_gib.get(kind), outcome.run.measured.memory_gib.get(kind)
            cells += ["" if gib is None else f"{gib:.1f}" for gib in pair]
            cells.append(format_error(outcome.memory_errors.get(kind), ""))
        rows.append([*cells, _configuration(outcome)])
    return [*headers, "configuration"], rows


def _configuration(outcome: RunOutcome) -> str:
    """Model, devices, plan and precision of a run."""
    job = outcome.run.known_job
    plan = job.plan
    sizes = {"dp": plan.dp_replicate * plan.dp_shard, "tp": plan.tp, "pp": plan.pp, "v": plan.virtual_stages}
    sizes |= {"cp": plan.cp, "ep": plan.ep}
    degrees = [f"{name} {value}" for name, value in sizes.items() if value > 1]
    batch = f"{job.num_microbatches} x {plan.microbatch_size}"
    recompute = "" if plan.recompute == "none" else f", recompute {plan.recompute}"
    schedule = "" if plan.schedule in ("none", "1f1b", "interleaved_1f1b") else f" {plan.schedule}"
    words = f"{job.model.name}, {job.cluster.devices_in_words}, {' '.join(degrees)}{schedule}"
    return f"{words}, {batch}, {job.training.precision}{recompute}"


def _skipped(outcomes: Iterable[RunOutcome]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.predicted is None:
            by_reason[outcome.reason or ""].append(outcome.run.id)
    for reason, ids in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        more = f" and {len(ids) - _MAX_IDS} more" if len(ids) > _MAX_IDS else ""
        yield f"  {', '.join(ids[:_MAX_IDS])}{more}: {reason}"


def _fallbacks(outcomes: Iterable[RunOutcome]) -> Iterator[str]:
    """Frameworks without a profile, the profile that their runs were predicted with, and the number of runs."""
    predicted = ((outcome.run.fallback_for, outcome.predicted) for outcome in outcomes)
    counts = Counter(
        (name, predicted_run.software)
        for name, predicted_run in predicted
        if name is not None and predicted_run is not None
    )
    for (framework, profile), number in counts.most_common():
        yield f"  {counted(number, 'run')} of {framework}: as {profile}, without the constants fitted on its runs"


def _figures(result: Accuracy) -> Iterator[tuple[str, Figures]]:
    """Figures by file, then by frameworks in the catalog or not if there are both, then of all if several files."""
    names = result.names
    for file, figures in result.by_file.items():
        yield names[file], figures
    yield from result.by_framework.items()
    if len(names) > 1:
        yield "all", result.overall


def _percent(value: float | None, *, digits: int = 1, signed: bool = False) -> str:
    """Percentage without the percent sign, which is in the column header."""
    if value is None:
        return ""
    return f"{100 * value:+.{digits}f}" if signed else f"{100 * value:.{digits}f}"
