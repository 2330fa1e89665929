"""``simplan draw --run``: the timeline of one simulated run, and where the time of all goes."""

from __future__ import annotations

from pathlib import Path

from simplan.cli.predict import calibration_for
from simplan.cli.terminal.drawing import refuse_other_suffix, terminal_width
from simplan.cli.terminal.output import print_json, print_result, say
from simplan.cli.terminal.progress import ProgressLine
from simplan.cli.terminal.scenario_request import ScenarioRequest
from simplan.errors import SpecError
from simplan.io import write_text
from simplan.report.drawings.run_timeline import run_timeline, whole_run_text
from simplan.report.drawings.run_timeline_svg import whole_run_svg
from simplan.scenario.whole_run.goodput import goodput_of


def draw_whole_run_command(
    request: ScenarioRequest,
    *,
    as_json: bool,
    output: Path | None,
    width: int | None,
    calibration_file: Path | None,
    seed: int,
    trial: int | None,
) -> int:
    """Runs the command.

    Args:
        seed: Seed of the failures.
        trial: Number of the run to draw, from 0; None for the one with the median time.
    """
    if output is not None:
        refuse_other_suffix(output)
    scenario, source = request.read()
    calibration = calibration_for(scenario, calibration_file)
    try:
        with ProgressLine("simulating runs", quarters=False):
            result = goodput_of(scenario, calibration=calibration, seed=seed)
            timeline = run_timeline(result, trial)
    except SpecError as error:
        raise source.located(error) from None
    if output is not None:
        write_text(output, whole_run_svg(result.to_json(), timeline))
        say(f"wrote {output}; any browser opens it")
    if as_json:
        print_json(timeline.to_json())
    else:
        print_result(whole_run_text(result, timeline, width or terminal_width()))
    return 0
