"""A lesson on one technique: two settings, sentences with live numbers, a figure of real predictions, and a link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import state
from app.awaited import awaited
from app.components.elements import csv_text, download, show_figure
from app.fields import remembered_choice
from app.figures.compared import memory_stacks, step_stacks
from app.lessons import LESSONS, Knob, Lesson
from app.page import escaped
from app.results.compared import ComparedPlan, compared_plans
from simplan.program.program import MemoryCategory
from simplan.units import GIB, format_bytes, format_count, format_percent, format_time


@dataclass(frozen=True, slots=True)
class LessonNumbers:
    """Numbers of one plan, as sentences of lessons name them; ``_share`` is a fraction of the step."""

    x: str
    step: str
    memory: str
    fits: str
    rate: str
    mfu: str
    compute: str
    recompute: str
    recompute_share: str
    exposed: str
    exposed_share: str
    wait: str
    wait_share: str
    optimizer: str
    parameters: str
    gradients: str
    optimizer_states: str
    activations: str
    logits: str


_FITS = {None: "may fit: the memory of the device is unknown", "fits, tight": "fits with little headroom"}
"""Verdicts on memory inside of a sentence, where they differ from the verdict."""


def numbers_of(plan: ComparedPlan) -> LessonNumbers | None:
    """Numbers for the sentences of a lesson; None for a plan without a prediction."""
    head, memory, split_s = plan.headline, plan.memory, plan.split_s
    if head is None or memory is None:
        return None

    def share(part: str) -> str:
        return format_percent(split_s[part] / head.step_time_s)

    def held(category: MemoryCategory) -> str:
        return format_bytes(memory.by_category.get(category, 0))

    return LessonNumbers(
        x=plan.name,
        step=format_time(head.step_time_s),
        memory=format_bytes(head.device_bytes),
        fits=_FITS.get(head.memory_verdict, str(head.memory_verdict)),
        rate=format_count(head.tokens_per_s),
        mfu="unknown" if head.mfu is None else format_percent(head.mfu),
        compute=format_time(split_s["compute"]),
        recompute=format_time(split_s["recompute"]),
        recompute_share=share("recompute"),
        exposed=format_time(split_s["exposed communication"]),
        exposed_share=share("exposed communication"),
        wait=format_time(split_s["wait"]),
        wait_share=share("wait"),
        optimizer=format_time(split_s["optimizer"]),
        parameters=held(MemoryCategory.PARAMETERS),
        gradients=held(MemoryCategory.GRADIENTS),
        optimizer_states=held(MemoryCategory.OPTIMIZER),
        activations=held(MemoryCategory.ACTIVATIONS),
        logits=held(MemoryCategory.LOGITS),
    )


def sentences_of(lesson: Lesson, now: LessonNumbers, first: LessonNumbers) -> list[str]:
    """Sentences of a lesson with the numbers of the chosen plan and of the first one of the axis."""
    return [sentence.format(x=now.x, now=now, first=first) for sentence in lesson.sentences]


def show_lesson(name: str) -> None:
    """One lesson.

    Args:
        name: Key of ``LESSONS``.
    """
    lesson = LESSONS[name]
    st.markdown(escaped(lesson.idea))
    left, right = st.columns(2, gap="medium")
    with left:
        chosen = _choose(lesson.axis, f"{name}_x", slider=True)
    with right:
        other = _choose(lesson.other, f"{name}_other")
    texts = [(_words(value), state.document_text(lesson.scenario(value, other))) for value in lesson.axis.values]
    plans = awaited("predicting the plans of the lesson", compared_plans, tuple(texts))
    _show_sentences(lesson, plans, _words(chosen))
    one, two = st.columns(2, gap="medium")
    for column, word, draw in ((one, "memory", memory_stacks), (two, "step", step_stacks)):
        with column:
            alt = f"{word.capitalize()} over {lesson.axis.label}"
            show_figure(draw(plans, lesson.axis.label, _words(chosen)), f"{lesson.title} {word}", alt=alt)
    for plan in plans:
        if plan.refused:
            st.caption(escaped(f"{lesson.axis.label} {plan.name}: {plan.refused}"))
    st.markdown(f"**Try this.** {escaped(lesson.attempt)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        document = lesson.scenario(chosen, other)
        query = state.encode(document, {})
        st.page_link("views/plan.py", label="Open this plan", icon=":material/open_in_new:", query_params=query)
        download("Numbers", f"{lesson.title} lesson", "csv", csv_text(_rows(lesson, plans)))
    st.caption(escaped(f"Every bar is a prediction of simplan. Source of the technique: {lesson.source}."))


def _choose(knob: Knob, name: str, *, slider: bool = False) -> object:
    more: dict[str, Any] = {"widget": st.select_slider} if slider else {}
    return remembered_choice(knob.label, name, knob.values, knob.start, format_func=_words, **more)


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show_sentences(lesson: Lesson, plans: tuple[ComparedPlan, ...], chosen: str) -> None:
    now = next(numbers for plan in plans if plan.name == chosen for numbers in [numbers_of(plan)])
    first = numbers_of(plans[0])
    if now is None or first is None:
        st.warning("This plan has no prediction; the reason is below the figures.")
    else:
        st.markdown("\n".join(f"- {escaped(sentence)}" for sentence in sentences_of(lesson, now, first)))


def _rows(lesson: Lesson, plans: tuple[ComparedPlan, ...]) -> list[dict[str, object]]:
    """Numbers of the figure as table rows."""
    rows = []
    for plan in plans:
        if plan.headline is None or plan.memory is None:
            continue
        parts = {f"{part.replace(' ', '_')}_s": seconds for part, seconds in plan.split_s.items()}
        memory = {f"{category}_gib": plan.memory.by_category.get(category, 0) / GIB for category in MemoryCategory}
        total = {"step_time_s": plan.headline.step_time_s, "device_gib": plan.headline.device_bytes / GIB}
        rows.append({lesson.axis.label: plan.name, **total, **parts, **memory})
    return rows
