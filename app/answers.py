"""Questions and their answers, kept by the text of the scenario for all sessions of the server."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from app.results import plan as plan_results
from app.results import timeline as timeline_results
from app.results.plan import PlanResult, plan_result
from app.results.quick import Quick, quick
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
        SpecError: It is wrong; all problems at once.
    """
    return _scenario(_key(document))


def quick_numbers(document: Document) -> Quick | None:
    """Step time and memory alone, in milliseconds; None for plans that have to be simulated.

    Raises:
        SpecError: As ``scenario``, or a price cannot be had.
    """
    return _quick(_key(document))


def plan(document: Document) -> PlanResult:
    """What the page Plan shows; worked out in another process, so that pages answer meanwhile.

    Raises:
        SpecError: As ``scenario``, or a price cannot be had.
    """
    return awaited("working out where the step goes", plan_result, text(document), calibrated_at(scenario(document)))


def timeline(
    document: Document, *, name: str = "", layers: bool = False, start: float = 0.0, end: float = 1.0
) -> TimelineResult:
    """What the page Timeline shows of one plan, or of a window of its step.

    Args:
        document: The scenario.
        name: What it is called among others; empty for its own name.
        layers, start, end: As of ``timeline_result``.

    Raises:
        SpecError: As ``scenario``, or a price cannot be had.
    """
    named = document | {"name": name} if name else document
    at = calibrated_at(scenario(document))
    return awaited(
        f"simulating {name or 'the step'}", timeline_result, text(named), at, layers=layers, start=start, end=end
    )


def prediction_text(document: Document) -> str:
    """All that ``simplan predict`` says, as its file; worked out in another process, so that pages answer meanwhile.

    Raises:
        SpecError: As ``plan``.
    """
    return handed_over(plan_results.prediction_text, text(document), calibrated_at(scenario(document)))


def trace_text(document: Document) -> str:
    """The step as a trace for Perfetto, in the same way.

    Raises:
        SpecError: As ``plan``.
    """
    return handed_over(timeline_results.trace_text, text(document), calibrated_at(scenario(document)))


def text(document: Document) -> str:
    """The scenario's text, by which processes know it."""
    return document_text(document)


def _is_machine(asked: Scenario) -> bool:
    return asked.job.cluster.cores_per_node is not None


def calibrated_at(asked: Scenario) -> int:
    """When the calibration was written that it is priced from: a new one makes new answers. 0 without one."""
    path = default_path()
    return path.stat().st_mtime_ns if _is_machine(asked) and path.exists() else 0


def _key(document: Document) -> str:
    """Equal for equal documents; the name is no part of the question but stands in the answer."""
    return json.dumps(document, default=str)


@st.cache_resource(max_entries=256, show_spinner=False)
def _scenario(key: str) -> Scenario:
    return parse_scenario(document_text(json.loads(key)))


@st.cache_resource(max_entries=256, show_spinner=False)
def _quick(key: str) -> Quick | None:
    return quick(_scenario(key))
