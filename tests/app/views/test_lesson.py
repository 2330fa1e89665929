"""Schedules on tiny pipelines: closed forms, memory limits, and a figure that plays them."""

from __future__ import annotations

import pytest

from app.figures.lesson import lesson, lesson_figure
from simplan.plan.schedules import SCHEDULE_FACTS
from tests.app.figures.drawn import checked


def test_what_ranks_hold() -> None:
    """GPipe holds all microbatches, 1F1B as many as ranks are left of the pipeline."""
    assert lesson("gpipe", 4, 8).most_in_flight == (8, 8, 8, 8)
    assert lesson("1f1b", 4, 8).most_in_flight == (4, 3, 2, 1)
    one = lesson("1f1b", 4, 8)
    assert [one.in_flight(rank, one.length) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", SCHEDULE_FACTS)
def test_every_schedule_plays_to_its_end(name: str) -> None:
    one = lesson(name, 4, 8)
    figure = checked(lesson_figure(one))
    first, last = figure.frames[0], figure.frames[-1]
    assert all(width is None for trace in first.data if trace.type == "bar" for width in trace.x)
    busy = sum(width for trace in last.data if trace.type == "bar" for width in trace.x if width is not None)
    assert busy == pytest.approx((1 - one.bubble_fraction) * one.num_ranks * one.length)
    assert len(figure.frames) == len(figure.layout.sliders[0].steps)
    assert len({box.action for box in one.boxes}) == len(one.boxes)
