"""Predictions of published runs with constants that were fitted without the whole source of the run.

``left_out.yaml``, which ``make fit`` writes, has them relative to the prediction with all constants. So they follow
changes of the code between two fits. Runs that no fit used have none: their prediction is one without their source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from simplan.accuracy.outcome import RunOutcome

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LEFT_OUT_FILE = Path(__file__).with_name("left_out.yaml")


class LeftOut(NamedTuple):
    """A run whose source was left out of the fit.

    Attributes:
        factor: Predicted step time over the one with all constants.
        low, high: Ends of the 90% interval over the predicted step time.
    """

    factor: float
    low: float
    high: float


def without_sources(outcomes: Iterable[RunOutcome]) -> list[RunOutcome]:
    """Outcomes of the runs that a fit used, predicted without their source."""
    files = []
    for outcome in outcomes:
        left = _left_out().get(outcome.run.id)
        if left is None or outcome.predicted is None:
            continue
        step_s = left.factor * outcome.predicted.step_time_s
        interval_s = (left.low * step_s, left.high * step_s)
        predicted = replace(outcome.predicted, step_time_s=step_s, step_time_interval_s=interval_s)
        files.append(replace(outcome, predicted=predicted))
    return files


@cache
def _left_out() -> Mapping[str, LeftOut]:
    data = yaml.load(LEFT_OUT_FILE.read_text(encoding="utf-8"), _LOADER)
    return {name: LeftOut(*numbers) for name, numbers in data["runs"].items()}
