"""Plans of a search: scatter plot, ranking, one plan in detail, and the reasons for excluding the others."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import streamlit as st

from app import basket, state
from app.components.downloads import csv_text, download, show_figure
from app.components.problems import escaped
from app.fields import remembered_choice
from app.figures.plans import (
    AXES,
    COLOURS,
    RESOURCES,
    plan_rows,
    plans_figure,
    shares_figure,
    space_figure,
    space_rows,
)
from app.words import meaning
from simplan.io import json_text
from simplan.report.search import alike_words, besides, search_plan_words
from simplan.scenario import SearchScenario
from simplan.search import NearestMiss, RankedPlan, SearchResult
from simplan.units import format_bytes, format_number, format_number_evenly, format_percent, format_time

__all__ = ["show_plans", "show_plans_so_far"]

_HEAD_START_S = 0.1

_FORMS = {
    "num_devices": "{:,.0f}",
    "step_time_s": format_number_evenly,
    "to_the_best": "{:+.1%}",
    "device_gib": "{:,.2f}",
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
    """All plans of a finished search.

    Args:
        asked: Scenario of the search.
        result: Result of the search.
    """
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
    lines = ["| # | plan | step | to the best | device GiB | per s and device |", "|---:|:---|---:|---:|---:|---:|"]
    for row in rows[: len(result.ranked)]:
        cells = (row["rank"], escaped(row["plan"]), format_time(row["step_time_s"]), f"{row['to_the_best']:+.1%}")
        more = (f"{row['device_gib']:,.2f}", f"{row['tokens_per_s_per_device']:,.0f}")
        lines.append(f"| {' | '.join(str(cell) for cell in (*cells, *more))} |")
    st.markdown("\n".join(lines))


def _show_points(rows: list[dict[str, Any]]) -> None:
    one, two, three = st.columns(3)
    with one:
        x = remembered_choice("Across", "x", list(AXES), "step_time_s", format_func=_label)
    with two:
        y = remembered_choice("Up", "y", list(AXES), "device_gib", format_func=_label)
    with three:
        colour = remembered_choice("Colour", "colour", list(COLOURS), "schedule", format_func=COLOURS.get)
    _show_figure(rows, x, y, colour, key="plans")


def _show_figure(rows: list[dict[str, Any]], x: str, y: str, colour: str, *, key: str) -> None:
    figure = plans_figure(rows, x, y, colour, basket.pinned())
    show_figure(figure, "plans", alt=f"Plans of the search by {_label(x)} and {_label(y)}", key=key)


def _label(axis: str) -> str:
    return AXES[axis].label


def _show_one(asked: SearchScenario, result: SearchResult) -> None:
    """One selected plan, and its actions."""
    names = [f"{rank}. {search_plan_words(plan.plan)}" for rank, plan in enumerate(result.ranked, 1)]
    number = remembered_choice(
        "Plan", "plan", range(len(names)), 0, format_func=names.__getitem__, help="One in detail"
    )
    plan = result.ranked[number]
    _show_detail(plan, result)
    _show_actions(asked, plan)


def _show_detail(plan: RankedPlan, result: SearchResult) -> None:
    one, two, three = st.columns(3)
    one.metric("Step time", format_time(plan.step_time_s), help=meaning("step_time_s"))
    two.metric("Device memory", format_bytes(plan.device_bytes), help=meaning("device"))
    unit = "images" if result.unit == "images" else "tokens"
    rate = format_number(plan.tokens_per_s_per_device)
    three.metric(f"{unit.capitalize()}/s per device", rate, help=f"{unit} of a step / step time / devices")
    st.markdown("\n".join(f"- {line}" for line in _why(plan, result)))


def _why(plan: RankedPlan, result: SearchResult) -> list[str]:
    """Explanation of a plan's rank, as sentences."""
    lines = []
    if plan.headroom_bytes is not None:
        lines.append(f"{format_bytes(plan.headroom_bytes)} headroom below the memory limit of plans.")
    if plan.alike.num_plans:
        lines.append(escaped(f"And {alike_words(plan.alike)}."))
    why = plan.explanation
    if why is None:
        return [*lines, "What limits it is being worked out."]
    low_s, high_s = why.step_time_interval_s
    lines.insert(0, f"In 9 of 10 cases a step takes {format_time(low_s)} to {format_time(high_s)}.")
    parts = sorted(((share, name) for name, share in why.shares.items() if share >= 0.0005), reverse=True)
    words = ", ".join(f"{name.replace('_', ' ')} {format_percent(share)}" for share, name in parts)
    lines.append(f"**Limited by** {words} of the step of rank {why.busiest_rank}, which waits least.")
    if why.saved:
        saved = sorted(((share, name) for name, share in why.saved.items()), reverse=True)
        helps = ", ".join(f"{RESOURCES[name]} {format_percent(share, 2)}" for share, name in saved)
        lines.append(f"**10 % more would save**: {helps} of the step.")
    if why.mfu is not None:
        lines.append(f"MFU {format_percent(why.mfu)}.")
    best = result.ranked[0]
    if plan is not best:
        slower = plan.step_time_s / best.step_time_s - 1
        memory = plan.device_bytes - best.device_bytes
        more = "more" if memory >= 0 else "less"
        lines.append(
            f"Against the best: {slower:+.1%} step time, {format_bytes(abs(memory))} {more} memory of the worst device."
        )
    return lines


def _show_actions(asked: SearchScenario, plan: RankedPlan) -> None:
    document = basket.with_plan(state.document(), plan.plan)
    is_pinned = basket.key_of(plan.plan) in basket.pinned()
    with st.container(horizontal=True):
        if is_pinned:
            if st.button("Unpin", icon=":material/keep_off:", key="unpin plan"):
                basket.unpin(basket.key_of(plan.plan))
                st.rerun()
        elif st.button("Pin", icon=":material/keep:", key="pin plan", help="Into the basket, which links bring along"):
            basket.pin(plan.plan)
            st.rerun()
        if st.button("Open as the plan", icon=":material/open_in_new:", key="open plan"):
            state.set_document(document)
            st.switch_page("views/plan.py")
        text = state.document_text(document)
        download(
            "Scenario", f"{asked.name} plan", "yaml", text, about="`simplan predict` gives the same numbers for it"
        )


def _show_ranked(rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    shown = ["rank", "plan", "step_time_s", "to_the_best", "device_gib", "headroom_gib", "tokens_per_s_per_device"]
    shown += ["mfu", "limit", "limit_share", "help", "help_share"]
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
        placeholder="",  # not computed yet, or never for plans only on the Pareto front
        height=min(36 * (len(frame) + 1), 420),
        column_config={
            "rank": column.TextColumn("#", width=50, help="front: nothing is better in both objectives"),
            "plan": column.TextColumn("plan", width="large"),
            "num_devices": column.NumberColumn("devices"),
            "step_time_s": column.NumberColumn("step, s", help=meaning("step_time_s")),
            "to_the_best": column.NumberColumn("to the best", help="Step time over that of the best plan, less one"),
            "device_gib": column.NumberColumn("device GiB", help=meaning("device")),
            "headroom_gib": column.NumberColumn("headroom GiB", help="Below the memory that plans may use of a device"),
            "tokens_per_s_per_device": column.NumberColumn(
                "per s and device", help="Tokens, or images for models of them"
            ),
            "cost_dollars": column.NumberColumn("dollars"),
            "mfu": column.NumberColumn("MFU", help=meaning("mfu")),
            "limit": column.TextColumn("limited by", help="The largest part of the step of the rank that waits least"),
            "limit_share": column.NumberColumn("of its step", help="How large that part is"),
            "help": column.TextColumn("helps most", help="Of which 10 % more would shorten the step most"),
            "help_share": column.NumberColumn("10 % more saves", help="Of the step, with 10 % more of that"),
            "alike": column.NumberColumn("alike", help="Plans with as many ranks on every axis that are as fast"),
            "alike_differ_in": column.TextColumn("which", help="What these have and the plan, the simplest, has not"),
        },
    )


def _show_others(result: SearchResult) -> None:
    explained = [(f"{rank}", plan) for rank, plan in enumerate(result.ranked, 1) if plan.explanation is not None]
    left, right = st.columns(2, gap="medium")
    with left:
        if explained:
            st.subheader("Where the steps go", help="Of the rank that waits least: the others wait for it")
            show_figure(shares_figure(explained), "steps of the ranked plans", alt="Parts of the step of each plan")
        if result.nearest_misses:
            st.subheader("Nearest misses", help="Plans that break no rule but a limit")
            st.markdown("\n".join(f"- {escaped(_miss(miss))}" for miss in result.nearest_misses))
        if result.changes:
            st.subheader("What would make a plan", help="Each was tried")
            words = (f"{change.words}: {search_plan_words(change.plan)}" for change in result.changes)
            st.markdown("\n".join(f"- {escaped(text)}" for text in words))
    with right:
        st.subheader(f"Where the {result.space.total:,} plans went")
        if result.space.some_blocks:
            st.caption(escaped(besides(result.space)))
        show_figure(space_figure(result.space), "rejected plans", alt="Plans by the rule that rejected them")
        with st.expander("The rules in words"):
            st.dataframe(pd.DataFrame(space_rows(result.space)), hide_index=True)


def _miss(miss: NearestMiss) -> str:
    words = search_plan_words(miss.plan)
    if miss.lacking_s is not None and miss.step_time_s is not None:
        return f"{format_time(miss.lacking_s)} too long, at {format_time(miss.step_time_s)}: {words}"
    return f"{format_bytes(miss.lacking_bytes or 0)} too much, {format_bytes(miss.device_bytes)} in all: {words}"
