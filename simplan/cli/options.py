"""Arguments and flags that several commands have, or that take more than a line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "AsJson",
    "CalibrationFile",
    "CheckpointDir",
    "CheckpointEvery",
    "ComparisonPlot",
    "Interface",
    "JoinTimeout",
    "Largest",
    "LastCallTimeout",
    "NodeRank",
    "Objectives",
    "Rendezvous",
    "Restarts",
    "Resume",
    "ScenarioFile",
    "ScenarioPaths",
    "StageTimes",
    "TimedDevice",
    "TimedPrecision",
    "TimedPrecisions",
    "Timeout",
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
Objectives = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="step_time, tokens_per_s_per_device, num_devices, memory or cost; given twice: the Pareto front.",
    ),
]
Largest = Annotated[
    str | None,
    typer.Option(
        metavar="QUANTITY", help="The largest seq_len, microbatch_size or num_hidden_layers for which a plan fits."
    ),
]
Timeout = Annotated[
    float,
    typer.Option(min=1.0, max=86_400.0, metavar="SECONDS", help="A rank without progress for so long ends the run."),
]
NumNodes = Annotated[
    str,
    typer.Option(metavar="N|MIN:MAX", help="Nodes; the same command runs on each. MIN go on when others go."),
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
LastCallTimeout = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=86_400.0,
        metavar="SECONDS",
        show_default="30",
        help="With MIN:MAX: how long to wait for more than MIN.",
    ),
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
StageTimes = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Predict from these profiled stage times instead of the cost model; others are skipped.",
    ),
]


class TimedPrecision(StrEnum):
    """Values of an option that may be given several times."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"


ComparisonPlot = Annotated[
    Path | None, typer.Option(metavar="FILE.svg", help="Draw both on one time axis too; FILE.html for a page.")
]
TimedDevice = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(metavar="cpu|cuda", help="Of the ranks (default: GPUs where there are any)."),
]
TimedPrecisions = Annotated[
    list[TimedPrecision] | None,
    typer.Option(
        metavar="|".join(TimedPrecision),
        help="Precision of the grid, may be given several times (default: fp32 on CPUs, bf16 on GPUs).",
    ),
]
