"""Predictions for pages, cached by the text of the scenario for all sessions of the server.

Every function takes a scenario as plain data and raises a SpecError if the scenario is wrong, or if the cost model has
no estimate for the plan.
"""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from app.awaited import awaited, handed_over
from app.results import plan as plan_results
from app.results import timeline as timeline_results
from app.results.plan import Headline, PlanResult, plan_fixes, plan_result, quick_headline
from app.results.timeline import TimelineResult, timeline_result
from app.state import document_text
from simplan.cost.calibration.store import default_path
from simplan.errors import Problem, SpecError
from simplan.scenario import Scenario, parse_scenario
from simplan.search.fixes import Fix

Document = dict[str, Any]

MAX_DEVICES = 131_072
"""Maximum number of devices of a plan that pages predict: each rank takes time and memory of the server."""

_MAX_QUICK_DEVICES = 8_192
_FIX = "use `simplan predict FILE` for larger clusters"


def scenario(document: Document) -> Scenario:
    """The checked scenario."""
    return _scenario(_key(document))


def headline(document: Document) -> Headline | None:
    """Key numbers as a search computes them; None for ranks that share CPU cores, and for large clusters."""
    return _headline(_key(without_budget(document)))


def plan(document: Document) -> PlanResult:
    """Data of the page Plan, computed in another process, so that pages stay responsive."""
    return awaited("predicting the step", plan_result, *worker_inputs(document))


def fixes(document: Document) -> tuple[Fix, ...]:
    """Smallest changes with which a plan fits that does not, tried in another process."""
    return awaited("trying changes with which the plan fits", plan_fixes, *worker_inputs(document))


def timeline(
    document: Document, *, name: str = "", layers: bool = False, start: float = 0.0, end: float = 1.0
) -> TimelineResult:
    """Data of the page Timeline for one plan, or for a window of its step.

    Args:
        document: The scenario.
        name: Name of the plan among several; empty for the scenario's name.
        layers, start, end: See ``timeline_result``.
    """
    inputs = worker_inputs(document | {"name": name} if name else document)
    return awaited(f"simulating {name or 'the step'}", timeline_result, *inputs, layers=layers, start=start, end=end)


def prediction_text(document: Document) -> str:
    """Output file of ``simplan predict``, computed in another process."""
    _, calibrated_at = worker_inputs(document)
    return handed_over(plan_results.prediction_text, document_text(document), calibrated_at)


def trace_text(document: Document) -> str:
    """Trace of the step for Perfetto, computed in another process."""
    return handed_over(timeline_results.trace_text, *worker_inputs(document))


def worker_inputs(document: Document) -> tuple[str, int]:
    """Arguments of tasks in worker processes: text of the scenario, and modification time of the calibration in use.

    The text has no budget, on which no step depends. The time is a cache key; it is 0 without a calibration.
    """
    path = default_path()
    calibrated = scenario(document).job.cluster.cores_per_node is not None and path.exists()
    return document_text(without_budget(document)), path.stat().st_mtime_ns if calibrated else 0


def without_budget(document: Document) -> Document:
    """The scenario without number of tokens and price."""
    document = dict(document)
    for name, key in (("training", "num_tokens"), ("cluster", "price_per_device_hour")):
        if isinstance(document.get(name), dict):
            document[name] = {other: value for other, value in document[name].items() if other != key}
    return document


def _key(document: Document) -> str:
    """Cache key, equal for equal documents; includes the name, which results show."""
    return json.dumps(document, default=str)


@st.cache_resource(max_entries=256, show_spinner=False)
def _scenario(key: str) -> Scenario:
    found = parse_scenario(document_text(json.loads(key)))
    devices = found.job.cluster.num_devices
    if devices > MAX_DEVICES:
        rule = f"is more than the pages predict, {MAX_DEVICES:,}"
        raise SpecError(Problem(field="cluster.num_devices", value=f"{devices:,}", rule=rule, fix=_FIX))
    return found


@st.cache_resource(max_entries=256, show_spinner=False)
def _headline(key: str) -> Headline | None:
    found = _scenario(key)
    return quick_headline(found) if found.job.cluster.num_devices <= _MAX_QUICK_DEVICES else None
