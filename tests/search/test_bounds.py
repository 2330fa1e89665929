"""Lower bounds on memory and step time, against ``predict`` of plans of many kinds."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.job import Job
from simplan.optimizers import OPTIMIZERS
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict import predict
from simplan.predict.step_summary import evaluate_step
from simplan.rules import violations
from simplan.search import SearchSpace
from simplan.search.bounds.candidate_bounds import Bounds
from simplan.search.candidates import FIELDS, Candidates, categories
from simplan.search.enumeration import Enumeration
from simplan.search.space import that_it_has
from simplan.units import GIB
from tests.jobs import A100, H100, mixed_cluster, node_group
from tests.search.jobs import FAMILIES, candidates_of, small_job
from tests.support.slow import slow_except

FRAMEWORKS = (
    "torch", "torchtitan", "megatron-core", "megatron-lm-2021", "megatron-lm-2022", "megatron-deepspeed",
    "megatron-bridge", "nemo", "llm-foundry", "maxtext", "deepspeed-2021",
)  # fmt: skip
LARGE: dict[str, Any] = {"hidden_size": 512, "seq_len": 256, "vocab_size": 1024}


@st.composite
def plans(draw: st.DrawFn, job: Job, space: SearchSpace) -> ParallelPlan:
    """One of those that keep the rules, of what the software has of a space."""
    tables = list(Enumeration(that_it_has(job.software, space), job).tables(Counter()))
    assume(tables)  # an optimizer may refuse all plans
    candidates = Candidates.joined(tables)
    return candidates.plan(draw(st.sampled_from(range(len(candidates)))))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job with a plan that keeps the rules."""
    software = draw(st.sampled_from(FRAMEWORKS))
    family = draw(st.sampled_from(sorted(set(FAMILIES) - {"resnet", "vit"})))
    job = small_job(
        family,
        draw(st.sampled_from([4, 8, 12])),
        batch=draw(st.sampled_from([12, 48])),
        software=software,
        num_hidden_layers=draw(st.sampled_from([4, 6])),
        **(LARGE if draw(st.booleans()) else {}),
    )
    for option in ("compiled", "gradient_as_bucket_view", "zero_grad_set_to_none"):
        if option in job.software.options:
            job = job.with_changes({f"software.{option}": draw(st.booleans())})
    of_software: list[str] = [name for name, facts in OPTIMIZERS.items() if software in facts.software]
    if draw(st.booleans()) and of_software:
        job = job.with_changes({"training.optimizer": draw(st.sampled_from(of_software))})
    space = SearchSpace(
        cp=(1, 2),
        cp_comm=("ring", "all_gather"),
        schedule=("gpipe", "1f1b", "interleaved_1f1b", "zb-h1", "zb-2p", "zb-v"),
    )
    if job.software.layers.attention == "unfused":
        space = space.model_copy(update={"cp": None})
    if "loss" in job.software.options and draw(st.booleans()):
        job = job.with_changes({"software.loss": "chunked"})
        if family in ("bert", "t5"):
            job = job.with_changes({"software.loss": "whole"})
    job = job.with_plan(draw(plans(job, space)))
    offloads = job.with_plan(job.plan.model_copy(update={"offload_optimizer": True}))
    return offloads if not any(violations(offloads)) and draw(st.booleans()) else job


def table_of(plan: ParallelPlan) -> Candidates:
    """A table of one row."""
    placements = [] if plan.placement is None else [tuple(map(str, plan.placement))]
    row = tuple(getattr(plan, name) for name in FIELDS)
    return Candidates.of_rows(plan, categories(placements=placements), FIELDS, [row])


@pytest.mark.slow
@given(jobs())
@settings(max_examples=40, deadline=None)
def test_no_prediction_is_below_its_bounds(job: Job) -> None:
    prediction = predict(job)
    table = table_of(job.plan)
    assert table.plan(0) == job.plan
    [num_bytes], [seconds] = Bounds(job).of(table)
    assert 0 < num_bytes <= max(rank.device_bytes for rank in prediction.memory)
    assert 0 < seconds <= prediction.step_time_s * (1 + 1e-9)


@st.composite
def placed_jobs(draw: st.DrawFn) -> Job:
    """A job on small nodes, in which stages and groups may end, placed or not; the network may be slow."""
    software = draw(st.sampled_from(["torch", "torchtitan", "megatron-core"]))
    job = small_job(
        draw(st.sampled_from(["llama", "moe"])), 16, batch=48, software=software, num_hidden_layers=6, **LARGE
    )
    devices, per_node = draw(st.sampled_from([(8, 2), (8, 3), (8, 4), (12, 4), (12, 5), (16, 4)]))
    assert job.cluster.inter_link is not None
    slow = job.cluster.inter_link.model_copy(update={"bytes_per_s": draw(st.sampled_from([1e8, 50e9]))})
    job = job.with_changes({"cluster.devices_per_node": per_node, "cluster.inter_link": slow})
    job = job.with_num_devices(devices)
    orders = [None, *itertools.permutations(("tp", "cp", "dp", "pp"))]
    space = SearchSpace(tp=(1, 2), cp=(1, 2), cp_comm=("all_gather",), schedule=("1f1b",), tp_across_nodes=True)
    plan = draw(plans(job, space))
    return job.with_plan(plan.model_copy(update={"placement": draw(st.sampled_from(orders))}))


@given(placed_jobs())
@settings(max_examples=15, deadline=None)
def test_no_prediction_on_small_nodes_is_below_its_bounds(job: Job) -> None:
    prediction = predict(job)
    [num_bytes], [seconds] = Bounds(job).of(table_of(job.plan))
    assert 0 < num_bytes <= max(rank.device_bytes for rank in prediction.memory)
    assert 0 < seconds <= prediction.step_time_s * (1 + 1e-9)


@st.composite
def mixed_jobs(draw: st.DrawFn) -> Job:
    """A job on nodes of H100s and of A100s, in any order, which have links of their own, and maybe little memory."""
    per_node = draw(st.sampled_from([2, 4]))
    fast = H100.device.model_copy(update={"memory_bytes": draw(st.sampled_from([80 * GIB, 2 * GIB]))})
    slow = A100.device.model_copy(update={"memory_bytes": draw(st.sampled_from([80 * GIB, 40 * GIB, 3 * GIB // 2]))})
    a100 = node_group(A100, draw(st.integers(1, 2))).model_copy(
        update={"device": slow, "intra_link": A100.intra_link, "inter_link": A100.inter_link}
    )
    h100 = node_group(H100, draw(st.integers(1, 2))).model_copy(update={"device": fast})
    groups = draw(st.permutations([h100, a100]))
    cluster = mixed_cluster(*groups, devices_per_node=per_node)
    software = draw(st.sampled_from(["torch", "torchtitan", "megatron-core", "megatron-lm-2022"]))
    batch = cluster.num_devices * draw(st.sampled_from([4, 12]))
    sizes = LARGE | {"hidden_size": draw(st.sampled_from([512, 2048]))}
    job = small_job(
        draw(st.sampled_from(["llama", "moe"])), batch=batch, software=software, num_hidden_layers=8, **sizes
    )
    job = replace(job, cluster=cluster)
    orders = draw(st.sampled_from([None, (("pp", "tp", "cp", "dp"), ("tp", "dp", "pp"))]))
    degrees = {"tp": (1, 2), "cp": (1, 2), "cp_comm": ("all_gather",), "placement": orders, "tp_across_nodes": True}
    space = SearchSpace.model_validate({**degrees, "schedule": tuple(SCHEDULE_FACTS)})
    if job.software.layers.attention == "unfused":
        space = space.model_copy(update={"cp": None})
    return job.with_plan(draw(plans(job, space)))


@pytest.mark.slow
@given(mixed_jobs())
@settings(max_examples=30, deadline=None)
def test_no_prediction_on_unequal_devices_is_below_its_bounds(job: Job) -> None:
    [least_bytes], [least_s] = Bounds(job).of(table_of(job.plan))
    num_bytes, seconds = evaluate_step(job, whole=True)
    assert seconds is not None
    assert 0 < least_bytes <= num_bytes
    assert 0 < least_s <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("degrees", "at_least"),
    [
        ({"dp_shard": 16, "microbatch_size": 2}, 0.85),
        ({"dp_replicate": 16, "microbatch_size": 8, "microbatch_sizes": "balanced"}, 0.9),
        ({"dp_replicate": 8, "pp": 2, "stage_layers": (10, 6)}, 0.95),
        ({"dp_replicate": 8, "pp": 2}, 0.9),
    ],
)
def test_bounds_on_unequal_devices_are_close(degrees: dict[str, Any], at_least: float) -> None:
    """The slowest replica decides; a split of layers that depends on memory is bounded by the speed of all ranks."""
    cluster = mixed_cluster(node_group(H100), node_group(A100))
    sizes = {**LARGE, "hidden_size": 2048, "seq_len": 1024, "num_hidden_layers": 16, "intermediate_size": 8192}
    job = replace(small_job("llama", batch=256, **sizes), cluster=cluster)
    job = job.with_plan(ParallelPlan.model_validate(degrees))
    [least_s] = Bounds(job).of(table_of(job.plan)).step_time_s
    _, seconds = evaluate_step(job, whole=True)
    assert seconds is not None
    assert at_least < least_s / seconds <= 1 + 1e-9


@pytest.mark.parametrize(("schedule", "stages"), [("zb-h1", 1), ("zb-v", 2), ("interleaved_1f1b", 2), ("gpipe", 1)])
def test_memory_bounds_on_unequal_devices_are_close(schedule: str, stages: int) -> None:
    """A pipeline far over memory keeps the first split of its layers."""
    cluster = mixed_cluster(node_group(H100, 2), node_group(A100, 2))
    job = replace(small_job("llama", batch=512), model=catalog.model("llama3-8b"), cluster=cluster)
    job = job.with_plan(ParallelPlan(tp=8, pp=4, schedule=schedule, virtual_stages=stages, microbatch_size=64))
    [least_bytes] = Bounds(job).of(table_of(job.plan)).device_bytes
    num_bytes, _ = evaluate_step(job)
    assert 0.9 < least_bytes / num_bytes <= 1


def test_bound_of_many_stages_has_their_sends() -> None:
    """With two microbatches, a step of 64 stages is little more than the way of one through all of them."""
    job = small_job("llama", 2, batch=2, num_hidden_layers=64)
    job = job.with_plan(ParallelPlan(pp=2, schedule="interleaved_1f1b", virtual_stages=32))
    seconds = float(Bounds(job).of(table_of(job.plan)).step_time_s[0])
    assert 0.97 < seconds / predict(job).step_time_s <= 1 + 1e-9


@pytest.mark.parametrize(
    ("software", "precision"),
    [("torch", "fp8"), ("nemo", "fp8"), ("nemo", "nvfp4"), ("megatron-bridge", "fp8"), ("megatron-bridge", "mxfp8")],
)
def test_memory_bounds_in_low_precision_are_close(software: str, precision: str) -> None:
    """Activations of all microbatches in flight and quantized weights count: most plans need no simulation."""
    cluster = "dgx-b200" if precision != "fp8" else "dgx-h100"
    job = small_job("llama", 8, cluster, None, 64, precision, software=software, num_hidden_layers=8, **LARGE)
    space = SearchSpace(pp=(2, 4), schedule=("1f1b", "interleaved_1f1b"), microbatch_size=(2, 8))
    candidates = candidates_of(job, that_it_has(job.software, space))
    every = np.linspace(0, len(candidates) - 1, 12).astype(int)
    context_bytes = job.software.context_bytes[job.cluster.device.kind]
    bounds = Bounds(job).of(candidates.take(every)).device_bytes
    exact = np.array([evaluate_step(job.with_plan(candidates.plan(row)))[0] for row in every])
    assert (bounds <= exact).all()
    assert np.median((bounds - context_bytes) / (exact - context_bytes)) > 0.9


@pytest.mark.parametrize(
    ("software", "base"),
    [
        ("torch", {"format": "nf4", "storage": "bf16"}),
        ("torch", {"format": "nf4", "library": "torchao", "double_quantization": True}),
        ("accelerate", {"format": "nf4", "storage": "bf16", "double_quantization": True}),
        ("deepspeed", {"format": "fp4", "storage": "bf16"}),
        ("accelerate", {"format": "int8"}),
    ],
)
def test_bounds_with_weights_of_few_bits_hold_for_every_plan(software: str, base: dict[str, Any]) -> None:
    """Scales that every rank has, packed weights that it shares, and FP32 ones where weights are whole."""
    job = small_job("llama", 4, batch=16, software=software, lora_rank=8, num_hidden_layers=4, **LARGE)
    job = job.with_changes({"training.task": "lora", "training.base_weights": base})
    space = SearchSpace(tp=(1,), pp=(1,), cp=(1,), microbatch_size=(1, 4), recompute=("none", "full"))
    candidates = candidates_of(job, that_it_has(job.software, space))
    bounds = Bounds(job).of(candidates)
    for row in range(len(candidates)):
        num_bytes, seconds = evaluate_step(job.with_plan(candidates.plan(row)), whole=True)
        assert seconds is not None
        assert 0.7 * num_bytes < bounds.device_bytes[row] <= num_bytes
        assert 0 < bounds.step_time_s[row] <= seconds * (1 + 1e-9)


PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"training.preference": {"reference": "second_model"}},
    "dpo whole": {"training.preference": {"reference": "second_model", "reference_sharded": False}},
    "dpo adapters": {"model.lora_rank": 8},
    "dpo fp32": {"training.preference": {"reference": "second_model", "reference_dtype": "fp32"}, "model.lora_rank": 8},
    "kto": {},
    "kto adapters": {"model.lora_rank": 8},
    "orpo": {},
}


@pytest.mark.parametrize(
    ("case", "bytes_per_s"),
    slow_except([("dpo", 50e9)], itertools.product(PREFERENCES, (50e9, 1e8))),
)
def test_bounds_of_preference_training_hold_and_are_close(case: str, bytes_per_s: float) -> None:
    """Every forward of a microbatch without gradients counts, and so do the weights of a second model."""
    task, software = case.split()[0], "accelerate" if case == "dpo" else "torch"
    family = "moe" if case in ("dpo whole", "kto") else "llama"
    sizes = {**LARGE, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000, "seq_len": 1024}
    job = small_job(
        family, 8, batch=64, software=software, num_hidden_layers=4, **(LARGE if family == "moe" else sizes)
    )
    assert job.cluster.intra_link is not None
    link = job.cluster.intra_link.model_copy(update={"bytes_per_s": bytes_per_s})
    job = job.with_changes({"training.task": task, **PREFERENCES[case], "cluster.intra_link": link})
    space = SearchSpace(tp=(1, 2), pp=(1,), cp=(1,), microbatch_size=(4,), recompute=("none", "full"))
    candidates = candidates_of(job, that_it_has(job.software, space))
    assert len(candidates) > 3
    bounds = Bounds(job).of(candidates)
    closeness = []
    for row in range(0, len(candidates), 3):
        num_bytes, seconds = evaluate_step(job.with_plan(candidates.plan(row)), whole=True)
        assert seconds is not None
        assert 0 < bounds.device_bytes[row] <= num_bytes
        assert 0 < bounds.step_time_s[row] <= seconds * (1 + 1e-9)
        closeness.append(float(bounds.step_time_s[row] / seconds))
    if family == "llama" and bytes_per_s > 1e9:  # all-gathers of the other passes do not count
        assert np.median(closeness) > 0.9
        assert min(closeness) > 0.6


@pytest.mark.parametrize("order", [*itertools.permutations(("tp", "dp", "pp"))])
@pytest.mark.parametrize("degrees", [{"dp_shard": 4, "tp": 2}, {"dp_replicate": 4, "tp": 2}, {"dp_shard": 4, "pp": 2}])
def test_bounds_follow_the_placement(degrees: dict[str, int], order: tuple[str, ...]) -> None:
    """A slow network makes up these steps, so placements differ up to three times in step time."""
    job = small_job("llama", 16, batch=48, num_hidden_layers=6, **LARGE)
    assert job.cluster.inter_link is not None
    slow = job.cluster.inter_link.model_copy(update={"bytes_per_s": 1e8})
    job = job.with_changes({"cluster.devices_per_node": 4, "cluster.inter_link": slow}).with_num_devices(8)
    job = job.with_plan(ParallelPlan.model_validate({**degrees, "placement": order}))
    [seconds] = Bounds(job).of(table_of(job.plan)).step_time_s
    assert 0.4 < seconds / predict(job).step_time_s <= 1 + 1e-9
