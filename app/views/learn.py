"""Learn: a lesson on each technique, schedules, definitions of terms, and the limits of simplan's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import getdoc
from typing import Any

import streamlit as st

from app import state
from app.components.elements import csv_text, download, show_drawing, show_figure, show_table
from app.fields import remembered_choice, remembered_number
from app.figures.compared import compared_plans, memory_stacks, plan_numbers, step_stacks
from app.figures.schedules import ScheduleTimeline, schedule_drawing, schedule_timeline, why_bubble
from app.fitting import document_text
from app.lessons import LESSONS, Knob, numbers_of, sentences_of
from app.page import bullets, escaped, run_page
from app.result_cache import awaited
from simplan import catalog
from simplan.cli.terminal.definitions import definitions
from simplan.plan.schedules import REFUSED_SCHEDULES, SCHEDULE_FACTS
from simplan.program.schedules import SCHEDULES
from simplan.report.drawings.drawing_svg import drawing_svg
from simplan.units import format_percent

_MAX_TIME = 10.0

_FORMULAS = (
    (
        "MFU",
        r"\frac{\text{model FLOPs of a step}}{\text{step time} \times \text{devices} \times \text{dense peak}}",
        "Model FLOPs utilization: causal attention counted half, without recomputation. "
        "Most papers count full attention (PaLM); predictions show both.",
    ),
    (
        "HFU",
        r"\text{MFU} \times \left(1 + \frac{\text{recomputed FLOPs}}{\text{model FLOPs}}\right)",
        "Hardware FLOPs utilization.",
    ),
    (
        "Bubble fraction, GPipe and 1F1B",
        r"\frac{p-1}{m+p-1}",
        "For equal stages and zero-cost communication: p ranks, m microbatches.",
    ),
    (
        "Bubble fraction, interleaved 1F1B",
        r"\frac{p-1}{v\,m+p-1}",
        "v stages per rank, m a multiple of p. Predictions use the actual stages and communication.",
    ),
    (
        "Split of a step",
        r"\text{step} = \text{compute} + \text{recompute} + \text{exposed communication} + \text{wait} + \text{host}"
        r" + \text{optimizer}",
        "Per rank; the six parts are exclusive.",
    ),
    (
        "Overlap",
        r"\frac{\text{compute time while communicating}}{\text{communication time}}",
        "Fraction of communication that compute hides.",
    ),
    (
        "Device memory",
        r"\text{device} = \underbrace{\text{allocated} + \text{rounding and fragmentation}}_{\text{reserved}}"
        r" + \text{context}",
        "Per rank, at the peak of the rank.",
    ),
    (
        "Signed error",
        r"\frac{\text{predicted} - \text{measured}}{\text{measured}}",
        "Compare with the spread of the repeats.",
    ),
)
"""Name, formula (LaTeX) and description of each metric."""


def show() -> None:
    """One topic: a lesson, the schedules, the definitions or the unmodeled features."""
    titles = {name: title for name, (title, _) in _TOPICS.items()}
    topic = remembered_choice("Topic", "topic", tuple(titles), "ddp", widget=st.pills, format_func=titles.get)
    _TOPICS[topic or "ddp"][1]()


def _show_lesson(name: str) -> None:
    """Two settings, sentences with live numbers, figures of real predictions, and a link to the plan.

    Args:
        name: Key of ``LESSONS``.
    """
    lesson = LESSONS[name]
    st.markdown(escaped(lesson.idea))
    left, right = st.columns(2, gap="medium")
    with left:
        chosen = _choose(lesson.axis, f"{name}_x", widget=st.select_slider)
    with right:
        other = _choose(lesson.other, f"{name}_other")
    texts = [(_words(value), document_text(lesson.scenario(value, other))) for value in lesson.axis.values]
    plans = awaited("predicting the plans of the lesson", compared_plans, tuple(texts))
    now, first = numbers_of(next(plan for plan in plans if plan.name == _words(chosen))), numbers_of(plans[0])
    if now is None or first is None:
        st.warning("This plan has no prediction; the reason is below the figures.")
    else:
        st.markdown(bullets(sentences_of(lesson, now, first)))
    first_column, second_column = st.columns(2, gap="medium")
    for column, word, draw in ((first_column, "memory", memory_stacks), (second_column, "step", step_stacks)):
        with column:
            alt = f"{word.capitalize()} over {lesson.axis.label}"
            show_figure(draw(plans, lesson.axis.label, _words(chosen)), f"{lesson.title} {word}", alt=alt)
    for plan in plans:
        if plan.refused:
            st.caption(escaped(f"{lesson.axis.label} {plan.name}: {plan.refused}"))
    st.markdown(f"**Try this.** {escaped(lesson.attempt)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        query = state.encode(lesson.scenario(chosen, other), {})
        st.page_link("views/plan.py", label="Open this plan", icon=":material/open_in_new:", query_params=query)
        download("Numbers", f"{lesson.title} lesson", "csv", csv_text(plan_numbers(plans, lesson.axis.label)))
    st.caption(escaped(f"Every bar is a prediction of simplan. Source of the technique: {lesson.source}."))


def _choose(knob: Knob, name: str, **more: Any) -> object:
    return remembered_choice(knob.label, name, knob.values, knob.start, format_func=_words, **more)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show_schedules() -> None:
    """Select boxes for a schedule, its description, and its timeline up to a time."""
    columns = st.columns([2, 1, 1, 1])
    with columns[0]:
        name = remembered_choice("Schedule", "lesson", tuple(SCHEDULE_FACTS), "1f1b")
    with columns[1]:
        ranks = remembered_choice("Ranks p", "lesson_p", range(2, 9), 4)
    with columns[2]:
        microbatches = remembered_choice("Microbatches m", "lesson_m", range(1, 17), 8)
    stages = 2
    if SCHEDULE_FACTS[name].virtual_stages is None:
        with columns[3]:
            stages = remembered_choice("Stages per rank v", "lesson_v", (2, 3, 4), 2)
    times = _choose_times()
    drawn = _timeline(name, ranks, microbatches, stages, times)
    about = (getdoc(SCHEDULES[name]) or "").split("\n\n")[:2]
    st.markdown(escaped(" ".join(" ".join(about).split())))
    st.markdown(f"**Why the bubble.** {escaped(why_bubble(drawn))}")
    until = remembered_choice(
        "Time",
        "lesson_time",
        drawn.instants,
        drawn.length,
        widget=st.select_slider,
        format_func="{:g}".format,
        help="The schedule up to this time; arrow keys step through it",
    )
    alt = f"The schedule {name} on {ranks} ranks"
    show_drawing("schedule", drawing_svg(schedule_drawing(drawn, until)), alt=alt)
    bubble = SCHEDULE_FACTS[name].bubble if name != "interleaved_1f1b" or microbatches % ranks == 0 else None
    closed = None if bubble is None else bubble.formula
    formula = f" Closed form {closed}." if closed and not drawn.times.send_s else ""
    v = drawn.virtual_stages
    of_stages, in_flight = (f", each stage 1/{v}", f" (in one of {v} stages, one counts 1/{v})") if v > 1 else ("", "")
    st.caption(
        f"Bubble fraction {format_percent(drawn.bubble_fraction)} of {drawn.length:g} units.{formula} All ranks take "
        f"the times above{of_stages}; predictions use actual times. Microbatches in flight at {until:g}, by rank"
        f"{in_flight}: {_numbers(drawn.in_flight(rank, until) for rank in range(ranks))}; the most: "
        f"{_numbers(drawn.most_in_flight)}."
    )
    rows = [
        {"rank": rank, "action": str(box.action), "start": box.start_s, "end": box.end_s}
        for rank, row in enumerate(drawn.rows)
        for box in row
    ]
    download("Table", f"{name} lesson", "csv", csv_text(rows), about="Actions with start and end")


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _choose_times() -> tuple[float, float, float, float]:
    """Forward, backward for the input, backward for the weights, and send."""
    labels = (
        ("Forward F", "lesson_f", 1.0, "Forward of all layers of a rank, for one microbatch"),
        ("Input gradient I", "lesson_i", 1.0, "Their backward for the input; a full backward B takes I + W"),
        ("Weight gradient W", "lesson_w", 1.0, "Their backward for the weights; a full backward B takes I + W"),
        ("Send", "lesson_send", 0.0, "Time until a result arrives on the next rank; sends overlap with compute"),
    )
    values = []
    for column, (label, name, start, about) in zip(st.columns(4), labels, strict=True):
        with column:
            least = 0.0 if name == "lesson_send" else 0.1
            values.append(remembered_number(label, name, start, least=least, most=_MAX_TIME, step=0.5, help=about))
    forward, backward_input, backward_weight, send = values
    return forward, backward_input, backward_weight, send


@st.cache_data(max_entries=64, show_spinner=False)
def _timeline(
    name: str, ranks: int, microbatches: int, stages: int, times: tuple[float, float, float, float]
) -> ScheduleTimeline:
    return schedule_timeline(name, ranks, microbatches, stages, times)


def _show_definitions() -> None:
    st.markdown("Formulas, and below the definitions of `simplan show metrics`.")
    for name, formula, about in _FORMULAS:
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
    rows = [
        {"framework": profile.id, "not modeled": feature} for profile in software for feature in profile.not_modelled
    ]
    show_table(rows, width="stretch")
    others = (
        *(f"the schedule {name}" for name in REFUSED_SCHEDULES),
        "failures and checkpoints of a whole training",
        "data loading: batches are assumed to be available in time",
    )
    st.markdown(f"For all frameworks:\n{bullets(others)}")


_TOPICS: Mapping[str, tuple[str, Callable[[], None]]] = {
    **{name: (lesson.title, partial(_show_lesson, name)) for name, lesson in LESSONS.items()},
    "schedules": ("Schedules", _show_schedules),
    "definitions": ("Definitions", _show_definitions),
    "missing": ("Not modeled", _show_missing),
}
"""Title of each topic and the function that shows it, by its name in links."""


if __name__ == "__main__":
    run_page(show)
