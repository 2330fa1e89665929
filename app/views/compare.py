"""Compare: up to six scenarios next to each other, and the reasons of their differences."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import streamlit as st

from app import result_cache, state
from app.budget import budget_of
from app.components.elements import csv_text, download, download_report, show_figure, show_table
from app.components.scenario_form import show_scenario_form
from app.fields import remembered_choice
from app.figures.compared import (
    ComparedPlan,
    compared_plan,
    difference_figure,
    difference_rows,
    difference_words,
    memory_stacks,
    plan_numbers,
    step_stacks,
)
from app.page import escaped, run_page
from app.predictions import Headline, explained
from app.result_cache import awaited, begun
from simplan.errors import SpecError
from simplan.explain import Difference, difference
from simplan.io import json_text
from simplan.model.step_work import work_differences, work_unit
from simplan.report.table import format_table_markdown
from simplan.report.text import device_memory_words, plan_words
from simplan.units import counted, format_bytes, format_count, format_number, format_percent, format_time

Document = dict[str, Any]

_CURRENT = "A"


def show() -> None:
    """The current scenario next to pinned scenarios."""
    show_scenario_form(budget=True)
    current = result_cache.scenario(state.document())
    documents = dict(zip(string.ascii_uppercase, [state.document(), *state.pinned()], strict=False))
    _show_chosen(documents)
    with ExitStack() as side_by_side:
        for letter, document in documents.items():
            with suppress(SpecError):  # it is shown below
                side_by_side.enter_context(begun(compared_plan, letter, *result_cache.worker_inputs(document)))
        plans = {letter: _predicted(letter, document) for letter, document in documents.items()}
    if len(plans) < 2:
        st.info(
            "Pin the current scenario and change it in the sidebar, or pin plans on the page Search. 2 to "
            f"{state.MAX_PINNED + 1} scenarios are compared."
        )
    _show_table(documents, plans, *budget_of(current))
    left, right = st.columns(2, gap="medium")
    for column, name, draw in ((left, "step time", step_stacks), (right, "peak memory", memory_stacks)):
        with column:
            alt = f"{name.capitalize()} of every scenario by part"
            show_figure(draw([*plans.values()], "scenario"), f"{name} of scenarios", alt=alt)
    st.caption(
        "Step of the rank with the longest compute time, and memory of the peak-memory rank, both with 90 % "
        "intervals; the memory of the device is a dashed line."
        + "".join(
            f" The bar of {letter} has {device_memory_words(plan.headline.memory)}."
            for letter, plan in plans.items()
            if plan.headline is not None and plan.headline.memory.short_bytes
        )
    )
    _show_settings(documents)
    predicted = [letter for letter, plan in plans.items() if not plan.refused]
    if len(predicted) > 1:
        _show_differences(documents, predicted)


def _show_chosen(documents: Mapping[str, Document]) -> None:
    """The scenarios by letter, with buttons to add and remove some."""
    for letter, document in documents.items():
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{letter}** {escaped(_description(document))}", width="content")
            if letter != _CURRENT:
                icon, key = ":material/keep_off:", f"unpin scenario {letter}"
                st.button("Unpin", icon=icon, key=key, type="tertiary", on_click=state.unpin, args=(document,))
    st.button(
        "Pin the current scenario",
        icon=":material/keep:",
        key="pin scenario",
        on_click=state.pin,
        args=(state.document(),),
        help="Keep it, and change the current scenario in the sidebar, or read another one with Edit as YAML",
    )


def _description(document: Document) -> str:
    try:
        scenario = result_cache.scenario(document)
    except SpecError:
        return "a scenario with an error"
    job = scenario.job
    devices = job.cluster.devices_in_words
    return f"{job.model.name} on {devices}, {job.software.id}: {plan_words(job.plan)}"


def _predicted(letter: str, document: Document) -> ComparedPlan:
    try:
        inputs = result_cache.worker_inputs(document)
    except SpecError as error:
        return ComparedPlan(letter, error.sentences)
    return awaited(f"predicting scenario {letter}", compared_plan, letter, *inputs)


def _show_table(
    documents: Mapping[str, Document], plans: Mapping[str, ComparedPlan], budget: float, price: float | None
) -> None:
    rows = {letter: _cells(plan.headline, plans[_CURRENT].headline, budget, price) for letter, plan in plans.items()}
    names = dict.fromkeys(name for row in rows.values() for name in row)
    filled = [name for name in names if any(row.get(name) for row in rows.values())] or ["step time"]
    cells = [[name, *(escaped(row.get(name, "")) for row in rows.values())] for name in filled]
    st.markdown(format_table_markdown(["", *rows], cells))
    if words := _work_words({letter: plan.headline for letter, plan in plans.items() if plan.headline is not None}):
        st.markdown(words)
    for letter, plan in plans.items():
        if plan.refused:
            st.warning(f"**{letter}**: {escaped(plan.refused)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        download("Comparison", "comparison of scenarios", "csv", csv_text(plan_numbers([*plans.values()], "scenario")))
        for letter, document in documents.items():
            if letter != _CURRENT:
                query = state.encode(document, {})
                st.page_link("views/plan.py", label=f"Open {letter}", icon=":material/open_in_new:", query_params=query)


def _cells(head: Headline | None, first: Headline | None, budget: float, price: float | None) -> dict[str, str]:
    """Numbers of a scenario as text, also relative to the first; empty for a scenario without a prediction."""
    if head is None:
        return {}
    images, devices = head.job.model.sample != "sequence", head.job.cluster.num_devices
    rate, unit = (head.samples_per_s, "images/s") if images else (head.tokens_per_s, "tokens/s")
    training = head.training(budget, price)
    change = "" if first is None or first is head else f"{_times_as_long(head, first) - 1:+.1%}"
    return {
        "step time": format_time(head.step_time_s),
        "90 % interval": " to ".join(map(format_time, head.step_time_interval_s or ())),
        f"vs {_CURRENT}": change,
        "verdict": _fit(head),
        "peak memory": format_bytes(head.memory.needed_bytes),
        "90 % interval of memory": " to ".join(map(format_bytes, head.memory.device_interval_bytes)),
        "MFU": "unknown" if head.mfu is None else format_percent(head.mfu),
        "throughput": f"{format_number(rate)} {unit}",
        "per device": f"{format_number(rate / devices)} {unit}",
        "devices": f"{devices:,}",
        "days of training": f"{training.days:,.1f}",
        "cost, in the price's currency": "no price" if training.cost is None else format_count(training.cost),
    }


def _times_as_long(head: Headline, first: Headline) -> float:
    """Step time relative to that of the first scenario; of steps of unequal work, the time of a common unit."""
    amount, first_amount = work_unit([head.job.step_work, first.job.step_work]).amounts
    return head.step_time_s / first.step_time_s * first_amount / amount


def _work_words(heads: Mapping[str, Headline]) -> str:
    """Sentences on what differs between scenarios besides their plans, and what it changes; empty if nothing does."""
    works = [head.job.step_work for head in heads.values()]
    unit = work_unit(works).name
    per_unit = () if unit == "step" else (f"*vs {_CURRENT}* compares times per {unit}.",)
    return " ".join([*map(escaped, work_differences([*heads], works)), *per_unit])


def _fit(head: Headline) -> str:
    memory, capacity = head.memory, head.memory.capacity_bytes
    if capacity is None:
        return "unknown"
    if memory.fits and memory.short_bytes:
        return f"{head.memory_verdict}: {format_bytes(memory.short_bytes)} short of the allocator's reserve"
    headroom = format_bytes(abs(capacity - memory.needed_bytes))
    return f"{head.memory_verdict}: {headroom} {'headroom' if memory.fits else 'over'}"


def _show_settings(documents: Mapping[str, Document]) -> None:
    """Settings that are not equal in all scenarios."""
    settings = {letter: _flat(document) for letter, document in documents.items()}
    keys = sorted({key for values in settings.values() for key in values})
    differ = [key for key in keys if len({values.get(key, "") for values in settings.values()}) > 1]
    if differ:
        with st.expander(counted(len(differ), "different setting")):
            cells = [[escaped(key), *(escaped(values.get(key, "")) for values in settings.values())] for key in differ]
            st.markdown(format_table_markdown(["setting", *settings], cells))


def _flat(document: Document) -> dict[str, str]:
    """Settings by their path of keys, without the name."""
    return {key: value for key, value in state.encode(document, {}).items() if key not in ("name", "search", "expect")}


def _show_differences(documents: Mapping[str, Document], letters: Sequence[str]) -> None:
    """Reasons of the differences from the first scenario, and the terms of any two."""
    st.subheader("Reasons", help="Terms of both predictions, as `simplan explain` prints them")
    explanations = {
        letter: awaited(f"explaining scenario {letter}", explained, *result_cache.worker_inputs(documents[letter]))
        for letter in letters
    }
    first, *others = letters
    lines = []
    for letter in others:
        differing = difference(explanations[first], explanations[letter])
        reason = " ".join(differing.reasons(first, letter))
        lines.append(f"- {_difference_sentence(differing, first, letter)} {escaped(reason)}")
    st.markdown("\n".join(lines))
    second = others[0]
    if len(others) > 1:
        left, right = st.columns(2)
        with left:
            first = remembered_choice("Terms of", "terms_first", letters, first)
        with right:
            others = [letter for letter in letters if letter != first]
            second = remembered_choice("and", "terms_of", others, others[0])
    _show_difference(difference(explanations[first], explanations[second]), (first, second))


def _difference_sentence(differing: Difference, first: str, second: str) -> str:
    """Difference of step time and memory in Markdown, with the groups that make it."""
    before, after = differing.first, differing.second
    more_bytes = after.device_bytes - before.device_bytes
    longer, larger = ("longer" if differing.step_time_s >= 0 else "shorter"), ("more" if more_bytes >= 0 else "less")
    time, memory = (
        escaped(", ".join(difference_words(rows)) or "nothing differs") for rows in (differing.time, differing.memory)
    )
    return (
        f"Each step of {second} is **{format_time(abs(differing.step_time_s))} {longer}** than that of {first} "
        f"({differing.step_time_s / before.step_time_s:+.1%}): {time}. "
        f"{second} uses **{format_bytes(abs(more_bytes))} {larger}** memory on its peak-memory rank: {memory}."
    )


def _show_difference(differing: Difference, names: tuple[str, str]) -> None:
    """Figures and a table of the terms of both predictions."""
    before, after = differing.first, differing.second
    panels = (
        ("Time", f"{format_time(before.step_time_s)} and {format_time(after.step_time_s)}", differing.time),
        ("Memory", f"{device_memory_words(before)} and {device_memory_words(after)}", differing.memory),
    )
    for column, (name, values, terms) in zip(st.columns(2, gap="medium"), panels, strict=True):
        with column:
            st.caption(f"{name}: {values}")
            title = f"{name.lower()} of two plans"
            show_figure(difference_figure(terms, names), title, alt=f"{name} of both plans by part", key=title)
    rows = difference_rows([*differing.time, *differing.memory])
    with st.expander(f"All {len(rows)} terms with their formulas"):
        show_table(rows)
    with st.container(horizontal=True):
        download("Terms", "difference of two plans", "csv", csv_text(rows))
        download_report("difference of two plans", lambda: [json.loads(json_text(differing.to_json()))])


if __name__ == "__main__":
    run_page(show)
