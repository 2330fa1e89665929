"""No plan: what would make one, and that it does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from simplan import catalog
from simplan.base import MAX_DEVICES
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.search import RequestChange, SearchSpace, search
from simplan.search.changes import _batch
from simplan.search.evaluation.evaluator import Evaluator, Numbers
from simplan.search.evaluation.workers import WorkerPool
from simplan.search.explore import first_fit
from simplan.search.progress import SearchPhase
from simplan.training import TrainingSpec
from simplan.units import MIB
from tests.search.jobs import small_job
from tests.support.problems import says


def changes_of(asked: Job, space: SearchSpace) -> dict[str, RequestChange]:
    result = search(asked, space)
    assert result.best is None
    return {change.what: change for change in result.changes}


def needs(asked: Job, plan: ParallelPlan) -> int:
    prediction = predict(asked.with_plan(plan))
    return prediction.worst_memory.device_bytes


def asked_for(memory_mib: int) -> Job:
    sizes: dict[str, Any] = {"hidden_size": 512, "vocab_size": 8192, "seq_len": 512, "intermediate_size": 2048}
    job = small_job(num_devices=2, memory_bytes=memory_mib * MIB, **sizes)
    return job.with_changes({"software.zero_grad_set_to_none": False})  # the thresholds below count gradients


def test_every_change_makes_a_plan() -> None:
    job = asked_for(1540)
    space = SearchSpace(recompute=("none",), microbatch_size=(4,), schedule=("1f1b",), max_memory_fraction=0.9)
    by_kind = changes_of(job, space)
    assert set(by_kind) == {
        "max_memory_fraction",
        "memory_bytes",
        "recompute",
        "ranges",
        "num_devices",
    }
    limit = int(1540 * MIB * 0.9)
    memory = by_kind["memory_bytes"]
    assert limit < needs(job, by_kind["max_memory_fraction"].plan) <= 1540 * MIB
    assert limit < needs(job, memory.plan) <= float(memory.value) * 0.9 < needs(job, memory.plan) + 1
    for what in ("recompute", "ranges"):
        assert needs(job, by_kind[what].plan) <= limit, what
    assert by_kind["recompute"].plan.recompute == "full"
    more = job.with_num_devices(int(by_kind["num_devices"].value))
    assert needs(more, by_kind["num_devices"].plan) <= limit


@pytest.mark.slow
def test_changes_keep_to_what_the_software_has() -> None:
    """Megatron Core has neither ZeRO-2 nor ZeRO-3: they are nothing that a user left out."""
    megatron = catalog.software("megatron-core")
    nothing = changes_of(replace(asked_for(800), software=megatron), SearchSpace(max_memory_fraction=1.0))
    assert set(nothing) == {"memory_bytes"}
    narrow = SearchSpace(microbatch_size=(4,), schedule=("1f1b",), recompute=("none",), max_memory_fraction=1.0)
    some = replace(asked_for(1300), software=megatron)
    assert changes_of(some, narrow)["ranges"].value == "schedule, microbatch_size, recompute"
    change = changes_of(some, narrow.model_copy(update={"zero_stage": (1,)}))["ranges"]
    assert change.value == "schedule, zero_stage, microbatch_size, recompute"
    assert change.plan.zero_stage in megatron.zero_stages


def test_no_device_has_more_memory_than_one_can_be_described_with() -> None:
    space = SearchSpace(max_memory_fraction=5e-324, recompute=("none",), schedule=("1f1b",), microbatch_size=(1,))
    by_kind = changes_of(asked_for(1500), space)
    assert "memory_bytes" not in by_kind


def test_no_cluster_has_more_devices_than_one_can_be_described_with() -> None:
    job = Job(
        small_job(num_devices=1).model,
        catalog.cluster("dgx-h100", MAX_DEVICES),
        TrainingSpec(global_batch_size=8),
        ParallelPlan(),
        catalog.software("torch"),
    )
    assert "num_devices" not in changes_of(job, SearchSpace(tp=(1,), pp=(1,), cp=(1,), microbatch_size=(1,)))


def test_a_smaller_batch_is_a_change_where_it_helps() -> None:
    job = asked_for(1310)
    space = SearchSpace(
        pp=(2,), schedule=("gpipe",), microbatch_size=(1,), recompute=("none", "full"), max_memory_fraction=1.0
    )
    by_kind = changes_of(job, space)
    size = int(by_kind["global_batch_size"].value)
    assert size < job.training.global_batch_size
    less = replace(job, training=job.training.model_copy(update={"global_batch_size": size}))
    assert needs(less, by_kind["global_batch_size"].plan) <= 1310 * MIB
    twice = replace(job, training=job.training.model_copy(update={"global_batch_size": 2 * size}))
    result = search(twice, space, explain=False)
    assert result.best is None, "it is the largest that works"


def test_a_plan_too_large_with_a_small_batch_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None fits with any batch, and each size evaluated all plans anew."""
    tried: Counter[ParallelPlan] = Counter()
    numbers = Evaluator.numbers

    def counted(self: Evaluator, plan: ParallelPlan, max_bytes: int | None) -> Numbers:
        tried[plan] += 1
        return numbers(self, plan, max_bytes)

    monkeypatch.setattr(Evaluator, "numbers", counted)
    job, space = asked_for(1368), SearchSpace(recompute=("none",), microbatch_size=(1,), schedule=("1f1b",))
    with WorkerPool(1) as workers:
        assert _batch(job, space, partial(first_fit, calibration=None, workers=workers)) is None
    assert max(tried.values()) == 1


def test_progress_counts_plans_tried_for_changes() -> None:
    """More devices were tried for minutes without a word."""
    told: list[SearchPhase] = []
    space = SearchSpace(recompute=("none",), microbatch_size=(1,), schedule=("1f1b",))
    search(asked_for(1368), space, on_progress=lambda progress: told.append(progress.phase))
    numbers = [phase.done for phase in told if phase.name == "looking for what would make a plan"]
    assert numbers == [*range(len(numbers))]
    assert len(numbers) > 2


def test_a_deadline_is_told_by_the_fastest_plan() -> None:
    job = small_job(num_devices=2)
    by_kind = changes_of(job, SearchSpace(max_step_time_s=1e-9, recompute=("none",), microbatch_size=(1,)))
    assert set(by_kind) == {"max_step_time_s"}
    deadline_s = float(by_kind["max_step_time_s"].value)
    words = by_kind["max_step_time_s"].words.split(":")[0]
    assert float(words.removeprefix("allow max_step_time_s = ")) >= deadline_s
    space = SearchSpace(max_step_time_s=deadline_s, recompute=("none",), microbatch_size=(1,))
    result = search(job, space, explain=False)
    assert [plan.step_time_s for plan in result.ranked] == [pytest.approx(deadline_s)]


def test_batch_that_all_devices_can_share_is_named() -> None:
    """Seven devices take no batch of 128, and their pipeline does not fit."""
    job = Job(
        catalog.model("llama3-8b"),
        catalog.cluster("dgx-h100", 7),
        TrainingSpec(global_batch_size=128),
        ParallelPlan(),
        catalog.software("torch"),
    )
    space = SearchSpace(recompute=("full",), schedule=("1f1b",), microbatch_size=(1,), zero_stage=(3,), cp=(1,))
    batch = changes_of(job, space)["global_batch_size"]
    assert batch.value == 126
    assert says(batch.words, "global_batch_size = 126", "128", "7 devices")
    assert batch.plan.dp == 7
