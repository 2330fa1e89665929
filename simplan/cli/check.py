"""``simplan check``: predicts scenarios and judges their expectations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from simplan.cli.calibrations import covers, is_needed, read
from simplan.cli.terminal.output import print_result, say, write_result
from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError
from simplan.io import read_yaml, write_text
from simplan.report.checks import (
    CheckedCase,
    CheckedFile,
    CheckStatus,
    checks_json,
    checks_text,
    count,
    github_text,
    junit_xml,
    markdown_summary,
)
from simplan.scenario import METRICS, Expectation, Scenario, evaluate, load_scenario
from simplan.scenario.expectation import OF_INTERVAL
from simplan.scenario.file import scenario_of_document

_SUFFIXES = (".yaml", ".yml")
_MEASURED_BY_OTHERS = {"published", "heldout", "validation"}
_FAILED, _BAD_FILE = 1, 2


def check_command(
    paths: list[Path],
    *,
    as_json: bool,
    output: Path | None,
    junit: Path | None,
    github: bool,
    bless_values: bool,
    calibration_file: Path | None,
) -> int:
    """Runs the command; returns 2 when a file is bad, else 1 when an expectation failed, else 0."""
    # the user's calibration is not read: a check must not depend on files of the machine
    calibration = None if calibration_file is None else read(calibration_file)
    files = scenario_files(paths)
    if bless_values:
        for file in files:
            if file.exists() and not file.is_file():
                problem = Problem(field="", rule="is not a file that --bless can write to", fix="save it")
                raise SpecError(problem, file=str(file))
            scenario = load_scenario(file)
            if covers(calibration, scenario):
                for change in bless(file, _predicted(scenario, calibration)):
                    say(change)
    checked = [check_file(file, calibration) for file in files]
    if junit is not None:
        write_text(junit, junit_xml(checked))
    if write_result(checks_json(checked), as_json=as_json, output=output):
        print_result(github_text(checked) if github else checks_text(checked))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if github and summary:
        with Path(summary).open("a", encoding="utf-8") as stream:
            stream.write(markdown_summary(checked))
    if bless_values and count(checked, CheckStatus.FAILED):
        say("note: --bless writes numbers whose why begins with 'blessed'; the others are yours to change")
    if count(checked, CheckStatus.ERROR):
        return _BAD_FILE
    return _FAILED if count(checked, CheckStatus.FAILED) else 0


def scenario_files(paths: Iterable[Path]) -> list[Path]:
    """Scenario files of paths: the files, and all ``*.yaml`` and ``*.yml`` below the folders, sorted.

    Folders named ``published`` or ``heldout`` below a given folder are skipped: they contain published measurements.

    Raises:
        SpecError: A path does not exist, or a folder holds no scenario.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)  # a missing file is reported as any other bad one
            continue
        below = (file for file in path.rglob("*") if _MEASURED_BY_OTHERS.isdisjoint(file.relative_to(path).parts[:-1]))
        scenarios = sorted(file for file in below if file.suffix in _SUFFIXES and file.is_file())
        if not scenarios:
            raise SpecError(
                Problem(field="", rule="holds no scenario (*.yaml)", fix="name another folder"), file=str(path)
            )
        files += scenarios
    return list(dict.fromkeys(files))


def check_file(file: Path, calibration: Calibration | None) -> CheckedFile:
    """Checks one scenario; an invalid scenario becomes a failed case, so that the others continue."""
    try:
        document = read_yaml(file)  # once: it may be a pipe
        scenario = scenario_of_document(document, file)
        if not covers(calibration, scenario):
            reason = "needs this machine's calibration: `simplan check --calibration FILE` takes one"
            cases = [CheckedCase(e.metric, CheckStatus.SKIPPED, reason, e.why) for e in scenario.expect]
            return CheckedFile(str(file), tuple(cases) or (CheckedCase("scenario", CheckStatus.SKIPPED, reason),))
        prediction = _predicted(scenario, calibration)
    except SpecError as error:
        return CheckedFile(
            str(file),
            tuple(CheckedCase("scenario", CheckStatus.ERROR, p.sentence(), line=p.line) for p in error.problems),
        )
    cases = [CheckedCase("scenario", CheckStatus.PASSED, "is valid and can be predicted")]
    for index, expectation in enumerate(scenario.expect):
        result = evaluate(expectation, prediction)
        status = CheckStatus.PASSED if result.passed else CheckStatus.FAILED
        line, _ = document.place(("expect", index))
        cases.append(CheckedCase(expectation.metric, status, result.message, expectation.why, line))
    return CheckedFile(str(file), tuple(cases))


def _predicted(scenario: Scenario, calibration: Calibration | None) -> dict[str, Any]:
    """JSON of the prediction, with that of the whole run if an expectation is of it."""
    calibration = calibration if is_needed(scenario.job.cluster) else None
    prediction = scenario.predict(calibration)
    document = prediction.to_json(timeline=False)
    of_run = {expectation.metric for expectation in scenario.expect if expectation.is_of_run}
    if of_run:
        from simplan.scenario.whole_run.goodput import goodput_of

        compares = not OF_INTERVAL.isdisjoint(of_run)
        result = goodput_of(scenario, prediction=prediction, calibration=calibration, compares=compares)
        document["whole_run"] = result.to_json()
    return document


_MARK = "blessed"


def bless(file: Path, prediction: Mapping[str, Any]) -> list[str]:
    """Rewrites the blessed numbers of a valid scenario file that do not hold in the JSON of its prediction.

    The number is that of value, or of max or min with a tolerance. A bound with a tolerance follows the prediction in
    both directions, so that a plan that became faster stays so.

    Returns:
        One line per change: file, metric, old and new value.
    """
    with file.open(encoding="utf-8", newline="") as stream:  # newline="": line ends stay as they are
        text = stream.read()
    changes, edits = [], []
    for expectation, node in zip(load_scenario(file).expect, _value_nodes(text), strict=True):
        recorded = _recorded(expectation)
        if node is None or not expectation.why.startswith(_MARK) or evaluate(recorded, prediction).passed:
            continue
        actual = METRICS[expectation.metric].read(prediction)
        if actual is None:
            continue
        new = _written(recorded, actual, prediction)
        edits.append((node.start_mark.index, node.end_mark.index, new))
        changes.append(f"{file}:{node.start_mark.line + 1}: {expectation.metric}: {node.value} -> {new}")
    for start, end, new in reversed(edits):
        text = text[:start] + new + text[end:]
    if edits:
        write_text(file, text)
    return changes


def _written(expectation: Expectation, actual: float | bool, prediction: Mapping[str, Any]) -> str:
    """Value with 12 digits, or with the digits that the tolerance needs."""
    if isinstance(actual, bool):
        return str(actual).lower()
    short = f"{actual:.12g}"
    holds = evaluate(expectation.model_copy(update={"value": float(short)}), prediction).passed
    return short if holds else repr(actual)


def _recorded(expectation: Expectation) -> Expectation:
    """The expectation with its only bound as the value."""
    bound = expectation.min if expectation.max is None else expectation.max
    if expectation.value is not None or bound is None:
        return expectation
    return expectation.model_copy(update={"value": bound, "min": None, "max": None})


def _value_nodes(text: str) -> Iterator[yaml.ScalarNode | None]:
    """Scalar after ``value:``, or after the only bound with a tolerance, of each expectation; else None."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    expectations = _child(root, "expect")
    for item in expectations.value if isinstance(expectations, yaml.SequenceNode) else ():
        has_tolerance = any(_child(item, key) is not None for key in ("rel_tol", "abs_tol"))
        nodes = [_child(item, key) for key in ("value", *(("max", "min") if has_tolerance else ()))]
        yield next((node for node in nodes if isinstance(node, yaml.ScalarNode)), None)


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)
