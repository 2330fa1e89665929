"""Compare: two to four scenarios next to each other, and the reasons of their differences."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import pinned_plans, result_cache, state, uploads
from app.awaited import awaited
from app.components.comparison import difference_sentence, explained, show_difference
from app.components.elements import csv_text, download, show_figure
from app.components.scenario_form import show_scenario_form
from app.components.verdict import budget_of, show_budget
from app.fields import remembered_choice
from app.figures.compared import memory_stacks, step_stacks
from app.page import escaped, run_page, show_problems
from app.results.compared import ComparedPlan, compared_plan
from app.results.plan import training_of
from simplan.errors import SpecError
from simplan.explain import difference
from simplan.report.explanation import main_reason
from simplan.report.table import format_table_markdown
from simplan.report.text import plan_words
from simplan.units import GIB, counted, format_bytes, format_count, format_number, format_percent, format_time

Document = dict[str, Any]

_MAX_PINNED = 3  # with the current one, four are compared
_PINNED = "scenarios"
_LEFT_OUT = ("search", "expect")


def show() -> None:
    """The current scenario next to pinned plans, pinned scenarios and uploaded scenarios."""
    show_scenario_form()
    current = result_cache.scenario(state.document())
    images = current.job.model.sample == "image"
    show_budget(images=images)
    documents = {letter: document for letter, (_, document) in zip(string.ascii_uppercase, _chosen(), strict=False)}
    _show_chosen()
    plans = {letter: _predicted(letter, document) for letter, document in documents.items()}
    if len(plans) < 2:
        st.info(
            "Pin the current scenario and change it in the sidebar, pin plans on the page Search, or upload scenario "
            "files. Two to four scenarios are compared."
        )
    _show_table(documents, plans, *budget_of(current), images=images)
    left, right = st.columns(2, gap="medium")
    for column, name, draw in ((left, "step time", step_stacks), (right, "peak memory", memory_stacks)):
        with column:
            alt = f"{name.capitalize()} of every scenario by part"
            show_figure(draw([*plans.values()], "scenario"), f"{name} of scenarios", alt=alt)
    st.caption(
        "Step of the rank with the longest compute time, and memory of the peak-memory rank, both with 90 % "
        "intervals; the memory of the device is a dashed line."
    )
    _show_settings(documents)
    others = [letter for letter, plan in plans.items() if letter != "A" and not plan.refused]
    if others and not plans["A"].refused:
        _show_differences(documents, others)


def _chosen() -> list[tuple[str, Document]]:
    """Origin and data of the scenarios: the current one, pinned scenarios, pinned plans; four at most."""
    now = state.document()
    plans = [(words, pinned_plans.with_plan(now, plan)) for words, plan in pinned_plans.pinned().items()]
    scenarios = [("pinned scenario", data) for data in _pinned_scenarios()]
    return [("current scenario", now), *scenarios, *plans][: _MAX_PINNED + 1]


def _show_chosen() -> None:
    """The scenarios by letter, with buttons to add and remove some."""
    num_scenarios = len(_pinned_scenarios())
    for place, (letter, (origin, document)) in enumerate(zip(string.ascii_uppercase, _chosen(), strict=False)):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{letter}** {escaped(_description(document))}", width="content")
            if 0 < place <= num_scenarios:
                st.button(
                    "Unpin",
                    icon=":material/keep_off:",
                    key=f"unpin scenario {place}",
                    type="tertiary",
                    on_click=_unpin_scenario,
                    args=(place - 1,),
                )
            elif place:
                st.button(
                    "Unpin",
                    icon=":material/keep_off:",
                    key=f"unpin scenario {place}",
                    type="tertiary",
                    on_click=pinned_plans.unpin,
                    args=(origin,),
                )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Pin the current scenario",
            icon=":material/keep:",
            key="pin scenario",
            on_click=_pin_scenario,
            args=(state.document(),),
            help="Keep it, and change the current scenario in the sidebar",
        )
        with st.popover("Upload scenarios", icon=":material/upload:"):
            _upload()


def _description(document: Document) -> str:
    try:
        scenario = result_cache.scenario(document)
    except SpecError:
        return "a scenario with an error"
    job = scenario.job
    devices = job.cluster.devices_in_words
    return f"{job.model.name} on {devices}, {job.software.id}: {plan_words(job.plan)}"


def _upload() -> None:
    uploaded = st.session_state.get("num uploaded scenarios", 0)
    files = st.file_uploader(
        "Scenario files, launch scripts or configurations of frameworks",
        type=uploads.CONFIG_SUFFIXES,
        accept_multiple_files=True,
        key=f"scenario files {uploaded}",
    )
    for file in files or ():
        try:
            text, _ = uploads.as_scenario(file.name, file.getvalue(), state.document())
            data = uploads.checked_scenario_data(file.name, text.encode())
            result_cache.scenario({key: value for key, value in data.items() if key not in ("search", "expect")})
        except SpecError as error:
            show_problems(error)
            return
        _pin_scenario(data)
    if files:
        st.session_state["num uploaded scenarios"] = uploaded + 1  # an empty uploader: an unpinned file stays away
        st.rerun()


def _predicted(letter: str, document: Document) -> ComparedPlan:
    try:
        inputs = result_cache.worker_inputs(document)
    except SpecError as error:
        return ComparedPlan(letter, "; ".join(problem.sentence() for problem in error.problems))
    return awaited(f"predicting scenario {letter}", compared_plan, letter, *inputs)


def _show_table(
    documents: Mapping[str, Document],
    plans: Mapping[str, ComparedPlan],
    budget: float,
    price: float | None,
    *,
    images: bool,
) -> None:
    rows = {letter: _cells(plan, plans["A"], budget, price, images=images) for letter, plan in plans.items()}
    names = list(next(iter(rows.values())))
    cells = [[name, *(escaped(row.get(name, "")) for row in rows.values())] for name in names]
    st.markdown(format_table_markdown(["", *rows], cells))
    for letter, plan in plans.items():
        if plan.refused:
            st.warning(f"**{letter}**: {escaped(plan.refused)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        table = [{"scenario": letter, **_numbers(plan)} for letter, plan in plans.items() if not plan.refused]
        download("Comparison", "comparison of scenarios", "csv", csv_text(table))
        for letter, document in documents.items():
            if letter != "A":
                query = state.encode(document, {})
                st.page_link("views/plan.py", label=f"Open {letter}", icon=":material/open_in_new:", query_params=query)


def _cells(
    plan: ComparedPlan, first: ComparedPlan, budget: float, price: float | None, *, images: bool
) -> dict[str, str]:
    """Numbers of a scenario as text."""
    head, start = plan.headline, first.headline
    names = [
        "step time",
        "90 % interval",
        "vs A",
        "verdict",
        "peak memory",
        "90 % interval of memory",
        "MFU",
        "throughput",
        "per device",
        "devices",
        "days of training",
        "cost",
    ]
    if head is None:
        return dict.fromkeys(names, "")
    rate, unit = (head.samples_per_s, "images/s") if images else (head.tokens_per_s, "tokens/s")
    training = training_of(head, plan.num_devices, budget, price)
    low_s, high_s = head.step_time_interval_s or (head.step_time_s, head.step_time_s)
    values = [
        format_time(head.step_time_s),
        f"{format_time(low_s)} to {format_time(high_s)}",
        "" if start is None or plan is first else f"{head.step_time_s / start.step_time_s - 1:+.1%}",
        _fit(plan),
        format_bytes(head.device_bytes),
        " to ".join(map(format_bytes, head.device_interval_bytes)),
        "unknown" if head.mfu is None else format_percent(head.mfu),
        f"{format_number(rate)} {unit}",
        f"{format_number(rate / plan.num_devices)} {unit}",
        f"{plan.num_devices:,}",
        f"{training.days:,.1f}",
        "no price" if training.cost is None else format_count(training.cost),
    ]
    return dict(zip(names, values, strict=True))


def _fit(plan: ComparedPlan) -> str:
    head = plan.headline
    if head is None or head.capacity_bytes is None:
        return "unknown"
    headroom = format_bytes(abs(head.capacity_bytes - head.device_bytes))
    over = head.device_bytes > head.capacity_bytes
    return f"{head.memory_verdict}: {headroom} {'over' if over else 'headroom'}"


def _numbers(plan: ComparedPlan) -> dict[str, object]:
    head, memory = plan.headline, plan.memory
    if head is None or memory is None:
        return {}
    low_s, high_s = head.step_time_interval_s or (None, None)
    return {
        "step_time_s": head.step_time_s,
        "low_s": low_s,
        "high_s": high_s,
        "mfu": head.mfu,
        "tokens_per_s": head.tokens_per_s,
        "num_devices": plan.num_devices,
        "device_gib": head.device_bytes / GIB,
        **{f"{part.replace(' ', '_')}_s": seconds for part, seconds in plan.split_s.items()},
    }


def _show_settings(documents: Mapping[str, Document]) -> None:
    """Settings that are not equal in all scenarios."""
    settings = {letter: _flat(document) for letter, document in documents.items()}
    keys = sorted({key for one in settings.values() for key in one})
    differ = [key for key in keys if len({one.get(key, "") for one in settings.values()}) > 1]
    if differ:
        with st.expander(counted(len(differ), "different setting")):
            cells = [[escaped(key), *(escaped(one.get(key, "")) for one in settings.values())] for key in differ]
            st.markdown(format_table_markdown(["setting", *settings], cells))


def _flat(document: Document) -> dict[str, str]:
    """Settings by their path of keys, without the name."""
    return {key: value for key, value in state.encode(document, {}).items() if key not in ("name", "search", "expect")}


def _show_differences(documents: Mapping[str, Document], others: list[str]) -> None:
    st.subheader("Reasons", help="Terms of both predictions, as `simplan explain` prints them")
    explanations = {}
    for letter in ("A", *others):
        inputs = result_cache.worker_inputs(documents[letter])
        explanations[letter] = awaited(f"explaining scenario {letter}", explained, *inputs)
    found = {letter: difference(explanations["A"], explanations[letter]) for letter in others}
    lines = []
    for letter, one in found.items():
        reason = main_reason(one).replace("The second step", f"The step of {letter}")
        lines.append(f"- {difference_sentence(one, 'A', letter)} {escaped(reason)}")
    st.markdown("\n".join(lines))
    letter = others[0]
    if len(others) > 1:
        letter = remembered_choice("Terms of A and", "terms_of", others, letter)
    show_difference(found[letter], f"terms of {letter}", ("A", letter))


def _pinned_scenarios() -> list[Document]:
    """Pinned scenarios as plain data, oldest first, of the page's address; skips entries that are no mappings."""
    stored = state.view(_PINNED, [])
    found = [data for data in stored if isinstance(data, dict)] if isinstance(stored, list) else []
    return found[:_MAX_PINNED]


def _pin_scenario(document: Document) -> None:
    """Pins a scenario; removes the oldest one if there are ``_MAX_PINNED``."""
    scenario = {key: value for key, value in document.items() if key not in _LEFT_OUT}
    others = [other for other in _pinned_scenarios() if other != scenario]
    state.set_view(_PINNED, [*others, scenario][-_MAX_PINNED:])


def _unpin_scenario(place: int) -> None:
    """Unpins the scenario at a place of the list."""
    pinned = _pinned_scenarios()
    state.set_view(_PINNED, pinned[:place] + pinned[place + 1 :] or None)


if __name__ == "__main__":
    run_page(show)
