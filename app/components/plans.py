"""Plans of a search: scatter plot, ranking, one plan in detail, and the excluded plans."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import streamlit as st

from app import state
from app.budget import without_budget
from app.components.elements import (
    csv_text,
    download,
    download_report,
    is_same_time,
    meaning,
    point_value,
    show_figure,
    show_table,
)
from app.components.plan_table import (
    PLAN,
    place_words,
    select_row,
    selected_row,
    show_filters,
    show_table_of_plans,
)
from app.fields import remembered_choice, remembered_switch
from app.figures.plans import (
    AXES,
    COLOURS,
    current_plan,
    importance_figure,
    plan_rows,
    plans_figure,
    setting_effects,
    shares_figure,
    shown_plans,
    space_figure,
    space_table,
)
from app.fitting import document_text, with_plan
from app.page import bullets, escaped
from app.result_cache import awaited, worker_inputs
from simplan.errors import SpecError
from simplan.io import json_text
from simplan.report.search import (
    RESOURCES,
    alike_words,
    besides,
    headroom_words,
    largest_first,
    main_difference_words,
    miss_words,
    other_software_words,
    search_plan_words,
    unsearched_words,
)
from simplan.report.table import format_table_markdown
from simplan.report.text import memory_interval
from simplan.scenario import SearchScenario
from simplan.search import RankedPlan, SearchResult
from simplan.units import counted, faster_or_slower, format_bytes, format_number, format_percent, format_time

_HEAD_START_S = 0.1
_POINTS = "plans"


def show_plans(asked: SearchScenario, result: SearchResult) -> None:
    """Shows all plans of a finished search."""
    if result.ranked:
        current = _current_plan(result)
        rows = plan_rows(result, current)
        if current is not None:
            st.caption(escaped(_current_words(current, result)))
        passing = show_filters(rows)
        shown = [rows[number] for number in passing]
        left, right = st.columns([3, 2], gap="medium")
        with left:
            _show_points(rows, shown, _pinned(shown_plans(result, current)))
        with right:
            _show_one(asked, result, current, rows)
        show_table_of_plans(rows, passing)
        selected = shown_plans(result, current)[selected_row(len(rows))]
        _show_importance(selected, result.max_memory_fraction)
        with st.container(horizontal=True):
            download("Plans", f"{result.name} plans", "csv", csv_text(rows))
            download("Search result", f"{result.name} search", "json", lambda: json_text(result.to_json()))
            download_report(result.name, lambda: [json.loads(json_text(result.to_json()))])
    _show_others(result)


def show_plans_so_far(result: SearchResult) -> None:
    """The best plans of a running search; nothing is selectable, since the plans change.

    The best plan is sent first, because browsers draw elements that arrive together at one time. The ranking is a plain
    table, which browsers draw in a tenth of the time of a sortable one.
    """
    rows = plan_rows(result)
    left, right = st.columns([3, 2], gap="medium")
    with right:
        best = result.ranked[0]
        st.markdown(f"**{escaped('1. ' + search_plan_words(best.plan, best.software))}**")
        _show_detail(best, result)
    time.sleep(_HEAD_START_S)
    with left:
        figure = plans_figure(rows, "step_time_s", "device_gib", "schedule", _pinned(shown_plans(result)))
        show_figure(figure, "plans", alt="Plans found so far by step time and device memory", key="plans so far")
    cells = [
        (
            f"{row['rank']}. {escaped(row['plan'])}",
            format_time(row["step_time_s"]),
            f"{row['vs_best']:+.1%}",
            f"{row['device_gib']:,.2f}",
            f"{row['tokens_per_s_per_device']:,.0f}",
        )
        for row in rows[: len(result.ranked)]
    ]
    headers = ["plan", "step time", "vs best", "device GiB", f"{result.unit}/s per device"]
    st.markdown(format_table_markdown(headers, cells))


def _current_plan(result: SearchResult) -> RankedPlan | None:
    """Plan of the session's scenario; None if it has none for this job."""
    try:
        inputs = worker_inputs(state.document())
        options = tuple(result.ranked[0].software)
        return awaited("predicting the current plan", current_plan, *inputs, result.max_memory_fraction, options)
    except SpecError:
        return None


def _current_words(current: RankedPlan, result: SearchResult) -> str:
    """The current plan beside the best one, in a sentence."""
    best = result.ranked[0]
    why = current.explanation
    verdict = f", {why.memory_verdict}" if why is not None and why.memory_verdict else ""
    words = f"The current plan ({search_plan_words(current.plan, current.software)}) takes "
    words += f"{format_time(current.step_time_s)} a step{verdict}"
    if is_same_time(current.step_time_s, best.step_time_s):
        return f"{words}: no plan is faster."
    reason = main_difference_words(current, best)
    compared = f"{faster_or_slower(current.step_time_s, best.step_time_s)} than the best one"
    return f"{words}: {compared}{f', mainly {reason}' if reason else ''}."


def _pinned(plans: Sequence[RankedPlan]) -> list[str]:
    """Plans whose scenarios are pinned, in words."""
    document, scenarios = state.document(), state.pinned()
    pinned = (plan for plan in plans if scenarios and with_plan(document, plan) in scenarios)
    return [search_plan_words(plan.plan, plan.software) for plan in pinned]


def _show_points(rows: list[dict[str, Any]], shown: list[dict[str, Any]], pinned: list[str]) -> None:
    left, middle, right = st.columns(3)
    with left:
        x = remembered_choice("X axis", "x", list(AXES), "step_time_s", format_func=_label)
    with middle:
        y = remembered_choice("Y axis", "y", list(AXES), "device_gib", format_func=_label)
    with right:
        colors = [key for key in COLOURS if key in rows[0]]
        color = remembered_choice("Color", "colour", colors, "schedule", format_func=COLOURS.get)
    figure = plans_figure(shown, x, y, color, pinned, rows[selected_row(len(rows))]["plan"])
    alt = f"Plans of the search by {_label(x)} and {_label(y)}"
    show_figure(figure, "plans", alt=alt, key=_POINTS, on_select=lambda: _take_point(rows))


def _take_point(rows: list[dict[str, Any]]) -> None:
    """Selects the plan of the clicked point."""
    names = [row["plan"] for row in rows]
    if (name := point_value(_POINTS)) in names:
        select_row(names.index(name))


def _label(axis: str) -> str:
    return AXES[axis].label


def _show_one(
    asked: SearchScenario, result: SearchResult, current: RankedPlan | None, rows: list[dict[str, Any]]
) -> None:
    """One selected plan, and its actions."""
    names = [f"{place_words(row)}. {row['plan']}" for row in rows]
    about = "Plan shown in detail; a click on a point or on a row selects it"
    number = remembered_choice("Plan", PLAN, range(len(names)), 0, format_func=names.__getitem__, help=about)
    plan = shown_plans(result, current)[number]
    _show_detail(plan, result)
    _show_actions(asked, plan)


def _show_importance(plan: RankedPlan, max_memory_fraction: float) -> None:
    """Effect of the settings of the selected plan, predicted on request."""
    title = "Importance of settings"
    about = "Step time of the selected plan with one other value of one setting; data parallelism follows the devices"
    if not remembered_switch(title, "importance", help=about):
        return
    text = document_text(without_budget(with_plan(state.document(), plan)))
    effects = awaited("predicting the plan with other settings", setting_effects, text, max_memory_fraction)
    show_figure(importance_figure(effects), "importance of settings", alt="Change of the step time by setting")
    st.caption(
        f"Fits: in {format_percent(max_memory_fraction)} of the device memory, the limit of the search. Not searched: "
        "values that a search tries on request only; a scenario file can set them."
    )


def _show_detail(plan: RankedPlan, result: SearchResult) -> None:
    left, middle, right = st.columns(3)
    left.metric("Step time", format_time(plan.step_time_s), help=meaning("step_time_s"))
    middle.metric("Device memory", format_bytes(plan.device_bytes), help=meaning("device"))
    rate = format_number(plan.tokens_per_s_per_device)
    right.metric(f"{result.unit.capitalize()}/s per device", rate, help="Throughput of the step / devices")
    st.markdown("\n".join(f"- {line}" for line in _why(plan, result)))


def _why(plan: RankedPlan, result: SearchResult) -> list[str]:
    """Explanation of a plan's rank, as sentences."""
    lines = []
    if plan.headroom_bytes is not None:
        lines.append(f"{format_bytes(plan.headroom_bytes)} headroom below the memory limit of plans.")
        if words := headroom_words(result, "memory limit 100 %"):
            lines[-1] += f" {words[:1].upper()}{words[1:]}."
    if plan.alike.num_plans:
        lines.append(escaped(f"And {alike_words(plan.alike)}."))
    why = plan.explanation
    if why is None:
        pending = plan in result.ranked
        words = "Bottleneck pending." if pending else "Pareto-optimal, not ranked; open the plan for its bottleneck."
        return [*lines, words, *_compared(plan, result)]
    low_s, high_s = why.step_time_interval_s
    lines.insert(0, f"90 % interval of the step time: {format_time(low_s)} to {format_time(high_s)}.")
    if why.memory_verdict is not None:
        lines.insert(1, f"Memory: **{why.memory_verdict}**, {memory_interval(why.device_interval_bytes)}.")
    words = ", ".join(f"{name} {format_percent(share)}" for name, share in largest_first(why.shares))
    lines.append(f"**Bottleneck**: {words} of the step of rank {why.busiest_rank}, the rank that waits least.")
    if why.saved:
        saved = ", ".join(f"{name} {format_percent(share, 2)}" for name, share in largest_first(why.saved, RESOURCES))
        lines.append(f"**Sensitivity**: step time saved by 10 % more {saved}.")
    lines += [f"With {escaped(other_software_words(plan, other))}." for other in why.other_software]
    if why.mfu is not None:
        lines.append(f"MFU {format_percent(why.mfu)}.")
    return [*lines, *_compared(plan, result)]


def _compared(plan: RankedPlan, result: SearchResult) -> list[str]:
    """Comparison with the best plan; empty for the best plan."""
    best = result.ranked[0]
    if plan is best:
        return []
    memory = plan.device_bytes - best.device_bytes
    reason = main_difference_words(plan, best)
    return [
        f"Compared with the best plan: {plan.step_time_s / best.step_time_s - 1:+.1%} step time"
        f"{f', mainly {reason}' if reason else ''}; "
        f"{format_bytes(abs(memory))} {'more' if memory >= 0 else 'less'} device memory."
    ]


def _show_actions(asked: SearchScenario, plan: RankedPlan) -> None:
    document = with_plan(state.document(), plan)
    pinned = state.pinned()
    with st.container(horizontal=True):
        if document in pinned:
            st.button("Unpin", icon=":material/keep_off:", key="unpin plan", on_click=state.unpin, args=(document,))
        else:
            about = "Keep the plan in the link of the page, to compare it"
            icon = ":material/keep:"
            st.button("Pin", icon=icon, key="pin plan", on_click=state.pin, args=(document,), help=about)
        if st.button("Open as the plan", icon=":material/open_in_new:", key="open plan"):
            state.set_document(document)
            st.switch_page("views/plan.py")
        text = document_text(document)
        download("Scenario", f"{asked.name} plan", "yaml", text, about="Input of `simplan predict`")
        if pinned:
            label = f"Compare {counted(len(pinned), 'pinned scenario')}"
            st.page_link("views/compare.py", label=label, icon=":material/compare_arrows:")


def _show_others(result: SearchResult) -> None:
    explained = [(f"{rank}", plan) for rank, plan in enumerate(result.ranked, 1) if plan.explanation is not None]
    left, right = st.columns(2, gap="medium")
    with left:
        if explained:
            st.subheader("Step breakdown", help="Step of the rank that waits least")
            show_figure(shares_figure(explained), "steps of the ranked plans", alt="Step breakdown of each plan")
        if result.nearest_misses:
            st.subheader("Near misses", help="Valid plans that exceed a constraint by the least")
            st.markdown(bullets(map(miss_words, result.nearest_misses)))
        if result.changes:
            st.subheader("Feasible changes", help="Changes that make a plan feasible; each was tried")
            plans = [(change.words, search_plan_words(change.plan, change.software)) for change in result.changes]
            st.markdown(bullets(f"{words}: {plan}" for words, plan in plans))
    with right:
        st.subheader(f"Outcomes of {result.space.total:,} plans")
        if result.space.some_blocks:
            st.caption(escaped(besides(result.space)))
        if result.unsearched:
            st.caption(escaped(unsearched_words(result)))
        show_figure(space_figure(result.space), "rejected plans", alt="Plans by the reason for their rejection")
        with st.expander("Rejection reasons"):
            show_table(space_table(result.space))
