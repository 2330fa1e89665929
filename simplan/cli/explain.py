"""``simplan explain`` and ``simplan trace``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simplan.cli.calibrations import is_needed
from simplan.cli.predict import calibration_for, name_of, predict_step
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import Problem, SpecError
from simplan.explain import difference, explain
from simplan.io import write_json
from simplan.report.explanation import difference_text, explanation_text
from simplan.report.trace import predicted_trace


def explain_command(
    request: ScenarioRequest,
    other: Path | None,
    *,
    as_json: bool,
    calibration_file: Path | None,
    stragglers: Sequence[str] = (),
) -> int:
    """``simplan explain``; stragglers are given as ``rank=17,slowdown=1.3``."""
    if stragglers:
        request = request.with_overrides({"cluster.stragglers": [_straggler(text) for text in stragglers]})
    explained = []
    for each in (request, *([replace(request, source=other)] if other else [])):
        scenario = each.scenario()
        calibration = calibration_for(
            scenario, calibration_file if is_needed(scenario.job.cluster) or other is None else None
        )
        prediction, simulated = predict_step(scenario, calibration)
        name = name_of(each, scenario, several=other is not None)
        explained.append(explain(replace(prediction, name=name), simulated, calibration=calibration))
    if other is None:
        document, text = explained[0].to_json(), explanation_text(explained[0])
    else:
        found = difference(*explained)
        document, text = found.to_json(), difference_text(found)
    if as_json:
        print_json(document)
    else:
        print_result(text)
    return 0


def _straggler(text: str) -> dict[str, Any]:
    """Straggler of an option.

    Raises:
        SpecError: The option is not ``rank=RANK,slowdown=TIMES`` or ``node=NODE,slowdown=TIMES``.
    """
    pairs = dict(part.strip().partition("=")[::2] for part in text.split(","))
    try:
        named: dict[str, Any] = {"node": pairs["node"]} if "node" in pairs else {"rank": int(pairs["rank"])}
        if len(pairs) == 2:
            return {**named, "slowdown": float(pairs["slowdown"])}
    except (KeyError, ValueError):
        pass
    rule = "must name a rank or a node, and how many times longer it computes"
    raise SpecError(Problem(field="--straggler", value=text, rule=rule, fix="write rank=17,slowdown=1.3"))


def trace_command(
    request: ScenarioRequest, *, as_json: bool, output: Path | None, calibration_file: Path | None
) -> int:
    """``simplan trace``."""
    if output is None and not as_json:
        raise SpecError(Problem(field="--output", rule="is missing", fix="give -o FILE, or --json to print the trace"))
    scenario = request.scenario()
    calibration = calibration_for(scenario, calibration_file)
    document = predicted_trace(*predict_step(scenario, calibration))
    if output is not None:
        write_json(output, document)
        say(f"wrote {output}; open it at ui.perfetto.dev or chrome://tracing")
    if as_json:
        print_json(document)
    return 0
