"""Folded and unfolded Programs of every scenario that is small enough: one step time, and one memory of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.cli.execute import predict_scenario
from simplan.predict import build_program, cost_model, simulate_program
from simplan.scenario import load_scenario
from simplan.sim.memory import memory_peak

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.yaml"))
MOST_OPERATIONS = 40_000


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_folded_is_unfolded(file: Path) -> None:
    scenario = load_scenario(file)
    prediction = predict_scenario(scenario, None)
    folded = build_program(prediction)
    if len(folded.ops) / len(folded.ranks) * scenario.plan.num_devices > MOST_OPERATIONS:
        pytest.skip("too large to write every rank out")
    whole = build_program(prediction, folded=False)
    asked = (scenario.cluster, scenario.training, scenario.plan, scenario.software)
    times = simulate_program(whole, cost_model(*asked, None), scenario.cluster).times
    assert prediction.step_time_s == pytest.approx(times.step_time_s, rel=1e-9)
    for rank, memory in enumerate(prediction.memory):
        assert memory_peak(whole, rank).total_bytes == memory.allocated_bytes
