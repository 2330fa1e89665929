"""What a search remembers, plan after plan, against a look at all plans at once."""

from __future__ import annotations

import random

import pytest

from simplan.plan.plan import ParallelPlan
from simplan.search.candidates import plan_order
from simplan.search.incumbents import NOISE, Goal, Incumbents, Timed
from simplan.search.space import Objective
from tests.search.jobs import plain_plan

TOP = 3


def plans(seed: int) -> list[tuple[ParallelPlan, int, float]]:
    """ParallelPlans of a few meshes, whose times are close together."""
    draw = random.Random(seed)
    rows = []
    for number in range(60):
        dp, v = draw.choice([1, 2]), draw.randint(1, 6)
        plan = plain_plan(dp_replicate=dp, pp=8 // dp, virtual_stages=v, microbatch_size=number % 2 + 1)
        changes = draw.choice(["none", "selective", "full"]), draw.choice(["1f1b", "interleaved_1f1b"])
        plan = plan.model_copy(update={"recompute": changes[0], "schedule": changes[1]})
        rows.append((plan, draw.randint(1, 9), 1 + draw.randint(0, 50) * NOISE / 7))
    return list({row[0]: row for row in rows}.values())


def all_at_once(
    rows: list[tuple[ParallelPlan, int, float]], goal: Goal
) -> list[tuple[ParallelPlan, set[ParallelPlan]]]:
    """Groups, each from its best plan on: who is shown, and the others."""
    left = sorted(
        Timed(goal.values(c.num_devices, size, s)[0], s, c.num_devices, size, plan_order(c), c) for c, size, s in rows
    )
    groups: list[tuple[Timed, set[ParallelPlan]]] = []
    noise = 1.0 if goal.objectives[0] == "memory" else 1 + NOISE
    while left and len(groups) < TOP:
        first = left[0]
        axes = (first.plan.dp, first.plan.pp, first.plan.microbatch_size)
        group = [
            timed
            for timed in left
            if (timed.plan.dp, timed.plan.pp, timed.plan.microbatch_size) == axes
            and timed.step_time_s <= noise * first.step_time_s
            and (goal.objectives[0] != "memory" or timed.device_bytes == first.device_bytes)
        ]
        left = [timed for timed in left if timed not in group]
        order = ("none", "selective", "full")
        shown = min(
            group,
            key=lambda t: (t.plan.virtual_stages, order.index(t.plan.recompute), t.device_bytes, t),
        )
        groups.append((shown, {timed.plan for timed in group if timed is not shown}))
    return [(shown.plan, others) for shown, others in sorted(groups, key=lambda pair: pair[0])]


def test_some_plans_are_alike() -> None:
    """Else the tests below say nothing."""
    goal = Goal(("step_time",), tokens_per_step=1)
    assert sum(bool(others) for seed in range(8) for _, others in all_at_once(plans(seed), goal)) > 4


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("objective", ["step_time", "tokens_per_s_per_device", "num_devices", "memory"])
def test_groups_are_those_of_all_plans_whatever_the_order(objective: Objective, seed: int) -> None:
    """Also where plans are left out that could not be kept."""
    goal = Goal((objective,), tokens_per_step=1)
    rows = plans(seed)
    incumbents = Incumbents(goal, TOP)
    random.Random(seed + 1).shuffle(rows)
    left_out = 0
    for candidate, size, seconds in rows:
        if incumbents.is_hopeless(candidate.num_devices, size, seconds):
            left_out += 1
        else:
            incumbents.add(candidate, size, seconds)
    groups = [(group.shown.plan, {timed.plan for timed in group.others}) for group in incumbents.groups]
    assert groups == all_at_once(rows, goal)
    assert left_out > 0, "bounds that never cut are no bounds"


@pytest.mark.parametrize("seed", range(4))
def test_corrected_numbers_count_as_if_they_had_been_known(seed: int) -> None:
    goal = Goal(("step_time",), tokens_per_step=1)
    rows = plans(seed)
    incumbents = Incumbents(goal, TOP)
    for row in rows:
        incumbents.add(*row)
    slow, gone = incumbents.ranked[0].plan, incumbents.ranked[1].plan
    incumbents.correct(slow, (3, 1.004))
    incumbents.correct(gone, None)
    corrected = [(plan, *((3, 1.004) if plan == slow else (size, s))) for plan, size, s in rows if plan != gone]
    groups = [(group.shown.plan, {timed.plan for timed in group.others}) for group in incumbents.groups]
    assert groups == all_at_once(corrected, goal)


def test_the_simplest_plan_of_a_group_is_shown() -> None:
    goal = Goal(("step_time",), tokens_per_step=1)
    incumbents = Incumbents(goal, 2)
    fastest = plain_plan(pp=4, virtual_stages=10, schedule="interleaved_1f1b", dp_shard=2, zero_stage=1)
    simpler = fastest.model_copy(update={"virtual_stages": 2})
    recomputes = simpler.model_copy(update={"recompute": "full"})
    larger = simpler.model_copy(update={"zero_stage": 0, "dp_shard": 1, "dp_replicate": 2})
    slower = fastest.model_copy(update={"virtual_stages": 5})
    for candidate, size, seconds in [
        (fastest, 6, 1.0), (simpler, 6, 1.0005), (recomputes, 2, 1.0009), (larger, 9, 1.0003), (slower, 6, 1.0011),
    ]:  # fmt: skip
        incumbents.add(candidate, size, seconds)
    first, second = incumbents.groups
    assert first.shown.plan == simpler
    assert {timed.plan for timed in first.others} == {fastest, recomputes, larger}
    assert (second.shown.plan, second.others) == (slower, ())
