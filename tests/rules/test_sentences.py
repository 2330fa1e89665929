"""Sentences of rules: plans and models that cannot be, and their nearest neighbours that can."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog, make_job
from simplan.cluster.topology import Dragonfly
from simplan.errors import NotModelledError, SpecError
from simplan.model.model import ModelSpec
from simplan.program.schedules import SCHEDULES
from simplan.rules import check_job, violations
from simplan.rules.experts import expert_overlap_precision, expert_overlap_ranks, expert_overlap_stages
from tests.jobs import job_of, problems, tiny_model
from tests.model.test_moe import model_of
from tests.search.jobs import FAMILIES

GPT2 = "gpt2-124m"
LLAMA = tiny_model(
    "llama", num_hidden_layers=8, hidden_size=96, num_attention_heads=12, num_key_value_heads=6, intermediate_size=240,
    vocab_size=600, seq_len=48, tied_embeddings=False,
)  # fmt: skip
ACTIVATIONS = {"offload_activations": True}
STATES = {"offload_optimizer": True, "dp_shard": 2}


@pytest.mark.parametrize(
    ("plan", "parts", "sentence"),
    [
        ({"compression": "fp16"}, {},
         "plan.compression = fp16: is about reducing gradients over data-parallel ranks"),
        ({"dp_shard": 8, "compression": "int8"}, {},
         "plan.compression = int8: is a hook of DDP, and zero_stage = 3 reduce-scatters"),
        ({"dp_shard": 8, "zero_stage": 2, "compression": "int8"}, {},
         "plan.compression = int8: is a hook of DDP, and zero_stage = 2"),
        ({"dp_shard": 8, "zero_stage": 1, "compression": "fp16"}, {"software": "deepspeed"},
         "plan.compression = fp16: is a hook of DDP, and ZeRO-1 of deepspeed"),
        ({"dp_replicate": 8, "compression": "one_bit"}, {"software": "megatron-core"},
         "plan.compression = one_bit: is a communication hook of torch's DDP, and"),
        ({"dp_replicate": 8, "compression": "top_k"}, {"software": "accelerate"},
         "plan.compression = top_k: is no communication hook of accelerate; use fp16,"),
        ({"dp_replicate": 8, "compression": {"kind": "powersgd", "rank": 1000}}, {},
         "plan.compression = powersgd: compresses nothing: every gradient"),
        ({"dp_replicate": 8, "compression": "int8", "collectives": {"all_reduce": "parameter_server"}}, {},
         "plan.compression = int8: is a hook of DDP's all-reduce"),
        ({"dp_replicate": 8, "compression": "int8", "grad_dtype": "fp32"}, {},
         "plan.grad_dtype = fp32: is another way"),
        ({"dp_replicate": 4, "pp": 2, "compression": "int8"}, {},
         "plan.compression.kind = int8: compression with plan.pp = 2 is not modeled yet"),
        ({"dp_replicate": 4, "tp": 2, "compression": "int8"}, {},
         "plan.compression.kind = int8: compression with plan.tp = 2 is not modeled yet"),
        ({"dp_replicate": 8, "grad_sync": "microbatch", "compression": "int8"}, {},
         "plan.compression.kind = int8: compression with plan.grad_sync = microbatch is not modeled yet"),
        ({"dp_replicate": 8, "compression": "int8"}, {"backup_workers": 1},
         "plan.compression.kind = int8: compression with training.backup_workers is not modeled yet"),
        ({"dp_replicate": 8, "compression": "one_bit_adam"}, {"optimizer": "lamb"},
         "training.optimizer = lamb: has another momentum than plan.compression = one_bit_adam averages; use adam or"),
        ({"dp_replicate": 8, "compression": "one_bit_adam"}, {"clip_grad_norm": 1.0},
         "training.clip_grad_norm = 1: clips gradients, and those of plan.compression = one_bit_adam differ"),
        ({"dp_shard": 8, "zero_stage": 1, "compression": "one_bit_adam"}, {},
         "plan.compression = one_bit_adam: needs the momentum of all parameters on every rank, and zero_stage = 1"),
        ({"dp_shard": 8, "compression": "one_bit_adam"}, {},
         "plan.compression = one_bit_adam: is a hook of DDP, and zero_stage = 3"),
    ],
)  # fmt: skip
def test_compression_is_for_hooks_of_ddp(plan: dict[str, Any], parts: dict[str, Any], sentence: str) -> None:
    assert any(each.startswith(sentence) for each in problems(LLAMA, plan, **parts))


def test_compression_of_replicas_is_possible() -> None:
    assert not problems(LLAMA, {"dp_replicate": 8, "compression": {"kind": "powersgd", "rank": 4}})
    assert not problems(LLAMA, {"dp_shard": 8, "zero_stage": 1, "compression": "fp16"})  # torch's ZeRO-1 has DDP


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
def test_plans_of_gpt2_pass(plan: dict[str, Any]) -> None:
    assert problems(GPT2, plan) == []


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 6},
        {"tp": 2, "sequence_parallel": False},
        {"cp": 2},
        {"cp": 3, "cp_comm": "a2a"},
        {"cp": 4, "cp_comm": "all_gather", "tp": 2},
        {"dp_shard": 4},
        {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 2, "reshard_after_forward": False},
        {"dp_shard": 3, "zero_stage": 1, "bucket_bytes": 1000},
        {"zero_stage": 3},
        {"pp": 2, "virtual_stages": 2},
        {"pp": 2, "virtual_stages": 4, "dp_shard": 3, "tp": 2},
        {"dp_replicate": 2, "grad_sync": "microbatch"},
        *({"recompute": mode} for mode in ("selective", "selective_op", "selective_layer", "full", "minimal")),
    ],
)
def test_plans_of_llama_pass(plan: dict[str, Any]) -> None:
    assert problems(LLAMA, plan) == []


@pytest.mark.parametrize("software", catalog.names("software"))
def test_only_maxtext_offloads_q_k_and_v(software: str) -> None:
    found = problems(LLAMA, {"recompute": "qkv_proj_offloaded"}, software=software)
    expected = f"plan.recompute = qkv_proj_offloaded: {software} does not support it"
    assert any(sentence.startswith(expected) for sentence in found) is (software != "maxtext")


@pytest.mark.parametrize(
    ("plan", "keys", "sentence"),
    [
        (
            {"dp_shard": 2},
            {"precision": "bf16"},
            "precision = bf16: has adapters of 4 bytes per weight next to",
        ),
        ({"dp_replicate": 2}, {}, "flat_parameters = true: is of parameters that FSDP shards"),
        ({"dp_shard": 2, "tp": 2}, {}, "tp = 2: tp = 2 with FSDP1's flat parameters is not modeled yet; use 1"),
        ({"dp_shard": 2}, {"lora_dora": True}, "lora_dora = true: lora_dora with FSDP1's flat parameters"),
        ({"dp_shard": 2}, {"software.flat_shards": True}, "flat_shards = true: is FSDP1 with use_orig_params"),
        ({"dp_shard": 2}, {"base_weights": "nf4"}, "base_weights = nf4: a weight of few bits in FSDP1's flat"),
    ],
)
def test_flat_parameters_that_cannot_be(plan: dict[str, Any], keys: dict[str, Any], sentence: str) -> None:
    """Shows the nearest plan that is accepted, too: FP32 over two shards."""
    usual = {"device": "h100-sxm-80gb", "num_devices": 2 * plan.get("tp", 1), "lora_rank": 4, "precision": "fp32"}
    usual |= {"software.flat_parameters": True, "seq_len": 512}
    with pytest.raises(SpecError) as error:
        make_job("llama3.2-1b", {**usual, **plan, **keys})
    assert any(sentence in problem.sentence() for problem in error.value.problems), error.value
    make_job("llama3.2-1b", {**usual, "num_devices": 2, "dp_shard": 2})


def test_frameworks_that_reduce_every_microbatch_reject_step() -> None:
    plan = {"dp_shard": 2, "grad_sync": "step"}
    assert problems(LLAMA, plan, software="torchtitan") == [
        "plan.grad_sync = step: torchtitan reduces sharded gradients after every microbatch; remove it"
    ]
    assert problems(LLAMA, plan) == []
    assert problems(LLAMA, {**plan, "pp": 2}, software="torchtitan") == []


@pytest.mark.parametrize(
    ("plan", "parts", "sentence"),
    [
        ({"dp_replicate": 3}, {"cluster": catalog.cluster("dgx-h100", 8)}, "plan = dp_replicate 3 x pp 1: the plan "
         "needs 3 devices and the cluster has 8; use dp_replicate = 8 or num_devices = 3 without num_nodes"),
        ({"pp": 2}, {"cluster": catalog.cluster("dgx-h100", 16)}, "plan = dp_replicate 1 x pp 2: the plan needs 2 "
         "devices and the cluster has 16; use dp_shard = 8, dp_replicate = 8 or num_devices = 2 without num_nodes"),
        ({"dp_replicate": 5}, {}, "training.global_batch_size = 24: must be a multiple of dp x microbatch_size = 5 x 1 "
         "= 5; use 20 or 25"),
        ({"dp_replicate": 2, "microbatch_size": 5}, {}, "training.global_batch_size = 24: must be a multiple of dp x "
         "microbatch_size = 2 x 5 = 10; use 20 or 30, or plan.microbatch_size = 4 or 6"),
        ({"dp_replicate": 32}, {}, "training.global_batch_size = 24: must be a multiple of dp x microbatch_size = 32 x "
         "1 = 32; use 32"),
        ({"pp": 13}, {}, "plan.pp = 13: 13 stages must be at most num_hidden_layers = 12; use at most 12, or "
         "stage_layers: [0, 1, ..., 1] with 12 ones, for separate stages of embedding"),
        ({"pp": 2, "virtual_stages": 7, "schedule": "interleaved_1f1b"}, {}, "plan.virtual_stages = 7: 14 stages must "
         "be at most num_hidden_layers = 12; use fewer stages, or stage_layers: [0, 1, ..., 1, 0] with 12 ones, for "
         "separate stages of embedding and head"),
        ({"pp": 15}, {}, "plan.pp = 15: 15 stages must be at most num_hidden_layers = 12; use at most 12"),
        ({"dp_shard": 8192, "zero_stage": 1}, {"num_microbatches": 1}, "plan.zero_stage = 1: an update of 8,192 "
         "shards, each of which one broadcast sends to all others, is not modeled yet; use 2 or 3, or 4,096 shards or "
         "fewer"),
        ({"pp": 2, "schedule": "none"}, {}, "plan.schedule = none: a pipeline of 2 ranks needs a schedule; use naive, "
         "gpipe, 1f1b, interleaved_1f1b, zb-h1, zb-h2, zb-1p, zb-2p, zb-v or dualpipe-v"),
        ({"pp": 2, "schedule": "zb-v", "virtual_stages": 1}, {}, "plan.virtual_stages = 1: must be 2 with zb-v, which "
         "goes down the ranks and back up; remove it"),
        ({"pp": 2, "schedule": "zb-h1", "recompute": "full"}, {}, "plan.recompute = full: would recompute layers in "
         "both parts of a backward, which zb-h1 splits in two; use none or selective, or schedule = 1f1b"),
        ({"pp": 2, "schedule": "zb-h1", "dp_replicate": 2}, {}, "plan.schedule = zb-h1: splits backward, and torch's "
         "DistributedDataParallel does not reduce what a split backward makes; use dp_shard = 2 and dp_replicate = 1 "
         "with zero_stage = 2, or schedule = 1f1b"),
        ({"schedule": "gpipe"}, {}, "plan.schedule = gpipe: must be none when pp = 1: there is no pipeline; remove it, "
         "or use pp = 2 or more"),
        ({"pp": 2, "stage_layers": (4, 4, 4)}, {}, "plan.stage_layers = [4, 4, 4]: has 3 entries and the plan has 2 "
         "stages; e.g. [6, 6], or remove it"),
        ({"pp": 3, "stage_layers": (6, 0, 6)}, {}, "plan.stage_layers = [6, 0, 6]: has a stage without layers between "
         "others; only the first and the last have something else; e.g. [4, 4, 4], or remove it"),
        ({"pp": 5, "stage_layers": (2, 2, 2, 2, 2)}, {}, "plan.stage_layers = [2, 2, 2, 2, 2]: sums to 10 and the "
         "model has num_hidden_layers = 12; e.g. [3, 3, 2, 2, 2], or remove it"),
        ({"pp": 4, "schedule": "zb-1p"}, {"global_batch_size": 4_000_000}, "training.global_batch_size = 4000000: "
         "gives 16,000,000 microbatches x pipeline ranks, more than 30,000, and schedule zb-1p differs with every "
         "number of microbatches; use at most 7500, a larger microbatch_size, or 1f1b"),
        ({"pp": 2, "schedule": "zb-2p-optsync"}, {}, "plan.schedule = zb-2p-optsync: an optimizer step for which "
         "pipeline ranks wait for each other is not modeled yet; use zb-2p"),
        ({"pp": 2, "dp_replicate": 2, "grad_sync": "microbatch"}, {}, "plan.grad_sync = microbatch: gradient reduction "
         "after every microbatch of a pipeline (torch's pipelines reduce once a step) is not modeled yet; use step"),
        ({"pp": 2, "dp_shard": 2}, {}, "model.tied_embeddings = true: sharding of an embedding whose two copies are on "
         "different stages is not modeled yet; use model.tied_embeddings = false, or plan.zero_stage = 1"),
        ({"grad_dtype": "bf16"}, {}, "plan.grad_dtype = bf16: another dtype for gradients with torch is not modeled "
         "yet; remove it"),
    ],
)  # fmt: skip
def test_a_violation_names_field_value_rule_and_nearest_values(
    plan: dict[str, Any], parts: dict[str, Any], sentence: str
) -> None:
    assert problems(GPT2, plan, **parts) == [sentence]


def test_the_number_of_shards_is_the_first_fix_of_a_plan_for_other_devices() -> None:
    (sentence,) = problems(LLAMA, {"dp_shard": 8, "tp": 2}, cluster=catalog.cluster("dgx-h100", 8))
    assert sentence.endswith(
        "the plan needs 16 devices and the cluster has 8; use dp_shard = 4 or num_devices = 16 without num_nodes"
    )


@pytest.mark.parametrize(
    ("plan", "fields", "sentence"),
    [
        ({"tp": 4}, {}, "plan.tp = 4: must divide model.num_key_value_heads = 6; use 3 or 6"),
        ({"tp": 12}, {"num_key_value_heads": 12, "vocab_size": 601}, "plan.tp = 12: must divide model.vocab_size = "
         "601; use 1 or 601, or model.vocab_size = 612 (padded)"),
        ({"sequence_parallel": True}, {}, "plan.sequence_parallel = true: splits tokens over the tensor-parallel "
         "ranks, and tp = 1; use false, or a larger tp"),
        ({"tp": 6}, {"seq_len": 50, "max_position_embeddings": 50}, "model.seq_len = 50: must be a multiple of tp x cp "
         "= 6 for sequence parallelism; use 48 or 54, or plan.sequence_parallel = false"),
        ({"cp": 5}, {}, "model.seq_len = 48: must be a multiple of 2 x cp = 10: each rank takes an early and a late "
         "part of the sequence, so that causal attention is spread evenly; use 40 or 50, or another plan.cp"),
        ({"cp": 4, "cp_comm": "a2a"}, {}, "plan.cp = 4: cp x tp = 4 must divide model.num_key_value_heads = 6: "
         "all-to-all trades tokens for heads; use plan.cp_comm = ring or all_gather, or a smaller cp"),
        ({"cp_comm": "a2a"}, {}, "plan.cp_comm = a2a: selects the communication of context-parallel ranks, and cp = 1; "
         "remove it, or use a larger cp"),
        ({"dp_shard": 2, "zero_stage": 0}, {}, "plan.zero_stage = 0: shards nothing, and dp_shard = 2; use 1, 2 or 3, "
         "or dp_replicate = 2 and dp_shard = 1"),
        ({"dp_replicate": 2, "zero_stage": 3}, {}, "plan.zero_stage = 3: shards states over dp_shard x cp ranks, which "
         "is 1, and dp_replicate = 2; use dp_shard = 2 and dp_replicate = 1, or zero_stage = 0"),
        ({"dp_shard": 2, "zero_stage": 1, "reshard_after_forward": False}, {}, "plan.reshard_after_forward = false: is "
         "about sharded parameters, and zero_stage = 1; remove it, or use zero_stage = 3"),
        ({"dp_shard": 2, "bucket_bytes": 1000}, {}, "plan.bucket_bytes = 1000: is about DDP's buckets; FSDP reduces "
         "layer by layer; remove it, or use zero_stage = 0 or 1"),
        ({"tp": 2, "bucket_bytes": 1000}, {}, "plan.bucket_bytes = 1000: is about reducing gradients over "
         "data-parallel ranks, and there is one; remove it"),
        ({"zero_stage": 3, "reshard_after_forward": False}, {}, "plan.reshard_after_forward = false: is about sharded "
         "parameters, and there is one shard; remove it, or use zero_stage = 3"),
        ({"grad_sync": "microbatch"}, {}, "plan.grad_sync = microbatch: is about reducing gradients over data-parallel "
         "ranks, and there is one; remove it"),
        ({"pp": 2, "virtual_stages": 2, "dp_replicate": 2}, {}, "plan.virtual_stages = 2: torch's "
         "DistributedDataParallel fails with several stages on a rank; use dp_shard = 2 and dp_replicate = 1 with "
         "zero_stage = 3, or virtual_stages = 1"),
        ({"pp": 2, "schedule": "interleaved_1f1b"}, {}, "plan.virtual_stages = 1: interleaving needs several stages on "
         "a rank; use virtual_stages = 2 or more, or schedule = 1f1b"),
        ({"pp": 2, "virtual_stages": 2, "schedule": "gpipe"}, {}, "plan.schedule = gpipe: takes one stage a rank, and "
         "virtual_stages = 2; use interleaved_1f1b, or virtual_stages = 1"),
    ],
)  # fmt: skip
def test_a_violation_of_parallel_layers_names_field_value_rule_and_nearest_values(
    plan: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    assert problems(LLAMA.model_copy(update=fields), plan) == [sentence]


def test_all_violations_are_told_at_once_and_mixed_ones_are_no_not_modelled_error() -> None:
    job = job_of(GPT2, {"pp": 13, "schedule": "none", "tp": 2, "ep": 2}, cluster=catalog.cluster("dgx-h100", 8))
    with pytest.raises(SpecError) as caught:
        check_job(job)
    assert not isinstance(caught.value, NotModelledError)
    assert {p.field for p in caught.value.problems} == {"plan", "plan.pp", "plan.schedule", "plan.tp", "plan.ep"}


def model(**fields: Any) -> ModelSpec:
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "intermediate_size": 64, "seq_len": 64}
    return tiny_model(**{"family": "llama", **sizes, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_key_value_heads": 5}, "model.num_key_value_heads = 5: must divide num_attention_heads = 12; use 4 or 6"),
        ({"num_attention_heads": 32}, "model.head_dim = 3: must be even: rotary positions turn pairs; use 2 or 4"),
        (
            {"family": "gpt", "max_position_embeddings": 32},
            "model.seq_len = 64: must be at most max_position_embeddings = 32; "
            "use 32, or set max_position_embeddings to 64 as well",
        ),
    ],
)
def test_model_rules(fields: dict[str, Any], sentence: str) -> None:
    assert problems(model(**fields)) == [sentence]


TEXT, PICTURES = "models that predict the next token", "models that predict the class of an image"


@pytest.mark.parametrize(
    ("family", "fields", "data", "sentence"),
    [
        ("gpt", {}, "markov", ""),
        ("vit", {"num_classes": 112}, "gratings", ""),
        ("vit", {"num_classes": 113}, "gratings",
         "has 112 different images of 16 x 16 pixels, and the model 113 classes; use larger images, or fewer classes"),
        ("gpt", {}, "gratings", f"is made for {PICTURES}, and gpt predicts the next token; use markov or random"),
        ("bert", {}, "markov", f"is made for {TEXT}, and bert predicts masked tokens; use random"),
        ("t5", {}, "markov", f"is made for {TEXT}, and t5 predicts the tokens of a decoder; use random"),
        ("vit", {}, "markov", f"is made for {TEXT}, and vit predicts the class of an image; use gratings or random"),
    ],
)  # fmt: skip
def test_data_to_learn_is_for_the_task_of_the_model(
    family: str, fields: dict[str, Any], data: str, sentence: str
) -> None:
    model = ModelSpec(family=family, **{**FAMILIES[family], **fields})
    assert problems(model, data=data) == ([f"training.data = {data}: {sentence}"] if sentence else [])


def test_cluster_rules() -> None:
    whole = catalog.cluster("dgx-h100", 16)
    unconnected = whole.model_copy(update={"intra_link": None, "inter_link": None})
    found = [sentence.split(":")[0] for sentence in problems(GPT2, {"dp_replicate": 8}, cluster=unconnected)]
    assert found[:2] == ["cluster.intra_link", "cluster.inter_link_gbit_per_node"]


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_cpu_ranks_compute_in_fp32_bf16_or_fp8(precision: str) -> None:
    here = catalog.cluster("this-machine", 1)
    assert problems(GPT2, cluster=here, precision=precision) == [
        f"training.precision = {precision}: must be fp32, bf16 or fp8 on a CPU (this-machine-cpu): "
        "the others are those of accelerators; use fp32"
    ]
    assert problems(GPT2, cluster=here, precision="fp32") == problems(GPT2, cluster=here) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rules_let_every_schedule_through(name: str) -> None:
    plan = {} if name == "none" else {"pp": 2, "schedule": name}
    assert problems(GPT2, plan | ({"virtual_stages": 2} if name == "interleaved_1f1b" else {})) == []


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
        assert problems(GPT2, plan, global_batch_size=batch) == []
        return
    [sentence] = problems(GPT2, plan, global_batch_size=batch)
    sizes, _, microbatches = sentence.partition("; use ")[2].partition(", or plan.microbatch_size = ")
    for size in sizes.split(" or "):
        assert problems(GPT2, plan, global_batch_size=int(size)) == []
    for size in microbatches.split(" or ") if microbatches else []:
        assert problems(GPT2, {**plan, "microbatch_size": int(size)}, global_batch_size=batch) == []


@pytest.mark.parametrize(
    "plan",
    [
        {**STATES, **ACTIVATIONS},
        {**STATES, **ACTIVATIONS, "dp_shard": 4, "recompute": "full"},
        {**STATES, "zero_stage": 2, "dp_replicate": 2},
        {**STATES, "dp_shard": 1, "cp": 2, "cp_comm": "a2a", "zero_stage": 3},
        {**ACTIVATIONS, "pp": 2, "virtual_stages": 2, "recompute": "selective"},
        {**ACTIVATIONS, "dp_replicate": 2},
        {**ACTIVATIONS, "cp": 2, "cp_comm": "all_gather"},
        {**ACTIVATIONS, "offload_layers": 3},
    ],
)
def test_plans_that_offload_pass(plan: dict[str, Any]) -> None:
    assert problems(GPT2, plan, cluster="dgx-a100-80gb") == []


@pytest.mark.parametrize(
    ("plan", "parts", "sentence"),
    [
        ({**STATES, "dp_shard": 1}, {}, "no parameters that FSDP shards; use dp_shard = 2 or more"),
        ({**STATES, "dp_shard": 1, "dp_replicate": 4}, {}, "shards; use dp_shard = 4 in place of dp_replicate"),
        ({**STATES, "zero_stage": 1}, {}, "this plan has no parameters that FSDP shards; use zero_stage = 3"),
        ({**STATES, "tp": 2}, {"model": "llama3-8b"}, "tensor parallelism (tp = 2) is not modeled yet with it; use tp "
         "= 1"),
        (STATES, {"precision": "fp8"}, "training.precision = fp8 is not modeled yet with it; use bf16"),
        ({**STATES, "ep": 2, "dp_replicate": 2}, {"model": "mixtral-8x7b"}, "plan.offload_optimizer = true: states of "
         "experts of which other ranks have others is not modeled"),
        (ACTIVATIONS, {"model": "t5-small"}, "activations of the family t5 is not modeled"),
        (ACTIVATIONS, {"model": "mistral-7b-v0.1"}, "attention in a window"),
        ({**ACTIVATIONS, "pp": 2, "schedule": "zb-h1"}, {}, "a backward in two parts (zb-h1) is not modeled"),
        ({**ACTIVATIONS, "pp": 2, "schedule": "mine.csv"}, {}, "a schedule of your own is not modeled"),
        ({**ACTIVATIONS, "recompute": "qkv_proj_offloaded"}, {"software": "maxtext"}, "which has transfers of its own"),
        ({"offload_layers": 2}, {}, "plan.offload_layers = 2: says of how many blocks activations are moved"),
        ({**ACTIVATIONS, "offload_layers": 2, "pp": 2}, {}, "blocks of a pipeline (pp = 2) is not modeled yet"),
    ],
)  # fmt: skip
def test_offloading_that_is_not_modelled(plan: dict[str, Any], parts: dict[str, Any], sentence: str) -> None:
    [found] = problems(**{"model": GPT2, "plan": plan, "cluster": "dgx-a100-80gb", **parts})
    assert sentence in found


@pytest.mark.parametrize("plan", [STATES, ACTIVATIONS])
def test_a_missing_host_link_is_asked_for(plan: dict[str, Any]) -> None:
    cluster = catalog.cluster("dgx-a100-80gb", num_devices=1).model_copy(update={"host_link": None})
    assert any(
        re.match(r"cluster.device.host_link: is missing: .* e.g. .preset: a100-sxm-80gb", found)
        for found in problems(GPT2, plan, cluster=cluster)
    )


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
    [found] = problems(GPT2, STATES, cluster="dgx-a100-80gb", software="llm-foundry")
    assert re.search(r"software llm-foundry is not modeled yet with it; use .* torch \(or", found)


def test_buckets_are_refused_where_nothing_is_reduced_in_buckets() -> None:
    plan = {"dp_replicate": 2, "bucket_bytes": 1000}
    assert problems(LLAMA, plan, software="megatron-bridge") == []
    assert problems(LLAMA, plan, software="megatron-core") == [
        "plan.bucket_bytes = 1000: is about reducing gradients while backward runs, "
        "and megatron-core reduces all of them after it; remove it"
    ]


@pytest.mark.parametrize(
    ("plan", "software", "said"),
    [
        ({"pp": 2}, {"expert_overlap": True}, r"plan.virtual_stages = 1: must be more with .*; use 2 or more, or"),
        ({"pp": 2, "schedule": "gpipe"}, {"expert_overlap": True}, r"plan.virtual_stages = 1: must be more with"),
        ({"tp": 2, "etp": 2}, {"expert_dispatch": "deepep"}, "software.expert_dispatch = deepep: .*plan.etp = 1"),
    ],
)
def test_ways_to_bring_tokens_that_do_not_go_with_a_plan(
    plan: dict[str, Any], software: dict[str, Any], said: str
) -> None:
    plan, profile = {"ep": 2, "dp_replicate": 2, **plan}, catalog.software("megatron-bridge")
    assert problems(model_of(), plan, software=profile) == []
    [found] = problems(model_of(), plan, software=profile.model_copy(update=software))
    assert re.match(said, found)


def test_step_of_many_microbatches_on_shared_cores_is_refused() -> None:
    """Ranks that share cores are simulated whole: 10**12 microbatches took all memory."""
    cluster = catalog.cluster("dgx-h100", num_devices=1).model_copy(update={"cores_per_node": 2})
    assert problems(GPT2, {}, cluster=cluster, global_batch_size=30_000) == []
    assert problems(GPT2, {}, cluster=cluster, global_batch_size=10**12) == [
        "training.global_batch_size = 1000000000000: gives 1,000,000,000,000 microbatches x pipeline ranks, more than "
        "30,000, and ranks share cores; use at most 30000, or a larger microbatch_size"
    ]


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_expert_parts_beyond_all_shards_are_refused(zero_stage: int) -> None:
    """Other rules divide the shards by them."""
    plan = {"ep": 2, "dp_shard": 2, "etp": 4, "zero_stage": zero_stage}
    assert any(
        found.startswith("plan.etp = 4: must divide plan.tp")
        for found in problems(model_of(), plan, software="megatron-core")
    )


def test_exchanges_beside_another_microbatch_are_for_narrow_weights_and_several_stages() -> None:
    """What Megatron Core asserts of overlap_moe_expert_parallel_comm."""
    profile = catalog.software("megatron-core").model_copy(update={"expert_overlap": True})

    def fields(precision: str = "bf16", **plan: int) -> list[str]:
        job = job_of(model_of(), {"ep": 2, "dp_replicate": 2, **plan}, software=profile, precision=precision)
        rules = (expert_overlap_ranks, expert_overlap_stages, expert_overlap_precision)
        return [problem.field for problem in violations(job, rules)]

    assert fields(dp_replicate=4) == fields(pp=2, virtual_stages=2) == []
    assert fields("fp32", pp=2) == ["plan.virtual_stages", "training.precision"]
    assert fields(ep=1, pp=2) == ["plan.ep"]
    several = {"ep": 2, "dp_replicate": 2, "pp": 2, "virtual_stages": 2}
    assert problems(model_of(), several, software=profile) == []


DRAGONFLY = catalog.cluster("dgx-h100", 16).model_copy(
    update={
        "inter_link": catalog.link("sharp-400gbit"),
        "topology": Dragonfly(kind="dragonfly", nodes_per_router=1, routers_per_group=2, global_gbit=400.0),
    }
)


def collectives_of(plan: dict[str, Any], algorithms: dict[str, Any], **parts: Any) -> list[str]:
    """Problems of a plan with prescribed algorithms."""
    fields = {"model": GPT2, "cluster": "dgx-h100", "global_batch_size": 48, **parts}
    return problems(plan={**plan, "collectives": algorithms}, **fields)


@pytest.mark.parametrize(
    ("plan", "algorithms", "parts"),
    [
        ({"dp_replicate": 8}, {"all_reduce": "ring"}, {}),
        ({"dp_replicate": 8}, {"all_gather": "ring", "all_to_all": "pairwise"}, {}),
        ({"dp_replicate": 16}, {"all_reduce": "tree"}, {}),
        ({"dp_replicate": 16}, {"all_reduce": "nvls"}, {}),
        ({"dp_replicate": 16}, {"all_reduce": "halving_doubling"}, {}),
        ({"dp_replicate": 16}, {"all_reduce": "hierarchical"}, {}),
        ({"dp_replicate": 16}, {"all_reduce": "parameter_server", "parameter_servers": 2}, {}),
        ({"dp_shard": 8}, {"all_gather": "nvls", "reduce_scatter": "halving_doubling"}, {}),
        ({"dp_shard": 8, "ep": 8}, {"all_to_all": "pairwise"}, {"model": model_of(num_experts=8)}),
        ({"dp_shard": 16, "ep": 16}, {"all_to_all": "hierarchical"}, {"model": model_of(num_experts=16)}),
    ],
)
def test_collectives_that_links_and_groups_can_run_pass(
    plan: dict[str, Any], algorithms: dict[str, Any], parts: dict[str, Any]
) -> None:
    assert collectives_of(plan, algorithms, **parts) == []


@pytest.mark.parametrize(
    ("plan", "algorithms", "parts", "sentence"),
    [
        ({"dp_replicate": 8}, {"all_reduce": "nvls"}, {"cluster": "dgx-a100-80gb"},
         "plan.collectives.all_reduce = nvls: reduces in a switch inside the node, and nvlink3 has none that does"),
        ({"dp_shard": 16}, {"all_gather": "nvls"}, {}, "stays inside a node, and the group spans 2 nodes"),
        ({"dp_replicate": 2, "tp": 8}, {"all_reduce": "nvls"}, {"model": "llama3-8b"}, "a node has one rank of"),
        ({"dp_replicate": 12}, {"all_reduce": "halving_doubling"}, {}, "12 ranks are no power of two"),
        ({"dp_replicate": 12}, {"all_reduce": "hierarchical"}, {}, "needs several nodes with equally many ranks"),
        ({"dp_replicate": 8}, {"all_reduce": "hierarchical"}, {}, "and 8 ranks are on 1 node"),
        ({"dp_replicate": 16}, {"all_reduce": "sharp"}, {}, "and network-400gbit has none that do"),
        ({"dp_replicate": 8}, {"all_reduce": "sharp"}, {}, "and the group is inside one node"),
        ({"dp_replicate": 16}, {"all_reduce": "sharp"}, {"cluster": DRAGONFLY}, "and the topology is a dragonfly"),
        ({"dp_replicate": 2, "dp_shard": 8, "ep": 4, "zero_stage": 1}, {"reduce_scatter": "nvls"},
         {"model": model_of(num_experts=4), "software": "megatron-core"}, "(group of expert-data-parallel ranks)"),
        ({"dp_replicate": 16}, {"all_reduce": "parameter_server", "parameter_servers": 3}, {},
         "plan.collectives.parameter_servers = 3: is more than the 2 nodes that could serve: gradients are added "
         "inside a node; use 2 or less"),
        ({"dp_replicate": 12}, {"all_reduce": "parameter_server"}, {}, "needs equally many ranks on each node"),
        ({"dp_replicate": 2, "tp": 2}, {"all_reduce": "parameter_server"}, {"model": model_of()},
         "plan.tp = 2: does not go with a parameter server"),
        ({"dp_shard": 8}, {"all_reduce": "parameter_server"}, {}, "plan.zero_stage = 3: shards states over ranks"),
        ({"dp_shard": 8, "ep": 8}, {"all_to_all": "pairwise"}, {"model": model_of(num_experts=8),
         "software": catalog.software("torch").model_copy(update={"expert_dispatch": "deepep"})},
         "deepep has an all-to-all of its own"),
    ],
)  # fmt: skip
def test_collectives_that_links_or_groups_cannot_run(
    plan: dict[str, Any], algorithms: dict[str, Any], parts: dict[str, Any], sentence: str
) -> None:
    found = collectives_of(plan, algorithms, **parts)
    assert found
    assert sentence in found[0]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"tp": 2, "pp": 4, "placement": ("tp", "dp")},
            "plan.placement = [tp, dp]: must name every axis of several ranks, and pp = 4; add pp where it belongs",
        ),
        (
            {"tp": 2, "dp_replicate": 2, "placement": (0, 1, 2)},
            "plan.placement = [0, 1, 2]: has 3 devices and the plan has 4 ranks; list the device of every rank",
        ),
    ],
)
def test_placements_that_leave_ranks_out(plan: dict[str, Any], said: str) -> None:
    assert problems(LLAMA, plan) == [said]


@pytest.mark.parametrize(
    ("placement", "is_mesh"),
    [
        (("tp", "cp", "ep", "dp", "pp"), True),
        (("tp", "ep", "dp_shard", "dp_replicate", "pp"), True),
        (("tp", "dp", "ep", "pp"), False),
        (("ep", "tp", "dp", "pp"), False),
        (("tp", "ep", "pp", "dp"), False),
        (("tp", "pp", "dp"), True),
    ],
)
def test_ep_in_a_placement_is_where_the_mesh_has_it(placement: tuple[str, ...], is_mesh: bool) -> None:
    plan = {"ep": 2, "tp": 2, "etp": 1, "dp_replicate": 2, "pp": 2, "placement": placement}
    found = problems(model_of(), plan, software=catalog.software("megatron-core"))
    assert [said.split("; ")[-1] for said in found] == ["write [tp, cp, ep, dp, pp], or leave ep out"] * (not is_mesh)


@pytest.mark.parametrize("plan", [{"pp": 2}, {"ep": 4, "dp_shard": 8}])
def test_torchtitan_captures_neither_pipelines_nor_expert_parallelism(plan: dict[str, Any]) -> None:
    """As its own check says; frameworks of Megatron's kin capture blocks one by one."""
    titan, bridge = (
        catalog.software(name).model_copy(update={"cuda_graphs": True}) for name in ("torchtitan", "megatron-bridge")
    )
    model = model_of(num_experts=8, top_k=2)
    [sentence] = problems(model, plan, software=titan)
    assert sentence.startswith("software.cuda_graphs = true: torchtitan captures no step with ")
    assert sentence.endswith("; use false")
    assert not any("cuda_graphs" in said for said in problems(model, plan, software=bridge))


@pytest.mark.parametrize("devices", [3, 7, 12, 24, 40, 48, 96])
@pytest.mark.parametrize("plan", [{"dp_shard": 8, "tp": 2}, {"tp": 6}, {"dp_replicate": 4, "pp": 2}])
def test_fix_for_other_devices_leaves_no_problem(plan: dict[str, Any], devices: int) -> None:
    """Also where the batch of 24 cannot be divided among the new data-parallel ranks."""
    cluster = catalog.cluster("dgx-h100", devices)
    (sentence,) = problems(LLAMA, plan, cluster=cluster)
    fixes = sentence.partition("; use ")[2].partition(" or num_devices = ")[0]
    assert fixes
    for fix in re.split(", | or ", fixes):
        changes = dict(re.findall(r"([\w.]+) = (\d+)", fix))
        batch = int(changes.pop("training.global_batch_size", 24))
        fixed = plan | {key: int(value) for key, value in changes.items()}
        assert problems(LLAMA, fixed, cluster=cluster, global_batch_size=batch) == []
