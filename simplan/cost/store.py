"""Where a machine's calibration lies, and reading and writing it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import ValidationError

from simplan.cost.calibration import Calibration
from simplan.errors import Problem, SpecError

__all__ = ["default_path", "load", "save"]


def default_path() -> Path:
    """``calibration.json`` in simplan's folder of the user's cache (XDG_CACHE_HOME, else ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "simplan" / "calibration.json"


def load(path: Path) -> Calibration | None:
    """The calibration in a file; None when there is no such file.

    Raises:
        SpecError: The file is not a calibration of this version.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(Problem(field="", rule=f"cannot be read: {error}"), file=str(path)) from None
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SpecError(
            Problem(
                field=place,
                rule=f"is not what a calibration file holds ({first['msg'].lower()})",
                fix="delete the file and run `simplan calibrate`",
            ),
            file=str(path),
        ) from None


def save(path: Path, calibration: Calibration) -> None:
    """Writes a calibration; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(calibration.model_dump(mode="json"), indent=1))
    temporary.replace(path)
