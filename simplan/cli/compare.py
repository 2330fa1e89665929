"""``simplan compare``: comparison of a prediction and a measurement of the same job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simplan.cli.terminal.output import print_json, print_result, say
from simplan.errors import Problem, SpecError
from simplan.io import MAX_JSON_BYTES, as_argument, read_text, write_text
from simplan.report.comparison import comparison_text, logged_text
from simplan.report.drawings.comparison_drawing import draw_comparison
from simplan.report.drawings.comparison_svg import comparison_html, comparison_svg
from simplan.runs.measurement import Measurement
from simplan.validate.compare import Comparison, compare
from simplan.validate.logged import YAML_SUFFIXES, LoggedComparison, LoggedRun, compare_logged, parse_measured
from simplan.validate.prediction_file import read_prediction

_WRITERS = {".svg": comparison_svg, ".html": comparison_html}


def compare_command(prediction_file: Path, measurement_file: Path, *, as_json: bool, plot: Path | None) -> int:
    """``simplan compare``."""
    if plot is not None and plot.suffix.lower() not in _WRITERS:
        fix = f"write {plot.with_suffix('.svg')}" if plot.name else "name a file"
        raise SpecError(Problem(field="--plot", value=str(plot), rule="must end in .svg or .html", fix=fix))
    if prediction_file.suffix.lower() in YAML_SUFFIXES and prediction_file.is_file():
        fix = f"run `simplan predict {as_argument(prediction_file)} -o prediction.json` first"
        raise SpecError(Problem(field="", rule="is YAML, and a prediction is JSON", fix=fix), file=str(prediction_file))
    prediction = read_prediction(prediction_file)
    measured = parse_measured(read_text(measurement_file, MAX_JSON_BYTES), str(measurement_file))
    comparison = _compared(prediction, measured, str(measurement_file))
    if plot is not None:
        if isinstance(measured, LoggedRun):
            fix = "leave it out, or measure with `simplan run`"
            raise SpecError(Problem(field="--plot", rule="draws a timeline, and a log has none", fix=fix))
        write_text(plot, _WRITERS[plot.suffix.lower()](draw_comparison(prediction, measured)))
        say(f"wrote {plot}; any browser opens it")
    if as_json:
        print_json(comparison.to_json())
    elif isinstance(comparison, LoggedComparison):
        print_result(logged_text(comparison))
    else:
        print_result(comparison_text(comparison))
    return 0


def _compared(
    prediction: Mapping[str, Any], measured: Measurement | LoggedRun, file: str
) -> Comparison | LoggedComparison:
    if isinstance(measured, Measurement):
        return compare(prediction, measured)
    try:
        return compare_logged(prediction, measured)
    except SpecError as error:
        raise error.in_file(file) from None
