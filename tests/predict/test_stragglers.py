"""Slow ranks and slow links: closed forms of what the others wait for."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest

from simplan import catalog
from simplan.cluster.hardware import Jitter, SlowLink, Straggler
from simplan.cluster.topology import Switch
from simplan.errors import NotModelledError, SpecError
from simplan.explain import explain
from simplan.job import Job
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.predict import predict, predict_step
from simplan.predict.build import folding_of
from simplan.predict.stragglers import slowdowns
from simplan.program.folding import unfolded
from simplan.search import search
from simplan.training import TrainingBudget, TrainingSpec
from tests.jobs import tiny_model
from tests.support.problems import refuses, says
from tests.support.slow import slow_except


def job_of(plan: ParallelPlan, **cluster: object) -> Job:
    cluster_of_plan = catalog.cluster("dgx-h100", plan.num_devices).with_changes(**cluster)
    training = TrainingSpec(global_batch_size=8 * plan.dp, precision="bf16")
    return Job(
        tiny_model(num_hidden_layers=4, tied_embeddings=False),
        cluster_of_plan,
        training,
        plan,
        catalog.software("torch"),
    )


def slow(rank: int, times: float) -> tuple[Straggler, ...]:
    return (Straggler(rank=rank, slowdown=times),)


def compute_s(job: Job, rank: int) -> float:
    split = predict(job).splits[rank]
    return split.compute_s + split.recompute_s + split.optimizer_s


def test_kernels_of_a_slow_rank_take_so_many_times_longer() -> None:
    plan = ParallelPlan(dp_replicate=16)
    before, after = job_of(plan), job_of(plan, stragglers=slow(5, 1.5))
    twice = job_of(plan, stragglers=slow(5, 2.0))
    first, second, third = (compute_s(job, 5) for job in (before, after, twice))
    assert second - first == pytest.approx((third - first) / 2, rel=1e-9)  # linear in the slowdown
    assert third - first == pytest.approx(first, rel=0.2)
    assert compute_s(after, 4) == pytest.approx(compute_s(before, 4), rel=0.05)


def test_all_wait_for_the_slow_rank_and_it_waits_for_none() -> None:
    plan = ParallelPlan(dp_replicate=16)
    step = predict(job_of(plan, stragglers=slow(5, 3.0)))
    waits = [step.step_time_s - split.compute_s - split.optimizer_s for split in step.splits]
    assert min(waits) == waits[5]
    assert step.step_time_s > predict(job_of(plan)).step_time_s


@pytest.mark.parametrize(
    "plan", [ParallelPlan(dp_shard=16), ParallelPlan(dp_replicate=2, tp=4, pp=2), ParallelPlan(dp_shard=4, pp=4)]
)
def test_folded_is_unfolded(plan: ParallelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(plan, stragglers=(*slow(3, 1.7), Straggler(node="node1", slowdown=1.2)))
    folded = predict(job)
    everyone = unfolded(RankMapping.of(plan))
    monkeypatch.setattr(sys.modules["simplan.predict.step"], "folding_of", lambda job: everyone)
    whole = predict(job)
    assert folded.step_time_s == pytest.approx(whole.step_time_s, rel=1e-12)
    for of_folded, of_whole in zip(folded.splits, whole.splits, strict=True):
        assert of_folded.compute_s == pytest.approx(of_whole.compute_s, rel=1e-9)


def test_a_node_is_all_ranks_that_are_placed_there() -> None:
    cluster = catalog.cluster("dgx-h100", 16).with_changes(stragglers=(Straggler(node="node1", slowdown=2.0),))
    assert slowdowns(cluster, ParallelPlan(dp_replicate=16)) == dict.fromkeys(range(8, 16), 2.0)
    placed = ParallelPlan(dp_replicate=8, pp=2, placement=("pp", "dp_replicate"))
    assert set(slowdowns(cluster, placed)) == {4, 5, 6, 7, 12, 13, 14, 15}


def test_explanation_says_what_slow_ranks_cost() -> None:
    job = job_of(ParallelPlan(dp_replicate=16), stragglers=slow(5, 2.0))
    prediction, simulated = predict_step(job)
    words = explain(prediction, simulated).stragglers
    assert words.startswith("rank 5, 2 times the time of the others to compute")
    none = predict(replace(job, cluster=job.cluster.with_changes(stragglers=())))
    assert f"{prediction.step_time_s / none.step_time_s - 1:.1%}".replace("%", " %") in words


def dropping(job: Job, num_dropped: int) -> Job:
    return replace(job, training=job.training.with_changes(backup_workers=num_dropped))


REPLICAS = [ParallelPlan(dp_replicate=16), ParallelPlan(dp_replicate=4, tp=2, pp=2)]


@pytest.mark.parametrize(
    ("plan", "topology"), slow_except([(REPLICAS[1], None)], product(REPLICAS, [None, Switch(kind="switch")]))
)
def test_a_backup_worker_removes_the_cost_of_the_slowest_replica(plan: ParallelPlan, topology: Switch | None) -> None:
    none, less, both = (
        job_of(plan, topology=topology, stragglers=stragglers)
        for stragglers in ((), slow(5, 1.2), (*slow(5, 1.2), *slow(0, 1.5)))
    )
    fast_s, less_s, both_s = (predict(job).step_time_s for job in (none, less, both))
    assert fast_s < less_s < both_s
    assert predict(dropping(less, 1)).step_time_s == pytest.approx(fast_s, rel=1e-12)
    assert predict(dropping(both, 1)).step_time_s == pytest.approx(less_s, rel=1e-12)
    assert predict(dropping(both, 2)).step_time_s == pytest.approx(fast_s, rel=1e-12)
    steady = both.cluster.with_changes(jitter=Jitter(seed=3))
    assert predict(dropping(replace(both, cluster=steady), 1)).step_time_s == pytest.approx(less_s, rel=1e-12)


@pytest.mark.parametrize("plan", REPLICAS)
def test_dropped_gradients_of_equal_replicas_only_cost_throughput(plan: ParallelPlan) -> None:
    job, replicas = job_of(plan), plan.dp_replicate
    assert folding_of(dropping(job, 1)) == folding_of(job), "none of them is slower than another"
    every, some = predict(job), predict(dropping(job, 1)).with_budget(TrainingBudget(num_tokens=1e9))
    assert some.step_time_s == pytest.approx(every.step_time_s, rel=1e-12)
    assert every.mfu is not None
    rates = (some.tokens_per_s_per_device, some.samples_per_s_per_device, some.mfu)
    before = (every.tokens_per_s_per_device, every.samples_per_s_per_device, every.mfu)
    assert rates == pytest.approx([value * (replicas - 1) / replicas for value in before], rel=1e-12)
    tokens = 8 * (replicas - 1) * job.model.seq_len  # 8 sequences per replica
    assert some.training_run is not None
    assert some.training_run.num_steps == -(-(10**9) // tokens)
    assert some.backup_workers is not None
    assert some.backup_workers.throughput_ratio == pytest.approx((replicas - 1) / replicas, rel=1e-12)
    assert f"drops the last of {replicas} gradients" in some.backup_workers.words


def test_kept_gradients_are_reduced_after_backward() -> None:
    """Until a replica has ended its backward, nobody knows that its gradients are kept."""
    job = replace(job_of(ParallelPlan(dp_replicate=4), stragglers=slow(1, 1.5)), model=catalog.model("gpt2-124m"))
    for num_dropped in (0, 1):
        spans = [span for span in predict(dropping(job, num_dropped)).timeline.spans if span.rank == 1]
        reduced_s = [span.start_s for span in spans if span.stream == "data_parallel"]
        passed_s = max(span.end_s for span in spans if span.stream == "compute" and span.action.startswith("0B"))
        assert (len(reduced_s) == 1, min(reduced_s) >= passed_s) == (bool(num_dropped), bool(num_dropped))


@pytest.mark.parametrize(
    ("plan", "num_dropped", "words"),
    [
        ({"dp_replicate": 16}, 16, "training.backup_workers = 16: ... plan.dp_replicate = 16"),
        ({"dp_replicate": 2, "dp_shard": 8}, 1, "is not modeled yet with plan.dp_shard = 8"),
        ({"dp_replicate": 8, "cp": 2}, 1, "is not modeled yet with plan.cp = 2"),
        ({"dp_replicate": 16, "grad_sync": "microbatch"}, 1, "is not modeled yet with plan.grad_sync = microbatch"),
    ],
)
def test_gradients_that_cannot_be_dropped_are_refused(plan: dict[str, object], num_dropped: int, words: str) -> None:
    job = dropping(job_of(ParallelPlan.model_validate(plan)), num_dropped)
    with pytest.raises(SpecError) as caught:
        predict(job)
    assert says(str(caught.value), words)


def test_a_search_refuses_backup_workers() -> None:
    with refuses("training.backup_workers", rule="a search compares steps that wait", kind=NotModelledError):
        search(dropping(job_of(ParallelPlan(dp_replicate=16)), 1))


def test_a_slow_link_delays_what_crosses_it() -> None:
    """A link with a tenth of its bandwidth, which a collective fills alone, takes ten times the transfer."""
    plan = ParallelPlan(dp_replicate=16)
    topology = Switch(kind="switch")
    before = predict(job_of(plan, topology=topology))
    cable = SlowLink(link="node0.nic0 -> switch", bandwidth_share=0.1)
    after = predict(job_of(plan, topology=topology, slow_links=(cable,)))
    assert after.network is not None
    assert after.step_time_s > before.step_time_s
    assert "node0.nic0 -> switch" in after.network.contention_words()


def test_a_flapping_link_costs_less_than_a_slow_one() -> None:
    plan, link = ParallelPlan(dp_replicate=16), "node0.nic0 -> switch"
    flapping = SlowLink(link=link, bandwidth_share=0.1, slow_s=0.00039, period_s=0.0004)
    never, always = flapping.with_changes(first_s=60.0), SlowLink(link=link, bandwidth_share=0.1)
    fast_s, same_s, part_s, slow_s = (
        predict(job_of(plan, topology=Switch(kind="switch"), slow_links=links)).step_time_s
        for links in ((), (never,), (flapping,), (always,))
    )
    assert same_s == pytest.approx(fast_s, rel=1e-9)
    assert fast_s < part_s <= slow_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stragglers": slow(16, 2.0)}, "cluster.stragglers.0.rank = 16: ... 0 to 15"),
        ({"stragglers": (Straggler(slowdown=2.0),)}, "cluster.stragglers.0: must name a rank or a node"),
        ({"stragglers": (Straggler(node="node2", slowdown=2.0),)}, "whose last node is node1"),
        (
            {
                "slow_links": (SlowLink(link="node0.nic0 -> switch", bandwidth_share=0.5, slow_s=1.0),),
                "topology": Switch(kind="switch"),
            },
            "cluster.slow_links.0: ... slow_s and period_s",
        ),
        ({"slow_links": (SlowLink(link="a", bandwidth_share=0.5),)}, "names links, and the cluster has no topology"),
        (
            {
                "slow_links": (SlowLink(link="node0.nic9 -> switch", bandwidth_share=0.5),),
                "topology": Switch(kind="switch"),
            },
            "cluster.slow_links.0.link = node0.nic9 -> switch: ... link ... fabric",
        ),
        (
            {
                "slow_links": (SlowLink(link="node0.nic0 -> switch", bandwidth_share=0.5, slow_s=1e-4, period_s=2e-4),),
                "topology": Switch(kind="switch"),
                "inter_link": catalog.link("tcp-10gbit").model_copy(update={"bytes_per_s": 1e3}),
            },
            "times or more in a step of",
        ),
    ],
)
def test_missing_input_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        predict(job_of(ParallelPlan(dp_replicate=16), **changes))
    assert says(str(caught.value), words)
