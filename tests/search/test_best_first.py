"""A search by bounds first, of software whose plans are written out one by one, against the numbers of every plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from simplan.search.abridged import AbridgedEvaluator
from tests.search.alike import shown

from simplan.errors import NotModelledError
from simplan.predict import predict
from simplan.search import Progress, Question, SearchResult, SearchSpace, search
from simplan.search.candidate import Candidate
from simplan.search.enumeration import Enumeration
from simplan.search.keep import NOISE
from simplan.search.tally import rounded
from simplan.spec import catalogue
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec
from simplan.units import MIB
from tests.search.questions import question

SPACE: dict[str, Any] = {
    "schedule": ("1f1b", "interleaved_1f1b", "zb-h1"),
    "microbatch_size": (1, 2),
    "recompute": ("none", "full"),
    "recompute_layers": "all",
    "zero_stage": (0, 1),
    "sequence_parallel": True,
}
CAPACITY = 1115 * MIB
Row = tuple[float, int, ParallelPlan]


def asked_for(software: str = "megatron-core", capacity: int = CAPACITY) -> Question:
    asked = question(num_devices=4, memory_bytes=capacity, hidden_size=512, vocab_size=4096, seq_len=256)
    return replace(asked, software=catalogue.software(software))


def candidates(asked: Question, space: SearchSpace) -> list[Candidate]:
    enumeration = Enumeration(space, asked)
    return list(enumeration.candidates(enumeration.meshes, Counter()))


@cache
def every() -> tuple[Row, ...]:
    """Time to 12 digits, memory and plan of every candidate, fastest first."""
    asked = asked_for()
    found = candidates(asked, SearchSpace(**SPACE))
    numbers = AbridgedEvaluator(asked).numbers(found, None)
    rows = [(rounded(s), size, c.plan()) for c, (size, s) in zip(found, numbers, strict=True) if s is not None]
    return tuple(sorted(rows, key=lambda row: row[:2]))


def found_by(asked: Question, jobs: int = 1, **space: Any) -> SearchResult:
    asked.check()
    space_of = SearchSpace.model_validate({**SPACE, **space})
    return search(asked.model, asked.cluster, asked.training, asked.software, space_of, jobs=jobs, explain=False)


def test_the_space_is_worth_searching() -> None:
    """Some plans fit and some do not, and what is fastest of all does not."""
    fitting = [row for row in every() if row[1] <= CAPACITY]
    assert 10 < len(fitting) < len(every()) - 10
    assert every()[0][1] > CAPACITY


def test_it_finds_the_best_and_looks_at_few() -> None:
    fitting = [row for row in every() if row[1] <= CAPACITY]
    result = found_by(asked_for(), top=3)
    wanted = shown([(plan, size, seconds) for seconds, size, plan in fitting])[:3]
    assert [(plan.plan, plan.device_bytes, plan.step_time_s) for plan in result.ranked] == [row[:3] for row in wanted]
    space = result.space
    assert space.total == sum(space.rejected.values()) + space.bounded + space.timed
    assert space.timed < len(fitting) / 2, (space, len(fitting))


@pytest.mark.parametrize("objectives", [("step_time", "memory"), ("memory", "step_time")])
def test_its_front_is_all_that_is_not_dominated(objectives: tuple[str, str]) -> None:
    fitting = [(size, seconds) for seconds, size, _ in every() if size <= CAPACITY]
    front = {
        (size, seconds)
        for size, seconds in fitting
        if not any(a <= size and b <= seconds and (a, b) != (size, seconds) for a, b in fitting)
    }
    result = found_by(asked_for(), objectives=objectives, top=1)
    assert {(plan.device_bytes, plan.step_time_s) for plan in result.pareto} == front
    assert len(front) > 2


def test_the_nearest_misses_are_those_that_could_be_among_the_best() -> None:
    """As far as a bound on their time tells; as fast to a thousandth is among them."""
    asked = asked_for()
    result = found_by(asked, top=1)
    assert result.best is not None
    missing = [row for row in every() if row[1] > CAPACITY]
    of_plan = {c.plan(): c for c in candidates(asked, SearchSpace(**SPACE))}
    least_s = AbridgedEvaluator(asked).least_time_s([of_plan[plan] for *_, plan in missing])
    near_s = (1 + NOISE) * result.best.step_time_s
    possible = [size for (_, size, _), bound_s in zip(missing, least_s, strict=True) if bound_s < near_s]
    assert [miss.device_bytes for miss in result.nearest_misses] == sorted(possible)[:3]
    assert 3 < len(possible) < len(missing)


def test_where_nothing_fits_the_nearest_misses_are_those_that_lack_least() -> None:
    sizes = sorted(size for _, size, _ in every())
    capacity = sizes[0] - MIB
    result = found_by(asked_for(capacity=capacity))
    assert result.best is None
    assert [miss.device_bytes for miss in result.nearest_misses] == sizes[:3]
    assert result.space.rejected["memory"] == len(sizes)


def test_nothing_within_the_deadline_tells_the_nearest() -> None:
    result = found_by(asked_for(), max_step_time_s=1e-9)
    fastest_s = min(seconds for seconds, size, _ in every() if size <= CAPACITY)
    assert result.best is None
    assert result.nearest_misses[0].step_time_s == fastest_s


def test_a_deadline_is_a_limit() -> None:
    fitting = [row for row in every() if row[1] <= CAPACITY]
    deadline_s = fitting[len(fitting) // 2][0]
    result = found_by(asked_for(), objective="memory", max_step_time_s=deadline_s)
    assert result.best is not None
    assert result.best.device_bytes == min(size for seconds, size, _ in fitting if seconds <= deadline_s)


def test_a_stopped_search_has_plans_of_what_it_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplan.search.best_first._BATCH", 16)
    monkeypatch.setattr("simplan.search.best_first._FIRST_LOOK_S", 0.0)
    seen: list[Progress] = []
    asked = asked_for()
    parts = asked.model, asked.cluster, asked.training, asked.software, SearchSpace(**SPACE)
    watched = search(*parts, explain=False, soon=True, on_progress=seen.append)
    first = next(progress.done for progress in seen if progress.best_step_time_s is not None)
    assert first < watched.space.total / 2
    assert watched.ranked == search(*parts, explain=False).ranked


@pytest.mark.slow
def test_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplan.search.spread._ALONE", 0)
    one, two = found_by(asked_for(), top=9), found_by(asked_for(), jobs=2, top=9)
    assert (one.ranked, one.nearest_misses, one.space) == (two.ranked, two.nearest_misses, two.space)


@pytest.mark.slow
@pytest.mark.parametrize("software", ["megatron-lm-2022", "megatron-deepspeed", "nemo", "torchtitan", "maxtext"])
def test_it_ranks_as_predict_of_every_plan_does(software: str) -> None:
    asked = asked_for(software)
    profile = asked.software
    has: dict[str, Any] = {"zero_stage": profile.zero_stages, "sequence_parallel": profile.sequence_parallelism}
    fitting = []
    for candidate in candidates(asked, SearchSpace.model_validate(SPACE | has)):
        one = predict(asked.job(candidate.plan()), name="x")
        if one.fits and not one.worst_memory.short_bytes:
            fitting.append((one.job.plan, one.worst_memory.device_bytes, one.step_time_s))
    result = found_by(asked, top=8, **has)
    wanted = shown(sorted(fitting, key=lambda numbers: numbers[2]))[:8]
    assert [plan.step_time_s for plan in result.ranked] == pytest.approx([seconds for *_, seconds, _ in wanted])
    assert [plan.alike.num_plans for plan in result.ranked] == [others for *_, others in wanted]


def test_a_space_of_all_defaults_is_what_the_software_has() -> None:
    """Megatron Core shards optimizer states at most; ZeRO-2 and 3 are no plans of its, and refused by name."""
    model = catalogue.model("llama3-8b").model_copy(update={"num_hidden_layers": 2})
    asked = (
        model,
        catalogue.cluster("dgx-h100"),
        TrainingSpec(global_batch_size=16),
        catalogue.software("megatron-core"),
    )
    found = search(*asked, explain=False)
    assert {ranked.plan.zero_stage for ranked in found.ranked} <= {0, 1}
    with pytest.raises(NotModelledError, match="megatron-core has zero_stage 0 or 1 only"):
        search(*asked, SearchSpace(zero_stage=(3,)))
