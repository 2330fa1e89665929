"""From the plan that runs today to the best one: what a switch costs, and how sure it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan.accuracy.plan_ranking import plan_groups, plan_pairs
from simplan.accuracy.predict_runs import predict_runs
from simplan.plan.plan import ParallelPlan
from simplan.scenario.published.reading import read_published
from simplan.search.switch import RIGHT_ORDER, switching_costs

ROOT = Path(__file__).resolve().parents[2]


def test_checkpoints_matter_only_where_states_are_split() -> None:
    plan = ParallelPlan(tp=2, dp_shard=4)
    assert switching_costs(plan, plan) == ()
    assert (
        switching_costs(plan, plan.with_changes(recompute="full", microbatch_size=2))[0]
        == "checkpoints stay as they are"
    )
    assert "(tp, dp_shard)" in switching_costs(plan, plan.with_changes(tp=4, dp_shard=2))[0]


@pytest.mark.slow
def test_certainty_is_that_of_published_pairs() -> None:
    files = read_published([ROOT / "scenarios" / "published", ROOT / "scenarios" / "heldout"])
    pairs = [pair for group in plan_groups(predict_runs(files)) for pair in plan_pairs(group)]
    start = 0.0
    for end, fraction, number in RIGHT_ORDER:
        right = [predicted * measured > 0 for predicted, measured in pairs if start <= abs(predicted) < end]
        assert len(right) == pytest.approx(number, abs=0.1 * number)
        assert sum(right) / len(right) == pytest.approx(fraction, abs=0.05)
        start = end
