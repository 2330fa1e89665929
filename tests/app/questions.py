"""Scenarios that tests of the dashboard ask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from app import predictions
from app.fitting import document_text
from simplan.errors import SpecError
from simplan.prediction import Prediction
from simplan.scenario import parse_scenario
from tests.search.jobs import SIZES

TINY: Mapping[str, Any] = {
    "name": "small",
    "model": {"family": "llama", **SIZES},
    "cluster": {"preset": "dgx-h100", "num_devices": 4},
    "training": {"global_batch_size": 8},
    "plan": {"dp_shard": 4},
}
"""A model of four tiny layers: a search of its plans takes no time."""

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@cache
def text_of(name: str) -> str:
    return (SCENARIOS / f"{name}.yaml").read_text()


def predicted(name: str) -> Prediction:
    return predictions.predicted(text_of(name), 0)


def is_valid(document: Mapping[str, Any]) -> bool:
    try:
        parse_scenario(document_text(dict(document)))
    except SpecError:
        return False
    return True
