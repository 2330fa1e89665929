"""``simplan compare`` and ``simplan accuracy``: predictions next to what one run, or published runs, measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simplan.accuracy.predict_runs import predict_runs
from simplan.accuracy.profiled import predict_from_profiles, read_profiles
from simplan.accuracy.result import Accuracy
from simplan.accuracy.run import ReadFile
from simplan.cli.terminal.drawing import refuse_other_suffix
from simplan.cli.terminal.output import print_result, say, write_result
from simplan.cli.terminal.progress import ProgressLine
from simplan.errors import Problem, SpecError, did_you_mean
from simplan.interop.compare_files import compare, read_prediction
from simplan.interop.logs.formats import read_run
from simplan.io import read_model, write_text
from simplan.report.accuracy import accuracy_markdown, accuracy_text, run_rows, runs_text
from simplan.report.comparison import comparison_text, logged_text
from simplan.report.drawings.accuracy_plot import accuracy_plot
from simplan.report.drawings.accuracy_svg import accuracy_svg
from simplan.report.drawings.comparison_drawing import draw_comparison
from simplan.report.drawings.comparison_svg import comparison_html, comparison_svg
from simplan.runs.measurement import Measurement
from simplan.scenario.published.reading import read_published
from simplan.validate.compare import Comparison
from simplan.validate.logged import LoggedComparison
from simplan.validate.logged_run import YAML_SUFFIXES, LoggedRun
from simplan.validate.losses import LossComparison, compare_with_baseline

_WRITERS = {".svg": comparison_svg, ".html": comparison_html}


def compare_command(
    prediction_file: Path,
    measurement_file: Path,
    *,
    as_json: bool,
    output: Path | None,
    plot: Path | None,
    baselines: Sequence[Path] = (),
) -> int:
    """``simplan compare``."""
    if plot is not None and plot.suffix.lower() not in _WRITERS:
        fix = f"write {plot.with_suffix('.svg')}" if plot.name else "name a file"
        raise SpecError(Problem(field="--plot", value=str(plot), rule="must end in .svg or .html", fix=fix))
    prediction, measured = _prediction(prediction_file), read_run(measurement_file)
    for option, value, does in (("--plot", plot, "draws a timeline"), ("--baseline", baselines, "compares losses")):
        if value and isinstance(measured, LoggedRun):
            fix = "leave it out, or measure with `simplan run`"
            raise SpecError(Problem(field=option, rule=f"{does}, and a log has none", fix=fix))
    try:
        comparison = compare(prediction, measured)
    except SpecError as error:
        raise error if error.file else error.in_file(str(measurement_file)) from None
    if isinstance(comparison, Comparison) and isinstance(measured, Measurement):
        comparison = replace(comparison, baselines=tuple(_with_baseline(measured, file) for file in baselines))
    if plot is not None and not isinstance(measured, LoggedRun):
        write_text(plot, _WRITERS[plot.suffix.lower()](draw_comparison(prediction, measured)))
        say(f"wrote {plot}; any browser opens it")
    if not write_result(comparison.to_json(), as_json=as_json, output=output):
        return 0
    if isinstance(comparison, LoggedComparison):
        print_result(logged_text(comparison))
    else:
        print_result(comparison_text(comparison))
    return 0


def _prediction(file: Path) -> dict[str, Any]:
    """Prediction of a file, or of a scenario, which is predicted as by ``simplan predict``."""
    if file.suffix.lower() not in YAML_SUFFIXES:
        return read_prediction(file)
    from simplan.cli.predict import calibration_for, predict_step
    from simplan.scenario import load_scenario

    scenario = load_scenario(file)
    return predict_step(scenario, calibration_for(scenario, None))[0].to_json()


def _with_baseline(measured: Measurement, file: Path) -> LossComparison:
    """Comparison with the run of a file, which has the file's name if the two have one name."""
    try:
        losses = compare_with_baseline(measured, read_model(file, Measurement))
    except SpecError as error:
        raise error if error.file else error.in_file(str(file)) from None
    if losses.baseline.name != measured.job.name:
        return losses
    return replace(losses, baseline=replace(losses.baseline, name=str(file)))


def accuracy_command(
    paths: list[Path],
    *,
    as_json: bool,
    output: Path | None,
    every_run: bool,
    only: list[str],
    markdown: bool,
    csv_file: Path | None,
    plot_file: Path | None,
    stage_times: Path | None,
    jobs: int,
) -> int:
    """``simplan accuracy``; returns 0 regardless of the size of the errors."""
    if plot_file is not None:
        refuse_other_suffix(plot_file, "--plot")
    files = _only(read_published(paths), only)
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
    if write_result(result.to_json(), as_json=as_json, output=output):
        text = runs_text(result) if only else accuracy_text(result, every_run=every_run)
        print_result(accuracy_markdown(result) if markdown else text)
    return 0


def _only(files: list[ReadFile], ids: list[str]) -> list[ReadFile]:
    """Files with runs of these ids, or with all runs where there are none.

    Raises:
        SpecError: No run has an id.
    """
    if not ids:
        return files
    known = [run.id for read in files for run in read.runs or ()]
    for name in ids:
        if name not in known:
            raise SpecError(
                Problem(field="--only", value=name, rule="is no run of the files", fix=did_you_mean(name, known))
            )
    kept = ((read, tuple(run for run in read.runs or () if run.id in ids)) for read in files)
    return [replace(read, runs=runs) for read, runs in kept if runs]


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
