"""Changes with which a plan fits: each is checked with ``predict``, and the best against a search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from simplan import catalog
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.jitter import apply_jitter
from simplan.predict.step_summary import summarize_step
from simplan.report.text import fixes_table
from simplan.scenario import make_job, scenario_from
from simplan.search import SearchSpace, fixes, search
from simplan.search.fixes import OUTSIDE_OF_SEARCHES
from simplan.training import TrainingSpec
from tests.support.problems import refuses
from tests.support.slow import slow_except


def job_of(plan: ParallelPlan, *, model: str = "llama3-8b", num_devices: int = 8, **training: Any) -> Job:
    fields: dict[str, Any] = {"global_batch_size": 64} | training
    cluster = catalog.cluster("dgx-h100", num_devices)
    return Job(catalog.model(model), cluster, TrainingSpec(**fields), plan, catalog.software("torch"))


@pytest.mark.parametrize(
    "job",
    [
        job_of(ParallelPlan(dp_shard=8, microbatch_size=2)),
        *slow_except(
            [],
            [
                job_of(ParallelPlan(dp_replicate=8), global_batch_size=16),
                job_of(ParallelPlan(pp=8, schedule="gpipe"), global_batch_size=32),
                job_of(ParallelPlan(dp_shard=8), model="llama3-70b", task="sft"),
            ],
        ),
    ],
    ids=["fsdp", "ddp", "gpipe", "70b"],
)
def test_every_fix_fits_as_written(job: Job) -> None:
    before = predict(job)
    changes = fixes(before)
    assert before.fits is False
    assert 1 <= len(changes) <= 5
    for fix in changes:
        changed = job.with_changes(fix.changes)
        after = predict(changed)
        assert changed == fix.job
        assert after.fits
        assert after.host_fits is not False
        assert after.worst_memory.short_bytes == 0
        assert (fix.step_time_s, fix.device_bytes) == (after.step_time_s, after.worst_memory.device_bytes)
        assert fix.memory_verdict == after.memory_verdict
        assert f" {after.memory_verdict} " in fixes_table([fix])
        assert fix.step_time_change == pytest.approx(after.step_time_s / before.step_time_s - 1)
    same = [fix for fix in changes if not fix.more_devices and fix.job.training == job.training]
    assert same == sorted(same, key=lambda fix: (fix.memory_verdict != "fits", fix.step_time_s))
    rows = [
        (fix.job.training.task, fix.job.cluster.num_devices, len(fix.changes), fix.step_time_s, fix.device_bytes)
        for fix in changes
    ]
    for task, *row in rows:
        better = [other for same_task, *other in rows if same_task == task and other[1] < row[1]]
        assert not any(all(a <= b for a, b in zip(other, row, strict=True)) for other in better), "no row is dominated"


def test_pairs_have_the_smallest_change_of_each_kind_that_is_enough() -> None:
    """Recomputation of some matmuls is enough with optimizer states on the host, and faster than of whole blocks.

    Next to a loss in chunks it is not enough.
    """
    changes = fixes(predict(make_job("llama3-8b", cluster="dgx-a100-40gb", num_devices=4, seq_len=8192)))
    assert changes[0].changes == {"plan.recompute": "full", "software.loss": "chunked"}
    assert changes[1].changes == {"plan.recompute": "selective_op", "plan.offload_optimizer": True}
    assert [fix.memory_verdict for fix in changes if not fix.more_devices][-1] == "may not fit", "these are last"


def test_no_fix_of_the_mesh_is_faster_than_the_best_plan_of_an_exact_search() -> None:
    """The search tries every setting of this mesh; it includes recomputation of some blocks, a fix does not."""
    job = job_of(ParallelPlan(dp_shard=8, microbatch_size=2))
    best = search(job, SearchSpace(tp=(1,), pp=(1,), dp_shard=(8,), max_memory_fraction=1.0), explain=False).best
    assert best is not None
    others = {"plan.tp", "plan.cp", "plan.pp", "plan.dp_shard", "cluster.num_devices", "software.loss"}
    same = [fix for fix in fixes(predict(job)) if not others & fix.changes.keys()]
    assert {"plan.recompute": "full"} in [dict(fix.changes) for fix in same]
    assert all(fix.step_time_s >= best.step_time_s for fix in same)


@pytest.mark.slow
def test_jitter_is_simulated_for_few_fixes_of_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes are compared without jitter, and those that are shown are predicted with it."""
    job = job_of(ParallelPlan(dp_replicate=8), global_batch_size=16)
    jittered = job.with_changes({"cluster.jitter": {"compute_relative_std": 0.1}})
    before, simulated = predict(jittered), Counter[str]()

    def counted(*args: Any) -> Any:
        simulated["steps"] += 1
        return apply_jitter(*args)

    monkeypatch.setattr(import_module("simplan.predict.jitter"), "apply_jitter", counted)
    assert [fix.changes for fix in fixes(before)] == [fix.changes for fix in fixes(predict(job))]
    assert 0 < simulated["steps"] <= 8
    monkeypatch.setattr(import_module("simplan.search.fixes"), "_MAX_INDIVIDUAL", len(before.timeline.spans) - 1)
    assert fixes(before) == ()


def test_a_plan_that_fits_needs_no_fix() -> None:
    assert fixes(predict(job_of(ParallelPlan(dp_shard=8, tp=1), model="gpt2-124m"))) == ()


def test_lora_is_a_fix_of_fine_tuning_alone() -> None:
    plan = ParallelPlan(dp_shard=2)
    for task, is_fix in (("sft", True), ("pretrain", False)):
        changes = fixes(predict(job_of(plan, model="llama3-8b", num_devices=2, task=task)))
        assert any("training.task" in fix.changes for fix in changes) == is_fix, task


def test_a_change_that_fits_for_sure_is_found_next_to_one_that_may_not() -> None:
    """QLoRA of an 8B at 8,192 tokens needs 24 GB with whole logits; in chunks half of them stays free."""
    job = make_job(
        "llama3-8b", device="rtx-4090", num_devices=1, seq_len=8192, task="lora", base_weights="nf4", lora_rank=16
    )
    changes = fixes(predict(job))
    assert [(dict(fix.changes), fix.memory_verdict) for fix in changes] == [
        ({"plan.recompute": "full", "software.loss": "chunked"}, "fits"),
        ({"plan.offload_activations": True}, "may not fit"),
    ]
    assert changes[0].headroom_bytes > 10 * 2**30


def test_base_weights_of_four_bits_come_after_changes_that_train_the_same() -> None:
    job = make_job("llama3-8b", device="rtx-4090", num_devices=1, seq_len=2048, task="lora", lora_rank=16)
    changes = fixes(predict(job))
    assert [fix.changes.get("training.base_weights") for fix in changes] == [None] * (len(changes) - 1) + ["nf4"]
    assert all(job.with_changes(fix.changes) == fix.job for fix in changes)


def test_a_full_host_is_relieved() -> None:
    job = job_of(ParallelPlan(dp_shard=16, offload_optimizer=True), num_devices=16)
    small = replace(job, cluster=job.cluster.with_changes(host_memory_bytes=10 * 2**30))
    before = predict(small)
    assert before.worst_memory.fits
    assert (before.fits, before.host_fits, before.memory_verdict) == (False, False, "does not fit")
    assert summarize_step(small).fits is False, "also in verdicts of published runs"
    assert (
        search(
            small,
            SearchSpace(tp=(1,), pp=(1,), zero_stage=(3,), microbatch_size=(1,), recompute=("full",)),
            explain=False,
        ).ranked
        == ()
    ), "every plan offloads"
    assert any(fix.changes == {"plan.offload_optimizer": False} for fix in fixes(before))


def test_changed_settings_are_those_of_a_file() -> None:
    """Defaults that depend on other settings follow, as in a scenario that has the other value."""
    text = {
        "model": {"preset": "llama3-8b"},
        "cluster": {"preset": "dgx-h100", "num_nodes": 2},
        "training": {"global_batch_size": 64},
    }
    job = scenario_from({**text, "plan": {"dp_replicate": 16}}).job
    for changes in (
        {"plan.dp_replicate": 1, "plan.dp_shard": 16},
        {"plan.dp_replicate": 1, "plan.dp_shard": 2, "plan.zero_stage": 2, "plan.pp": 8, "plan.schedule": "zb-v"},
        {"plan.dp_replicate": 2, "plan.tp": 8, "training.precision": "fp8", "model.num_hidden_layers": 16},
        {"cluster.num_devices": 32, "plan.dp_replicate": 32},
    ):
        assert job.with_changes(changes) == scenario_from({**text, "plan": {"dp_replicate": 16}}, changes).job
    alone = scenario_from({**text, "plan": {"dp_replicate": 8}}, {"cluster.num_nodes": 1}).job
    assert alone.with_changes({"cluster.num_devices": 16}).cluster == job.cluster


@pytest.mark.parametrize(
    ("changes", "field", "rule", "fix"),
    [
        ({"plan.microbatch": 2}, "plan.microbatch", "is not a known key", "microbatch_size or microbatch_sizes"),
        ({"plan.tp": "two"}, "plan.tp", "must be a whole number", ""),
        ({"plans.tp": 2}, "plans", "is no setting", "did you mean plan?"),
        ({"plan": 2}, "plan", "is no setting", "write plan.KEY"),
    ],
)
def test_an_unknown_change_is_named(changes: dict[str, object], field: str, rule: str, fix: str) -> None:
    with refuses(field, rule=rule, fix=fix):
        job_of(ParallelPlan()).with_changes(changes)


@pytest.mark.parametrize("framework", ["torch", "torchtitan", "accelerate", "deepspeed"])
def test_host_is_offered_by_every_framework_that_has_it(framework: str) -> None:
    model = catalog.model("qwen2.5-32b").model_copy(update={"num_hidden_layers": 40, "seq_len": 1024})
    software = catalog.software(framework)
    training = TrainingSpec(global_batch_size=8, task="sft" if framework in ("accelerate", "deepspeed") else "pretrain")
    plan = ParallelPlan(dp_shard=8, recompute="full")
    before = predict(Job(model, catalog.cluster("dgx-a100-40gb", 8), training, plan, software))
    assert before.fits is False
    [fix] = fixes(before, kinds=OUTSIDE_OF_SEARCHES[:1])
    assert fix.changes == {"plan.offload_optimizer": True}
    after = predict(fix.job)
    host_s = sum(term.seconds * term.count for term in after.terms if term.name.endswith("optimizer on the host"))
    assert host_s > 0.1 * after.step_time_s
    slow_s = after.step_time_s + 4 * host_s  # with too few threads (deepspeedai/DeepSpeed issue 6834)
    assert after.step_time_interval_s[1] > 0.85 * slow_s
