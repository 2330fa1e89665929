"""Plans of a search: scatter plot, ranking, one plan in detail, and the excluded plans."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import streamlit as st

from app import pinned_plans, state
from app.components.elements import csv_text, download, show_figure, show_table
from app.definitions import meaning
from app.fields import remembered_choice
from app.figures.plans import (
    AXES,
    COLOURS,
    plan_rows,
    plans_figure,
    shares_figure,
    space_figure,
    space_table,
)
from app.page import bullets, escaped
from simplan.io import json_text
from simplan.report.search import (
    RESOURCES,
    alike_words,
    besides,
    headroom_words,
    largest_first,
    miss_words,
    search_plan_words,
)
from simplan.report.table import format_table_markdown
from simplan.report.text import memory_interval
from simplan.scenario import SearchScenario
from simplan.search import RankedPlan, SearchResult
from simplan.units import format_bytes, format_number, format_number_evenly, format_percent, format_time

_HEAD_START_S = 0.1

_FORMS = {
    "num_devices": "{:,.0f}",
    "step_time_s": format_number_evenly,
    "vs_best": "{:+.1%}",
    "device_gib": "{:,.2f}",
    "memory_verdict": str,
    "headroom_gib": "{:,.2f}",
    "tokens_per_s_per_device": "{:,.0f}",
    "cost_dollars": "{:,.0f}",
    "mfu": "{:.1%}",
    "limit_share": "{:.0%}",
    "help_share": "{:.1%}",
    "limit": str,
    "help": str,
    "alike": "{:,.0f}",
    "alike_differ_in": str,
}


def show_plans(asked: SearchScenario, result: SearchResult) -> None:
    """Shows all plans of a finished search."""
    if result.ranked:
        rows = plan_rows(result)
        left, right = st.columns([3, 2], gap="medium")
        with left:
            _show_points(rows)
        with right:
            _show_one(asked, result)
        _show_ranked(rows)
        with st.container(horizontal=True):
            download("Plans", f"{result.name} plans", "csv", csv_text(rows))
            download("Search result", f"{result.name} search", "json", lambda: json_text(result.to_json()))
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
        st.markdown(f"**{escaped('1. ' + search_plan_words(best.plan))}**")
        _show_detail(best, result)
    time.sleep(_HEAD_START_S)
    with left:
        _show_figure(rows, "step_time_s", "device_gib", "schedule", key="plans so far")
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


def _show_points(rows: list[dict[str, Any]]) -> None:
    one, two, three = st.columns(3)
    with one:
        x = remembered_choice("X axis", "x", list(AXES), "step_time_s", format_func=_label)
    with two:
        y = remembered_choice("Y axis", "y", list(AXES), "device_gib", format_func=_label)
    with three:
        colour = remembered_choice("Color", "colour", list(COLOURS), "schedule", format_func=COLOURS.get)
    _show_figure(rows, x, y, colour, key="plans")


def _label(axis: str) -> str:
    return AXES[axis].label


def _show_figure(rows: list[dict[str, Any]], x: str, y: str, colour: str, *, key: str) -> None:
    figure = plans_figure(rows, x, y, colour, pinned_plans.pinned())
    show_figure(figure, "plans", alt=f"Plans of the search by {_label(x)} and {_label(y)}", key=key)


def _show_one(asked: SearchScenario, result: SearchResult) -> None:
    """One selected plan, and its actions."""
    names = [f"{rank}. {search_plan_words(plan.plan)}" for rank, plan in enumerate(result.ranked, 1)]
    number = remembered_choice(
        "Plan", "plan", range(len(names)), 0, format_func=names.__getitem__, help="Plan shown in detail"
    )
    plan = result.ranked[number]
    _show_detail(plan, result)
    _show_actions(asked, plan)


def _show_detail(plan: RankedPlan, result: SearchResult) -> None:
    one, two, three = st.columns(3)
    one.metric("Step time", format_time(plan.step_time_s), help=meaning("step_time_s"))
    two.metric("Device memory", format_bytes(plan.device_bytes), help=meaning("device"))
    rate = format_number(plan.tokens_per_s_per_device)
    three.metric(f"{result.unit.capitalize()}/s per device", rate, help="Throughput of the step / devices")
    st.markdown("\n".join(f"- {line}" for line in _why(plan, result)))


def _why(plan: RankedPlan, result: SearchResult) -> list[str]:
    """Explanation of a plan's rank, as sentences."""
    lines = []
    if plan.headroom_bytes is not None:
        limit = f"{format_bytes(plan.headroom_bytes)} headroom below the memory limit of plans."
        lines.append(f"{limit} {words[:1].upper()}{words[1:]}." if (words := headroom_words(result)) else limit)
    if plan.alike.num_plans:
        lines.append(escaped(f"And {alike_words(plan.alike)}."))
    why = plan.explanation
    if why is None:
        return [*lines, "Bottleneck pending."]
    low_s, high_s = why.step_time_interval_s
    lines.insert(0, f"90 % interval of the step time: {format_time(low_s)} to {format_time(high_s)}.")
    if why.memory_verdict is not None:
        lines.insert(1, f"Memory: **{why.memory_verdict}**, {memory_interval(why.device_interval_bytes)}.")
    words = ", ".join(f"{name} {format_percent(share)}" for name, share in largest_first(why.shares))
    lines.append(f"**Bottleneck**: {words} of the step of rank {why.busiest_rank}, the rank that waits least.")
    if why.saved:
        saved = ", ".join(f"{name} {format_percent(share, 2)}" for name, share in largest_first(why.saved, RESOURCES))
        lines.append(f"**Sensitivity**: step time saved by 10 % more {saved}.")
    if why.mfu is not None:
        lines.append(f"MFU {format_percent(why.mfu)}.")
    best = result.ranked[0]
    if plan is not best:
        memory = plan.device_bytes - best.device_bytes
        lines.append(
            f"Compared with the best plan: {plan.step_time_s / best.step_time_s - 1:+.1%} step time, "
            f"{format_bytes(abs(memory))} {'more' if memory >= 0 else 'less'} device memory."
        )
    return lines


def _show_actions(asked: SearchScenario, plan: RankedPlan) -> None:
    document = pinned_plans.with_plan(state.document(), plan.plan)
    key = search_plan_words(plan.plan)
    with st.container(horizontal=True):
        if key in pinned_plans.pinned():
            if st.button("Unpin", icon=":material/keep_off:", key="unpin plan"):
                pinned_plans.unpin(key)
                st.rerun()
        elif st.button("Pin", icon=":material/keep:", key="pin plan", help="Keep the plan in the link of the page"):
            pinned_plans.pin(plan.plan)
            st.rerun()
        if st.button("Open as the plan", icon=":material/open_in_new:", key="open plan"):
            state.set_document(document)
            st.switch_page("views/plan.py")
        text = state.document_text(document)
        download("Scenario", f"{asked.name} plan", "yaml", text, about="Input of `simplan predict`")


def _show_ranked(rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    shown = ["rank", "plan", "step_time_s", "vs_best", "device_gib", "memory_verdict", "headroom_gib"]
    shown += ["tokens_per_s_per_device", "mfu", "limit", "limit_share", "help", "help_share"]
    if frame["alike"].notna().any():
        shown += ["alike", "alike_differ_in"]
    if frame["num_devices"].nunique() > 1:
        shown.insert(2, "num_devices")
    if frame["cost_dollars"].notna().any():
        shown.insert(4, "cost_dollars")
    frame = frame[shown]
    frame["rank"] = ["front" if pd.isna(rank) else f"{rank:.0f}" for rank in frame["rank"]]
    column = st.column_config
    st.dataframe(
        frame.style.format({name: form for name, form in _FORMS.items() if name in shown}, na_rep=""),
        hide_index=True,
        placeholder="",  # pending, or not computed for plans only on the Pareto front
        height=min(36 * (len(frame) + 1), 420),
        column_config={
            "rank": column.TextColumn("#", width=50, help="front: not ranked, but on the Pareto front"),
            "plan": column.TextColumn("plan", width="large"),
            "num_devices": column.NumberColumn("devices"),
            "step_time_s": column.NumberColumn("step time, s", help=meaning("step_time_s")),
            "vs_best": column.NumberColumn("vs best", help="Step time / step time of the best plan - 1"),
            "device_gib": column.NumberColumn("device GiB", help=meaning("device")),
            "memory_verdict": column.TextColumn("memory verdict", help=meaning("memory verdict")),
            "headroom_gib": column.NumberColumn("headroom GiB", help="Below the memory limit of plans"),
            "tokens_per_s_per_device": column.NumberColumn("throughput", help="Tokens or images per second and device"),
            "cost_dollars": column.NumberColumn("dollars"),
            "mfu": column.NumberColumn("MFU", help=meaning("mfu")),
            "limit": column.TextColumn("bottleneck", help="Largest part of the step of the rank that waits least"),
            "limit_share": column.NumberColumn("bottleneck share", help="Fraction of the step"),
            "help": column.TextColumn("top sensitivity", help="Resource of which 10 % more saves most step time"),
            "help_share": column.NumberColumn("saving", help="Fraction of the step saved by 10 % more"),
            "alike": column.NumberColumn("equivalent", help="Plans with the same degrees and step time within 0.1 %"),
            "alike_differ_in": column.TextColumn("differ in", help="Options of the equivalent plans"),
        },
    )


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
            st.markdown(bullets(f"{change.words}: {search_plan_words(change.plan)}" for change in result.changes))
    with right:
        st.subheader(f"Outcomes of {result.space.total:,} plans")
        if result.space.some_blocks:
            st.caption(escaped(besides(result.space)))
        show_figure(space_figure(result.space), "rejected plans", alt="Plans by the rule that rejected them")
        with st.expander("Reasons"):
            show_table(space_table(result.space))
