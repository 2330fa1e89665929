"""``simplan draw``: the predicted step, the network, its load, ways to train, or a whole run, as text, JSON and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simplan.cli.predict import calibration_for, predict_step
from simplan.cli.terminal.drawing import colored_drawing, refuse_other_suffix, terminal_width
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.progress import ProgressLine
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import Problem, SpecError
from simplan.explain.charts import ways_curves
from simplan.explain.ways_map import ways_lines, ways_map
from simplan.io import write_text
from simplan.report.drawings.charts_svg import curves_svg
from simplan.report.drawings.drawing import draw_pipeline
from simplan.report.drawings.drawing_svg import drawing_svg
from simplan.report.drawings.fabric_drawing import draw_fabric, fabric_text
from simplan.report.drawings.fabric_svg import fabric_svg
from simplan.report.drawings.link_load import draw_link_load, link_load_svg, link_load_text
from simplan.report.drawings.run_timeline import run_timeline, whole_run_text
from simplan.report.drawings.run_timeline_svg import whole_run_svg
from simplan.scenario.whole_run.goodput import goodput_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """Options of ``simplan draw``.

    Attributes:
        width: Columns of a text; None for those of the terminal.
        calibration_file: As for ``predict``.
        seed: Seed of the failures of a whole run.
        trial: Number of the run to draw, from 0; None for the one with the median time.
    """

    width: int | None
    calibration_file: Path | None
    seed: int
    trial: int | None


_Forms = tuple[dict[str, Any], Callable[[], str], Callable[[], str]]
"""A drawing as JSON document, as SVG and as text."""


def draw_command(
    request: ScenarioRequest, asked: Sequence[str], *, as_json: bool, output: Path | None, options: DrawOptions
) -> int:
    """``simplan draw``.

    Args:
        asked: Options for drawings in place of the step, such as ``--network``.

    Raises:
        SpecError: There are several, an option has no meaning with a drawing, or the file is no SVG.
    """
    if len(asked) > 1:
        problem = Problem(field=asked[1], rule=f"is another drawing than {asked[0]}", fix="remove one of the two")
        raise SpecError(problem)
    name = asked[0] if asked else ""
    draw, unused = _DRAWINGS[name]
    for option, value in {"--width": options.width, "--calibration": options.calibration_file}.items():
        if option in unused and value is not None:
            rule, fix = f"has no meaning with {name}", "remove one of the two"
            raise SpecError(Problem(field=option, value=str(value), rule=rule, fix=fix))
    if output is not None:
        refuse_other_suffix(output)
    document, svg, text = draw(request, options)
    if output is not None:
        write_text(output, svg())
        say(f"wrote {output}; any browser opens it")
    if as_json:
        print_json(document)
    else:
        print_result(text())
    return 0


def _step(request: ScenarioRequest, options: DrawOptions) -> _Forms:
    scenario = request.scenario()
    drawing = draw_pipeline(scenario.predict(calibration_for(scenario, options.calibration_file)))
    return drawing.to_json(), lambda: drawing_svg(drawing), lambda: colored_drawing(drawing, options.width)


def _network(request: ScenarioRequest, _: DrawOptions) -> _Forms:
    drawing = draw_fabric(request.scenario().job.cluster)
    return drawing.to_json(), lambda: fabric_svg(drawing), lambda: fabric_text(drawing)


def _load(request: ScenarioRequest, options: DrawOptions) -> _Forms:
    scenario = request.scenario()
    if scenario.job.cluster.topology is None:
        fix = "give cluster.topology, e.g. {kind: leaf_spine, nodes_per_leaf: 4}"
        raise SpecError(Problem(field="--load", rule="needs links, and the cluster has no topology", fix=fix))
    network = predict_step(scenario, calibration_for(scenario, options.calibration_file))[0].network
    assert network is not None
    drawing = draw_link_load(scenario.name, network)
    return drawing.to_json(), lambda: link_load_svg(drawing), lambda: link_load_text(drawing)


def _ways(request: ScenarioRequest, _: DrawOptions) -> _Forms:
    scenario = request.scenario()
    ways = ways_map(scenario.job, scenario.name)
    return ways.to_json(), lambda: curves_svg(ways_curves(ways)), lambda: "\n".join(ways_lines(ways))


def _whole_run(request: ScenarioRequest, options: DrawOptions) -> _Forms:
    scenario, source = request.read()
    calibration = calibration_for(scenario, options.calibration_file)
    try:
        with ProgressLine("simulating runs", quarters=False):
            result = goodput_of(scenario, calibration=calibration, seed=options.seed)
            timeline = run_timeline(result, options.trial)
    except SpecError as error:
        raise source.located(error) from None
    return (
        timeline.to_json(),
        lambda: whole_run_svg(result.to_json(), timeline),
        lambda: whole_run_text(result, timeline, options.width or terminal_width()),
    )


_DRAWINGS: Mapping[str, tuple[Callable[[ScenarioRequest, DrawOptions], _Forms], tuple[str, ...]]] = MappingProxyType(
    {
        "": (_step, ()),
        "--network": (_network, ("--width", "--calibration")),
        "--load": (_load, ("--width",)),
        "--ways": (_ways, ("--width", "--calibration")),
        "--run": (_whole_run, ()),
    }
)
"""Function of a drawing, and the options without meaning to it, by the option for the drawing."""
