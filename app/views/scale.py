"""Scale and what-if: the scenario's plan over one axis, and its sensitivity to resources and slow ranks."""

from __future__ import annotations

import streamlit as st

from app import answers, state
from app.components.downloads import csv_text, download, show_figure
from app.components.problems import escaped
from app.components.question import show_question
from app.components.verdict import kept_budget, show_budget
from app.fields import remembered_choice
from app.figures.scale import scale_figures, scale_rows, slow_figure, worth_figure
from app.page import run_page
from app.results.scale import AXES, ScalePoint, place_on, slow_ranks, sweep, worth
from app.work import awaited
from simplan.scenario import Scenario
from simplan.units import counted, format_number

_NAMES = {
    "devices": "devices",
    "batch": "global batch size",
    "sequence": "sequence length",
    "microbatch": "microbatch size",
    "inter_link": "bandwidth between nodes",
    "intra_link": "bandwidth within nodes",
    "compute": "FLOP/s of the device",
    "memory_bandwidth": "memory bandwidth of the device",
}
_BATCH = {"same": "the same global batch (strong scaling)", "follows": "a batch in proportion (weak scaling)"}
_SLOWER = {5: "5 % slower", 10: "10 % slower", 25: "25 % slower", 50: "50 % slower", 100: "half as fast"}


def show() -> None:
    """Curves over an axis, then value of more resources, then cost of a slow rank."""
    show_question()
    document = state.document()
    asked = answers.scenario(document)
    images = asked.job.model.sample == "image"
    show_budget(images=images)
    budget, price = kept_budget(images=images)
    text = answers.text(document)
    left, right = st.columns(2)
    with left:
        axis = remembered_choice("What changes", "axis", list(AXES), "devices", format_func=_NAMES.get)
    batch = "same"
    if axis == "devices":
        with right:
            batch = remembered_choice("More devices train", "batch", list(_BATCH), "same", format_func=_BATCH.get)
    points = awaited("predicting every point", sweep, text, axis, batch == "follows")
    _show_curves(asked, axis, points, budget, price)
    one, two = st.columns(2, gap="medium")
    with one:
        st.subheader("What more would be worth", help="Along the critical path: the step again with 1 % more of each")
        show_figure(worth_figure(awaited("pricing better hardware", worth, text)), "worth", alt="What 1 % more saves")
    with two:
        _show_slow(text)


def _show_curves(
    asked: Scenario, axis: str, points: tuple[ScalePoint, ...], budget: float, price: float | None
) -> None:
    unit = "images" if asked.job.model.sample == "image" else "tokens"
    rows = scale_rows(points, budget, price)
    now = place_on(asked, axis)
    figures = scale_figures(rows, AXES[axis].label, now, asked.job.cluster.device.memory_bytes, unit=unit)
    for column, (name, figure) in zip(st.columns(len(figures)), figures.items(), strict=True):
        with column:
            alt = f"{name.capitalize()} over {_NAMES[axis]}"
            show_figure(figure, f"{asked.name} {name} over {_NAMES[axis]}", alt=alt)
    words = ["The plan stays as it is; every point is a new prediction. A cross does not fit."]
    if axis == "devices":
        words.append("More devices are more data parallelism.")
    if price is None:
        words.append("Give a price in the sidebar to see the cost.")
    st.caption(" ".join(words))
    refused = [point for point in points if point.refused]
    if refused:
        with st.expander(f"{counted(len(refused), 'value')} without an answer"):
            st.markdown(
                "\n".join(f"- {escaped(f'{format_number(point.value)}: {point.refused}')}" for point in refused)
            )
    if rows:
        download("Curve", f"{asked.name} over {_NAMES[axis]}", "csv", csv_text(rows))


def _show_slow(text: str) -> None:
    st.subheader("What a slow rank costs", help="Others wait for it: how much of its delay reaches the step")
    percent = remembered_choice("A rank is", "slower", list(_SLOWER), 10, format_func=_SLOWER.get)
    found = awaited("slowing one rank after the other", slow_ranks, text, percent / 100)
    show_figure(slow_figure(found, percent / 100), "slow ranks", alt="How much longer a step takes by slow rank")
    st.caption(
        "One of each set of identical ranks is shown: they synchronize at every collective. A slower link is the "
        "bandwidth axis above, for all links of a kind together; a single slow link among equal ones, jitter and ranks "
        "that come and go are not modelled."
    )


if __name__ == "__main__":
    run_page(show)
