"""The rulebook: what a search rejects early is what a scenario is refused for, and each rule reads what it says."""

from __future__ import annotations

import doctest
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simplan.rules.filter as plan_filter
from simplan import catalog
from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.rules import BY_NAME, RULES, Rule, check_job, violations
from simplan.rules.filter import PlanFilter
from simplan.search import SearchSpace
from simplan.search.enumeration import Enumeration
from tests.rules.jobs import job, jobs, plans
from tests.search.jobs import FAMILIES
from tests.support.slow import examples


def violated_by(asked: Job) -> list[Rule]:
    first = [rule for rule in RULES if not rule.after_others and any(rule.problems(asked))]
    return first or [rule for rule in RULES if rule.after_others and any(rule.problems(asked))]


def of_one_field(fields: dict[str, Any], place: int) -> tuple[str, Any]:
    return sorted(fields.items())[place % len(fields)]


@given(jobs(), plans(), st.lists(st.builds(of_one_field, plans(), st.integers(0)), min_size=8, max_size=24))
@settings(max_examples=examples(20, 50), deadline=None)
def test_a_filter_names_the_first_rule_that_a_plan_violates(
    asked: Job, first: dict[str, Any], changes: list[tuple[str, Any]]
) -> None:
    """It looks answers up by what rules say they read, so a rule that reads more is found out."""
    of_job = PlanFilter(asked)
    for change in ((), *([single] for single in changes)):
        plan = ParallelPlan.model_validate({**first, **dict(change)})
        violated = violated_by(asked.with_plan(plan))
        assert of_job.first_violated(plan) == (violated[0].name if violated else None)


@given(jobs())
@settings(max_examples=examples(40, 75), deadline=None)
def test_a_job_is_refused_for_all_that_it_violates(asked: Job) -> None:
    told = violations(asked)
    assert told == [problem for rule in violated_by(asked) for problem in rule.problems(asked)]
    if not told:
        check_job(asked)
        return
    with pytest.raises(SpecError) as refused:
        check_job(asked)
    assert refused.value.problems == tuple(told)
    could_be = not any(rule.modelled for rule in violated_by(asked))
    assert isinstance(refused.value, NotModelledError) == could_be
    assert all(problem.rule for problem in told)


@pytest.mark.parametrize("software", ["torch", "megatron-core", "maxtext"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_enumeration_leaves_out_what_is_refused_and_nothing_else(family: str, software: str) -> None:
    asked = job(family, num_devices=8, software=software, training={"global_batch_size": 16})
    space = SearchSpace(schedule=("gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-2p", "zb-v"), cp=(1, 2))
    space = space.model_copy(update={"tp_across_nodes": True})
    rejected: Counter[str] = Counter()
    enumeration = Enumeration(space, asked)
    kept = [table.plan(row) for table in enumeration.tables(rejected) for row in range(len(table))]
    assert not any(violations(asked.with_plan(plan)) for plan in kept)
    assert len(kept) + rejected.total() == enumeration.total
    assert {*rejected} <= {*BY_NAME}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_words_are_those_of_the_framework(name: str) -> None:
    words = BY_NAME[name].in_words(catalog.software("maxtext"))
    assert not any(of_torch in words for of_torch in ("DistributedDataParallel", "FSDP", "torch loses"))


def test_the_example_is_true() -> None:
    assert doctest.testmod(plan_filter).failed == 0
