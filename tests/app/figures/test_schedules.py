"""Schedules on tiny pipelines: closed forms, memory limits, and a figure that shows them up to a time."""

from __future__ import annotations

import pytest

from app.figures.schedules import schedule_figure, schedule_timeline, why_bubble
from simplan.plan.schedules import SCHEDULE_FACTS
from tests.app.figures.drawn import checked


def test_bytes_that_ranks_hold() -> None:
    """GPipe holds all microbatches, 1F1B as many as ranks are left of the pipeline."""
    assert schedule_timeline("gpipe", 4, 8).most_in_flight == (8, 8, 8, 8)
    drawn = schedule_timeline("1f1b", 4, 8)
    assert drawn.most_in_flight == (4, 3, 2, 1)
    assert [drawn.in_flight(rank, drawn.length) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_interleaving_splits_the_same_model(stages: int) -> None:
    """Length and bubble: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; memory: arXiv:2205.05198, 4.2.3."""
    p, m, both = 4, 8, 2.5
    drawn = schedule_timeline("interleaved_1f1b", p, m, stages, (1.0, 0.5, 1.0, 0.0))
    assert drawn.length == pytest.approx((stages * m + p - 1) * both / stages)
    assert drawn.idle == pytest.approx(p * (p - 1) * both / stages)
    assert drawn.most_in_flight[0] == pytest.approx(p * (1 + (p - 1) / (p * stages)))
    assert f"= {(p - 1) * both / stages:g} units" in why_bubble(drawn)
    v_shaped, plain = (schedule_timeline(name, p, m) for name in ("zb-v", "1f1b"))
    assert v_shaped.num_ranks * v_shaped.length - v_shaped.idle == pytest.approx(p * plain.length - plain.idle)


@pytest.mark.parametrize("name", SCHEDULE_FACTS)
def test_every_schedule_is_drawn_up_to_a_time(name: str) -> None:
    drawn = schedule_timeline(name, 4, 8)
    assert not checked(schedule_figure(drawn, drawn.instants[0])).data
    whole = checked(schedule_figure(drawn, drawn.instants[-1]))
    busy = sum(width for trace in whole.data for width in trace.x)
    assert busy == pytest.approx((1 - drawn.bubble_fraction) * drawn.num_ranks * drawn.length)
    until = drawn.instants[len(drawn.instants) // 2]
    part = checked(schedule_figure(drawn, until))
    assert max(base + width for trace in part.data for base, width in zip(trace.base, trace.x, strict=True)) <= until
    assert sum(len(trace.x) for trace in part.data) == sum(box.start_s < until for row in drawn.rows for box in row)
    assert len({box.action for row in drawn.rows for box in row}) == sum(map(len, drawn.rows))


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
def test_edited_times_keep_the_closed_form(weight: float) -> None:
    """(p-1)/(m+p-1) for equal stages, whatever F and B take; Huang et al. 2019."""
    times = (1.5, 0.5, weight, 0.0)
    for name in ("gpipe", "1f1b"):
        assert schedule_timeline(name, 4, 8, times=times).bubble_fraction == pytest.approx(3 / 11)
    assert schedule_timeline("1f1b", 4, 8, times=(1.0, 1.0, 1.0, 0.5)).bubble_fraction > 3 / 11
    long_weight = schedule_timeline("zb-h1", 4, 8, times=times).bubble_fraction
    assert long_weight < schedule_timeline("1f1b", 4, 8, times=times).bubble_fraction
