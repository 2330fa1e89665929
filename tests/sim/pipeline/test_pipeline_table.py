"""Compiled tables against those that are made of actions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.program.complete import Unshard, complete_table
from simplan.program.schedules import SCHEDULES, PipelineShape
from simplan.sim.pipeline.orders import COMPILED_SCHEDULES
from simplan.sim.pipeline.table import compiled_table
from simplan.spec.schedules import SCHEDULE_FACTS

UNSHARDS: tuple[Unshard, ...] = ("none", "once", "window")


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Schedule, ranks, microbatches, stages of a rank."""
    schedule = draw(st.sampled_from(sorted(COMPILED_SCHEDULES)))
    facts = SCHEDULE_FACTS.get(schedule)
    p = 1 if facts is None else draw(st.integers(1, 7))
    v = 1 if facts is None else facts.virtual_stages or draw(st.integers(1, 5))
    return schedule, p, draw(st.integers(1, 24)), v


@given(pipelines(), st.sampled_from(UNSHARDS))
def test_tables_are_those_made_of_actions(pipeline: tuple[str, int, int, int], unshard: Unshard) -> None:
    schedule, p, m, v = pipeline
    expected = complete_table(SCHEDULES[schedule](PipelineShape(p, m, v)), unshard=unshard)
    assert compiled_table(schedule, p, m, v, unshard).actions() == expected


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v"),
    [
        ("gpipe", 40, 3, 1),
        ("1f1b", 70, 80, 1),
        ("interleaved_1f1b", 36, 72, 2),
        ("interleaved_1f1b", 8, 30, 12),
        ("zb-h1", 33, 64, 1),
        ("zb-v", 35, 80, 2),
    ],
)
@pytest.mark.parametrize("unshard", UNSHARDS)
def test_long_tables_are_too(schedule: str, p: int, m: int, v: int, unshard: Unshard) -> None:
    expected = complete_table(SCHEDULES[schedule](PipelineShape(p, m, v)), unshard=unshard)
    assert compiled_table(schedule, p, m, v, unshard).actions() == expected
