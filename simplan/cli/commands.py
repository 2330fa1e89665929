"""``simplan run`` and ``simplan calibrate``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
)
from simplan.cli.nodes import NodeRendezvous, nodes_of, nodes_to_time, refuse_without_nodes
from simplan.cli.predict import calibration_for
from simplan.cli.search import scenarios_to_time
from simplan.cli.terminal.output import print_json, print_result
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.cost.calibration.store import default_path
from simplan.errors import Problem, SpecError
from simplan.report.comparison import comparison_text
from simplan.report.text import verdict
from simplan.runs.lock import exclusive
from simplan.scenario import Scenario
from simplan.scenario.elastic import scenarios_on_fewer


def run_command(
    request: ScenarioRequest,
    *,
    as_json: bool,
    output: Path | None,
    calibration_file: Path | None,
    options: RunOptions,
    rendezvous: NodeRendezvous,
) -> int:
    """``simplan run``."""
    scenario = request.scenario()
    refuse_other_software(scenario)
    folder = output or default_folder(scenario)
    nodes = nodes_of(scenario, options, rendezvous)
    if nodes is not None and not nodes.leads:
        join(nodes, folder)
        return 0
    with exclusive(folder, "--output"):
        return _run_alone(
            scenario, folder, calibration_file, replace(options, nodes=nodes), rendezvous, as_json=as_json
        )


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
    every = [scenario, *smaller.values()]
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
