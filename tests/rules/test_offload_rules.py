"""Plans with offloading that are refused, each with its sentence."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.errors import NotModelledError, SpecError
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.rules import check_job
from simplan.training.training import TrainingSpec
from tests import jobs

ACTIVATIONS = {"offload_activations": True}
STATES = {"offload_optimizer": True, "dp_shard": 2}


def check(
    plan: dict[str, Any], *, model: str | ModelSpec = "gpt2-124m", cluster: ClusterSpec | None = None, **training: Any
) -> None:
    asked = cluster or catalog.cluster("dgx-a100-80gb", num_devices=ParallelPlan(**plan).num_devices)
    found = catalog.model(model) if isinstance(model, str) else model
    jobs.check(found, asked, {"global_batch_size": 16, **training}, **plan)


@pytest.mark.parametrize(
    "plan",
    [
        {**STATES, **ACTIVATIONS},
        {**STATES, **ACTIVATIONS, "dp_shard": 4, "recompute": "full"},
        {**STATES, "zero_stage": 2, "dp_replicate": 2},
        {**STATES, "dp_shard": 1, "cp": 2, "cp_comm": "a2a", "zero_stage": 3},
        {**ACTIVATIONS, "pp": 2, "virtual_stages": 2, "recompute": "selective"},
        {**ACTIVATIONS, "dp_replicate": 2},
        {**ACTIVATIONS, "offload_layers": 3},
    ],
)
def test_what_is_modelled_passes(plan: dict[str, Any]) -> None:
    check(plan)


@pytest.mark.parametrize(
    ("plan", "kwargs", "sentence"),
    [
        ({**STATES, "dp_shard": 1}, {}, "no parameters that FSDP shards; use dp_shard = 2 or more"),
        ({**STATES, "dp_shard": 1, "dp_replicate": 4}, {}, "shards; use dp_shard = 4 in place of dp_replicate"),
        ({**STATES, "zero_stage": 1}, {}, "this plan has no parameters that FSDP shards; use zero_stage = 3"),
        (
            {**STATES, "tp": 2},
            {"model": "llama3-8b"},
            "tensor parallelism (tp = 2) is not modelled yet with it; use tp = 1",
        ),
        (STATES, {"precision": "fp8"}, "training.precision = fp8 is not modelled yet with it; use bf16"),
        (
            {**STATES, "ep": 2, "dp_replicate": 2},
            {"model": "mixtral-8x7b"},
            "plan.offload_optimizer = true: states of experts of which other ranks have others is not modelled",
        ),
        (ACTIVATIONS, {"model": "t5-small"}, "activations of the family t5 is not modelled"),
        (ACTIVATIONS, {"model": "mistral-7b-v0.1"}, "attention in a window"),
        ({**ACTIVATIONS, "pp": 2, "schedule": "zb-h1"}, {}, "a backward in two parts (zb-h1) is not modelled"),
        ({**ACTIVATIONS, "pp": 2, "schedule": "mine.csv"}, {}, "a schedule of your own is not modelled"),
        ({**ACTIVATIONS, "cp": 2, "cp_comm": "all_gather"}, {}, "context parallelism (cp = 2) is not modelled"),
        ({**ACTIVATIONS, "recompute": "qkv_proj_offloaded"}, {}, "which has transfers of its own"),
        ({"offload_layers": 2}, {}, "plan.offload_layers = 2: says of how many blocks activations are moved"),
        ({**ACTIVATIONS, "offload_layers": 2, "pp": 2}, {}, "blocks of a pipeline (pp = 2) is not modelled yet"),
    ],
)
def test_what_is_not_is_refused_by_name(plan: dict[str, Any], kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(plan, **kwargs)
    assert sentence in str(caught.value)
    assert isinstance(caught.value, NotModelledError) == ("not modelled" in str(caught.value))


@pytest.mark.parametrize("plan", [STATES, ACTIVATIONS])
def test_a_missing_host_link_is_asked_for(plan: dict[str, Any]) -> None:
    cluster = catalog.cluster("dgx-a100-80gb", num_devices=1).model_copy(update={"host_link": None})
    with pytest.raises(SpecError, match=r"cluster.device.host_link: is missing: .* e.g. .preset: a100-sxm-80gb"):
        check(plan, cluster=cluster)


@pytest.mark.parametrize(
    ("device", "bytes_per_s"),
    [("a100-sxm-80gb", 31e9), ("h100-sxm-80gb", 63e9), ("v100-sxm2-32gb", 16e9), ("gh200", 450e9)],
)
def test_host_links_have_the_bandwidth_of_their_generation(device: str, bytes_per_s: float) -> None:
    """16 lanes of 8, 16 and 32 GT/s with 128b/130b, less a little; NVLink-C2C half of 900 GB/s."""
    name = catalog.device(device).host_link
    assert name is not None
    assert catalog.link(name).bytes_per_s == pytest.approx(bytes_per_s, rel=0.02)


def test_another_framework_is_refused_by_name() -> None:
    cluster = catalog.cluster("dgx-a100-80gb", num_devices=2)
    training = TrainingSpec(global_batch_size=16, precision="bf16")
    plan = ParallelPlan.model_validate(STATES)
    with pytest.raises(NotModelledError, match=r"software llm-foundry is not modelled yet with it; use .* torch \(or"):
        check_job(Job(catalog.model("gpt2-124m"), cluster, training, plan, catalog.software("llm-foundry")))
