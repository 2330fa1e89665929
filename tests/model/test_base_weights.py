"""Frozen weights of few bits: published bytes, arithmetic by hand, and what changes with them."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog, make_job
from simplan.errors import SpecError
from simplan.job import Job
from simplan.model.base_weights import BaseWeights
from simplan.model.layer import CollectiveKind, LayerKind
from simplan.predict import predict
from simplan.program.program import MemoryCategory, MemoryEffect
from tests.jobs import lowered

MIB = 1024**2
NF4 = {"format": "nf4"}
FLOATS = {"format": "nf4", "storage": "bf16"}
TORCHAO = {"format": "nf4", "library": "torchao", "double_quantization": True}


def job_of(base: dict[str, Any] | None, software: str = "torch", model: str = "llama3-8b", **keys: Any) -> Job:
    """A job on GPUs of one node that trains adapters of rank 16."""
    more = {} if base is None else {"training.base_weights": base}
    usual = {"device": "h100-sxm-80gb", "num_devices": 1, "lora_rank": 16, "seq_len": 1024, "software": software}
    return make_job(model, {**usual, **more, **keys})


def held(job: Job, rank: int = 0) -> int:
    """Bytes of the parameters that a rank holds between steps."""
    return lowered(job, 2).persistent_bytes[rank][MemoryCategory.PARAMETERS]


def linear_elements(job: Job) -> int:
    blocks = [layer for layer in job.model.layers if layer.kind is LayerKind.BLOCK]
    return sum(p.num_elements for layer in blocks for p in layer.parameters if p.frozen and len(p.shape) == 2)


@pytest.mark.parametrize(
    ("base", "bits"),
    [
        # Dettmers et al. 2023, section 3: 32 / 64 bits per parameter; 8 / 64 + 32 / (64 * 256)
        (NF4, 4 + 32 / 64),
        ({**NF4, "double_quantization": True}, 4 + 8 / 64 + 32 / (64 * 256)),
        # torchao: 16-bit factors of the second level
        (TORCHAO, 4 + 8 / 64 + 16 / (64 * 256)),
        ({"format": "int8"}, 8),
        ({"format": "gptq_int4"}, 4 + (16 + 4) / 128),
        # Egiazarian et al. 2024, section 4: 16 bits per 8 weights, 16 per row, and a table of 1 MiB for each of the 7
        # matrices of a block, which have 43,008 rows
        ({"format": "aqlm_2bit"}, 2 + (7 * 8 * MIB + 16 * 43_008) / 218_103_808),
        ({"format": "nf4", "block_size": 128}, 4 + 32 / 128),
    ],
)
def test_bits_per_parameter(base: dict[str, Any], bits: float) -> None:
    job = job_of(base)
    elements = linear_elements(job)
    wide = held(job_of(None)) - 2 * elements
    assert 8 * (held(job) - wide) / elements == pytest.approx(bits, rel=2e-3)


def test_weights_are_those_that_a_published_run_printed() -> None:
    """fitcheck-llm, TinyLlama on a T4: NF4 462.0 MiB, scales 57.8, and 534.7 in FP32, adapters of rank 32 included."""
    model = {
        "family": "llama", "num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "seq_len": 512, "lora_rank": 32,
        "lora_targets": ["attention"],
    }  # fmt: skip
    job = make_job(
        {
            "model": model,
            "training": {"precision": "fp16", "base_weights": NF4, "task": "lora", "global_batch_size": 2},
            "software": "accelerate",
            "cluster": {"device": "t4", "num_devices": 1},
            "plan": {"microbatch_size": 2},
        }
    )
    assert held(job) == pytest.approx((462.0 + 57.8 + 534.7) * MIB, rel=2e-4)


def test_embeddings_head_and_norms_stay_wide() -> None:
    job = job_of(NF4, "accelerate", model="qwen3-8b", lora_targets=["q"])
    layers = job.software.layers_of(job.model, job.plan, job.training)
    stored = {p.name for layer in layers for p in layer.parameters if p.stored is not None}
    assert stored == {f"{name}.weight" for name in ("q", "k", "v", "proj", "gate", "up", "down")}


@pytest.mark.parametrize(("base", "whole"), [(FLOATS, True), (TORCHAO, False)])
def test_shards_have_a_part_of_the_packed_weights(base: dict[str, Any], whole: bool) -> None:
    """bitsandbytes' scales are attributes that every rank has; torchao shards them with the weights."""
    alone, shards = job_of(base), job_of(base, num_devices=8, dp_shard=8, zero_stage=3)
    elements = linear_elements(alone)
    scales = elements / 64 * 4 if whole else 0
    wide, trained = alone.model.num_parameters - alone.model.num_trained_parameters - elements, 4
    packed = elements / 2 + (0 if whole else elements / 64 + 2 * elements / 16384)
    expected = (packed + 2 * wide + trained * alone.model.num_trained_parameters) / 8 + scales
    assert held(shards) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("base", [NF4, FLOATS, TORCHAO])
def test_stages_of_a_pipeline_hold_their_own_packed_weights(base: dict[str, Any]) -> None:
    """Of 32 blocks on 4 stages, each has 8, and the ends have the embedding and the head in 16 bits."""
    alone = job_of(base)
    stages = lowered(job_of(base, num_devices=4, pp=4, num_microbatches=4), 2, stage_layers=[8, 8, 8, 8])
    packed, model = linear_elements(alone) / 4, alone.model
    bits = 4 + 8 / 64 + 16 / (64 * 256) if base == TORCHAO else 4 + 32 / 64
    norms = 2 * 8 * 2 * model.hidden_size
    adapters = (model.num_trained_parameters // 4) * 4
    ends = [2 * model.vocab_size * model.hidden_size, 0, 0, 2 * (model.vocab_size + 1) * model.hidden_size]
    for rank, end in enumerate(ends):
        weight_bytes = stages.persistent_bytes[rank][MemoryCategory.PARAMETERS]
        assert weight_bytes == pytest.approx(packed * bits / 8 + norms + adapters + end, rel=1e-3)


def test_context_parallel_ranks_have_whole_packed_weights_and_unpack_them_as_often() -> None:
    """Half of the tokens on each rank, all of the weights, and one unpacking per pass and microbatch."""
    plan: dict[str, Any] = {"num_devices": 2, "cp": 2, "zero_stage": 0, "cp_comm": "all_gather", "global_batch_size": 1}
    assert held(job_of(NF4, **plan)) == held(job_of(NF4))

    def more_s(**keys: Any) -> float:
        keys = {"software.autocast": False, "seq_len": 4096, **keys}
        return predict(job_of(NF4, **keys)).step_time_s - predict(job_of(None, **keys)).step_time_s

    assert more_s(**plan) == pytest.approx(more_s(), rel=0.05)  # a part hides beside gathers of keys
    shards = job_of(FLOATS, **(plan | {"zero_stage": 3}), lora_targets=["q", "v"])
    moved = [op.communication for op in lowered(shards, 2).ops if op.communication is not None]
    gathers = [
        communication.num_bytes
        for communication in moved
        if communication.kind is CollectiveKind.ALL_GATHER and len(communication.ranks) == 2
    ]
    block = linear_elements(shards) / shards.model.num_hidden_layers
    assert block / 2 + 2 * 2 * shards.model.hidden_size in [
        num_bytes - 2 * shards.model.num_trained_parameters / shards.model.num_hidden_layers for num_bytes in gathers
    ]


@pytest.mark.parametrize("plan", [{"dp_replicate": 8}, {"dp_shard": 8, "zero_stage": 1}])
def test_replicas_have_whole_weights_and_reduce_adapters_alone(plan: dict[str, Any]) -> None:
    alone, replicas = job_of(NF4), job_of(NF4, num_devices=8, **plan)
    assert held(replicas) == held(alone)
    moved = [op.communication for op in lowered(replicas, 2).ops if op.communication is not None]
    assert max(communication.num_bytes for communication in moved) <= 4 * alone.model.num_trained_parameters


def test_gathers_are_in_few_bits() -> None:
    """Half a byte per linear weight, 2 of the norms, and adapters in 16 bits."""
    job = job_of(FLOATS, num_devices=8, dp_shard=8, zero_stage=3, lora_targets=["q", "v"])
    block = next(layer for layer in job.model.layers if layer.kind is LayerKind.BLOCK)
    linear = sum(p.num_elements for p in block.parameters if p.frozen and len(p.shape) == 2)
    expected = linear / 2 + 2 * (block.num_parameters - linear)
    gathers = {
        op.communication.num_bytes
        for op in lowered(job, 2).ops
        if op.communication is not None and "all_gather block" in op.name
    }
    assert gathers == {expected}


def test_weight_is_unpacked_once_per_pass_and_not_per_token() -> None:
    """The difference to whole weights does not grow with tokens, and recomputation adds one pass of three."""

    def more_s(**keys: Any) -> float:
        keys = {"software.autocast": False, **keys}
        return predict(job_of(NF4, **keys)).step_time_s - predict(job_of(None, **keys)).step_time_s

    short, long, again = more_s(), more_s(seq_len=2048), more_s(recompute="full")
    assert long == pytest.approx(short, rel=0.02)
    assert again / short == pytest.approx(3 / 2, rel=0.05)
    job = job_of(NF4)
    elements = linear_elements(job)
    bandwidth = catalog.device("h100-sxm-80gb").memory_bandwidth_bytes_per_s
    assert bandwidth is not None
    assert short > 2 * elements * (0.5625 + 2) / bandwidth


def test_autograd_keeps_unpacked_weights_of_gptq_and_inputs_of_int8() -> None:
    """Of all blocks, without recomputation: 2 bytes per weight; and what frozen linear layers read."""

    def saved(form: str) -> int:
        job = job_of({"format": form}, lora_targets=["q"], recompute="none")
        return max(effect.after_bytes for effect in _activations(job))

    awq, gptq, int8 = map(saved, ("awq_int4", "gptq_int4", "int8"))
    job = job_of(NF4)
    hidden, keys = job.model.hidden_size, job.model.num_key_value_heads * job.model.head_dim
    first = hidden * (hidden + 2 * keys)  # nothing before the first block is trained
    assert gptq - awq == 2 * (linear_elements(job) - first)
    # of each block: the second norm's output, and the product that the down projection reads; others are saved anyway
    model = job.model
    assert int8 - awq == 2 * model.seq_len * model.num_hidden_layers * (model.hidden_size + model.intermediate_size)


def _activations(job: Job) -> list[MemoryEffect]:
    ops = lowered(job, 1).ops
    return [e for op in ops for e in op.memory if e.category is MemoryCategory.ACTIVATIONS and e.after_bytes > 0]


def test_upcast_makes_the_rest_wide() -> None:
    """The PEFT default, which a scenario may turn off; fact: Qwen2.5-7B has 4,198 MiB in FP32 (fitcheck-llm)."""
    wide, narrow = (job_of({**NF4, "upcast": on}, "accelerate", model="qwen2.5-7b") for on in (True, False))
    rest = held(wide) - held(narrow)
    assert rest == pytest.approx(4198 * MIB / 2, rel=0.03)
    assert held(job_of(NF4, "accelerate", model="qwen2.5-7b")) == held(wide)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"format": "nf4"}, {"lora_rank": 0, "task": "sft"}, "base_weights.format = nf4: is for frozen weights below"),
    ({"format": "int8", "double_quantization": True}, {}, "double_quantization = true: quantizes the scales of nf4"),
    ({"format": "int8"}, {"num_devices": 8, "dp_shard": 8, "zero_stage": 3}, "format = int8: cannot be sharded"),
    (
        {"format": "awq_int4"},
        {"num_devices": 8, "dp_shard": 8, "zero_stage": 3},
        "format = awq_int4: cannot be sharded",
    ),
    (
        {"format": "nf4"},
        {"num_devices": 8, "dp_shard": 8, "zero_stage": 3},
        "storage = uint8: is not the type in which ranks gather",
    ),
    (
        {**FLOATS, "upcast": True},
        {"num_devices": 8, "dp_shard": 8, "zero_stage": 3},
        "upcast = true: is not done under FSDP and ZeRO-3",
    ),
    ({"format": "nf4", "library": "torchao"}, {}, "library = torchao: always quantizes the scales"),
    (
        {"format": "nf4", "double_quantization": False},
        {"software": "torchtune"},
        "torchao: always quantizes the scales",
    ),
    ({"format": "nf4", "library": "bitsandbytes"}, {"software": "torchtune"}, "use library: torchao, double_quan"),
    ({"format": "fp4", "library": "torchao"}, {}, "library = torchao: has nf4 alone"),
    ({"format": "nf4", "block_size": 48}, {}, "block_size = 48: must be a power of two from 32 to 4096; use 64"),
    ({**TORCHAO, "block_size": 4096}, {"model": "gpt2-124m"}, "needs 1,048,576 elements, and"),
    ({"format": "nf4"}, {"num_devices": 2, "tp": 2}, "tp = 2: with training.base_weights, weights of few bits"),
    ({"format": "nf4"}, {"software": "megatron-bridge"}, "in tensors of bitsandbytes is not modeled yet with"),
    ({"format": "nf4"}, {"software.compiled": True}, "is not modeled yet with software.compiled = true"),
    ({"format": "nf4"}, {"precision": "fp8"}, "is not modeled yet with training.precision = fp8"),
]


@pytest.mark.parametrize(("base", "keys", "sentence"), REFUSED)
def test_weights_that_cannot_be_are_refused(base: dict[str, Any], keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        job_of(base, **keys)
    sentences = [problem.sentence() for problem in error.value.problems]
    assert any(sentence in text for text in sentences), sentences


@pytest.mark.parametrize(
    "software", [name for name in catalog.names("software") if catalog.software(name).base_weights]
)
def test_the_library_is_that_of_the_framework(software: str) -> None:
    """Shows that a format alone is enough under every profile; torchtune's is torchao."""
    base = job_of(NF4, software).training.base_weights
    assert base == BaseWeights.model_validate(TORCHAO if software == "torchtune" else NF4)


def test_words_of_a_format() -> None:
    assert BaseWeights(format="nf4", double_quantization=True).words == "nf4 with double quantization"
