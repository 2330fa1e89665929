"""Every scenario: folded as unfolded if that is small enough, one step time and one memory; compiled as simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.cli.execute import predict_scenario
from simplan.cost.pricing import price_program
from simplan.predict import build_program, cost_model, simulate_program
from simplan.scenario import load_scenario
from simplan.sim.memory import memory_peak
from tests.laws import check_engines

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


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_compiled_is_simulated(file: Path, level: int) -> None:
    scenario = load_scenario(file)
    program = build_program(predict_scenario(scenario, None), level=level)
    asked = (scenario.cluster, scenario.training, scenario.plan, scenario.software)
    check_engines(program, price_program(program, cost_model(*asked, None)).durations_s)
