"""Comparison of a prediction with a file: the record of a run, a log, a trace, or numbers of a log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.interop.logs.formats import read_run
from simplan.io import as_argument
from simplan.prediction import Prediction
from simplan.runs.measurement import Measurement
from simplan.validate import prediction_file
from simplan.validate.compare import Comparison
from simplan.validate.compare import compare as compare_measured
from simplan.validate.logged import LoggedComparison, compare_logged
from simplan.validate.logged_run import YAML_SUFFIXES, LoggedRun
from simplan.validate.prediction_file import check_prediction


def compare(
    prediction: Prediction | Mapping[str, Any] | str | Path, measured: Measurement | LoggedRun | str | Path
) -> Comparison | LoggedComparison:
    """Compare a prediction with a measurement of the same job.

    Args:
        prediction: A prediction, its JSON document, or the file of ``simplan predict -o``.
        measured: Measurement of a run, a logged run, or a file: ``measurement.json`` of ``simplan run``, the log of a
            framework, a trace, a memory snapshot, or YAML such as ``step_times_s: [2.41, 2.39]``.

    Returns:
        For a run, errors and the differences of all terms of the step; for a log, errors of time and memory, the parts
        of the step that can explain them, and changes of the job that would.

    Raises:
        SpecError: A file cannot be read, the jobs differ, or the measurement has no steady step.
    """
    file = str(measured) if isinstance(measured, str | Path) else None
    run = read_run(measured) if isinstance(measured, str | Path) else measured
    document = read_prediction(Path(prediction)) if isinstance(prediction, str | Path) else prediction
    if document is prediction and not isinstance(document, Prediction):
        check_prediction(document, "prediction")
    try:
        if isinstance(run, Measurement):
            return compare_measured(document, run)
        if isinstance(document, Prediction):
            return compare_logged(document.to_json(), run, document.job)
        return compare_logged(document, run)
    except SpecError as error:
        raise error if file is None or error.file else error.in_file(file) from None


def read_prediction(file: Path) -> dict[str, Any]:
    """JSON document of a prediction.

    Raises:
        SpecError: The file cannot be read, or is none of a prediction.
    """
    if file.suffix.lower() in YAML_SUFFIXES and file.is_file():
        fix = f"run `simplan predict {as_argument(file)} -o prediction.json` first"
        raise SpecError(Problem(field="", rule="is YAML, and a prediction is JSON", fix=fix), file=str(file))
    return prediction_file.read_prediction(file)
