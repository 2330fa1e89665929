"""``simplan compare``: a prediction and a measurement of the same job, side by side."""

from __future__ import annotations

from pathlib import Path

from simplan.cli.output import print_json, print_result, say
from simplan.errors import Problem, SpecError
from simplan.io import read_json, read_model, write_text
from simplan.prediction import PREDICTION_SCHEMA_VERSION
from simplan.program.measurement import Measurement
from simplan.report.comparison import comparison_text
from simplan.report.comparison_drawing import draw_comparison
from simplan.report.comparison_svg import comparison_html, comparison_svg
from simplan.validate.compare import compare

__all__ = ["compare_command"]

_WRITERS = {".svg": comparison_svg, ".html": comparison_html}


def compare_command(prediction_file: Path, measurement_file: Path, *, as_json: bool, plot: Path | None) -> int:
    """``simplan compare``."""
    if plot is not None and plot.suffix.lower() not in _WRITERS:
        fix = f"write {plot.with_suffix('.svg')}" if plot.name else "name a file"
        raise SpecError(Problem(field="--plot", value=str(plot), rule="must end in .svg or .html", fix=fix))
    prediction = read_json(prediction_file, schema_version=PREDICTION_SCHEMA_VERSION, kind="prediction")
    measured = read_json(measurement_file)
    if isinstance(measured, dict) and measured.get("kind") == "prediction":
        problem = Problem(field="", rule="is a prediction", fix="give the measurement.json of a run as the second file")
        raise SpecError(problem, file=str(measurement_file))
    measurement = read_model(measurement_file, Measurement)
    try:
        comparison = compare(prediction, measurement)
    except KeyError as error:
        problem = Problem(
            field=str(error.args[0]), rule="is missing", fix="write the file with `simplan predict -o FILE`"
        )
        raise SpecError(problem, file=str(prediction_file)) from None
    if plot is not None:
        write_text(plot, _WRITERS[plot.suffix.lower()](draw_comparison(prediction, measurement)))
        say(f"wrote {plot}; any browser opens it")
    if as_json:
        print_json(comparison.to_json())
    else:
        print_result(comparison_text(comparison))
    return 0
