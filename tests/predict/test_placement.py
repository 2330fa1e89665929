"""Placements in predictions: the same ranks on other devices communicate over other links."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.model.layer import CollectiveKind
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.predict import StepContext, build_program, cost_model, predict, simulate_program
from simplan.program.program import Communication
from simplan.report.drawings.drawing import draw_pipeline, notes
from simplan.report.text import prediction_text
from tests.search.jobs import small_job
from tests.support.slow import examples

ORDERS = [*itertools.permutations(("tp", "cp", "dp", "pp"))]
PLANS = (
    ParallelPlan(tp=2, dp_replicate=2, pp=2),
    ParallelPlan(tp=2, dp_shard=4),
    ParallelPlan(dp_replicate=2, dp_shard=2, pp=2, zero_stage=3),
    ParallelPlan(cp=2, tp=2, dp_shard=2, cp_comm="all_gather"),
    ParallelPlan(dp_shard=4, pp=2, zero_stage=1),
)
JOB = small_job(num_devices=16, batch=16, hidden_size=256, seq_len=128)


def placed(plan: ParallelPlan, order: tuple[str, ...] | tuple[int, ...] | None, devices_per_node: int) -> float:
    job = JOB.with_changes({"cluster.devices_per_node": devices_per_node}).with_num_devices(8)
    return predict(job.with_plan(plan.model_copy(update={"placement": order}))).step_time_s


@given(st.sampled_from(PLANS), st.sampled_from(ORDERS))
@settings(max_examples=examples(5, 15), deadline=None)
def test_one_node_predicts_the_same_for_any_placement(plan: ParallelPlan, order: tuple[str, ...]) -> None:
    assert placed(plan, order, 8) == placed(plan, None, 8)


@given(st.sampled_from(PLANS), st.sampled_from(ORDERS), st.sampled_from([2, 3, 4]))
@settings(max_examples=examples(8, 25), deadline=None)
def test_folded_is_unfolded_and_lists_are_orders(plan: ParallelPlan, order: tuple[str, ...], per_node: int) -> None:
    job = JOB.with_changes({"cluster.devices_per_node": per_node}).with_num_devices(8)
    job = job.with_plan(plan.model_copy(update={"placement": order}))
    prediction, cost = predict(job), cost_model(job, None)
    folded, whole = (
        simulate_program(build_program(prediction, folded=is_folded), cost, StepContext.of(job)).times.step_time_s
        for is_folded in (True, False)
    )
    assert folded == pytest.approx(whole, rel=1e-9)
    if job.placement is not None:
        assert placed(plan, job.placement.devices, per_node) == prediction.step_time_s


def test_collectives_take_the_links_of_the_devices() -> None:
    """The cost model is given ranks; without a placement, those of the numbers of their devices."""
    job = JOB.with_changes({"cluster.devices_per_node": 4}).with_num_devices(8)
    for order in ORDERS:
        placed_job = job.with_plan(ParallelPlan(tp=2, dp_replicate=4, placement=order))
        cost, mapping = cost_model(placed_job, None), RankMapping.of(placed_job.plan)
        inside = order.index("tp") < order.index("dp")
        for group, devices in (
            (mapping.group("tp", 0), (0, 1) if inside else (0, 4)),
            (mapping.group("dp", 0), (0, 2, 4, 6) if inside else (0, 1, 2, 3)),
        ):
            seconds = cost.communication(Communication(CollectiveKind.ALL_REDUCE, 2**20, group)).seconds
            there = cost_model(job, None).communication(Communication(CollectiveKind.ALL_REDUCE, 2**20, devices))
            assert seconds == there.seconds


def test_pipelines_inside_nodes_pay_if_they_send_more_than_gradients() -> None:
    """Many microbatches and one reduction: on a slow network, stages belong into a node."""
    assert JOB.cluster.inter_link is not None
    slow = JOB.cluster.inter_link.model_copy(update={"bytes_per_s": 1e8})
    job = JOB.with_changes(
        {"training.global_batch_size": 256, "cluster.devices_per_node": 2, "cluster.inter_link": slow}
    )
    job = job.with_num_devices(4)
    across, inside = (
        predict(job.with_plan(ParallelPlan(dp_replicate=2, pp=2, placement=order))).step_time_s
        for order in (("dp", "pp"), ("pp", "dp"))
    )
    assert inside < across


def test_outputs_say_the_placement() -> None:
    job = JOB.with_changes({"cluster.devices_per_node": 4}).with_num_devices(8)
    words = "dp_replicate-tp: groups of replicas inside nodes, tensor-parallel groups across 2 nodes"
    prediction = predict(job.with_plan(ParallelPlan(tp=2, dp_replicate=4, placement=("dp", "tp"))))
    assert f"  placement    {words}\n" in prediction_text(prediction)
    assert f"placement: {words}" in notes(draw_pipeline(prediction))
    rows = prediction.to_json(timeline=False)["ranks"]
    assert [(row["rank"], row["node"], row["device"]) for row in rows[:3]] == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    plain = predict(job.with_plan(ParallelPlan(tp=2, dp_replicate=4)))
    assert Placement.of(plain.job.plan) is None
    assert "placement" not in prediction_text(plain)
    assert "node" not in plain.to_json(timeline=False)["ranks"][0]
