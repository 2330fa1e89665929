"""Learn: schedules, definitions of terms, and the limits of simplan's model."""

from __future__ import annotations

from inspect import getdoc

import pandas as pd
import streamlit as st

from app.components.downloads import csv_text, download, show_figure
from app.components.problems import escaped
from app.fields import remembered_choice
from app.figures.lesson import lesson_figure
from app.page import run_page
from app.results.lesson import CLOSED_FORMS, Lesson, lesson
from app.words import FORMULAS
from simplan import catalog
from simplan.cli.terminal.definitions import definitions
from simplan.plan.schedules import REFUSED_SCHEDULES, SCHEDULE_FACTS
from simplan.program.schedules import SCHEDULES
from simplan.units import format_percent

_MOST_RANKS, _MOST_MICROBATCHES = 8, 16


def show() -> None:
    """Three tabs."""
    schedules, words, missing = st.tabs(["Schedules, step by step", "What words mean", "What is not modelled"])
    with schedules:
        _show_schedules()
    with words:
        _show_words()
    with missing:
        _show_missing()


def _show_schedules() -> None:
    columns = st.columns([2, 1, 1, 1])
    names = tuple(SCHEDULE_FACTS)
    with columns[0]:
        name = remembered_choice("Schedule", "lesson", names, "1f1b")
    with columns[1]:
        ranks = remembered_choice("Ranks p", "lesson_p", tuple(range(2, _MOST_RANKS + 1)), 4)
    with columns[2]:
        microbatches = remembered_choice("Microbatches m", "lesson_m", tuple(range(1, _MOST_MICROBATCHES + 1)), 8)
    facts = SCHEDULE_FACTS[name]
    stages = 2
    if facts.virtual_stages is None:
        with columns[3]:
            stages = remembered_choice("Stages per rank v", "lesson_v", (2, 3, 4), 2)
    one = _lesson(name, ranks, microbatches, stages)
    st.markdown(_order_of(name))
    show_figure(lesson_figure(one), f"{name} step by step", alt=f"The schedule {name} on {ranks} ranks, step by step")
    closed = CLOSED_FORMS.get(name)
    formula = f" Closed form {closed}." if closed and _is_closed(one) else ""
    st.caption(
        f"Bubble fraction {format_percent(one.bubble_fraction)} of {one.length:g} units.{formula} A forward takes one "
        "unit on every stage, a backward two (I and W one each), messages take none; predictions take all of these as "
        "they are. White space is the bubble; the number next to each rank is its microbatches in flight."
    )
    rows = [{"rank": box.rank, "action": str(box.action), "start": box.start, "end": box.end} for box in one.boxes]
    download("Table", f"{name} lesson", "csv", csv_text(rows), about="Every action with its start and end")


@st.cache_data(max_entries=64, show_spinner=False)
def _lesson(name: str, ranks: int, microbatches: int, stages: int) -> Lesson:
    return lesson(name, ranks, microbatches, stages)


def _order_of(name: str) -> str:
    """First paragraph of the schedule's docstring, which describes its order."""
    first = " ".join((getdoc(SCHEDULES[name]) or "").split("\n\n")[0].split())
    return escaped(first)


def _is_closed(one: Lesson) -> bool:
    return one.name != "interleaved_1f1b" or one.num_microbatches % one.num_ranks == 0


def _show_words() -> None:
    st.markdown("Formulas, with the words of `simplan show metrics` below.")
    for name, formula, about in FORMULAS:
        left, right = st.columns([2, 3], vertical_alignment="center")
        left.markdown(f"**{name}**  \n{about}")
        right.latex(formula)
    rows = [{key: row[key] for key in ("name", "unit", "definition")} for row in definitions()]
    st.dataframe(pd.DataFrame(rows), hide_index=True, width="stretch", height=420)
    download("Definitions", "definitions", "csv", csv_text(rows))


def _show_missing() -> None:
    st.markdown(
        "An option that is not modelled is an error that names it, never ignored; pages show it instead of a result. "
        "Each framework does things that simplan leaves out of its predictions; these are known."
    )
    software = [catalog.software(name) for name in catalog.names("software")]
    rows = [{"software": one.id, "not modelled": what} for one in software for what in one.not_modelled]
    st.dataframe(pd.DataFrame(rows), hide_index=True, width="stretch")
    others = (
        *(f"the schedule {name}" for name in REFUSED_SCHEDULES),
        "flows that slow each other down on a network, and other jobs on the cluster",
        "failures, stragglers and checkpoints of a whole training",
        "several kinds of devices in one job",
        "reading data: it is taken to be there in time",
    )
    st.markdown("For all of them:\n" + "\n".join(f"- {escaped(text)}" for text in others))


if __name__ == "__main__":
    run_page(show)
