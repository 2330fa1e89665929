from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.errors import NotModelledError, SpecError
from simplan.model.model import ModelSpec
from simplan.program.schedules import SCHEDULES
from tests import jobs

GPT2 = catalog.model("gpt2-124m")
TORCH = catalog.software("torch")


def check(
    plan: dict[str, Any],
    *,
    num_devices: int | None = None,
    model: ModelSpec = GPT2,
    training: dict[str, Any] | None = None,
    cluster: ClusterSpec | None = None,
) -> None:
    asked = catalog.cluster("dgx-h100", num_devices) if num_devices else cluster
    jobs.check(model, asked, training, **plan)


def problems(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        check(*args, **kwargs)
    return [problem.sentence() for problem in caught.value.problems]


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"dp_replicate": 8},
        {"dp_replicate": 2, "pp": 4, "schedule": "gpipe", "microbatch_size": 3},
        {"pp": 12, "schedule": "naive", "stage_layers": (1,) * 12},
        {"pp": 14, "stage_layers": (0, *(1,) * 12, 0)},
        {"zero_stage": 1},
        {"pp": 2, "dp_replicate": 2, "stage_layers": (5, 7), "bucket_bytes": 1000},
        {"pp": 14, "schedule": "gpipe", "stage_layers": (0, *(1,) * 12, 0)},
    ],
)
def test_valid_plans_pass(plan: dict[str, Any]) -> None:
    check(plan)


@pytest.mark.parametrize(
    ("plan", "kwargs", "sentence"),
    [
        (
            {"dp_replicate": 3},
            {"num_devices": 8},
            "plan = dp_replicate 3 x pp 1: the plan needs 3 devices and the cluster has 8; "
            "use dp_replicate = 8 or num_devices = 3 without num_nodes",
        ),
        (
            {"pp": 2},
            {"num_devices": 16},
            "plan = dp_replicate 1 x pp 2: the plan needs 2 devices and the cluster has 16; "
            "use dp_replicate = 8 or num_devices = 2 without num_nodes",
        ),
        (
            {"dp_replicate": 5},
            {},
            "training.global_batch_size = 24: must be a multiple of dp x microbatch_size = 5 x 1 = 5; use 20 or 25",
        ),
        (
            {"dp_replicate": 2, "microbatch_size": 5},
            {},
            "training.global_batch_size = 24: must be a multiple of dp x microbatch_size = 2 x 5 = 10; "
            "use 20 or 30, or plan.microbatch_size = 4 or 6",
        ),
        ({"dp_replicate": 32}, {}, "training.global_batch_size = 24: must be a multiple of dp x microbatch_size "
         "= 32 x 1 = 32; use 32"),
        ({"pp": 13}, {}, "plan.pp = 13: 13 stages must be at most num_hidden_layers = 12; use at most 12"),
        (
            {"pp": 2, "schedule": "none"},
            {},
            "plan.schedule = none: a pipeline of 2 ranks needs a schedule; use naive, gpipe, 1f1b, interleaved_1f1b, "
            "zb-h1, zb-h2, zb-1p, zb-2p, zb-v or dualpipe-v",
        ),
        (
            {"pp": 2, "schedule": "zb-v", "virtual_stages": 1},
            {},
            "plan.virtual_stages = 1: must be 2 with zb-v, which goes down the ranks and back up; remove it",
        ),
        (
            {"pp": 2, "schedule": "zb-h1", "recompute": "full"},
            {},
            "plan.recompute = full: would recompute layers in both parts of a backward, which zb-h1 splits in two; "
            "use none or selective, or schedule = 1f1b",
        ),
        (
            {"pp": 2, "schedule": "zb-h1", "dp_replicate": 2},
            {},
            "plan.schedule = zb-h1: splits backward, and torch's DistributedDataParallel does not reduce what a split "
            "backward makes; use dp_shard = 2 and dp_replicate = 1 with zero_stage = 2, or schedule = 1f1b",
        ),
        (
            {"schedule": "gpipe"},
            {},
            "plan.schedule = gpipe: must be none when pp = 1: there is no pipeline; remove it, or use pp = 2 or more",
        ),
        (
            {"pp": 2, "stage_layers": (4, 4, 4)},
            {},
            "plan.stage_layers = [4, 4, 4]: has 3 entries and the plan has 2 stages; e.g. [6, 6], or remove it",
        ),
        (
            {"pp": 3, "stage_layers": (6, 0, 6)},
            {},
            "plan.stage_layers = [6, 0, 6]: has a stage without layers between others; only the first and the last "
            "have something else; e.g. [4, 4, 4], or remove it",
        ),
        (
            {"pp": 5, "stage_layers": (2, 2, 2, 2, 2)},
            {},
            "plan.stage_layers = [2, 2, 2, 2, 2]: sums to 10 and the model has num_hidden_layers = 12; "
            "e.g. [3, 3, 2, 2, 2], or remove it",
        ),
        (
            {"pp": 4, "schedule": "zb-1p"},
            {"training": {"global_batch_size": 4_000_000}},
            "training.global_batch_size = 4000000: gives 16,000,000 microbatches x pipeline ranks, more than 30,000, "
            "and schedule zb-1p differs with every number of microbatches; use at most 7500, a larger microbatch_size, "
            "or 1f1b",
        ),
    ],
)  # fmt: skip
def test_a_violation_names_field_value_rule_and_nearest_values(
    plan: dict[str, Any], kwargs: dict[str, Any], sentence: str
) -> None:
    assert problems(plan, **kwargs) == [sentence]


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            {"pp": 2, "schedule": "zb-2p-optsync"},
            "plan.schedule = zb-2p-optsync: an optimizer step for which pipeline ranks wait for each other is not "
            "modelled yet; use zb-2p",
        ),
        (
            {"pp": 2, "dp_replicate": 2, "grad_sync": "microbatch"},
            "plan.grad_sync = microbatch: gradient reduction after every microbatch of a pipeline (torch's pipelines "
            "reduce once a step) is not modelled yet; use step",
        ),
        (
            {"pp": 2, "dp_shard": 2},
            "model.tied_embeddings = true: sharding of an embedding whose two copies are on different stages is not "
            "modelled yet; use model.tied_embeddings = false, or plan.zero_stage = 1",
        ),
        (
            {"grad_dtype": "bf16"},
            "plan.grad_dtype = bf16: another dtype for gradients with torch is not modelled yet; remove it",
        ),
    ],
)
def test_options_that_are_not_modelled_are_refused_by_name(plan: dict[str, Any], sentence: str) -> None:
    assert problems(plan) == [sentence]
    with pytest.raises(NotModelledError):
        check(plan)


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        (
            {"precision": "fp8", "fp8_recipe": "delayed"},
            "training.fp8_recipe = delayed: linear layers of torch have no such recipe; use tensorwise, rowwise, "
            "rowwise_with_gw_hp or blockwise",
        ),
    ],
)
def test_trainings_that_are_not_modelled_are_refused_by_name(training: dict[str, Any], sentence: str) -> None:
    assert problems({}, training=training) == [sentence]


def test_all_violations_are_told_at_once_and_mixed_ones_are_no_not_modelled_error() -> None:
    with pytest.raises(SpecError) as caught:
        check({"pp": 13, "schedule": "none", "tp": 2, "ep": 2}, num_devices=8)
    assert not isinstance(caught.value, NotModelledError)
    assert {p.field for p in caught.value.problems} == {"plan", "plan.pp", "plan.schedule", "plan.tp", "plan.ep"}


def model(**fields: Any) -> ModelSpec:
    shape = {"family": "llama", "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 12, "vocab_size": 100}
    return ModelSpec.model_validate({**shape, "intermediate_size": 64, "seq_len": 64, **fields})


def test_model_rules() -> None:
    assert problems({}, model=model(num_key_value_heads=5)) == [
        "model.num_key_value_heads = 5: must divide num_attention_heads = 12; use 4 or 6"
    ]
    assert problems({}, model=model(num_attention_heads=32)) == [
        "model.head_dim = 3: must be even: rotary positions turn pairs; use 2 or 4"
    ]
    assert problems({}, model=model(family="gpt", max_position_embeddings=32)) == [
        "model.seq_len = 64: must be at most max_position_embeddings = 32; "
        "use 32, or set max_position_embeddings to 64 as well"
    ]


def test_cluster_rules() -> None:
    whole = catalog.cluster("dgx-h100", 16)
    unconnected = whole.model_copy(update={"intra_link": None, "inter_link": None})
    assert [sentence.split(":")[0] for sentence in problems({"dp_replicate": 8}, cluster=unconnected)][:2] == [
        "cluster.intra_link",
        "cluster.inter_link_gbit_per_device",
    ]


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_cpu_ranks_compute_in_fp32_bf16_or_fp8(precision: str) -> None:
    here = catalog.cluster("this-machine", 1)
    assert problems({}, cluster=here, training={"precision": precision}) == [
        f"training.precision = {precision}: must be fp32, bf16 or fp8 on a CPU (this-machine-cpu): "
        "the others are those of accelerators; use fp32"
    ]
    check({}, cluster=here, training={"precision": "fp32"})
    check({}, cluster=here, training={"precision": "bf16"})


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rules_let_every_schedule_through(name: str) -> None:
    if name == "none":
        check({})
        return
    check({"pp": 2, "schedule": name, **({"virtual_stages": 2} if name == "interleaved_1f1b" else {})})


@pytest.mark.parametrize(
    ("field", "most"), [("num_hidden_layers", 2000), ("hidden_size", 10**6), ("vocab_size", 10**8), ("seq_len", 10**8)]
)
def test_sizes_of_a_model_have_limits(field: str, most: int) -> None:
    assert getattr(model(**{"head_dim": 8, field: most}), field) == most
    with pytest.raises(ValueError, match=f"less than or equal to {most}"):
        model(**{"head_dim": 8, field: most + 1})


@given(st.integers(1, 500), st.integers(1, 12), st.integers(1, 12))
def test_the_batch_sizes_offered_are_valid(batch: int, dp: int, microbatch_size: int) -> None:
    plan = {"dp_replicate": dp, "microbatch_size": microbatch_size}
    if batch % (dp * microbatch_size) == 0:
        check(plan, training={"global_batch_size": batch})
        return
    [sentence] = problems(plan, training={"global_batch_size": batch})
    sizes, _, microbatches = sentence.partition("; use ")[2].partition(", or plan.microbatch_size = ")
    for size in sizes.split(" or "):
        check(plan, training={"global_batch_size": int(size)})
    for size in microbatches.split(" or ") if microbatches else []:
        check({**plan, "microbatch_size": int(size)}, training={"global_batch_size": batch})
