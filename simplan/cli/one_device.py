"""The commands for which one device is enough, and their flags (see ``app``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simplan.cli.options import AsJson, CalibrationFile, ScenarioFile

__all__ = ["rehearse", "suite"]


def rehearse(
    scenario: ScenarioFile,
    rank: Annotated[
        str, typer.Option(metavar="RANK", help="A rank's number, or worst: the one predicted to need most memory.")
    ] = "worst",
    fake: Annotated[
        bool, typer.Option("--fake", help="On tensors without data: memory of any rank, without any device.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Steps to measure.")] = 5,
    warmup: Annotated[
        int, typer.Option(min=0, max=10_000, metavar="N", help="Steps before them that do not count.")
    ] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON document too.")
    ] = None,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Run one rank of a job of any size alone on the device here, and show its prediction beside it.

    The rank's own kernels and allocator run, and no peer exists; the simulator joins what was measured with modelled
    communication into a step time of the whole job.
    """
    from simplan.cli.rehearse import RehearseOptions, rehearse_command

    options = RehearseOptions(rank=rank, fake=fake, num_steps=steps, num_warmup_steps=warmup)
    return rehearse_command(scenario, as_json=json, output=output, calibration_file=calibration, options=options)


def suite(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Folders of scenarios, or single ones.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="Folder for measurements and the report.")
    ],
    device: Annotated[
        str, typer.Option(metavar="cuda|cpu", help="cuda, or cpu for scenarios of this-machine.")
    ] = "cuda",
    budget: Annotated[
        float, typer.Option(min=10.0, max=86_400.0, metavar="SECONDS", help="Time for all of it.")
    ] = 520.0,
    limit: Annotated[
        float, typer.Option(min=5.0, max=86_400.0, metavar="SECONDS", help="Time for each scenario.")
    ] = 90.0,
    steps: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Steady steps to measure of each.")] = 10,
    json: AsJson = False,
    calibration: CalibrationFile = None,
) -> int:
    """Run a folder of scenarios on one device, each in a process of its own, and report predicted against measured.

    Calibrates first, unless --calibration names a file. Of scenarios called rehearse-*, the worst rank is rehearsed.
    What fails is a line of the report. The same command again goes on where the last one ended.
    """
    from simplan.cli.suite import SuiteOptions, suite_command

    options = SuiteOptions(device=device, budget_s=budget, limit_s=limit, num_steps=steps)
    return suite_command(folders, output=output, as_json=json, calibration_file=calibration, options=options)
