"""Arguments and options of several commands."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from simplan.errors import Problem, SpecError


def opened(path: Path) -> Path:
    """File of an argument; standard input for ``-``."""
    return Path("/dev/stdin") if str(path) == "-" else path


ScenarioPaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH",
        help="Scenario files, or folders of them; - for standard input.",
        callback=lambda paths: [opened(path) for path in paths],
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
JsonFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="File for the JSON document (default: none).")
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="Calibration of this machine (default: in the cache folder)."),
]
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def number_of(text: str | float) -> float:
    """Number with a suffix: ``100B`` is 1e11.

    Raises:
        typer.BadParameter: The text is no number.
    """
    digits = str(text).strip()
    try:
        return float(digits[:-1]) * _SUFFIXES[digits[-1].upper()] if digits[-1:].upper() in _SUFFIXES else float(digits)
    except ValueError:
        raise typer.BadParameter(f"{digits} is no number; write e.g. 100B or 1e11") from None


def whole_number_of(text: str | int, instead: str) -> int:
    """Whole number, at least 1.

    Args:
        instead: What else may be written, for the error.

    Raises:
        typer.BadParameter: The text is no such number.
    """
    digits = str(text).strip()
    if not digits.isdecimal() or int(digits) < 1:
        raise typer.BadParameter(f"{digits} is no whole number from 1 on; write one, {instead}")
    return int(digits)


Tokens = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        parser=number_of,
        help="Tokens of the full training, e.g. 1e12 or 1T (default: training.num_tokens).",
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price",
        metavar="P",
        help="Price per device and hour in any currency (default: cluster.price_per_device_hour).",
    ),
]
Trial = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=10**9,
        metavar="N",
        help="Number of the simulated run, from 0 (default: that with the median time).",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint", "--rdzv", metavar="HOST:PORT", help="Rendezvous: one of the nodes, and a free port of it."
    ),
]
RendezvousConf = Annotated[
    str | None,
    typer.Option(
        "--rdzv-conf",
        metavar="KEY=NUMBER,...",
        show_default="join_timeout=300,last_call_timeout=30",
        help="Timeouts of the rendezvous, in seconds: for MIN nodes, then for more.",
    ),
]
CheckpointDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for checkpoints of the training state (default: none).")
]
CheckpointEvery = Annotated[
    int | None, typer.Option(min=1, max=10**9, metavar="N", help="Steps between checkpoints (default: 10).")
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        "--restarts",
        min=0,
        max=1000,
        metavar="K",
        help="Restarts of failed ranks from the newest checkpoint, or of replicas that may leave.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Start from the newest checkpoint, also with other data-parallel ranks.")
]


OUTPUTS = frozenset({"csv", "junit", "output", "plot", "runs_file", "save_plan", "trace"})
"""Parameters of commands that name a file to write."""


class FileCommand(TyperCommand):
    """A command that never writes over its own input."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command.

        Raises:
            SpecError: A file to write is one of its arguments.
        """
        arguments = {param.name for param in self.params if isinstance(param, TyperArgument)}
        inputs = [path for name in sorted(arguments & ctx.params.keys()) for path in _paths(ctx.params[name])]
        for param in self.params:
            if param.name in OUTPUTS:
                for written in _paths(ctx.params.get(param.name)):
                    if any(written.exists() and read.exists() and written.samefile(read) for read in inputs):
                        rule = "is the file that the command reads"
                        problem = Problem(field=param.opts[0], value=str(written), rule=rule, fix="name another file")
                        raise SpecError(problem)
        return super().invoke(ctx)


def _paths(value: object) -> list[Path]:
    """Paths of a parameter, which may be given several times."""
    return [path for path in (value if isinstance(value, list | tuple) else [value]) if isinstance(path, Path)]


class TimedPrecision(StrEnum):
    """Values of an option that may be given several times."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"
