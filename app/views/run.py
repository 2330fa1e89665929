"""Whole run: when a training is done and for how much, with its failures, checkpoints and recovery."""

from __future__ import annotations

from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import result_cache, state
from app.components.elements import (
    csv_text,
    download,
    download_report,
    file_name,
    meaning,
    show_drawing,
    show_metrics,
    show_table,
)
from app.components.run_form import show_run_form, started
from app.components.scenario_form import show_scenario_form
from app.fields import remembered_number
from app.fitting import document_text
from app.page import bullets, escaped, run_page
from app.predictions import goodput_document, simulated_run, simulated_run_trace
from app.result_cache import awaited, handed_over
from simplan.io import json_text
from simplan.report.drawings.goodput_svg import goodput_svg
from simplan.report.drawings.run_timeline import subheading
from simplan.report.drawings.run_timeline_svg import run_timeline_svg
from simplan.report.goodput import format_money, headline
from simplan.report.html.goodput import change_rows, interruption_rows, simulated, waterfall_rows
from simplan.scenario import Scenario
from simplan.scenario.whole_run.goodput import NUM_RUNS
from simplan.units import format_bytes, format_number, format_percent, format_span, format_time

_FIRST_RUNS = 20
"""Runs that are shown first; the others follow."""


def show() -> None:
    """Form; then the answer from a few runs, and from as many as the command simulates."""
    show_scenario_form()
    show_run_form()
    document = state.document()
    scenario = result_cache.scenario(document)
    if not scenario.budget.has_length:
        _show_start(document)
        return
    text, calibrated_at = document_text(document), result_cache.worker_inputs(document)[1]
    place = st.empty()
    _show_answer(place, awaited("simulating some runs", goodput_document, text, calibrated_at, _FIRST_RUNS, False))
    answer = awaited(f"simulating {NUM_RUNS:,} runs", goodput_document, text, calibrated_at, NUM_RUNS, True)
    _show_answer(place, answer)
    _show_why(answer)
    _show_timeline(scenario, text, calibrated_at, answer)
    _show_downloads(scenario, document, answer)


def _show_start(document: dict[str, Any]) -> None:
    st.info(
        "**How long is the run?** Set its tokens or its steps above. Failures, checkpoints, recovery and price are "
        "optional: what is not set does not happen."
    )
    about = "1 T tokens, failures as of Llama 3, checkpoints at the best interval, one spare node, 2.5 per device-hour"
    changed = started(document)
    icon = ":material/play_arrow:"
    st.button("Start with an example", icon=icon, help=about, on_click=state.set_document, args=(changed,))


def _show_answer(place: DeltaGenerator, answer: dict[str, Any]) -> None:
    with place.container():
        st.markdown(f"#### {escaped(_sentence(headline(answer)))}")
        if answer["memory_verdict"] not in (None, "fits"):
            st.warning(f"The plan {answer['memory_verdict']} in the memory of its devices: see the page Plan.")
        show_metrics([*_metrics(answer)])
        st.caption(
            f"{simulated(answer)}; {answer['num_steps']:,} steps of {format_time(answer['step_time_s'])}. With the "
            f"uncertainty of the step time, too: {_range(answer['time_to_finish_with_step_interval_s'])}."
        )


def _range(quantiles: dict[str, float]) -> str:
    return f"P10 {format_span(quantiles['p10'])}, P90 {format_span(quantiles['p90'])}"


def _metrics(answer: dict[str, Any]) -> list[tuple[str, str, str]]:
    cost, stops = answer["cost_distribution"], answer["num_interruptions"]
    cells = [
        ("Done in", format_span(answer["time_to_finish_s"]["mean"]), _range(answer["time_to_finish_s"])),
        ("Without failures", format_span(answer["undisturbed_s"]), "Steps, evaluations and checkpoints alone"),
        ("Goodput", format_percent(answer["goodput"]), meaning("goodput")),
        ("Interruptions", format_number(stops["mean"]), f"P10 {stops['p10']:,.0f}, P90 {stops['p90']:,.0f}"),
        ("Device-hours", format_number(answer["device_hours"]), "Of all devices, those of spares included"),
    ]
    if cost is None:
        cells.append(("Cost", "no price", "Set a price above"))
    else:
        about = f"P10 {format_money(cost['p10'])}, P90 {format_money(cost['p90'])}, in the currency of the price"
        cells.append(("Cost", format_money(cost["mean"]), about))
    if answer["energy_kwh"] is not None:
        co2 = "" if answer["co2_kg"] is None else f"{format_money(answer['co2_kg'])} kg of CO2"
        cells.append(("Energy", f"{format_money(answer['energy_kwh'])} kWh", co2))
    return cells


def _show_why(answer: dict[str, Any]) -> None:
    parts = ", ".join(f"{name} {span} ({share})" for name, span, share in waterfall_rows(answer))
    show_drawing("whole-run", goodput_svg(answer), alt=f"Where the time of the run goes: {parts}")
    left, right = st.columns(2, gap="medium")
    with left:
        st.subheader("What changes are worth", help="Mean of runs with equal failures, with its standard error")
        show_table([dict(zip(("change", "time saved", "cost saved"), row, strict=True)) for row in change_rows(answer)])
        if not answer["sensitivity"]:
            st.caption("Nothing can fail, so nothing is to be gained.")
    with right:
        st.subheader("Interruptions")
        rows = interruption_rows(answer)
        show_table([dict(zip(("cause", "mean number", "share"), row, strict=True)) for row in rows])
        if not rows:
            st.caption("None: choose failures above.")
    if answer["checkpoint_bytes"] is not None:
        interval = format_span(answer["checkpoint_interval_s"])
        st.caption(f"A checkpoint of {format_bytes(answer['checkpoint_bytes'])} every {interval} of training.")
    if answer["assumptions"]:
        with st.expander(f"Assumptions ({len(answer['assumptions'])})"):
            st.markdown(bullets(answer["assumptions"]))


def _show_timeline(scenario: Scenario, text: str, calibrated_at: int, answer: dict[str, Any]) -> None:
    """Timeline of the median run, or of one chosen by its number."""
    title, chosen = st.columns([3, 1], vertical_alignment="bottom")
    with title:
        st.subheader("One run", help="One of the simulated runs, as `simplan draw --run` draws it")
    with chosen:
        median: int = answer["median_trial"]
        last = answer["trials"] - 1
        about = f"0 to {last}; run {median} has the median time. The CSV file of `simplan goodput --runs` lists all"
        number = remembered_number("Run", "trial", median, most=last, help=about)
    inputs = text, calibrated_at, NUM_RUNS, number
    timeline = awaited("simulating one run", simulated_run, *inputs)
    name, svg = f"{scenario.name} run {number}", run_timeline_svg(timeline)
    show_drawing("one-run", svg, alt=f"Timeline of one simulated run: {subheading(timeline)}")
    with st.container(horizontal=True):
        download("One run", name, "svg", svg)
        download(
            "Trace for Perfetto",
            f"{name} trace",
            "json",
            lambda: handed_over(simulated_run_trace, *inputs),
            about="This run, for ui.perfetto.dev or chrome://tracing",
        )


def _show_downloads(scenario: Scenario, document: dict[str, Any], answer: dict[str, Any]) -> None:
    st.subheader("Downloads")
    name = f"{scenario.name} whole run"
    with st.container(horizontal=True):
        download("Scenario", scenario.name, "yaml", document_text(document), about="Input of `simplan goodput`")
        download("Numbers", name, "json", json_text(answer), about="Output of the command below")
        download("Intervals", f"{scenario.name} checkpoint intervals", "csv", csv_text(answer["interval_curve"]))
        download_report(name, lambda: [answer])
    st.caption("The same on a terminal")
    st.code(
        f"simplan goodput {file_name(scenario.name)}.yaml --trials {answer['trials']} --seed {answer['seed']}", "sh"
    )


def _sentence(words: str) -> str:
    """Words with a capital letter at the beginning."""
    return words[:1].upper() + words[1:]


if __name__ == "__main__":
    run_page(show)
