"""Ways that change the mathematics are searched, and ranked only with a number of samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplan.errors import SpecError
from simplan.job import Job
from simplan.predict import predict
from simplan.search import SearchSpace, search
from simplan.search.ways import PUBLISHED, ways_of
from tests.search.jobs import small_job

SPACE = {"tp": 1, "pp": 1, "recompute": "none", "microbatch_size": 1, "replication": [{"kind": "diloco"}]}


def slow_job() -> Job:
    """A job whose nodes have a slow network, so that replicas that train alone take far less time a step."""
    job = small_job("llama", 16, batch=16, cluster="dgx-h100", num_hidden_layers=4)
    assert job.cluster.inter_link is not None
    slow = job.cluster.inter_link.model_copy(update={"bytes_per_s": 1e8})
    return job.with_changes({"cluster.inter_link": slow})


JOB = slow_job()


def test_a_way_without_samples_is_never_ranked() -> None:
    result = search(JOB, SPACE, explain=False)
    assert all(plan.plan.replication is None for plan in result.ranked)
    [way] = result.ways
    assert way.best is not None
    assert way.best.plan.replication is not None
    assert way.samples_factor is None
    assert result.synchronous == result.best
    assert "not ranked" in result.report()


def test_a_way_pays_up_to_the_ratio_of_step_times() -> None:
    """The factor is where both reach a loss at once, by ``predict``; ranks change there and nowhere else."""
    [way] = search(JOB, SPACE, explain=False).ways
    assert way.best is not None
    assert way.pays_below is not None
    synchronous_s = min(
        predict(JOB.with_plan(plan.plan)).step_time_s
        for plan in search(JOB, {**SPACE, "replication": None, "dp_replicate": [1, 2, 4, 8, 16]}, explain=False).ranked
    )
    own_s = predict(JOB.with_plan(way.best.plan)).step_time_s
    assert way.pays_below == pytest.approx(synchronous_s / own_s, rel=1e-6)
    assert way.pays_below > 1.05
    for factor, first in ((0.99 * way.pays_below, True), (1.01 * way.pays_below, False)):
        result = search(JOB, {**SPACE, "samples_factor": {"diloco": factor}}, explain=False)
        assert result.best is not None
        assert (result.best.plan.replication is not None) is first


def test_published_factors_name_their_source() -> None:
    result = search(JOB, {**SPACE, "samples_factor": {"diloco": "published"}}, explain=False)
    [way] = result.ways
    assert way.samples_factor == PUBLISHED["diloco"].factor
    assert "arXiv:2311.08105" in way.source
    assert "arXiv:2311.08105" in result.report()
    assert all(factor.source and factor.read in ("paper", "abstract", "recalled") for factor in PUBLISHED.values())


def test_a_way_that_nothing_of_the_space_allows_says_why() -> None:
    space = {"tp": 1, "pp": 2, "compression": ["powersgd"], "schedule": "1f1b", "recompute": "none"}
    [way] = search(JOB, space, explain=False).ways
    assert way.best is None
    assert way.why_not


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"samples_factor": {"diloco": 1.1}}, "compares no such way"),
        ({"replication": ["diloco"], "samples_factor": {"diloco": 0}}, "greater than 0"),
        ({"replication": ["disloco"]}, "disloco"),
        ({"replication": ["hogwild"], "samples_factor": {"hogwild": "published"}}, "no published"),
    ],
)
def test_wrong_ways_are_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        search(JOB, {"tp": 1, **fields}, explain=False)


def test_ways_keep_their_order() -> None:
    space = SearchSpace.from_fields({"replication": ("local_sgd", "diloco"), "compression": ("fp16",)})
    assert [way.kind for way in ways_of(space)] == ["local_sgd", "diloco", "fp16"]
    assert replace(search(JOB, {**SPACE, "top": 1}, explain=False)).to_json()["ways"]
