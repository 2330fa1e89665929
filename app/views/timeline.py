"""Timeline: actions, waits and memory of every rank over a step; several schedules on one axis."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import answers, state
from app.components.downloads import csv_text, download, show_figure
from app.components.problems import show_problems
from app.components.question import show_question
from app.fields import remembered_choice
from app.figures.gantt import gantt_figure
from app.page import run_page
from app.results.timeline import MOST_BOXES, TimelineResult
from simplan.errors import SpecError
from simplan.plan.schedules import SCHEDULE_FACTS

_MOST_COMPARED = 6
_WINDOW = "window"


def show() -> None:
    """Controls and the Gantt chart."""
    show_question()
    document = state.document()
    asked = answers.scenario(document)
    pipeline = asked.job.plan.pp > 1
    left, middle, right = st.columns([5, 2, 2], vertical_alignment="bottom")
    with left:
        schedules = _schedules(asked.job.plan.schedule) if pipeline else []
        if not pipeline:
            st.caption("No pipeline, so no schedules to compare: with Pipeline above 1 they are chosen here.")
    with middle:
        boxes = remembered_choice(
            "A box for each", "boxes", ("action", "layer"), "action", help="Layers show overlapped compute"
        )
    start, end = _window()
    layers = boxes == "layer"
    results = _results(document, schedules, layers=layers, start=start, end=end)
    if not results:
        return
    several = len(results) > 1
    ranks = [curve.rank for curve in results[0].memory]
    worst = max(results[0].memory, key=lambda curve: (max(curve.total_bytes), -curve.rank)).rank
    with right:
        rank = worst
        if not several:
            rank = remembered_choice("Memory of rank", "memory_rank", ranks, worst, help="Its tensors, over the step")
    _say_window(results)
    figure = gantt_figure(results, rank)
    names = " and ".join(result.name for result in results)
    show_figure(figure, f"timeline {names}", alt=f"Timeline of {names}: what every rank does when, and its memory")
    ranks_per_lane = results[0].ranks_per_lane
    first = (
        f"the first of {ranks_per_lane} ranks at each place of the pipeline is drawn; " if ranks_per_lane > 1 else ""
    )
    st.caption(
        f"What is empty is the bubble; {first}the thin lane under a rank is its messages; lighter shades are later "
        "stages of the same rank. Drag to zoom, double-click to see all."
    )
    _select_window()
    with st.container(horizontal=True):
        download(
            "Trace for Perfetto",
            f"{asked.name} trace",
            "json",
            lambda: answers.trace_text(document),
            about="The whole step with all simulated ranks; open it at ui.perfetto.dev or chrome://tracing",
        )
        rows = [row for result in results for row in _rows(result)]
        download("Boxes", f"{asked.name} timeline", "csv", csv_text(rows), about="What is drawn, a row for each box")
        download("Scenario", asked.name, "yaml", state.document_text(document))


def _schedules(own: str) -> list[str]:
    """Schedules to draw over each other; the plan's own one first."""
    options = [own, *(name for name in SCHEDULE_FACTS if name != own)]
    kept = state.view("schedules", [])
    known = [name for name in kept if name in options] if isinstance(kept, list) else []
    key = "view:schedules"
    st.session_state[key] = known or [own]
    st.multiselect(
        "Schedules on one axis",
        options,
        key=key,
        on_change=lambda: state.set_view("schedules", st.session_state[key] or None),
        max_selections=_MOST_COMPARED,
        help="The same plan under each of them",
        placeholder="The plan's own",
    )
    return list(st.session_state[key]) or [own]


def _results(
    document: dict[str, Any], schedules: list[str], *, layers: bool, start: float, end: float
) -> list[TimelineResult]:
    """One result per schedule that the plan supports; shows the reason for the others."""
    if len(schedules) < 2:
        asked = _with_schedule(document, schedules[0]) if schedules else document
        return [answers.timeline(asked, layers=layers, start=start, end=end)]
    found = []
    for name in schedules:
        try:
            found.append(
                answers.timeline(_with_schedule(document, name), name=name, layers=layers, start=start, end=end)
            )
        except SpecError as error:
            show_problems(error)
    return found


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
    start, end = (min(1.0, max(0.0, float(value))) for value in kept)
    return (start, end) if start < end else (0.0, 1.0)


def _select_window() -> None:
    key = f"view:{_WINDOW}"
    start, end = _window()
    st.session_state[key] = (round(100 * start, 1), round(100 * end, 1))
    st.slider(
        "Part of the step that is drawn, %",
        0.0,
        100.0,
        step=0.5,
        key=key,
        on_change=_keep_window,
        args=(key,),
        help=f"At most {MOST_BOXES:,} boxes are drawn together",
    )


def _keep_window(key: str) -> None:
    start, end = st.session_state[key]
    whole = (start, end) == (0.0, 100.0) or start >= end
    state.set_view(_WINDOW, None if whole else [start / 100, end / 100])


def _say_window(results: list[TimelineResult]) -> None:
    """Notes that not everything is drawn, if so."""
    for result in results:
        drawn = sum(len(lane.compute) + len(lane.communications) for lane in result.lanes)
        if drawn < result.num_boxes:
            start, end = (share / result.step_time_s for share in result.window_s)
            st.info(
                f"{result.name}: {drawn:,} of {result.num_boxes:,} boxes are drawn, {start:.0%} to {end:.1%} of the "
                "step. Choose another part below, or take the whole trace away for Perfetto.",
                icon=":material/crop:",
            )


def _rows(result: TimelineResult) -> list[dict[str, Any]]:
    return [
        {
            "plan": result.name,
            "rank": lane.rank,
            "lane": kind,
            "what": box.label,
            "stage": box.stage,
            "microbatch": box.microbatch,
            "start_s": box.start_s,
            "end_s": box.end_s,
            "recompute_s": box.recompute_s,
            "waited_s": box.waited_s,
            "waited_for": box.waited_for,
            "bytes": box.num_bytes,
        }
        for lane in result.lanes
        for kind, boxes in (("compute", lane.compute), ("communication", lane.communications))
        for box in boxes
    ]


if __name__ == "__main__":
    run_page(show)
