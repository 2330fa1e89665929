"""Reads the file of a captured model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.io import read_json
from simplan.model.captured.facts import CapturedModel
from simplan.problems import parse_model

FORMAT = "simplan-captured-model"


def is_captured(data: Any) -> bool:
    """True for the content of such a file."""
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_captured(path: Path) -> CapturedModel:
    """Reads a captured model.

    Raises:
        SpecError: The file is missing or wrong.
    """
    data = read_json(path)
    if not is_captured(data):
        rule, fix = "is no captured model", "write one: simplan capture MODULE:FACTORY --inputs MODULE:FUNCTION -o FILE"
        raise SpecError(Problem(field="", rule=rule, fix=fix), file=str(path))
    return parse_model(CapturedModel, data, file=str(path))
