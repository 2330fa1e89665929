"""``simplan accuracy``: published runs predicted, and how far off that is."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from simplan.accuracy.evaluate import predict_runs
from simplan.accuracy.profiled import predict_from_profiles, read_profiles
from simplan.accuracy.reading import read_published
from simplan.accuracy.result import Accuracy
from simplan.cli.terminal.drawing import refuse_other_suffix
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.progress import ProgressLine
from simplan.io import write_text
from simplan.report.accuracy import accuracy_markdown, accuracy_text, run_rows
from simplan.report.drawings.accuracy_plot import accuracy_plot
from simplan.report.drawings.accuracy_svg import accuracy_svg


def accuracy_command(
    paths: list[Path],
    *,
    as_json: bool,
    every_run: bool,
    markdown: bool,
    csv_file: Path | None,
    plot_file: Path | None,
    stage_times: Path | None,
    jobs: int,
) -> int:
    """Runs the command; returns 0 regardless of the size of the errors."""
    if plot_file is not None:
        refuse_other_suffix(plot_file, "--plot")
    files = read_published(paths)
    without_runs = tuple(read.file for read in files if read.runs is None)
    for file in without_runs:
        say(f"note: {file} holds no runs, and is passed over")
    if stage_times is not None:
        outcomes = predict_from_profiles(files, read_profiles(stage_times))
    else:
        with ProgressLine("predicting published runs") as progress:
            outcomes = predict_runs(files, jobs=jobs, on_progress=progress.update)
    result = Accuracy(tuple(outcomes), without_runs)
    if csv_file is not None:
        _write_csv(csv_file, result)
    if plot_file is not None:
        _write_plot(plot_file, result)
    if as_json:
        print_json(result.to_json())
    else:
        print_result(accuracy_markdown(result) if markdown else accuracy_text(result, every_run=every_run))
    return 0


def _write_plot(path: Path, result: Accuracy) -> None:
    plot = accuracy_plot(result)
    if plot is None:
        say(f"note: no step time was both measured and predicted, so {path} is not written")
    else:
        write_text(path, accuracy_svg(plot))


def _write_csv(path: Path, result: Accuracy) -> None:
    rows = run_rows(result)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
