"""Different nodes in one job: closed forms, equality with equal nodes, and brute force."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.errors import SpecError
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.predict.balance import balanced_sizes
from simplan.predict.step_summary import evaluate_step
from simplan.prediction import Prediction
from simplan.program.tables.partition import balanced_assignment, balanced_unequal_assignment
from simplan.search import SearchSpace, search
from simplan.training import TrainingSpec
from tests.jobs import A100, H100, mixed_cluster, node_group, tiny_model


def equal_nodes(entry: catalog.NodeEntry, num_nodes: int) -> ClusterSpec:
    return mixed_cluster(node_group(entry, num_nodes)).as_group(0)


def step_of(cluster: ClusterSpec, plan: ParallelPlan, batch: int = 128, **model: object) -> Prediction:
    training = TrainingSpec(global_batch_size=batch, precision="bf16")
    shape: dict[str, Any] = {
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "seq_len": 1024,
        "tied_embeddings": False,
    } | model
    return predict(Job(tiny_model(**shape), cluster, training, plan, catalog.software("torch")))


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp_replicate=16),
        ParallelPlan(dp_shard=16, microbatch_size=2),
        ParallelPlan(dp_shard=16, microbatch_sizes=(2,) * 16),
        ParallelPlan(dp_shard=16, microbatch_size=2, microbatch_sizes="balanced"),
        ParallelPlan(pp=4, tp=4),
        ParallelPlan(pp=2, dp_replicate=8, placement=("pp", "dp")),
        ParallelPlan(pp=2, virtual_stages=2, dp_shard=4, tp=2),
    ],
)
def test_groups_of_equal_nodes_are_as_equal_nodes(plan: ParallelPlan) -> None:
    mixed, equal = (step_of(c, plan) for c in (mixed_cluster(node_group(H100), node_group(H100)), equal_nodes(H100, 2)))
    assert mixed.step_time_s == pytest.approx(equal.step_time_s, rel=1e-9)
    assert [m.device_bytes for m in mixed.memory] == [m.device_bytes for m in equal.memory]
    assert mixed.assignment == equal.assignment
    assert mixed.mfu == pytest.approx(equal.mfu, rel=1e-9)
    assert mixed.splits[15].compute_s == pytest.approx(equal.splits[15].compute_s, rel=1e-9)


@pytest.mark.parametrize("plan", [ParallelPlan(dp_replicate=16), ParallelPlan(dp_shard=16)])
def test_step_of_replicas_is_that_of_the_slowest(plan: ParallelPlan) -> None:
    """Every replica does the same, so those on A100s take as long as if all devices were A100s."""
    mixed, slow, fast = (
        step_of(cluster, plan)
        for cluster in (mixed_cluster(node_group(H100), node_group(A100)), equal_nodes(A100, 2), equal_nodes(H100, 2))
    )
    assert mixed.step_time_s == pytest.approx(slow.step_time_s, rel=1e-3)
    assert mixed.step_time_s >= fast.step_time_s
    first, second = mixed.node_groups
    assert (first.limits, second.limits) == (False, True)
    lost_s = slow.splits[0].compute_s - fast.splits[0].compute_s
    idle_s = [split.wait_s + split.exposed_communication_s for split in (mixed.splits[0], mixed.splits[8])]
    assert idle_s[0] - idle_s[1] == pytest.approx(lost_s, rel=0.25)  # the fast ranks wait for the slow ones


def test_ranks_compute_as_their_device_does_with_their_microbatch() -> None:
    plan = ParallelPlan(dp_replicate=16, microbatch_sizes=(3,) * 8 + (1,) * 8)
    mixed = step_of(mixed_cluster(node_group(H100), node_group(A100)), plan)
    for place, entry, size in ((0, H100, 3), (8, A100, 1)):
        alone = step_of(equal_nodes(entry, 2), ParallelPlan(dp_replicate=16, microbatch_size=size), batch=64 * size)
        assert mixed.splits[place].compute_s == pytest.approx(alone.splits[0].compute_s, rel=0.02)
        assert mixed.memory[place].allocated_bytes == alone.memory[0].allocated_bytes
    assert mixed.job.num_microbatches == 4


def test_balanced_microbatches_take_all_work_over_all_speed() -> None:
    cluster = mixed_cluster(node_group(H100), node_group(A100))
    equal, shared = (
        step_of(cluster, ParallelPlan(dp_replicate=16, microbatch_size=16, microbatch_sizes=sizes), batch=1024)
        for sizes in (None, "balanced")
    )
    assert sum(shared.job.plan.sizes_of_ranks) == 16 * 16
    assert shared.job.num_microbatches == equal.job.num_microbatches
    computing = [equal.splits[rank].compute_s for rank in (0, 8)]
    # a rank of speed 1 / t does t_other / (t + t_other) of the sequences of two
    ideal_s = 2 * computing[0] * computing[1] / sum(computing)
    compute_s = [shared.splits[rank].compute_s for rank in (0, 8)]
    assert max(compute_s) == pytest.approx(ideal_s, rel=0.06)  # whole sequences, and larger kernels are more efficient
    assert shared.step_time_s < equal.step_time_s


@pytest.mark.parametrize(("total", "each_s"), [(7, (1.0, 2.0)), (12, (1.0, 3.0, 2.5)), (9, (1.0, 1.0, 5.0, 2.0))])
def test_sizes_are_the_best_of_all(total: int, each_s: tuple[float, ...]) -> None:
    def slowest_s(sizes: tuple[int, ...]) -> float:
        return max(size * of for size, of in zip(sizes, each_s, strict=True))

    balanced = balanced_sizes(total, [partial(float.__mul__, of) for of in each_s])
    splits = itertools.product(range(1, total), repeat=len(each_s))
    assert sum(balanced) == total
    assert slowest_s(balanced) == min(slowest_s(sizes) for sizes in splits if sum(sizes) == total)


def test_stages_split_as_the_best_of_all() -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        num_blocks, num_stages = int(rng.integers(4, 10)), int(rng.integers(2, 5))
        times_s = [[*rng.uniform(0.5, 2) * rng.uniform(0.5, 1.5, num_blocks + 2)] for _ in range(num_stages)]
        max_blocks = rng.integers(2, num_blocks, num_stages).tolist()

        def slowest_s(bounds: tuple[int, ...], of: list[list[float]] = times_s) -> float:
            return max(sum(of[s][bounds[s] : bounds[s + 1]]) for s in range(len(of)))

        every = [
            (0, *(1 + cut for cut in cuts), num_blocks + 2)
            for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1)
        ]
        assignment = balanced_unequal_assignment(times_s, range(num_stages))
        assert slowest_s(assignment.boundaries) == pytest.approx(min(map(slowest_s, every)), rel=1e-9)
        if sum(max_blocks) < num_blocks:
            continue
        within = balanced_unequal_assignment(times_s, range(num_stages), max_blocks=max_blocks)
        assert all(blocks <= limit for blocks, limit in zip(within.stage_layers(), max_blocks, strict=True))


def test_stages_of_equal_speed_split_as_those_of_equal_devices() -> None:
    times_s = [0.3, *[1.0] * 12, 2.2]
    for ranks in ((0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)):
        equal = balanced_assignment(times_s, len(ranks), 1, ranks)
        mixed = balanced_unequal_assignment([times_s] * 3, ranks)
        shares = [[b - a for a, b in itertools.pairwise(assignment.boundaries)] for assignment in (equal, mixed)]
        rank_s = [
            max(
                sum(size for size, rank in zip(sizes, ranks, strict=True) if rank == chosen_rank)
                for chosen_rank in set(ranks)
            )
            for sizes in shares
        ]
        assert rank_s[0] == rank_s[1]


def test_pipeline_of_two_stages_is_the_closed_form_of_1f1b() -> None:
    """Two stages of 1F1B take m times the slower one, and one forward and backward of the other (Narayanan 2021)."""
    link = H100.intra_link
    assert link is not None
    free = link.model_copy(update={"bytes_per_s": 1e18, "latency_s": 0.0, "launch_s": 0.0, "bandwidth_share": 1.0})
    groups = [node_group(entry).model_copy(update={"inter_link": free}) for entry in (H100, A100)]
    step = step_of(mixed_cluster(*groups), ParallelPlan(pp=2, dp_replicate=8, stage_layers=(5, 3)), batch=8 * 16)
    number = step.job.num_microbatches
    each_s = [step.splits[rank].compute_s / number for rank in (0, 8)]
    slower, other = max(each_s), min(each_s)
    tail_s = max(split.optimizer_s + split.exposed_communication_s for split in step.splits)
    assert number * slower + other <= step.step_time_s * 1.001
    assert step.step_time_s <= (number * slower + other) * 1.03 + tail_s


def test_stages_take_layers_by_speed_and_memory() -> None:
    plan = ParallelPlan(pp=2, dp_replicate=8, microbatch_size=4)
    shape = {"num_hidden_layers": 24}
    fast = step_of(mixed_cluster(node_group(H100), node_group(A100)), plan, **shape)
    first, second = fast.assignment.stage_layers()
    assert first > second  # an H100 is two to three times as fast
    used = fast.memory[0].device_bytes
    small = step_of(mixed_cluster(node_group(H100, memory_bytes=int(0.7 * used)), node_group(A100)), plan, **shape)
    assert small.assignment.stage_layers()[0] < first
    assert small.fits
    assert small.step_time_s > fast.step_time_s


def test_layers_are_split_by_the_memory_of_all_microbatches() -> None:
    """GPipe keeps the activations of 64 microbatches, of which a truncated step simulates twelve."""
    plan = ParallelPlan(pp=2, dp_replicate=8, schedule="gpipe")
    needs = step_of(mixed_cluster(node_group(H100), node_group(A100)), plan, batch=512).memory[0].device_bytes
    cluster = mixed_cluster(node_group(H100, memory_bytes=int(0.8 * needs)), node_group(A100))
    whole = step_of(cluster, plan, batch=512)
    assert whole.fits
    num_bytes, seconds = evaluate_step(whole.job)
    assert num_bytes == evaluate_step(whole.job, whole=True)[0]
    assert seconds == pytest.approx(whole.step_time_s, rel=1e-9)


def test_fit_is_that_of_each_device() -> None:
    plan = ParallelPlan(dp_replicate=16)
    whole = step_of(mixed_cluster(node_group(H100), node_group(A100)), plan)
    needs = whole.worst_memory.device_bytes
    little = step_of(mixed_cluster(node_group(H100), node_group(A100, memory_bytes=needs // 2)), plan)
    assert whole.fits
    assert not little.fits
    assert (little.worst_rank, little.capacity_bytes) == (8, needs // 2)
    assert [group.memory_verdict for group in little.node_groups] == ["fits", "does not fit"]


def test_mfu_counts_the_peak_of_every_device() -> None:
    step = step_of(mixed_cluster(node_group(H100, 2), node_group(A100)), ParallelPlan(dp_shard=24), batch=24 * 4)
    peaks = 16 * H100.device.peak_flop_per_s["bf16"] + 8 * A100.device.peak_flop_per_s["bf16"]
    flops = step.job.model.flops_per_sequence(full_attention=False) * 24 * 4
    assert step.mfu == pytest.approx(flops / step.step_time_s / peaks, rel=1e-12)


def test_communication_between_groups_is_that_of_the_slower_network() -> None:
    slow = node_group(A100).model_copy(update={"inter_link": A100.inter_link})
    names = [
        {term.formula for term in step_of(cluster, ParallelPlan(dp_shard=16)).terms if "over 16" in term.name}
        for cluster in (mixed_cluster(node_group(H100), slow), mixed_cluster(slow, node_group(H100)))
    ]
    assert names[0] == names[1]
    alone = step_of(mixed_cluster(slow).as_group(0).with_changes(num_devices=16), ParallelPlan(dp_shard=16))
    assert names[0] == {term.formula for term in alone.terms if "over 16" in term.name}


def test_search_finds_the_best_of_predict() -> None:
    small = int(9e9)
    cluster = mixed_cluster(node_group(H100, memory_bytes=int(1.5 * small)), node_group(A100, memory_bytes=small))
    model = tiny_model(num_hidden_layers=16, hidden_size=2048, seq_len=1024, tied_embeddings=False)
    training = TrainingSpec(global_batch_size=64, precision="bf16")
    job = Job(model, cluster, training, ParallelPlan(), catalog.software("torch"))
    space = SearchSpace(tp=(1, 2), pp=(1, 2), zero_stage=(0, 3), schedule=("1f1b",), recompute=("none",),
                        dp_replicate=(1, 16, 8, 4), reshard_after_forward=(True,), grad_sync=("step",),
                        microbatch_size=(1, 2, 4), sequence_parallel=(True,), top=1)  # fmt: skip
    result = search(job, space)
    best = result.best
    assert best is not None
    assert 0 < result.space.timed < result.space.bounded
    timed: list[tuple[float, ParallelPlan]] = []
    shares: tuple[Literal["balanced"] | None, ...] = (None, "balanced")
    for tp, pp, size, sizes, shard in itertools.product((1, 2), (1, 2), (1, 2, 4), shares, (False, True)):
        dp = 16 // tp // pp
        if sizes and size == 1:
            continue
        plan = ParallelPlan(tp=tp, pp=pp, microbatch_size=size, microbatch_sizes=sizes, grad_sync="step",
                            dp_shard=dp if shard else 1, dp_replicate=1 if shard else dp)  # fmt: skip
        try:
            step = predict(job.with_plan(plan))
        except SpecError:
            continue
        if all(m.device_bytes <= 0.95 * (m.capacity_bytes or 0) for m in step.memory):
            timed.append((step.step_time_s, plan))
    assert len(timed) > 4
    assert best.step_time_s == pytest.approx(min(seconds for seconds, _ in timed), rel=1e-6)
    assert best.headroom_bytes is not None
    assert best.headroom_bytes >= 0
