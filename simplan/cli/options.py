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
    "Interface",
    "JoinTimeout",
    "NodeRank",
    "Rendezvous",
    "Restarts",
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
Rendezvous = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where they meet: a port of node 0, free there.")
]
NodeRank = Annotated[
    int | None,
    typer.Option(min=0, max=999_999, metavar="N", help="Place of this node (default: 0 on HOST, else a free one)."),
]
Interface = Annotated[
    str | None, typer.Option(metavar="IF", help="Network interface of the ranks (default: that towards HOST).")
]
JoinTimeout = Annotated[
    float, typer.Option(min=1.0, max=86_400.0, metavar="SECONDS", help="How long to wait for the other nodes.")
]
CheckpointDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep the state of the training in checkpoints here.")
]
CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, max=10**9, metavar="N", help="Steps between checkpoints (default 10).")
]
Restarts = Annotated[
    int, typer.Option(min=0, max=1000, metavar="K", help="How often ranks that fail go on from the newest checkpoint.")
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
