"""Lessons: every plan has a prediction, and what the sentences claim holds in the numbers."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from app.figures.compared import ComparedPlan, compared_plans, memory_stacks, step_stacks
from app.fitting import document_text
from app.lessons import LESSONS, numbers_of, sentences_of
from app.predictions import Headline, predicted
from app.state import decode
from simplan.program.program import MemoryCategory
from tests.app.figures.drawn import checked
from tests.app.views.pages import assert_no_bug, opened


@cache
def plans_of(name: str, other: Any = None) -> dict[Any, ComparedPlan]:
    lesson = LESSONS[name]
    other = lesson.other.start if other is None else other
    texts = [(str(value), document_text(lesson.scenario(value, other))) for value in lesson.axis.values]
    return dict(zip(lesson.axis.values, compared_plans(texts), strict=True))


def held(plan: ComparedPlan, category: MemoryCategory) -> int:
    return head(plan).memory.by_category.get(category, 0)


def head(plan: ComparedPlan) -> Headline:
    assert plan.headline is not None, plan.refused
    return plan.headline


def numbers(plan: ComparedPlan) -> SimpleNamespace:
    of_plan = numbers_of(plan)
    assert of_plan is not None, plan.refused
    return of_plan


@pytest.mark.parametrize("name", LESSONS)
def test_every_plan_of_a_lesson_has_numbers(name: str) -> None:
    lesson, plans = LESSONS[name], plans_of(name)
    first = numbers(plans[lesson.axis.values[0]])
    for plan in plans.values():
        assert not plan.refused
        assert sum(plan.split_s.values()) == pytest.approx(head(plan).step_time_s)
        assert not any(" 0 B" in words for words in sentences_of(lesson, numbers(plan), first))
    step, memory = (checked(draw([*plans.values()], "x")) for draw in (step_stacks, memory_stacks))
    heights = [sum(trace.y[0] for trace in figure.data if trace.type == "bar") for figure in (step, memory)]
    shown = head(plans[lesson.axis.values[0]])
    unit_s = 1e-3 if "ms" in step.layout.yaxis.title.text else 1.0
    assert heights[0] * unit_s == pytest.approx(shown.step_time_s)
    assert heights[1] == pytest.approx(shown.memory.device_bytes / 2**30)


def test_states_of_data_parallelism_are_replicated() -> None:
    """fp32 parameters: 4 bytes of parameters and of gradients, 8 of Adam, of 1,557,686,400 (GPT-2 with this head)."""
    plan = plans_of("ddp")[16]
    assert held(plan, MemoryCategory.PARAMETERS) == pytest.approx(4 * 1.5577e9, rel=2e-3)
    assert held(plan, MemoryCategory.OPTIMIZER) == 2 * held(plan, MemoryCategory.PARAMETERS)
    assert head(plan).memory.device_bytes == head(plans_of("ddp")[64]).memory.device_bytes
    slow = plans_of("ddp", "tcp-10gbit")[16]
    assert slow.split_s["exposed communication"] > 10 * plan.split_s["exposed communication"]


def test_zero_stages_shard_states_by_the_number_of_ranks() -> None:
    """Rajbhandari et al. 2020, figure 1."""
    sharded = {
        1: (MemoryCategory.OPTIMIZER,),
        2: (MemoryCategory.OPTIMIZER, MemoryCategory.GRADIENTS),
        3: (MemoryCategory.OPTIMIZER, MemoryCategory.GRADIENTS, MemoryCategory.PARAMETERS),
    }
    plans = plans_of("zero")
    for stage, categories in sharded.items():
        for category in categories:
            assert held(plans[stage], category) == pytest.approx(held(plans[0], category) / 8, rel=5e-3)
    assert [head(plan).memory_verdict for plan in plans.values()] == 2 * ["does not fit"] + 2 * ["fits"]


def test_bubble_of_the_pipeline_lesson_does_not_depend_on_microbatches() -> None:
    waits_s = [plan.split_s["wait"] for plan in plans_of("pp").values()]
    assert waits_s == pytest.approx([waits_s[0]] * 4, rel=0.01)
    one_f_one_b, gpipe, zero_bubble = (plans_of("pp", name)[32] for name in ("1f1b", "gpipe", "zb-h1"))
    assert gpipe.split_s["wait"] == pytest.approx(one_f_one_b.split_s["wait"], rel=0.1)
    assert zero_bubble.split_s["wait"] < one_f_one_b.split_s["wait"] / 2
    activations = [held(plan, MemoryCategory.ACTIVATIONS) for plan in (one_f_one_b, zero_bubble, gpipe)]
    assert activations == sorted(activations)
    peaks = {
        name: [rank.device_bytes for rank in predicted(document_text(LESSONS["pp"].scenario(32, name)), 0).memory]
        for name in ("1f1b", "interleaved_1f1b", "zb-h1")
    }
    assert peaks["zb-h1"][0] == peaks["1f1b"][0]
    assert all(more > less for more, less in zip(peaks["zb-h1"][1:], peaks["1f1b"][1:], strict=True))
    assert all(more > less for more, less in zip(peaks["interleaved_1f1b"], peaks["1f1b"], strict=True))


def test_context_parallelism_divides_activations() -> None:
    plans = plans_of("cp")
    for cp, plan in plans.items():
        assert held(plan, MemoryCategory.ACTIVATIONS) * cp == pytest.approx(
            held(plans[1], MemoryCategory.ACTIVATIONS), rel=1e-3
        )
    short, long = (plans_of("cp", length)[4] for length in (8192, 131072))
    assert short.split_s["exposed communication"] / head(short).step_time_s > (
        10 * long.split_s["exposed communication"] / head(long).step_time_s
    )


def test_other_lessons_claim_what_is_predicted() -> None:
    on, off = (plans_of("tp", value)[8] for value in (True, False))
    assert held(off, MemoryCategory.ACTIVATIONS) > held(on, MemoryCategory.ACTIVATIONS)
    experts = plans_of("ep")
    assert experts[16].split_s["exposed communication"] > experts[8].split_s["exposed communication"]
    assert experts[8].split_s["compute"] < experts[1].split_s["compute"]
    again = plans_of("recompute")
    activations = [held(plan, MemoryCategory.ACTIVATIONS) for plan in again.values()]
    assert [kept / activations[0] for kept in activations] == pytest.approx([1, 1, 0.05], abs=0.01)


def test_link_of_a_lesson_is_its_plan() -> None:
    page = opened("learn", view={"topic": "zero", "zero_x": 2, "zero_other": 16})
    assert_no_bug(page)
    assert any("ZeRO\\-2" in shown.value for shown in page.markdown)
    [link] = page.get("page_link")
    query = dict(pair.split("=") for pair in link.proto.query_string.split("&"))
    assert decode(query)[0]["plan"] == {"dp_shard": 16, "zero_stage": 2, "recompute": "full"}
