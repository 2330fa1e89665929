"""A search against brute force: ``predict`` of every plan of a small space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simplan.search.floor import MemoryFloor
from simplan.search.reference import ReferenceEvaluator
from tests.search.alike import Numbers, shown

from simplan.predict import predict
from simplan.program.program import MemoryCategory
from simplan.search import Question, SearchResult, SearchSpace, search
from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration
from simplan.search.tally import rounded
from simplan.spec.plan import ParallelPlan
from simplan.units import MIB
from tests.search.questions import FAMILIES, question

SPACE: dict[str, Any] = {
    "schedule": ("gpipe", "1f1b", "zb-h1"),
    "microbatch_size": (1, 2),
    "recompute": ("none", "full"),
    "recompute_layers": "all",
}
CAPACITY = 1091 * MIB


@cache
def brute_force(num_devices: int = 4) -> tuple[Numbers, ...]:
    """Every plan with its worst device's memory and its step time to 12 digits, by ``predict``."""
    asked = asked_for(num_devices)
    enumeration = Enumeration(SearchSpace(**SPACE), asked)
    found = []
    for candidate in enumeration.candidates(enumeration.meshes, Counter()):
        one = predict(asked.job(candidate.plan()), name="x")
        found.append((one.job.plan, one.worst_memory.device_bytes, rounded(one.step_time_s)))
    return tuple(found)


def asked_for(num_devices: int = 4) -> Question:
    return question(num_devices=num_devices, memory_bytes=CAPACITY, hidden_size=512, vocab_size=4096, seq_len=256)


def found_by(space: SearchSpace, jobs: int = 1) -> SearchResult:
    asked = asked_for()
    return search(asked.model, asked.cluster, asked.training, asked.software, space, jobs=jobs, explain=False)


def values(result: SearchResult) -> list[tuple[int, float]]:
    return [(plan.device_bytes, plan.step_time_s) for plan in result.ranked]


def test_the_space_is_worth_searching() -> None:
    """Some plans fit and some do not, and what is fastest of all does not."""
    every = brute_force()
    fitting = [numbers for numbers in every if numbers[1] <= CAPACITY]
    assert 20 < len(fitting) < len(every) - 20
    assert min(every, key=lambda n: n[2])[1] > CAPACITY


@pytest.mark.parametrize(
    ("objective", "value"),
    [
        ("step_time", lambda size, seconds: (seconds,)),
        ("tokens_per_s_per_device", lambda size, seconds: (-1 / seconds,)),
        ("memory", lambda size, seconds: (size, seconds)),
        ("num_devices", lambda size, seconds: (seconds,)),
        ("cost", lambda size, seconds: (seconds,)),
    ],
)
def test_the_ranked_plans_are_the_best_of_all(objective: str, value: Callable[[int, float], tuple[float, ...]]) -> None:
    space = SearchSpace.model_validate(
        {
            **SPACE,
            "objective": objective,
            "top": 7,
            "num_devices": 4,
            "dollars_per_device_hour": 2.0,
            "token_budget": 1e9,
        }
    )
    result = found_by(space)
    fitting = [numbers for numbers in brute_force() if numbers[1] <= CAPACITY]
    wanted = shown(sorted(fitting, key=lambda n: value(*n[1:])), alone=objective == "memory")[:7]
    for plan, (_, wanted_size, wanted_s, others) in zip(result.ranked, wanted, strict=True):
        assert plan.step_time_s == pytest.approx(wanted_s, rel=1e-9)
        assert objective != "memory" or plan.device_bytes == wanted_size
        assert plan.alike.num_plans == others
    counts = result.space
    assert counts.total == sum(counts.rejected.values()) + counts.bounded + counts.timed
    assert counts.rejected["memory"] == len(brute_force()) - len(fitting)
    assert counts.bounded > 0, "bounds that never cut are no bounds"


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("objectives", [("step_time", "memory"), ("memory", "step_time")])
def test_the_front_is_all_that_is_not_dominated(objectives: tuple[str, str], jobs: int) -> None:
    result = found_by(SearchSpace.model_validate({**SPACE, "objectives": objectives, "top": 2}), jobs)
    fitting = [(size, float(f"{seconds:.9g}")) for _, size, seconds in brute_force() if size <= CAPACITY]
    front = {
        (size, seconds)
        for size, seconds in fitting
        if not any(a <= size and b <= seconds and (a, b) != (size, seconds) for a, b in fitting)
    }
    assert {(plan.device_bytes, float(f"{plan.step_time_s:.9g}")) for plan in result.pareto} == front
    assert len(result.pareto) == len(front) > 2


def test_a_deadline_and_less_memory_are_limits() -> None:
    fitting = sorted(seconds for _, size, seconds in brute_force() if size <= CAPACITY)
    deadline_s = fitting[len(fitting) // 2]
    result = found_by(SearchSpace(**SPACE, objective="memory", max_step_time_s=deadline_s))
    within = [(size, s) for _, size, s in brute_force() if size <= CAPACITY and s <= deadline_s]
    assert values(result)[0] == min(within)
    smallest = min(size for _, size, _ in brute_force())
    narrow = found_by(SearchSpace(**SPACE, max_memory_fraction=(smallest + 1) / CAPACITY))
    assert {size for size, _ in values(narrow)} == {smallest}


def test_nothing_within_the_deadline_tells_the_nearest() -> None:
    result = found_by(SearchSpace(**SPACE, max_step_time_s=1e-9))
    assert result.best is None
    fastest_s = min(seconds for _, size, seconds in brute_force() if size <= CAPACITY)
    [nearest, *_] = result.nearest_misses
    assert nearest.step_time_s == pytest.approx(fastest_s)
    assert nearest.lacking_s == pytest.approx(fastest_s - 1e-9)


def test_processes_find_the_same() -> None:
    space = SearchSpace(**SPACE, top=9)
    one, two = found_by(space), found_by(space, jobs=2)
    assert (one.ranked, one.nearest_misses) == (two.ranked, two.nearest_misses)
    assert one.space.rejected == two.space.rejected
    assert one.space.total == two.space.total == sum(two.space.rejected.values()) + two.space.bounded + two.space.timed


def test_several_numbers_of_devices_are_one_space() -> None:
    result = found_by(SearchSpace(**SPACE, objective="num_devices", num_devices=(2, 4), top=3))
    assert not [size for _, size, _ in brute_force(2) if size <= CAPACITY]
    assert {plan.num_devices for plan in result.ranked} == {4}
    assert result.best is not None
    assert result.best.step_time_s == min(seconds for _, size, seconds in brute_force() if size <= CAPACITY)


@st.composite
def any_candidate(draw: st.DrawFn) -> tuple[Question, Candidate]:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    asked = question(family, draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from(["dgx-h100", "dgx-v100"])))
    if asked.cluster.id == "dgx-v100":
        asked = replace(asked, training=asked.training.model_copy(update={"precision": "fp16"}))
    if family == "resnet":
        asked = replace(asked, training=asked.training.model_copy(update={"precision": "fp32"}))
    space = SearchSpace(
        cp=(1, 2),
        cp_comm=("ring", "all_gather"),
        schedule=("gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-2p", "zb-v"),
    )
    enumeration = Enumeration(space, asked)
    found = list(enumeration.candidates(enumeration.meshes, Counter()))
    return asked, draw(st.sampled_from(found))


@given(any_candidate())
@settings(max_examples=60, deadline=None)
def test_the_reference_is_what_predict_says_and_its_bound_is_below(drawn: tuple[Question, Candidate]) -> None:
    asked, candidate = drawn
    one = predict(asked.job(candidate.plan()), name="x")
    evaluator = ReferenceEvaluator(asked)
    assert evaluator.device_bytes([candidate]) == [one.worst_memory.device_bytes]
    assert 0 < MemoryFloor(asked).bytes(candidate) <= one.worst_memory.device_bytes
    assert evaluator.step_times_s([candidate]) == [one.step_time_s]
    [least_s] = evaluator.least_time_s([candidate])
    assert 0 < least_s <= one.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        {"dp_replicate": 4},
        {"dp_shard": 4, "zero_stage": 1},
        {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 3},
        {"tp": 2, "pp": 2},
        {"pp": 2, "dp_shard": 2, "zero_stage": 2},
        {"tp": 2, "dp_replicate": 2, "lora": True},
    ],
)
def test_the_memory_floor_is_the_mean_of_weights_optimizer_states_and_inputs_of_blocks(plan: dict[str, Any]) -> None:
    asked = asked_for()
    if plan.pop("lora", False):
        model = asked.model.model_copy(update={"lora_rank": 8})
        asked = replace(asked, model=model, training=asked.training.model_copy(update={"task": "lora"}))
    one = predict(asked.job(ParallelPlan.model_validate(plan)), name="x")
    kept = (MemoryCategory.PARAMETERS, MemoryCategory.OPTIMIZER)
    mean_bytes = sum(memory.by_category.get(kind, 0) for memory in one.memory for kind in kept) / len(one.memory)
    blocks = asked.model.num_hidden_layers - (asked.model.lora_rank > 0)
    mean_bytes += (
        2 * asked.model.seq_len * asked.model.hidden_size * blocks / (one.job.plan.tp * one.job.plan.pp)
    )  # bf16
    floor = MemoryFloor(asked)
    candidate = Candidate(**{key: getattr(one.job.plan, key) for key in Candidate._fields})
    least_bytes = floor.bytes(candidate) - floor.bytes(Candidate(pp=10**12))
    assert least_bytes == pytest.approx(mean_bytes, rel=0.02)  # norms are whole on every tensor-parallel rank
    assert least_bytes <= mean_bytes
