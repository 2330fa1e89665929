"""Every scenario: folded as unfolded, one step time and memory, large ones by whole actions; compiled as simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.cost.program_costs import estimate_program
from simplan.predict import build_program, cost_model, simulate_program
from simplan.scenario import load_scenario
from simplan.sim.memory import memory_peak
from tests.laws import check_engines

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))
MAX_OPERATIONS = 40_000
LARGE = ("four-dimensions", "moe-pipeline", "three-dimensions")
"""Smaller ones combine the same axes two by two."""

ALL = [pytest.param(file, marks=[pytest.mark.slow] if file.stem in LARGE else [], id=file.stem) for file in SCENARIOS]


@pytest.mark.parametrize("file", ALL)
def test_folded_is_unfolded_and_compiled_is_simulated(file: Path) -> None:
    scenario = load_scenario(file)
    prediction = scenario.predict()
    folded, level = build_program(prediction), 2
    cost = cost_model(scenario.job, None)
    check_engines(folded, estimate_program(folded, cost).durations_s)
    if len(folded.ops) / len(folded.ranks) * scenario.job.plan.num_devices > MAX_OPERATIONS:
        folded, level = build_program(prediction, level=1), 1
    whole = build_program(prediction, level=level, folded=False)
    once, every = (
        simulate_program(program, cost, scenario.job.cluster).times.step_time_s for program in (folded, whole)
    )
    assert once == pytest.approx(every, rel=1e-9)
    peaks = [memory_peak(whole, rank).total_bytes for rank in whole.ranks]
    assert peaks == [memory_peak(folded, rank).total_bytes for rank in folded.stands_for]
    if level == 2:
        assert prediction.step_time_s == pytest.approx(every, rel=1e-9)
        assert [memory.allocated_bytes for memory in prediction.memory] == peaks
