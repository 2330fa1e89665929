"""Predictions for pages, cached by the text of the scenario for all sessions of the server."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from app.results import plan as plan_results
from app.results import timeline as timeline_results
from app.results.plan import PlanResult, plan_result
from app.results.quick import PlanEstimate, quick
from app.results.timeline import TimelineResult, timeline_result
from app.state import document_text
from app.work import awaited, handed_over
from simplan.cost.calibration.store import default_path
from simplan.scenario import Scenario, parse_scenario

__all__ = [
    "calibrated_at",
    "plan",
    "prediction_text",
    "quick_numbers",
    "scenario",
    "text",
    "timeline",
    "trace_text",
]

Document = dict[str, Any]


def scenario(document: Document) -> Scenario:
    """The checked scenario.

    Raises:
        SpecError: The scenario is wrong; the error lists all problems.
    """
    return _scenario(_key(document))


def quick_numbers(document: Document) -> PlanEstimate | None:
    """Step time and memory as a search computes them, in milliseconds; None for ranks that share CPU cores.

    Raises:
        SpecError: See ``scenario``; also when the cost model has no estimate for the plan.
    """
    return _quick(_key(document))


def plan(document: Document) -> PlanResult:
    """Data of the page Plan, computed in another process, so that pages stay responsive.

    Raises:
        SpecError: See ``scenario``; also when the cost model has no estimate for the plan.
    """
    return awaited("working out where the step goes", plan_result, text(document), calibrated_at(scenario(document)))


def timeline(
    document: Document, *, name: str = "", layers: bool = False, start: float = 0.0, end: float = 1.0
) -> TimelineResult:
    """Data of the page Timeline for one plan, or for a window of its step.

    Args:
        document: The scenario.
        name: Name of the plan among several; empty for the scenario's name.
        layers, start, end: See ``timeline_result``.

    Raises:
        SpecError: See ``scenario``; also when the cost model has no estimate for the plan.
    """
    named = document | {"name": name} if name else document
    at = calibrated_at(scenario(document))
    return awaited(
        f"simulating {name or 'the step'}", timeline_result, text(named), at, layers=layers, start=start, end=end
    )


def prediction_text(document: Document) -> str:
    """Output file of ``simplan predict``, computed in another process, so that pages stay responsive.

    Raises:
        SpecError: See ``plan``.
    """
    return handed_over(plan_results.prediction_text, text(document), calibrated_at(scenario(document)))


def trace_text(document: Document) -> str:
    """Trace of the step for Perfetto, computed in another process.

    Raises:
        SpecError: See ``plan``.
    """
    return handed_over(timeline_results.trace_text, text(document), calibrated_at(scenario(document)))


def text(document: Document) -> str:
    """Text of the scenario, the form in which it is sent to processes."""
    return document_text(document)


def _is_machine(asked: Scenario) -> bool:
    return asked.job.cluster.cores_per_node is not None


def calibrated_at(asked: Scenario) -> int:
    """Modification time of the calibration in use, a cache key; 0 without a calibration."""
    path = default_path()
    return path.stat().st_mtime_ns if _is_machine(asked) and path.exists() else 0


def _key(document: Document) -> str:
    """Cache key, equal for equal documents; includes the name, which results show."""
    return json.dumps(document, default=str)


@st.cache_resource(max_entries=256, show_spinner=False)
def _scenario(key: str) -> Scenario:
    return parse_scenario(document_text(json.loads(key)))


@st.cache_resource(max_entries=256, show_spinner=False)
def _quick(key: str) -> PlanEstimate | None:
    return quick(_scenario(key))
