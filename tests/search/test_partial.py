"""Plans that run as few blocks again as fit, against every number of blocks of every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from simplan import catalog
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.search import SearchResult, SearchSpace, search
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.explore import Exploration
from simplan.search.incumbents import Goal, Incumbents
from simplan.search.partial_recompute import _in_stages, _most_blocks, _whole
from simplan.search.statistics import Statistics, rounded
from simplan.units import MIB
from tests.search.brute_force import Row, shown
from tests.search.jobs import plans_of, small_job

SPACE: dict[str, Any] = {
    "max_memory_fraction": 1.0,
    "schedule": "1f1b",
    "pp": (1, 2),
    "tp": 1,
    "microbatch_size": 2,
    "recompute": ("none", "full"),
    "zero_stage": (0, 1),
    "top": 4,
}
CAPACITIES = {"torch": 1160 * MIB, "megatron-core": 1116 * MIB}
BLOCKS = 6


def asked_for(software: str) -> Job:
    sizes: dict[str, Any] = {"hidden_size": 512, "vocab_size": 2048, "seq_len": 256, "num_hidden_layers": BLOCKS}
    return small_job(memory_bytes=CAPACITIES[software], software=software, **sizes)


def found_by(asked: Job, **space: Any) -> SearchResult:
    space_of = SearchSpace.model_validate({**SPACE, **space})
    return search(asked, space_of, explain=False)


@cache
def every(software: str) -> tuple[tuple[ParallelPlan, int, float], ...]:
    """Every plan that fits with every number of blocks that run again, none and all among them, by ``predict``."""
    job = asked_for(software)

    def variants(plan: ParallelPlan) -> Iterator[ParallelPlan]:
        yield plan
        if plan.recompute == "full":
            yield from (plan.model_copy(update={"recompute_layers": number}) for number in range(1, BLOCKS))

    rows = []
    for candidate in plans_of(job, SearchSpace.model_validate(SPACE)):
        for plan in variants(candidate):
            prediction = predict(job.with_plan(plan))
            if prediction.worst_memory.device_bytes <= CAPACITIES[software]:
                rows.append((plan, prediction.worst_memory.device_bytes, rounded(prediction.step_time_s)))
    return tuple(rows)


def wanted(software: str) -> list[Row]:
    """Of the plans that differ in ``recompute_layers`` alone those that need it, with as few blocks as fit."""
    least: dict[ParallelPlan, tuple[ParallelPlan, int, float]] = {}
    fitting = {plan for plan, _, _ in every(software)}
    rows = []
    for plan, size, seconds in every(software):
        family = plan.model_copy(update={"recompute_layers": None})
        if not plan.recompute_layers:
            rows.append((plan, size, seconds))
        elif family.model_copy(update={"recompute": "none"}) not in fitting:
            known = least.get(family)
            if known is None or plan.recompute_layers < (known[0].recompute_layers or BLOCKS):
                least[family] = plan, size, seconds
    alike = {(family, seconds) for family, _, seconds in every(software)}
    rows += [(plan, size, s) for family, (plan, size, s) in least.items() if (family, s) not in alike]
    return sorted(rows, key=lambda row: row[2])


@pytest.mark.parametrize("software", CAPACITIES)
def test_the_search_recomputes_as_few_blocks_as_fit(software: str) -> None:
    result = found_by(asked_for(software))
    best = shown(wanted(software))[: SPACE["top"]]
    assert [plan.plan for plan in result.ranked] == [row[0] for row in best]
    assert [plan.step_time_s for plan in result.ranked] == pytest.approx([row[2] for row in best], rel=1e-3)
    assert [plan.device_bytes for plan in result.ranked] == pytest.approx([row[1] for row in best], rel=1e-3)
    some = [plan.plan.recompute_layers for plan in result.ranked if plan.plan.recompute_layers]
    assert len(some) > 1, "else little was tested"
    space = result.space
    assert space.total == sum(space.rejected.values()) + space.bounded + space.timed


@pytest.mark.parametrize("software", CAPACITIES)
def test_fewer_blocks_are_faster_and_hold_more(software: str) -> None:
    """What the bisection relies on."""
    families: dict[ParallelPlan, list[tuple[int, int, float]]] = {}
    for plan, size, seconds in every(software):
        if plan.recompute == "full":
            number = plan.recompute_layers or BLOCKS
            families.setdefault(plan.model_copy(update={"recompute_layers": None}), []).append((number, size, seconds))
    for rows in families.values():
        _, sizes, times_s = zip(*sorted(rows), strict=True)
        assert list(sizes) == sorted(sizes, reverse=True)
        assert list(times_s) == sorted(times_s)


def test_without_it_all_blocks_run_again_or_none() -> None:
    result = found_by(asked_for("torch"), recompute_layers="all", top=50)
    assert all(plan.plan.recompute_layers is None for plan in result.ranked)
    fastest = min(seconds for plan, _, seconds in every("torch") if not plan.recompute_layers)
    assert result.best is not None
    assert result.best.step_time_s == pytest.approx(fastest, rel=1e-9)


def test_software_that_cannot_does_not() -> None:
    job = replace(asked_for("megatron-core"), software=catalog.software("deepspeed-2021"))
    result = found_by(job, zero_stage=(0, 1), top=50)
    assert all(plan.plan.recompute_layers is None for plan in result.ranked)


def test_how_many_plans_there_are_depends_on_no_ranking() -> None:
    few, many = (found_by(asked_for("torch"), top=top).space for top in (1, 50))
    assert few.total == many.total == sum(many.rejected.values()) + many.bounded + many.timed
    assert few.rejected == many.rejected
    assert many.some_blocks > 0


@pytest.mark.parametrize("num_blocks", [8, 10, 13])
@pytest.mark.parametrize("software", CAPACITIES)
def test_estimates_are_just_below_the_time_with_one_block_in_every_stage(software: str, num_blocks: int) -> None:
    """A plan is not simulated if 0.99 of its estimate is too slow, so this bounds the fewest blocks of any plan."""
    job = replace(asked_for(software), cluster=catalog.cluster("dgx-h100", 4))
    job = job.with_changes({"model.num_hidden_layers": num_blocks})
    interleaved = {"schedule": ("1f1b", "interleaved_1f1b"), "pp": (2, 4), "virtual_stages": (1, 2, 3, 4)}
    space = SearchSpace.model_validate({**SPACE, **interleaved, "microbatch_size": 1})
    goal = Goal.of(space, job)
    exploration = Exploration(job, space, None, WorkerPool(), Incumbents(goal, 4), Statistics(), lambda *_: None)
    exploration.bound()
    estimates = list(_whole(exploration, Incumbents(goal, 4), 10**15))  # bytes, so that memory asks for no block
    assert len(estimates) > 3
    for estimate in estimates:
        better = _in_stages(job, estimate, goal)
        assert estimate.about_s < better.about_s
        if (max_blocks := _most_blocks(job.with_plan(estimate.plan))) > 1:
            seconds = predict(job.with_plan(estimate.plan.model_copy(update={"recompute_layers": 1}))).step_time_s
            assert 0.9 < better.about_s / seconds <= 1 / 0.99, max_blocks
