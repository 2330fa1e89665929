"""Learn: a lesson on each technique, schedules, definitions of terms, and the limits of simplan's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import streamlit as st

from app.components.elements import csv_text, download, show_table
from app.components.lesson import show_lesson
from app.components.schedule_lesson import show_schedules
from app.definitions import FORMULAS
from app.fields import remembered_choice
from app.lessons import LESSONS
from app.page import bullets, run_page
from simplan import catalog
from simplan.cli.terminal.definitions import definitions
from simplan.plan.schedules import REFUSED_SCHEDULES


def show() -> None:
    """One topic: a lesson, the schedules, the definitions or the unmodeled features."""
    titles = {name: title for name, (title, _) in _TOPICS.items()}
    topic = remembered_choice("Topic", "topic", tuple(titles), "ddp", widget=st.pills, format_func=titles.get)
    _TOPICS[topic or "ddp"][1]()


def _show_definitions() -> None:
    st.markdown("Formulas, and below the definitions of `simplan show metrics`.")
    for name, formula, about in FORMULAS:
        left, right = st.columns([2, 3], vertical_alignment="center")
        left.markdown(f"**{name}**  \n{about}")
        right.latex(formula)
    rows = [{key: row[key] for key in ("name", "unit", "definition")} for row in definitions()]
    show_table(rows, width="stretch", height=420)
    download("Definitions", "definitions", "csv", csv_text(rows))


def _show_missing() -> None:
    st.markdown(
        "An option that is not modeled is an error that names the option. Known features of frameworks that "
        "predictions leave out:"
    )
    software = [catalog.software(name) for name in catalog.names("software")]
    rows = [{"framework": one.id, "not modeled": feature} for one in software for feature in one.not_modelled]
    show_table(rows, width="stretch")
    others = (
        *(f"the schedule {name}" for name in REFUSED_SCHEDULES),
        "flows that slow each other down on a network, and other jobs on the cluster",
        "failures, stragglers and checkpoints of a whole training",
        "several kinds of devices in one job",
        "data loading: batches are assumed to be available in time",
    )
    st.markdown(f"For all frameworks:\n{bullets(others)}")


_TOPICS: Mapping[str, tuple[str, Callable[[], None]]] = {
    **{name: (one.title, partial(show_lesson, name)) for name, one in LESSONS.items()},
    "schedules": ("Schedules", show_schedules),
    "definitions": ("Definitions", _show_definitions),
    "missing": ("Not modeled", _show_missing),
}
"""Title of each topic and the function that shows it, by its name in links."""


if __name__ == "__main__":
    run_page(show)
