"""Arguments and flags that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "CalibrationFile",
    "CheckpointDir",
    "CheckpointEvery",
    "Endpoint",
    "MaxRestarts",
    "RendezvousConf",
    "Resume",
    "ScenarioFile",
    "ScenarioPaths",
    "TimedPrecision",
]


def _opened(path: Path) -> Path:
    """Standard input by its usual sign."""
    return Path("/dev/stdin") if str(path) == "-" else path


ScenarioFile = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="A scenario file (YAML); - for standard input.", callback=_opened)
]
ScenarioPaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH",
        help="Scenario files, or folders of them; - for standard input.",
        callback=lambda paths: [_opened(path) for path in paths],
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration", metavar="FILE", help="Calibration of this machine, instead of the one in the cache folder."
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint", "--rdzv", metavar="HOST:PORT", help="Where they meet: one of the nodes, a port free there."
    ),
]
RendezvousConf = Annotated[
    str | None,
    typer.Option(
        "--rdzv-conf",
        metavar="KEY=NUMBER,...",
        show_default="join_timeout=300,last_call_timeout=30",
        help="How long to wait for MIN nodes, and then for more.",
    ),
]
CheckpointDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep the state of the training in checkpoints here.")
]
CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, max=10**9, metavar="N", help="Steps between checkpoints (default 10).")
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        "--restarts",
        min=0,
        max=1000,
        metavar="K",
        help="How often ranks that fail go on from the newest checkpoint.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint; other data-parallel ranks may do so.")
]


class TimedPrecision(StrEnum):
    """Values of an option that may be given several times."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"
