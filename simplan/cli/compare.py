"""``simplan compare``: comparison of a prediction and a measurement of the same job."""

from __future__ import annotations

from pathlib import Path

from simplan.cli.terminal.output import print_json, print_result, say
from simplan.errors import Problem, SpecError
from simplan.interop.compare_files import compare, read_prediction
from simplan.interop.logs.formats import read_run
from simplan.io import write_text
from simplan.report.comparison import comparison_text, logged_text
from simplan.report.drawings.comparison_drawing import draw_comparison
from simplan.report.drawings.comparison_svg import comparison_html, comparison_svg
from simplan.validate.logged import LoggedComparison
from simplan.validate.logged_run import LoggedRun

_WRITERS = {".svg": comparison_svg, ".html": comparison_html}


def compare_command(prediction_file: Path, measurement_file: Path, *, as_json: bool, plot: Path | None) -> int:
    """``simplan compare``."""
    if plot is not None and plot.suffix.lower() not in _WRITERS:
        fix = f"write {plot.with_suffix('.svg')}" if plot.name else "name a file"
        raise SpecError(Problem(field="--plot", value=str(plot), rule="must end in .svg or .html", fix=fix))
    prediction, measured = read_prediction(prediction_file), read_run(measurement_file)
    if plot is not None and isinstance(measured, LoggedRun):
        fix = "leave it out, or measure with `simplan run`"
        raise SpecError(Problem(field="--plot", rule="draws a timeline, and a log has none", fix=fix))
    try:
        comparison = compare(prediction, measured)
    except SpecError as error:
        raise error if error.file else error.in_file(str(measurement_file)) from None
    if plot is not None and not isinstance(measured, LoggedRun):
        write_text(plot, _WRITERS[plot.suffix.lower()](draw_comparison(prediction, measured)))
        say(f"wrote {plot}; any browser opens it")
    if as_json:
        print_json(comparison.to_json())
    elif isinstance(comparison, LoggedComparison):
        print_result(logged_text(comparison))
    else:
        print_result(comparison_text(comparison))
    return 0
