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
from tests.support.problems import says

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
         "plan.compression = fp16: ... gradients ... data-parallel"),
        ({"dp_shard": 8, "compression": "int8"}, {},
         "plan.compression = int8: ... DDP, and zero_stage = 3"),
        ({"dp_shard": 8, "zero_stage": 2, "compression": "int8"}, {},
         "plan.compression = int8: ... DDP, and zero_stage = 2"),
        ({"dp_shard": 8, "zero_stage": 1, "compression": "fp16"}, {"software": "deepspeed"},
         "plan.compression = fp16: ... DDP, and ZeRO-1 of deepspeed"),
        ({"dp_replicate": 8, "compression": "one_bit"}, {"software": "megatron-core"},
         "plan.compression = one_bit: ... communication ... DDP"),
        ({"dp_replicate": 8, "compression": "top_k"}, {"software": "accelerate"},
         "plan.compression = top_k: ... communication ... accelerate; use fp16"),
        ({"dp_replicate": 8, "compression": {"kind": "powersgd", "rank": 1000}}, {},
         "plan.compression = powersgd: compresses nothing: every gradient"),
        ({"dp_replicate": 8, "compression": "int8", "collectives": {"all_reduce": "parameter_server"}}, {},
         "plan.compression = int8: is a hook of DDP's all-reduce"),
        ({"dp_replicate": 8, "compression": "int8", "grad_dtype": "fp32"}, {},
         "plan.grad_dtype = fp32: is another way"),
        ({"dp_replicate": 4, "pp": 2, "compression": "int8"}, {},
         "plan.compression.kind = int8: ... plan.pp = 2 is not modeled"),
        ({"dp_replicate": 4, "tp": 2, "compression": "int8"}, {},
         "plan.compression.kind = int8: ... plan.tp = 2 is not modeled"),
        ({"dp_replicate": 8, "grad_sync": "microbatch", "compression": "int8"}, {},
         "plan.compression.kind = int8: ... plan.grad_sync = microbatch is not modeled"),
        ({"dp_replicate": 8, "compression": "int8"}, {"backup_workers": 1},
         "plan.compression.kind = int8: ... training.backup_workers is not modeled"),
        ({"dp_replicate": 8, "compression": "one_bit_adam"}, {"optimizer": "lamb"},
         "training.optimizer = lamb: ... plan.compression = one_bit_adam ... use adam"),
        ({"dp_replicate": 8, "compression": "one_bit_adam"}, {"clip_grad_norm": 1.0},
         "training.clip_grad_norm = 1: ... plan.compression = one_bit_adam"),
        ({"dp_shard": 8, "zero_stage": 1, "compression": "one_bit_adam"}, {},
         "plan.compression = one_bit_adam: ... zero_stage = 1"),
        ({"dp_shard": 8, "compression": "one_bit_adam"}, {},
         "plan.compression = one_bit_adam: ... DDP, and zero_stage = 3"),
    ],
)  # fmt: skip
def test_compression_is_for_hooks_of_ddp(plan: dict[str, Any], parts: dict[str, Any], sentence: str) -> None:
    assert any(says(refusal, sentence) for refusal in problems(LLAMA, plan, **parts))


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
    refusals = problems(LLAMA, {"recompute": "qkv_proj_offloaded"}, software=software)
    expected = f"plan.recompute = qkv_proj_offloaded: {software} does not support it"
    assert any(sentence.startswith(expected) for sentence in refusals) is (software != "maxtext")


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
    (sentence,) = problems(LLAMA, plan, software="torchtitan")
    assert says(sentence, "plan.grad_sync = step: torchtitan", "every microbatch; remove it")
    assert problems(LLAMA, plan) == []
    assert problems(LLAMA, {**plan, "pp": 2}, software="torchtitan") == []


@pytest.mark.parametrize(
    ("plan", "parts", "sentence"),
    [
        ({"dp_replicate": 3}, {"cluster": catalog.cluster("dgx-h100", 8)},
         "plan = dp_replicate 3 x pp 1: ... 3 ... 8; use dp_replicate = 8 or num_devices = 3 ... num_nodes"),
        ({"pp": 2}, {"cluster": catalog.cluster("dgx-h100", 16)},
         "plan = dp_replicate 1 x pp 2: ... 2 ... 16; use dp_shard = 8, dp_replicate = 8 or num_devices = 2 ... "
         "num_nodes"),
        ({"dp_replicate": 5}, {},
         "training.global_batch_size = 24: ... multiple of dp x microbatch_size = 5 x 1 = 5; use 20 or 25"),
        ({"dp_replicate": 2, "microbatch_size": 5}, {},
         "training.global_batch_size = 24: ... multiple of dp x microbatch_size = 2 x 5 = 10; use 20 or 30, or "
         "plan.microbatch_size = 4 or 6"),
        ({"dp_replicate": 32}, {},
         "training.global_batch_size = 24: ... multiple of dp x microbatch_size = 32 x 1 = 32; use 32"),
        ({"pp": 13}, {},
         "plan.pp = 13: 13 ... most num_hidden_layers = 12; use at most 12, or stage_layers: [0, 1 ... 1] with 12"),
        ({"pp": 2, "virtual_stages": 7, "schedule": "interleaved_1f1b"}, {},
         "plan.virtual_stages = 7: 14 ... most num_hidden_layers = 12; use ... stage_layers: [0, 1 ... 1, 0] with 12"),
        ({"pp": 15}, {}, "plan.pp = 15: 15 ... most num_hidden_layers = 12; use at most 12"),
        ({"dp_shard": 8192, "zero_stage": 1}, {"num_microbatches": 1},
         "plan.zero_stage = 1: ... 8,192 ... not modeled ... use 2 or 3, or 4,096"),
        ({"pp": 2, "schedule": "none"}, {},
         "plan.schedule = none: ... pipeline of 2 ... use "
         + " or ".join(", ".join(name for name in SCHEDULES if name != "none").rsplit(", ", 1))),
        ({"pp": 2, "schedule": "zb-v", "virtual_stages": 1}, {}, "plan.virtual_stages = 1: ... 2 with zb-v ... remove"),
        ({"pp": 2, "schedule": "zb-h1", "recompute": "full"}, {},
         "plan.recompute = full: ... recompute ... zb-h1 ... use none or selective, or schedule = 1f1b"),
        ({"pp": 2, "schedule": "zb-h1", "dp_replicate": 2}, {},
         "plan.schedule = zb-h1: ... backward ... DistributedDataParallel ... use dp_shard = 2 and dp_replicate = 1 "
         "with zero_stage = 2, or schedule = 1f1b"),
        ({"schedule": "gpipe"}, {}, "plan.schedule = gpipe: ... none ... pp = 1: ... remove ... pp = 2"),
        ({"pp": 2, "stage_layers": (4, 4, 4)}, {}, "plan.stage_layers = [4, 4, 4]: ... 3 ... 2 ... e.g. [6, 6]"),
        ({"pp": 3, "stage_layers": (6, 0, 6)}, {},
         "plan.stage_layers = [6, 0, 6]: ... without ... between ... e.g. [4, 4, 4]"),
        ({"pp": 5, "stage_layers": (2, 2, 2, 2, 2)}, {},
         "plan.stage_layers = [2, 2, 2, 2, 2]: ... 10 ... num_hidden_layers = 12; e.g. [3, 3, 2, 2, 2]"),
        ({"pp": 4, "schedule": "zb-1p"}, {"global_batch_size": 4_000_000},
         "training.global_batch_size = 4000000: ... 16,000,000 ... x ... 30,000 ... zb-1p ... use at most 7500 ... "
         "microbatch_size, or 1f1b"),
        ({"pp": 2, "schedule": "zb-2p-optsync"}, {}, "plan.schedule = zb-2p-optsync: ... not modeled ... use zb-2p"),
        ({"pp": 2, "dp_replicate": 2, "grad_sync": "microbatch"}, {},
         "plan.grad_sync = microbatch: ... not modeled ... use"),
        ({"pp": 2, "dp_shard": 2}, {},
         "model.tied_embeddings = true: ... not modeled ... use model.tied_embeddings = false, or plan.zero_stage = 1"),
        ({"grad_dtype": "bf16"}, {}, "plan.grad_dtype = bf16: ... torch is not modeled ... remove"),
    ],
)  # fmt: skip
def test_a_violation_names_field_value_rule_and_nearest_values(
    plan: dict[str, Any], parts: dict[str, Any], sentence: str
) -> None:
    [refusal] = problems(GPT2, plan, **parts)
    assert says(refusal, sentence)


def test_the_number_of_shards_is_the_first_fix_of_a_plan_for_other_devices() -> None:
    (sentence,) = problems(LLAMA, {"dp_shard": 8, "tp": 2}, cluster=catalog.cluster("dgx-h100", 8))
    assert says(sentence, "16 devices", "cluster has 8; use dp_shard = 4 or num_devices = 16")


@pytest.mark.parametrize(
    ("plan", "fields", "sentence"),
    [
        ({"tp": 4}, {}, "plan.tp = 4: must divide model.num_key_value_heads = 6; use 3 or 6"),
        ({"tp": 12}, {"num_key_value_heads": 12, "vocab_size": 601},
         "plan.tp = 12: ... divide model.vocab_size = 601; use 1 or 601, or model.vocab_size = 612"),
        ({"sequence_parallel": True}, {}, "plan.sequence_parallel = true: ... tp = 1; use false ... tp"),
        ({"tp": 6}, {"seq_len": 50, "max_position_embeddings": 50},
         "model.seq_len = 50: ... multiple of tp x cp = 6 ... use 48 or 54, or plan.sequence_parallel = false"),
        ({"cp": 5}, {}, "model.seq_len = 48: ... multiple of 2 x cp = 10: ... use 40 or 50 ... plan.cp"),
        ({"cp": 4, "cp_comm": "a2a"}, {},
         "plan.cp = 4: cp x tp = 4 ... divide model.num_key_value_heads = 6: ... use plan.cp_comm = ring or "
         "all_gather ... cp"),
        ({"cp_comm": "a2a"}, {}, "plan.cp_comm = a2a: ... cp = 1; remove ... cp"),
        ({"dp_shard": 2, "zero_stage": 0}, {},
         "plan.zero_stage = 0: ... dp_shard = 2; use 1, 2 or 3, or dp_replicate = 2 and dp_shard = 1"),
        ({"dp_replicate": 2, "zero_stage": 3}, {},
         "plan.zero_stage = 3: ... dp_shard x cp ... 1, and dp_replicate = 2; use dp_shard = 2 and dp_replicate = 1, "
         "or zero_stage = 0"),
        ({"dp_shard": 2, "zero_stage": 1, "reshard_after_forward": False}, {},
         "plan.reshard_after_forward = false: ... zero_stage = 1; remove ... zero_stage = 3"),
        ({"dp_shard": 2, "bucket_bytes": 1000}, {},
         "plan.bucket_bytes = 1000: ... DDP's buckets; FSDP ... remove ... zero_stage = 0 or 1"),
        ({"tp": 2, "bucket_bytes": 1000}, {}, "plan.bucket_bytes = 1000: ... gradients ... data-parallel ... remove"),
        ({"zero_stage": 3, "reshard_after_forward": False}, {},
         "plan.reshard_after_forward = false: ... sharded parameters ... remove ... zero_stage = 3"),
        ({"grad_sync": "microbatch"}, {}, "plan.grad_sync = microbatch: ... gradients ... data-parallel ... remove"),
        ({"pp": 2, "virtual_stages": 2, "dp_replicate": 2}, {},
         "plan.virtual_stages = 2: torch's DistributedDataParallel ... use dp_shard = 2 and dp_replicate = 1 with "
         "zero_stage = 3, or virtual_stages = 1"),
        ({"pp": 2, "schedule": "interleaved_1f1b"}, {},
         "plan.virtual_stages = 1: interleaving ... several ... use virtual_stages = 2 ... schedule = 1f1b"),
        ({"pp": 2, "virtual_stages": 2, "schedule": "gpipe"}, {},
         "plan.schedule = gpipe: ... virtual_stages = 2; use interleaved_1f1b, or virtual_stages = 1"),
    ],
)  # fmt: skip
def test_a_violation_of_parallel_layers_names_field_value_rule_and_nearest_values(
    plan: dict[str, Any], fields: dict[str, Any], sentence: str
) -> None:
    [refusal] = problems(LLAMA.model_copy(update=fields), plan)
    assert says(refusal, sentence)


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
        ({"num_attention_heads": 32}, "model.head_dim = 3: ... rotary positions ... use 2 or 4"),
        (
            {"family": "gpt", "max_position_embeddings": 32},
            "model.seq_len = 64: ... most max_position_embeddings = 32; use 32 ... max_position_embeddings to 64",
        ),
    ],
)
def test_model_rules(fields: dict[str, Any], sentence: str) -> None:
    [refusal] = problems(model(**fields))
    assert says(refusal, sentence)


@pytest.mark.parametrize(
    ("family", "fields", "data", "sentence"),
    [
        ("gpt", {}, "markov", ""),
        ("vit", {"num_classes": 112}, "gratings", ""),
        ("vit", {"num_classes": 113}, "gratings",
         "112 ... images of 16 x 16 pixels ... 113 classes; use larger images, or fewer classes"),
        ("gpt", {}, "gratings", "class of an image ... gpt ... next token; use markov or random"),
        ("bert", {}, "markov", "next token ... bert ... masked tokens; use random"),
        ("t5", {}, "markov", "next token ... t5 ... tokens of a decoder; use random"),
        ("vit", {}, "markov", "next token ... vit ... class of an image; use gratings or random"),
    ],
)  # fmt: skip
def test_data_to_learn_is_for_the_task_of_the_model(
    family: str, fields: dict[str, Any], data: str, sentence: str
) -> None:
    model = ModelSpec(family=family, **{**FAMILIES[family], **fields})
    refusals = problems(model, data=data)
    assert len(refusals) == bool(sentence)
    assert all(says(refusal, f"training.data = {data}: ", sentence) for refusal in refusals)


def test_cluster_rules() -> None:
    whole = catalog.cluster("dgx-h100", 16)
    unconnected = whole.model_copy(update={"intra_link": None, "inter_link": None})
    fields = [sentence.split(":")[0] for sentence in problems(GPT2, {"dp_replicate": 8}, cluster=unconnected)]
    assert fields[:2] == ["cluster.intra_link", "cluster.inter_link_gbit_per_node"]


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_cpu_ranks_compute_in_fp32_bf16_or_fp8(precision: str) -> None:
    here = catalog.cluster("this-machine", 1)
    (sentence,) = problems(GPT2, cluster=here, precision=precision)
    assert says(sentence, f"training.precision = {precision}: ", "fp32, bf16 or fp8", "this-machine-cpu", "use fp32")
    assert problems(GPT2, cluster=here, precision="fp32") == problems(GPT2, cluster=here) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rules_let_every_schedule_through(name: str) -> None:
    plan = {} if name == "none" else {"pp": 2, "schedule": name}
    assert problems(GPT2, plan | ({"virtual_stages": 2} if name == "interleaved_1f1b" else {})) == []


@pytest.mark.parametrize(
    ("field", "largest"),
    [("num_hidden_layers", 2000), ("hidden_size", 10**6), ("vocab_size", 10**8), ("seq_len", 10**8)],
)
def test_sizes_of_a_model_have_limits(field: str, largest: int) -> None:
    assert getattr(model(**{"head_dim": 8, field: largest}), field) == largest
    with pytest.raises(ValueError, match=f"less than or equal to {largest}"):
        model(**{"head_dim": 8, field: largest + 1})


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
        ({**STATES, "zero_stage": 1}, {}, "parameters ... FSDP ... use zero_stage = 3"),
        ({**STATES, "tp": 2}, {"model": "llama3-8b"}, "(tp = 2) is not modeled ... use tp = 1"),
        (STATES, {"precision": "fp8"}, "training.precision = fp8 is not modeled ... use bf16"),
        ({**STATES, "ep": 2, "dp_replicate": 2}, {"model": "mixtral-8x7b"},
         "plan.offload_optimizer = true: ... not modeled"),
        (ACTIVATIONS, {"model": "t5-small"}, "activations of the family t5 is not modeled"),
        (ACTIVATIONS, {"model": "mistral-7b-v0.1"}, "attention in a window"),
        ({**ACTIVATIONS, "pp": 2, "schedule": "zb-h1"}, {}, "a backward in two parts (zb-h1) is not modeled"),
        ({**ACTIVATIONS, "pp": 2, "schedule": "mine.csv"}, {}, "a schedule of your own is not modeled"),
        ({**ACTIVATIONS, "recompute": "qkv_proj_offloaded"}, {"software": "maxtext"}, "which has transfers of its own"),
        ({"offload_layers": 2}, {}, "plan.offload_layers = 2: ... blocks activations"),
        ({**ACTIVATIONS, "offload_layers": 2, "pp": 2}, {}, "blocks of a pipeline (pp = 2) is not modeled yet"),
    ],
)  # fmt: skip
def test_offloading_that_is_not_modelled(plan: dict[str, Any], parts: dict[str, Any], sentence: str) -> None:
    [refusal] = problems(**{"model": GPT2, "plan": plan, "cluster": "dgx-a100-80gb", **parts})
    assert says(refusal, sentence)


@pytest.mark.parametrize("plan", [STATES, ACTIVATIONS])
def test_a_missing_host_link_is_asked_for(plan: dict[str, Any]) -> None:
    cluster = catalog.cluster("dgx-a100-80gb", num_devices=1).model_copy(update={"host_link": None})
    refused = problems(GPT2, plan, cluster=cluster)
    assert any(says(text, "cluster.device.host_link: is missing", "preset: a100-sxm-80gb") for text in refused)


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
    [refusal] = problems(GPT2, STATES, cluster="dgx-a100-80gb", software="llm-foundry")
    assert says(refusal, "llm-foundry is not modeled", "use ", " torch (or")


def test_buckets_are_refused_where_nothing_is_reduced_in_buckets() -> None:
    plan = {"dp_replicate": 2, "bucket_bytes": 1000}
    assert problems(LLAMA, plan, software="megatron-bridge") == []
    (sentence,) = problems(LLAMA, plan, software="megatron-core")
    assert says(sentence, "plan.bucket_bytes = 1000: ", "megatron-core", "after it; remove it")


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
    [refusal] = problems(model_of(), plan, software=profile.model_copy(update=software))
    assert re.match(said, refusal)


def test_step_of_many_microbatches_on_shared_cores_is_refused() -> None:
    """Ranks that share cores are simulated whole: 10**12 microbatches took all memory."""
    cluster = catalog.cluster("dgx-h100", num_devices=1).model_copy(update={"cores_per_node": 2})
    assert problems(GPT2, {}, cluster=cluster, global_batch_size=30_000) == []
    (sentence,) = problems(GPT2, {}, cluster=cluster, global_batch_size=10**12)
    assert says(sentence, "training.global_batch_size = 1000000000000: ", "ranks share cores; use at most 30000")


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_expert_parts_beyond_all_shards_are_refused(zero_stage: int) -> None:
    """Other rules divide the shards by them."""
    plan = {"ep": 2, "dp_shard": 2, "etp": 4, "zero_stage": zero_stage}
    assert any(
        refusal.startswith("plan.etp = 4: must divide plan.tp")
        for refusal in problems(model_of(), plan, software="megatron-core")
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
         "plan.collectives.all_reduce = nvls: ... inside ... nvlink3 ... none"),
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
         "plan.collectives.parameter_servers = 3: ... 2 ... inside ... use 2"),
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
    refusals = collectives_of(plan, algorithms, **parts)
    assert refusals
    assert says(refusals[0], sentence)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"tp": 2, "pp": 4, "placement": ("tp", "dp")},
            "plan.placement = [tp, dp]: ... pp = 4; add pp",
        ),
        (
            {"tp": 2, "dp_replicate": 2, "placement": (0, 1, 2)},
            "plan.placement = [0, 1, 2]: ... 3 ... 4",
        ),
    ],
)
def test_placements_that_leave_ranks_out(plan: dict[str, Any], said: str) -> None:
    [refusal] = problems(LLAMA, plan)
    assert says(refusal, said)


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
    refusals = problems(model_of(), plan, software=catalog.software("megatron-core"))
    assert [said.split("; ")[-1] for said in refusals] == ["write [tp, cp, ep, dp, pp], or leave ep out"] * (
        not is_mesh
    )


@pytest.mark.parametrize("plan", [{"pp": 2}, {"ep": 4, "dp_shard": 8}])
def test_torchtitan_captures_neither_pipelines_nor_expert_parallelism(plan: dict[str, Any]) -> None:
    """As its own check says; frameworks of Megatron's kin capture blocks one by one."""
    titan, bridge = (
        catalog.software(name).model_copy(update={"cuda_graphs": True}) for name in ("torchtitan", "megatron-bridge")
    )
    model = model_of(num_experts=8, top_k=2)
    [sentence] = problems(model, plan, software=titan)
    assert says(sentence, "software.cuda_graphs = true: torchtitan")
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
