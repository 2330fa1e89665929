"""Timeline: actions, waits and memory of every rank over a step; several schedules on one axis."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import streamlit as st

from app import result_cache, state
from app.components.elements import csv_text, download, download_report, show_figure
from app.components.scenario_form import show_scenario_form
from app.fields import remembered_choice, remembered_choices
from app.figures.gantt import gantt_figure, label_words
from app.figures.timeline import MAX_BOXES, TimelineResult, timeline_result
from app.fitting import document_text
from app.page import escaped, run_page, show_problems
from app.predictions import prediction_text, trace_text
from app.result_cache import awaited, handed_over
from simplan.errors import SpecError
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.units import format_bytes, format_time

_MAX_COMPARED = 6
_WINDOW = "window"


def show() -> None:
    """Controls and the Gantt chart."""
    show_scenario_form()
    document = state.document()
    scenario = result_cache.scenario(document)
    pipeline = scenario.job.plan.pp > 1
    left, middle, right = st.columns([5, 2, 2], vertical_alignment="bottom")
    with left:
        schedules = _schedules(scenario.job.plan.schedule) if pipeline else []
        if not pipeline:
            st.caption("Set Pipeline above 1 to compare schedules.")
    with middle:
        boxes = remembered_choice(
            "Granularity", "boxes", ("action", "layer"), "action", help="One box per action or per layer"
        )
    start, end = _window()
    layers = boxes == "layer"
    results, plans = _results(document, schedules, layers=layers, start=start, end=end)
    if not results:
        return
    ranks = [curve.rank for curve in results[0].memory]
    with right:
        rank = results[0].peak_memory.rank
        if len(results) == 1:
            rank = remembered_choice("Memory of rank", "memory_rank", ranks, rank, help="Tensors over the step")
    curve = next(curve for curve in results[0].memory if curve.rank == rank)
    figure = gantt_figure(results, rank)
    names = " and ".join(result.name for result in results)
    show_figure(figure, f"timeline {names}", alt=f"Timeline of {names}: actions and memory of every rank")
    if len(results) == 1:
        when = f"during {curve.peak_action}" if curve.peak_action else "between steps"
        st.caption(
            f"Memory of rank {rank}: tensors peak at {format_bytes(curve.peak[1])} {when}; with the device "
            f"context and the allocator's reserve, as far as it fits, {format_bytes(curve.needed_bytes)} on the device."
        )
    labels = label_words(several=any(len(lane.stages) > 1 for result in results for lane in result.lanes))
    ranks_per_lane = results[0].ranks_per_lane
    first = f"lanes show the first of {ranks_per_lane} ranks per pipeline stage; " if ranks_per_lane > 1 else ""
    st.caption(
        f"{labels}. Gaps are idle time (bubble); {first}thin lanes are communication; lighter shades are later stages "
        "of a rank. Drag to zoom, double-click to reset."
    )
    _select_window(results)
    with st.container(horizontal=True):
        download(
            "Trace for Perfetto",
            f"{scenario.name} trace",
            "json",
            lambda: handed_over(trace_text, *result_cache.worker_inputs(document)),
            about="Full step of all simulated ranks, for ui.perfetto.dev or chrome://tracing",
        )
        rows = [row for result in results for row in _rows(result)]
        download(
            "Boxes",
            f"{scenario.name} timeline",
            "csv",
            csv_text(rows),
            about="One row per drawn box; the trace has all of them",
        )
        download("Scenario", scenario.name, "yaml", document_text(document))
        download_report(f"{scenario.name} timeline", lambda: _predictions(plans))


def _schedules(of_plan: str) -> list[str]:
    """Selected schedules, by default that of the plan."""
    return remembered_choices(
        "Schedules",
        "schedules",
        [of_plan, *(name for name in SCHEDULE_FACTS if name != of_plan)],
        [of_plan],
        max_selections=_MAX_COMPARED,
        help="Schedules of the same plan, on one axis",
        placeholder="Schedule of the plan",
    )


def _results(
    document: dict[str, Any], schedules: list[str], *, layers: bool, start: float, end: float
) -> tuple[list[TimelineResult], list[dict[str, Any]]]:
    """One result, and its scenario, per schedule that the plan supports; shows the reason for the others."""
    several = len(schedules) > 1
    results, plans = [], []
    for name in schedules or [""]:
        plan = _with_schedule(document, name) | ({"name": name} if several else {}) if name else document
        try:
            inputs = result_cache.worker_inputs(plan)
            what = f"simulating {name if several else 'the step'}"
            results.append(awaited(what, timeline_result, *inputs, layers=layers, start=start, end=end))
            plans.append(plan)
        except SpecError as error:
            if not several:
                raise
            show_problems(error)
    return results, plans


def _predictions(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Documents of the predictions of scenarios."""
    return [json.loads(handed_over(prediction_text, *result_cache.worker_inputs(plan))) for plan in plans]


def _with_schedule(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The scenario with another schedule and that schedule's number of stages per rank."""
    plan = {key: value for key, value in document["plan"].items() if key not in ("schedule", "virtual_stages")}
    facts = SCHEDULE_FACTS.get(name)
    if facts is not None and facts.virtual_stages is None:
        stages = document["plan"].get("virtual_stages", 2)
        plan["virtual_stages"] = stages if isinstance(stages, int) and stages > 1 else 2
    return document | {"plan": plan | {"schedule": name}}


def _window() -> tuple[float, float]:
    """Window of the step to draw, as fractions of the step."""
    kept = state.view(_WINDOW, [0.0, 1.0])
    if not isinstance(kept, list) or len(kept) != 2 or not all(isinstance(v, int | float) for v in kept):
        return 0.0, 1.0
    start, end = (float(min(1, max(0, value))) for value in kept)
    return (start, end) if start < end else (0.0, 1.0)


def _select_window(results: list[TimelineResult]) -> None:
    key = f"view:{_WINDOW}"
    start, end = _window()
    st.session_state[key] = (round(100 * start, 1), round(100 * end, 1))
    st.slider(
        "Window, % of the step",
        0.0,
        100.0,
        step=0.5,
        key=key,
        on_change=_keep_window,
        args=(key,),
        help=f"The part of the step that is drawn. A shorter window shows more of its {MAX_BOXES:,} boxes unmerged.",
    )
    shown_s = [(end - start) * result.step_time_s for result in results]
    whole = (start, end) == (0.0, 1.0)
    part = "The whole step" if whole else f"{start:.1%} to {end:.1%} of the step"
    st.caption(f"{part} is shown ({' and '.join(map(format_time, shown_s))}). {escaped(_merging_words(results))}.")


def _keep_window(key: str) -> None:
    start, end = st.session_state[key]
    whole = (start, end) == (0.0, 100.0) or start >= end
    state.set_view(_WINDOW, None if whole else [start / 100, end / 100])


def _merging_words(results: list[TimelineResult]) -> str:
    """Number of boxes, and how neighbors are merged where a window has more than are drawn."""
    words = []
    for result in results:
        drawn = sum(len(lane.compute) + len(lane.communications) for lane in result.lanes)
        name = f"{result.name}: " * (len(results) > 1)
        if drawn == result.num_boxes:
            words.append(f"{name}{drawn:,} boxes")
            continue
        below = " and ".join(
            f"{kind} up to {format_time(below_s)}"
            for kind, below_s in zip(("compute", "communication"), result.merged_below_s, strict=True)
            if below_s
        )
        words.append(f"{name}{result.num_boxes:,} boxes drawn as {drawn:,}: neighbors are merged, {below}")
    return ". ".join(words)


def _rows(result: TimelineResult) -> list[dict[str, Any]]:
    """Boxes as table rows."""
    return [
        {
            "plan": result.name,
            "rank": lane.rank,
            "lane": kind,
            **{key: value for key, value in asdict(box).items() if key != "action"},
            **box.action._asdict(),
            "formula": box.formula.replace("<br>", "; "),
        }
        for lane in result.lanes
        for kind, boxes in (("compute", lane.compute), ("communication", lane.communications))
        for box in boxes
    ]


if __name__ == "__main__":
    run_page(show)
