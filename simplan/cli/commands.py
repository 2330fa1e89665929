"""Commands without their flags, except ``predict``: each function runs one command and returns its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import simplan
from simplan.cli.calibrations import (
    CalibrationTarget,
    ensure,
    is_needed,
    measure,
    request_across,
    requests_for,
)
from simplan.cli.execute import (
    RunOptions,
    check_before_calibrating,
    default_folder,
    execute,
    join,
    refuse_other_software,
    refuse_restarts,
)
from simplan.cli.nodes import NodeRendezvous, nodes_of, nodes_to_time, refuse_without_nodes
from simplan.cli.predict import calibration_for, name_of, predict_step
from simplan.cli.search.command import scenarios_to_time
from simplan.cli.terminal.output import print_json, print_result, say, write_result
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.cost.calibration.store import default_path
from simplan.errors import Problem, SpecError
from simplan.explain import difference, explain
from simplan.io import MAX_JSON_BYTES, as_argument, parse_json, read_text, write_json, write_text
from simplan.report.comparison import comparison_text
from simplan.report.explanation import difference_text, explanation_text
from simplan.report.html import html_report
from simplan.report.text import verdict
from simplan.report.trace import predicted_trace
from simplan.runs.lock import exclusive
from simplan.scenario import Scenario
from simplan.scenario.elastic import scenarios_of_replicas_left, scenarios_on_fewer
from simplan.scenario.whole_run.executed import FaultOptions, read_faults


def explain_command(
    request: ScenarioRequest,
    other: Path | None,
    *,
    as_json: bool,
    output: Path | None,
    calibration_file: Path | None,
    stragglers: Sequence[str] = (),
    kernels: bool = False,
) -> int:
    """``simplan explain``; stragglers are given as ``rank=17,slowdown=1.3``."""
    if stragglers:
        request = request.with_overrides({"cluster.stragglers": [_straggler(text) for text in stragglers]})
    explained = []
    for asked in (request, *([replace(request, source=other)] if other else [])):
        scenario = asked.scenario()
        calibration = calibration_for(
            scenario, calibration_file if is_needed(scenario.job.cluster) or other is None else None
        )
        prediction, simulated = predict_step(scenario, calibration)
        name = name_of(asked, scenario, several=other is not None)
        explained.append(explain(replace(prediction, name=name), simulated, calibration=calibration))
    if other is None:
        document, text = explained[0].to_json(), explanation_text(explained[0], kernels=kernels)
    else:
        differing = difference(*explained)
        document, text = differing.to_json(), difference_text(differing)
    if write_result(document, as_json=as_json, output=output):
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


def report_command(files: Sequence[Path], output: Path) -> int:
    """``simplan report``."""
    if output.suffix.lower() not in (".html", ".htm"):
        rule, fix = "is an HTML page", f"write {output.stem or 'report'}.html"
        raise SpecError(Problem(field="--output", value=str(output), rule=rule, fix=fix))
    documents = [(str(file), _document(file)) for file in files]
    written = f"written by simplan {simplan.__version__} on {datetime.now(UTC):%Y-%m-%d}"
    write_text(output, html_report(documents, written=written))
    say(f"wrote {output}; any browser opens it")
    return 0


def _document(file: Path) -> dict[str, Any]:
    """JSON document of a file.

    Raises:
        SpecError: The file is a scenario, a script or something else that is no JSON document.
    """
    text = read_text(file, MAX_JSON_BYTES)
    if not text.lstrip().startswith("{"):
        wanted = as_argument(file.with_suffix(".json").name)
        fix = f"run `simplan predict {as_argument(file)} -o {wanted}; simplan report {wanted}`"
        rule = "is no JSON document, and a report shows those that simplan wrote"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=str(file))
    return parse_json(text, str(file))


def run_command(
    request: ScenarioRequest,
    *,
    as_json: bool,
    output: Path | None,
    calibration_file: Path | None,
    options: RunOptions,
    rendezvous: NodeRendezvous,
    faults: FaultOptions | None = None,
) -> int:
    """``simplan run``."""
    scenario = request.scenario()
    refuse_other_software(scenario)
    refuse_restarts(scenario, options)
    _say_whose_code_runs(scenario)
    folder = output or default_folder(scenario)
    nodes = nodes_of(scenario, options, rendezvous)
    if nodes is not None and not nodes.leads:
        join(nodes, folder)
        return 0
    with exclusive(folder, "--output"):
        options = replace(options, nodes=nodes)
        if faults is not None:
            request_of_faults = read_faults(scenario, faults, options.checkpointing, rendezvous.nodes[1])
            options = replace(options, faults=request_of_faults)
        return _run_alone(scenario, folder, calibration_file, options, rendezvous, as_json=as_json)


def _say_whose_code_runs(scenario: Scenario) -> None:
    """Says which functions a captured model imports from the current folder."""
    captured = scenario.job.model.captured
    if captured is not None:
        functions = [name for name in (captured.factory, captured.batch, captured.loss) if name]
        say(f"note: runs {', '.join(functions)}, imported from this folder or the environment")


def _run_alone(
    scenario: Scenario,
    folder: Path,
    calibration_file: Path | None,
    options: RunOptions,
    rendezvous: NodeRendezvous,
    *,
    as_json: bool,
) -> int:
    check_before_calibrating(scenario, options)
    smaller = scenarios_on_fewer(scenario, rendezvous.nodes[0])[0] if rendezvous.is_elastic else {}
    every = [scenario, *smaller.values(), *scenarios_of_replicas_left(scenario)]
    needed = is_needed(scenario.job.cluster)
    calibration = ensure(every, calibration_file) if needed else calibration_for(scenario, calibration_file)
    outcome = execute(scenario, calibration, folder, options)
    if as_json:
        print_json(outcome.to_json())
        return 0
    print_result(
        f"{scenario.name}: {verdict(outcome.prediction)}\n\n{comparison_text(outcome.comparison)}\n\n"
        f"Files in {folder}: prediction, job, measurement, comparison, predicted.trace, measured.trace (.json)\n"
        "Next\n  open both traces at ui.perfetto.dev and see where they part\n"
        f"  simplan compare {outcome.prediction_file} {folder / 'measurement.json'} --plot steps.svg"
    )
    return 0


def calibrate_command(
    files: list[Path],
    *,
    as_json: bool,
    num_ranks: int | None,
    budget_s: float,
    calibration_file: Path | None,
    wanted: CalibrationTarget,
    rendezvous: NodeRendezvous,
) -> int:
    """``simplan calibrate``."""
    scenarios = [scenario for file in files for scenario in scenarios_to_time(file)]
    for scenario in scenarios:
        _say_whose_code_runs(scenario)
    if rendezvous.nodes[1] > 1:
        if files:
            rule = "is not timed across nodes: collectives and P2P sends are, for any scenario"
            raise SpecError(Problem(field="SCENARIO", value=str(files[0]), rule=rule, fix="leave it out"))
        request = request_across(rendezvous.nodes[1], num_ranks, budget_s, wanted)
        calibration = measure([request], calibration_file, nodes_to_time(rendezvous, request))
    else:
        refuse_without_nodes(rendezvous)
        calibration = measure(requests_for(scenarios, num_ranks, budget_s, wanted), calibration_file)
    where = calibration_file or default_path()
    if as_json:
        print_json(calibration.model_dump(mode="json"))
        return 0
    parts = (
        f"{len(calibration.layers)} layers",
        f"{len(calibration.kernels)} kernels of the grid",
        f"{len(calibration.communication)} collectives and P2P sends",
    )
    device = calibration.environment.get("device") or "this machine"
    print_result(f"{where} holds {', '.join(parts)}, timed on {device}, {calibration.num_cores} cores")
    return 0
