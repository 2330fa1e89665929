"""Figures of a search: every plan is there with its numbers, and nothing of the front is dominated."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from app.components.elements import csv_text
from app.figures.plans import (
    AXES,
    COLOURS,
    SettingEffect,
    importance_figure,
    plan_rows,
    plans_figure,
    shares_figure,
    shown_plans,
    space_figure,
    space_table,
)
from simplan.search import SearchResult, SearchSpace, search
from simplan.units import GIB
from tests.app.figures.drawn import checked
from tests.search.jobs import small_job

SPACE = SearchSpace(objectives=("step_time", "memory"), top=3, microbatch_size=(1, 2), schedule=("1f1b",))


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search(small_job(num_devices=4, hidden_size=512, vocab_size=8192, seq_len=512), SPACE)


def points(figure: Any) -> list[tuple[float, float]]:
    return [pair for t in figure.data if t.mode == "markers" for pair in zip(t.x, t.y, strict=True)]


def test_every_plan_is_a_row_and_a_point(result: SearchResult) -> None:
    rows = plan_rows(result)
    plans = {plan.plan.model_dump_json(): plan for plan in (*result.ranked, *result.pareto)}
    assert len(rows) == len(plans)
    assert [row["rank"] for row in rows[:3]] == [1, 2, 3]
    assert sum(row["on_front"] for row in rows) == len(result.pareto)
    assert len(rows) > len(result.ranked), "plans of the front are rows, too"
    assert [plan.step_time_s for plan in shown_plans(result)] == [row["step_time_s"] for row in rows]
    figure = checked(plans_figure(rows, "step_time_s", "device_gib", "schedule"))
    expected = sorted((plan.step_time_s, plan.device_bytes / GIB) for plan in plans.values())
    assert sorted(points(figure)) == expected


def test_rows_have_the_same_columns_where_one_plan_sets_what_others_do_not(result: SearchResult) -> None:
    """As one that recomputes some blocks of every stage among those that recompute all: a file has one header."""
    first, *others = result.ranked
    some = replace(first, plan=first.plan.model_copy(update={"recompute": "full", "recompute_layers": 2}))
    assert not any("recompute_layers" in row for row in plan_rows(result))
    rows = plan_rows(replace(result, ranked=(*others, some)))
    header, *lines = csv.reader(csv_text(rows).splitlines())
    assert "recompute_layers" in header
    assert {len(line) for line in lines} == {len(header)}
    assert len(lines) == len(rows)


def test_the_line_is_the_front_that_the_search_found(result: SearchResult) -> None:
    [line] = [
        t for t in checked(plans_figure(plan_rows(result), "step_time_s", "device_gib", "pp")).data if t.mode == "lines"
    ]
    points = list(zip(line.x, line.y, strict=True))
    assert points == [(plan.step_time_s, plan.device_bytes / GIB) for plan in result.pareto]


@pytest.mark.parametrize("colour", COLOURS)
def test_any_two_axes_can_be_drawn_and_hover_tells_everything(result: SearchResult, colour: str) -> None:
    rows = plan_rows(result)
    for x, y in zip(AXES, reversed(list(AXES)), strict=True):
        checked(plans_figure(rows, x, y, colour)).to_dict()
    figure = checked(plans_figure(rows, "step_time_s", "device_gib", colour, pinned=[rows[0]["plan"]]))
    texts = [pair for t in figure.data if t.customdata is not None for pair in t.customdata]
    assert {plan for _, plan in texts} == {row["plan"] for row in rows}
    hover = [text for text, _ in texts]
    best = next(text for text in hover if text.startswith("<b>1."))
    for words in ("step time:", "device memory", "MFU:", "pp:", "bottleneck:", "saves", "recompute:"):
        assert words in best
    assert sum(t.name == "pinned" for t in figure.data) == 1


def test_shares_are_as_long_as_the_step(result: SearchResult) -> None:
    figure = checked(shares_figure([(str(rank), plan) for rank, plan in enumerate(result.ranked, 1)]))
    sums = [sum(column) for column in zip(*(trace.x for trace in figure.data), strict=True)]
    assert sums == pytest.approx([plan.step_time_s for plan in result.ranked])


def test_every_plan_of_the_space_went_somewhere(result: SearchResult) -> None:
    assert sum(row["plans"] for row in space_table(result.space)) == result.space.total
    [bars] = checked(space_figure(result.space)).data
    assert sum(bars.x) == result.space.total
    reasons = {label.replace("<br>", " ").strip() for label in bars.y}
    assert all(reason.count(" ") >= 2 or reason == "feasible" for reason in reasons), "sentences, not names of rules"


def effect(key: str, value: object, change: float) -> SettingEffect:
    return SettingEffect(key, value, 1 + change, change, GIB, True, True)


def test_slow_values_leave_room_for_the_others_and_labels_do_not_overlap() -> None:
    """As with the default question, where one value of ``cp`` takes seven times as long."""
    effects = [effect("cp", size, size / 9) for size in (2, 4, 8, 16, 32, 64)]
    effects += [effect("tp", size, 0.01 * size) for size in (1, 2, 4, 8)]
    effects += [effect("recompute", f"a_long_word_{number}", 0.02 * number - 0.2) for number in range(12)]
    figure = checked(importance_figure(effects))
    low, high = figure.layout.xaxis.range
    assert high < 110, "twice the step time, and not seven times"
    per_char = (high - low) / 120
    rows: dict[str, list[tuple[float, float]]] = {}
    for trace in figure.data:
        for x, row, text, position in zip(trace.x, trace.y, trace.text, trace.textposition, strict=True):
            assert low <= x <= high
            width = len(text) * per_char
            if text:
                start = x - width if position == "top left" else x - width / 2
                rows.setdefault(row, []).append((start, start + width))
    for spans in rows.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))
    texts = [text for trace in figure.data for text in trace.text]
    assert "64 +711%" in texts, "what is beyond the axis names its change"
    hovers = [change for trace in figure.data for *_, change, _ in trace.customdata]
    assert "+711.1%" in hovers
