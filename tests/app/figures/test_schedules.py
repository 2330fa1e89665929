"""Schedules on tiny pipelines: closed forms, memory limits, and a drawing that shows them up to a time."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from app.figures.schedules import schedule_drawing, schedule_timeline, why_bubble
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.report.drawings.drawing_svg import drawing_svg


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
    assert not schedule_drawing(drawn, drawn.instants[0]).boxes
    whole = schedule_drawing(drawn, drawn.instants[-1])
    busy = sum(box.duration_s for box in whole.boxes)
    assert busy == pytest.approx((1 - drawn.bubble_fraction) * drawn.num_ranks * drawn.length)
    assert whole.idle_fraction == pytest.approx(drawn.bubble_fraction)
    until = drawn.instants[len(drawn.instants) // 2]
    part = schedule_drawing(drawn, until)
    assert max(box.end_s for box in part.boxes) <= until
    assert len(part.boxes) == sum(box.start_s < until for row in drawn.rows for box in row)
    assert part.idle_fraction == pytest.approx(drawn.bubble_fraction)
    svg = ElementTree.fromstring(drawing_svg(part))
    assert len(svg.findall("{*}g[@class='box']")) == len(part.boxes)
    words = [text for part in svg.iter() if (text := part.text) and text.strip()]
    assert f"{name}: {drawn.length:g} units" in words
    assert not [text for text in words if re.search(r"\d (s|ms|us)\b", text)], "times have no unit of ours"


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
def test_edited_times_keep_the_closed_form(weight: float) -> None:
    """(p-1)/(m+p-1) for equal stages, whatever F and B take; Huang et al. 2019."""
    times = (1.5, 0.5, weight, 0.0)
    for name in ("gpipe", "1f1b"):
        assert schedule_timeline(name, 4, 8, times=times).bubble_fraction == pytest.approx(3 / 11)
    assert schedule_timeline("1f1b", 4, 8, times=(1.0, 1.0, 1.0, 0.5)).bubble_fraction > 3 / 11
    long_weight = schedule_timeline("zb-h1", 4, 8, times=times).bubble_fraction
    assert long_weight < schedule_timeline("1f1b", 4, 8, times=times).bubble_fraction
