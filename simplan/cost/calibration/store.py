"""Where a machine's calibration lies, and reading and writing it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from simplan.cost.calibration.format import Calibration
from simplan.errors import SpecError
from simplan.io import read_model, write_model

__all__ = ["default_path", "load", "save"]


def default_path() -> Path:
    """``calibration.json`` in simplan's folder of the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "simplan" / "calibration.json"


def load(path: Path) -> Calibration | None:
    """The calibration in a file; None when there is no such file.

    Raises:
        SpecError: The file is not a calibration of this version.
    """
    if not path.exists():
        return None
    try:
        return read_model(path, Calibration)
    except SpecError as error:
        fix = "delete the file and run `simplan calibrate`"
        raise SpecError([replace(p, fix=p.fix or fix) for p in error.problems], file=error.file) from None


def save(path: Path, calibration: Calibration) -> None:
    """Writes a calibration; a reader never sees half a file.

    Raises:
        SpecError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_model(path, calibration)
