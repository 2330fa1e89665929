"""``simplan draw``: the schedule of a plan, and the links of a cluster with their load."""

from __future__ import annotations

from pathlib import Path

from simplan.cli.predict import calibration_for, predict_step
from simplan.cli.terminal.drawing import print_drawing, refuse_other_suffix
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import Problem, SpecError
from simplan.io import write_text
from simplan.report.drawings.drawing import draw_pipeline
from simplan.report.drawings.drawing_svg import drawing_svg
from simplan.report.drawings.fabric_drawing import draw_fabric, fabric_text
from simplan.report.drawings.fabric_svg import fabric_svg
from simplan.report.drawings.link_load import draw_link_load, link_load_svg, link_load_text


def draw_command(
    request: ScenarioRequest, *, as_json: bool, output: Path | None, width: int | None, calibration_file: Path | None
) -> int:
    """``simplan draw``."""
    if output is not None:
        refuse_other_suffix(output)
    scenario = request.scenario()
    drawing = draw_pipeline(scenario.predict(calibration_for(scenario, calibration_file)))
    if output is not None:
        write_text(output, drawing_svg(drawing))
        say(f"wrote {output}; any browser opens it")
    if as_json:
        print_json(drawing.to_json())
    else:
        print_drawing(drawing, width)
    return 0


def draw_network_command(
    request: ScenarioRequest, *, as_json: bool, output: Path | None, width: int | None, calibration_file: Path | None
) -> int:
    """``simplan draw --network``."""
    for option, value in (("--width", width), ("--calibration", calibration_file)):
        if value is not None:
            rule, fix = "has no meaning with --network", "remove one of the two"
            raise SpecError(Problem(field=option, value=str(value), rule=rule, fix=fix))
    if output is not None:
        refuse_other_suffix(output)
    drawing = draw_fabric(request.scenario().job.cluster)
    if output is not None:
        write_text(output, fabric_svg(drawing))
        say(f"wrote {output}; any browser opens it")
    if as_json:
        print_json(drawing.to_json())
    else:
        print_result(fabric_text(drawing))
    return 0


def draw_load_command(
    request: ScenarioRequest, *, as_json: bool, output: Path | None, width: int | None, calibration_file: Path | None
) -> int:
    """``simplan draw --load``."""
    if width is not None:
        rule, fix = "has no meaning with --load", "remove one of the two"
        raise SpecError(Problem(field="--width", value=str(width), rule=rule, fix=fix))
    if output is not None:
        refuse_other_suffix(output)
    scenario = request.scenario()
    if scenario.job.cluster.topology is None:
        fix = "give cluster.topology, e.g. {kind: leaf_spine, nodes_per_leaf: 4}"
        raise SpecError(Problem(field="--load", rule="needs links, and the cluster has no topology", fix=fix))
    network = predict_step(scenario, calibration_for(scenario, calibration_file))[0].network
    assert network is not None
    drawing = draw_link_load(scenario.name, network)
    if output is not None:
        write_text(output, link_load_svg(drawing))
        say(f"wrote {output}; any browser opens it")
    if as_json:
        print_json(drawing.to_json())
    else:
        print_result(link_load_text(drawing))
    return 0
