"""Schedules step by step, with editable times of forward and backward, and the reason of the bubble."""

from __future__ import annotations

from inspect import getdoc

import streamlit as st

from app.components.elements import csv_text, download, show_figure
from app.fields import remembered_choice, remembered_number
from app.figures.lesson import CLOSED_FORMS, LessonTimes, ScheduleLesson, lesson, lesson_figure
from app.page import escaped
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.program.schedules import SCHEDULES
from simplan.units import format_percent

_MAX_TIME = 10.0


def show_schedules() -> None:
    """Select boxes for a schedule, its description, and its timeline."""
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
    times = _choose_times()
    one = _lesson(name, ranks, microbatches, stages, times)
    about = (getdoc(SCHEDULES[name]) or "").split("\n\n")[:2]
    st.markdown(escaped(" ".join(" ".join(about).split())))
    st.markdown(f"**Why the bubble.** {escaped(why_bubble(one))}")
    show_figure(lesson_figure(one), f"{name} step by step", alt=f"The schedule {name} on {ranks} ranks, step by step")
    closed = CLOSED_FORMS.get(name) if name != "interleaved_1f1b" or microbatches % ranks == 0 else None
    formula = f" Closed form {closed}." if closed and not times.send else ""
    st.caption(
        f"Bubble fraction {format_percent(one.bubble_fraction)} of {one.length:g} units.{formula} All stages take the "
        "times above; predictions use actual times. White space is the bubble; the number next to each rank is its "
        "microbatches in flight."
    )
    rows = [{"rank": box.rank, "action": str(box.action), "start": box.start, "end": box.end} for box in one.boxes]
    download("Table", f"{name} lesson", "csv", csv_text(rows), about="Actions with start and end")


def why_bubble(one: ScheduleLesson) -> str:
    """Reason of the idle time of a schedule, with its numbers."""
    p, m, v = one.num_ranks, one.num_microbatches, one.virtual_stages
    both = one.times.forward + one.times.backward
    fill = (
        f"The first microbatch reaches rank {p - 1} only after {p - 1} other forwards, and its gradient returns to "
        f"rank 0 only after {p - 1} other backwards."
    )
    if one.name == "naive":
        return f"{fill} Nothing else runs in between, so that one rank of {p} works at a time."
    if SCHEDULE_FACTS[one.name].splits_backward:
        return (
            f"{fill} Only the input gradient (I) is on that path. The weight gradient (W) is needed by no other rank, "
            f"so that ranks run it where they would wait: {one.idle:g} of {p * one.length:g} rank units stay idle."
        )
    if v > 1:
        return (
            f"{fill} A stage is {v} times smaller than with one stage per rank, and so is this wait. More stages per "
            "rank make it shorter, and send more activations between ranks."
        )
    return (
        f"{fill} Each rank therefore idles (p-1)(F+B) = {(p - 1) * both:g} units next to m(F+B) = {m * both:g} of "
        "work. More microbatches make the fraction smaller, not the bubble shorter."
    )


def _choose_times() -> LessonTimes:
    columns = st.columns(4)
    labels = (
        ("Forward F", "lesson_f", 1.0, "Time of a forward of one stage"),
        ("Input gradient I", "lesson_i", 1.0, "Backward for the input; a full backward B takes I + W"),
        ("Weight gradient W", "lesson_w", 1.0, "Backward for the weights; a full backward B takes I + W"),
        ("Send", "lesson_send", 0.0, "Time until a result arrives on the next rank; sends overlap with compute"),
    )
    values = []
    for column, (label, name, start, about) in zip(columns, labels, strict=True):
        with column:
            least = 0.0 if name == "lesson_send" else 0.1
            values.append(remembered_number(label, name, start, least=least, most=_MAX_TIME, step=0.5, help=about))
    return LessonTimes(*values)


@st.cache_data(max_entries=64, show_spinner=False)
def _lesson(name: str, ranks: int, microbatches: int, stages: int, times: LessonTimes) -> ScheduleLesson:
    return lesson(name, ranks, microbatches, stages, times)
