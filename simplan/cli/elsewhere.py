"""The command for clusters with a scheduler of their own, and its flags (see ``app``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simplan.cli.options import AsJson, CheckpointDir, CheckpointEvery, Restarts, Resume, ScenarioFile

__all__ = ["export"]


def export(
    scenario: ScenarioFile,
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help="slurm or kubernetes.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to a file (default: print it).")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="As of run; MAX are the nodes of the scenario (default).")
    ] = None,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = None,
    restarts: Restarts = 0,
    resume: Resume = False,
    json: AsJson = False,
) -> int:
    """Write what runs the plan on a cluster: a Slurm batch script, or a Kubernetes PyTorchJob.

    Each node then runs `simplan run SCENARIO --nodes N --rdzv HOST:PORT`, with the options about checkpoints that are
    given here.
    """
    from simplan.cli.checkpointing import checkpointing
    from simplan.cli.export import export_command

    kept = checkpointing(checkpoint_dir, checkpoint_every, restarts=restarts, resume=resume)
    return export_command(scenario, target=to, as_json=json, output=output, nodes=nodes, checkpointing=kept)
