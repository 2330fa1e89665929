"""Learn: schedules, definitions of terms, and the limits of simplan's model."""

from __future__ import annotations

from inspect import getdoc

import streamlit as st

from app.components.elements import csv_text, download, show_figure, show_table
from app.definitions import FORMULAS
from app.fields import remembered_choice
from app.figures.lesson import CLOSED_FORMS, Lesson, lesson, lesson_figure
from app.page import bullets, escaped, run_page
from simplan import catalog
from simplan.cli.terminal.definitions import definitions
from simplan.plan.schedules import REFUSED_SCHEDULES, SCHEDULE_FACTS
from simplan.program.schedules import SCHEDULES
from simplan.units import format_percent


def show() -> None:
    """Schedules, definitions and unmodeled features, as tabs."""
    schedules, words, missing = st.tabs(["Schedules", "Definitions", "Not modeled"])
    with schedules:
        _show_schedules()
    with words:
        _show_definitions()
    with missing:
        _show_missing()


def _show_schedules() -> None:
    columns = st.columns([2, 1, 1, 1])
    with columns[0]:
        name = remembered_choice("Schedule", "lesson", tuple(SCHEDULE_FACTS), "1f1b")
    with columns[1]:
        ranks = remembered_choice("Ranks p", "lesson_p", range(2, 9), 4)
    with columns[2]:
        microbatches = remembered_choice("Microbatches m", "lesson_m", range(1, 17), 8)
    facts = SCHEDULE_FACTS[name]
    stages = 2
    if facts.virtual_stages is None:
        with columns[3]:
            stages = remembered_choice("Stages per rank v", "lesson_v", (2, 3, 4), 2)
    one = _lesson(name, ranks, microbatches, stages)
    order = (getdoc(SCHEDULES[name]) or "").split("\n\n")[0]
    st.markdown(escaped(" ".join(order.split())))
    show_figure(lesson_figure(one), f"{name} step by step", alt=f"The schedule {name} on {ranks} ranks, step by step")
    closed = CLOSED_FORMS.get(name) if name != "interleaved_1f1b" or microbatches % ranks == 0 else None
    formula = f" Closed form {closed}." if closed else ""
    st.caption(
        f"Bubble fraction {format_percent(one.bubble_fraction)} of {one.length:g} units.{formula} A forward takes one "
        "unit on every stage, a backward two (I and W one each), communication none; predictions use actual times. "
        "White space is the bubble; the number next to each rank is its microbatches in flight."
    )
    rows = [{"rank": box.rank, "action": str(box.action), "start": box.start, "end": box.end} for box in one.boxes]
    download("Table", f"{name} lesson", "csv", csv_text(rows), about="Actions with start and end")


@st.cache_data(max_entries=64, show_spinner=False)
def _lesson(name: str, ranks: int, microbatches: int, stages: int) -> Lesson:
    return lesson(name, ranks, microbatches, stages)


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


if __name__ == "__main__":
    run_page(show)
