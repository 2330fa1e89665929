"""Scale and what-if: the scenario's plan over one axis, and its sensitivity to resources and slow ranks."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from app import result_cache, state
from app.budget import budget_of, without_budget
from app.components.elements import csv_text, download, download_report, show_drawing, show_figure
from app.components.scenario_form import show_scenario_form
from app.fields import remembered_choice
from app.figures.scale import (
    AXES,
    DelayedRank,
    ScalePoint,
    place_on,
    predicted_ways,
    scale_document,
    scale_figures,
    scale_rows,
    slow_figure,
    slow_ranks,
    sweep,
    worth,
    worth_figure,
)
from app.fitting import document_text
from app.page import bullets, run_page
from app.result_cache import awaited
from simplan.errors import SpecError
from simplan.explain.charts import ways_curves
from simplan.io import json_text
from simplan.report.drawings.charts_svg import curves_svg
from simplan.scenario import Scenario
from simplan.units import counted, format_number

_BATCH = {"same": "constant (strong scaling)", "follows": "proportional (weak scaling)"}
_SLOWER = {5: "5 % slower", 10: "10 % slower", 25: "25 % slower", 50: "50 % slower", 100: "half as fast"}


def _name(axis: str) -> str:
    return AXES[axis].label


def show() -> None:
    """Curves over an axis, sensitivity to resources, and cost of a slow rank."""
    show_scenario_form(budget=True)
    document = state.document()
    scenario = result_cache.scenario(document)
    budget, price = budget_of(scenario)
    text = document_text(without_budget(document))
    left, right = st.columns(2)
    with left:
        axis = remembered_choice("Axis", "axis", list(AXES), "devices", format_func=_name)
    batch = "same"
    if axis == "devices":
        with right:
            batch = remembered_choice("Global batch size", "batch", list(_BATCH), "same", format_func=_BATCH.get)
    points = awaited("predicting every point", sweep, text, axis, batch == "follows")
    rows = scale_rows(points, budget, price)
    _show_curves(scenario, axis, points, rows, price)
    first_column, second_column = st.columns(2, gap="medium")
    with first_column:
        st.subheader("Sensitivity", help="Step time with 1 % more of each resource")
        worths = awaited("estimating sensitivities", worth, text)
        show_figure(worth_figure(worths), "sensitivity", alt="Saving by resource")
    with second_column:
        slow = _show_slow(text)
    _show_ways(scenario, text)
    document = scale_document(scenario, axis, points, rows, worths, slow)
    with st.container(horizontal=True):
        if rows:
            download("Curve", f"{scenario.name} over {_name(axis)}", "csv", csv_text(rows))
        download("Numbers", f"{scenario.name} over {_name(axis)}", "json", lambda: json_text(document))
        download_report(f"{scenario.name} over {_name(axis)}", lambda: [json.loads(json_text(document))])


def _show_curves(
    scenario: Scenario, axis: str, points: tuple[ScalePoint, ...], rows: list[dict[str, Any]], price: float | None
) -> None:
    unit = "images" if scenario.job.model.sample != "sequence" else "tokens"
    now = place_on(scenario, axis)
    figures = scale_figures(rows, AXES[axis].words(scenario), now, scenario.job.cluster.largest_memory_bytes, unit=unit)
    for column, (name, figure) in zip(st.columns(len(figures)), figures.items(), strict=True):
        with column:
            alt = f"{name.capitalize()} over {_name(axis)}"
            show_figure(figure, f"{scenario.name} {name} over {_name(axis)}", alt=alt)
    words = ["Every point is a prediction of the same plan. Plans marked by a cross do not fit."]
    if axis == "devices":
        words.append("The data-parallel degree follows the number of devices.")
    if price is None:
        words.append("Set a price in the sidebar to see the cost.")
    st.caption(" ".join(words))
    failed = [point for point in points if point.refused]
    if failed:
        with st.expander(f"{counted(len(failed), 'value')} without a prediction"):
            st.markdown(bullets(f"{format_number(point.value)}: {point.refused}" for point in failed))


def _show_ways(scenario: Scenario, text: str) -> None:
    """Step time of every way to train over bandwidth, on request: it takes a prediction of each at ten bandwidths."""
    st.subheader("Ways to train", help="Gradient compression, parameter servers, Local SGD and DiLoCo over bandwidth")
    if not st.toggle("Predict every way", key="ways"):
        return
    try:
        ways = awaited("predicting every way", predicted_ways, text)
    except SpecError as error:
        st.info(error.sentences)
        return
    svg = curves_svg(ways_curves(ways))
    show_drawing("ways", svg, alt="Step time of ways to train over bandwidth")
    download("Ways", f"{scenario.name} ways to train", "svg", svg)
    st.caption(
        "A step of one way may be worth fewer samples than that of another: `search.samples_factor` weighs them."
    )
    refused = [curve for curve in ways.curves if curve.refused]
    if refused:
        with st.expander(f"{counted(len(refused), 'way')} without a prediction"):
            st.markdown(bullets(f"{curve.name}: {curve.refused}" for curve in refused))


def _show_slow(text: str) -> tuple[float, tuple[DelayedRank, ...]]:
    """Cost of a slow rank; returns the relative increase of its compute time, and the cost on each rank."""
    st.subheader("Slow rank", help="Increase of the step time if one rank computes more slowly")
    percent = remembered_choice("Slowdown", "slower", list(_SLOWER), 10, format_func=_SLOWER.get)
    ranks = awaited("simulating slow ranks", slow_ranks, text, percent / 100)
    show_figure(slow_figure(ranks, percent / 100), "slow ranks", alt="Step time increase by slow rank")
    st.caption(
        "One rank of each set of identical ranks is shown: they synchronize at every collective. Slow links are on the "
        "page Network, random jitter is `cluster.jitter` in the YAML. Not modeled: ranks that join or leave."
    )
    return percent / 100, ranks


if __name__ == "__main__":
    run_page(show)
