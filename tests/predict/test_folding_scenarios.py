"""Every scenario: folded as unfolded, one step time and memory, large ones by whole actions; compiled as simulated."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from simplan import catalog
from simplan.cost.program_costs import estimate_program
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import StepContext, build_program, cost_model, simulate_program
from simplan.predict.build import folding_of
from simplan.predict.truncated import TruncatedStep, predicted_extent
from simplan.scenario import load_scenario
from simplan.sim.memory import memory_peak
from simplan.training import TrainingSpec
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
        simulate_program(program, cost, StepContext.of(scenario.job)).times.step_time_s for program in (folded, whole)
    )
    assert once == pytest.approx(every, rel=1e-9)
    peaks = [memory_peak(whole, rank).total_bytes for rank in whole.ranks]
    assert peaks == [memory_peak(folded, rank).total_bytes for rank in folded.stands_for]
    if level == 2:
        assert prediction.step_time_s == pytest.approx(every, rel=1e-9)
        assert [memory.allocated_bytes for memory in prediction.memory] == peaks


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("qwen3-0.6b", {"tp": 2, "dp_shard": 24}),  # norms of 128 rows: 21 shards of 6, one of 2, two of none
        ("gpt-oss-20b", {"tp": 2, "dp_shard": 24, "ep": 2}),  # a router of 32 rows as well
        ("qwen3-0.6b", {"tp": 2, "dp_shard": 12, "pp": 2, "schedule": "1f1b"}),
    ],
)
def test_uneven_shards_fold_to_classes_of_equal_work(model: str, plan: dict[str, Any]) -> None:
    cluster = catalog.cluster("dgx-h100", 48)
    training = TrainingSpec(global_batch_size=96, precision="bf16")
    job = Job(catalog.model(model), cluster, training, ParallelPlan(**plan), catalog.software("torchtitan"))
    folding = folding_of(job)
    extent = predicted_extent(job, folding)
    assert len(folding.ranks) <= 24  # three classes of shards, on nodes whose ranks have some or all of them
    folded, whole = TruncatedStep(job, extent, folding=folding), TruncatedStep(job, extent)
    assert float(folded.seconds()[0]) == float(whole.seconds()[0])
    assert folded.memory() == whole.memory()
    of_simulated, of_all = (step.splits(float(whole.seconds()[0])) for step in (folded, whole))
    assert [of_simulated[rank] for rank in folding.stands_for] == list(of_all.values())
    assert folded.idle_fraction() == pytest.approx(whole.idle_fraction(), rel=1e-12)
    assert _counts(folded) == _counts(whole)


def _counts(step: TruncatedStep) -> Counter[str]:
    """Occurrences of each kind of work over all ranks."""
    counts: Counter[str] = Counter()
    for term in step.simulated[0].program_costs.terms:
        counts[term.title] += term.count
    return counts
