"""A search over the modules that selective recomputation runs again, against the prediction of every plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.predict import predict
from simplan.rules import BY_NAME, check_job
from simplan.search import SearchSpace, search
from simplan.search.enumeration import Enumeration
from simplan.units import MIB
from tests.search.jobs import small_job
from tests.support.problems import refuses

MODULES = ["core_attn"], ["mlp"], ["mlp", "core_attn"]
SPACE: dict[str, Any] = {
    "max_memory_fraction": 1.0,
    "schedule": ("1f1b", "zb-h1"),
    "pp": (1, 2),
    "tp": 1,
    "microbatch_size": 2,
    "recompute": ("none", "selective"),
    "recompute_modules": MODULES,
    "zero_stage": (0, 1),
    "top": 100,
}


def asked_for(software: str = "megatron-core") -> Job:
    return small_job(memory_bytes=1095 * MIB, software=software, hidden_size=512, vocab_size=2048, seq_len=256)


def test_every_list_of_modules_is_a_plan_that_predict_would_give() -> None:
    job = asked_for()
    result = search(job, SearchSpace.model_validate(SPACE), explain=False)
    assert {("mlp",), ("mlp", "core_attn")} <= {plan.plan.recompute_modules for plan in result.ranked}
    assert result.space.rejected["split_backward_recompute"] > 0
    assert result.space.rejected["memory"] > 0, "modules decide what fits"
    for plan in result.ranked:
        alone = predict(job.with_plan(plan.plan))
        assert plan.step_time_s == pytest.approx(alone.step_time_s, rel=1e-3)
        assert plan.device_bytes == pytest.approx(alone.worst_memory.device_bytes, rel=1e-3)


def test_plans_that_pass_the_rules_are_valid() -> None:
    job = asked_for()
    enumeration = Enumeration(SearchSpace.model_validate(SPACE), job)
    rejected: Counter[str] = Counter()
    passed = [table.plan(row) for table in enumeration.tables(rejected) for row in range(len(table))]
    for plan in passed:
        check_job(job.with_plan(plan))
    assert len(passed) + rejected.total() == enumeration.total
    assert {*rejected} <= {*BY_NAME}


def test_one_list_stands_for_itself() -> None:
    space = SearchSpace.model_validate({"recompute_modules": ["mlp", "core_attn"]})
    assert space.recompute_modules == (("mlp", "core_attn"),)


@pytest.mark.parametrize(
    ("software", "modules", "error", "said"),
    [
        ("megatron-core", [["moe_act"]], SpecError, "no block of the model has such a module"),
        ("megatron-core", [["mlp", "mlp"]], SpecError, "names a module twice"),
        ("torch", [["core_attn"], ["mlp"]], NotModelledError, "torch does not run this module alone again"),
    ],
)
def test_modules_that_cannot_be_are_refused_by_name(
    software: str, modules: list[list[str]], error: type[SpecError], said: str
) -> None:
    job = asked_for(software)
    space = SearchSpace.model_validate({"recompute_modules": modules})
    with pytest.raises(error, match=said) as refused:
        search(job, space)
    assert [problem.field for problem in refused.value.problems] == ["search.recompute_modules"]


def test_modules_without_selective_recomputation_are_refused() -> None:
    job = asked_for()
    space = SearchSpace.model_validate({"recompute_modules": [["mlp"]], "recompute": ["none", "full"]})
    with refuses("search.recompute_modules", rule="search.recompute = "):
        search(job, space)
