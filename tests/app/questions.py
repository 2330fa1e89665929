"""Scenarios that tests of the workbench ask."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from app.results import plan
from simplan.prediction import Prediction

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@cache
def text_of(name: str) -> str:
    return (SCENARIOS / f"{name}.yaml").read_text()


def predicted(name: str) -> Prediction:
    return plan.predicted(text_of(name), 0)
