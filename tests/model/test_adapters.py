"""LoRA: published numbers of trained parameters, closed forms of its work, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simplan
from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.program import MemoryCategory
from tests.jobs import problems
from tests.support.problems import says

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_len": 32}
LORA = {"task": "lora"}
GPT = ModelSpec(family="gpt", vocab_size=100, lora_rank=4, **SIZES)


def adapted(name: str, **fields: Any) -> ModelSpec:
    return ModelSpec(**{**catalog.model(name).model_dump(exclude_defaults=True), **fields})


def test_trained_parameters_are_those_that_torchtune_prints() -> None:
    """pytorch.org/torchtune/main/tutorials/lora_finetune.html: Llama 2 7B, rank 8, q and v."""
    model = adapted("llama2-7b", lora_rank=8, lora_targets=["q", "v"])
    assert (model.num_parameters, model.num_trained_parameters) == (6_742_609_920, 4_194_304)


def test_backward_makes_what_it_has_to() -> None:
    """With n tokens, hidden size h and rank r: a frozen matrix has one product in backward, A and B have two.

    Below the first block's adapters nothing is trained: its qkv has no product, its A only that of the weight.
    """
    n, h, r = 32, 64, 4
    shapes = {"qkv": (3 * h, h), "proj": (h, h), "up": (4 * h, h), "down": (h, 4 * h)}
    base = sum(2 * n * rows * columns for rows, columns in shapes.values())
    narrow = sum(2 * n * r * (rows + columns) for rows, columns in shapes.values())
    scores = 2 * n * n * h  # half of both products, causal
    _, first, second, *_, head = GPT.layers
    assert second.flops() == base + narrow + scores
    assert second.backward_flops() == base + 2 * narrow + 2 * scores
    assert second.backward_flops() - first.backward_flops() == 2 * n * 3 * h * h + 2 * n * r * h
    assert head.backward_flops() == head.flops() == 2 * n * h * 100
    assert GPT.layers[0].backward_flops() == 0


def test_norm_of_heads_follows_the_adapter_of_its_projection() -> None:
    """Qwen3's attention normalizes ``q_proj(x)``, of which the adapter's product is a part (PEFT wraps q_proj)."""
    model = adapted("qwen3-4b", lora_rank=8, lora_targets=["all"], num_hidden_layers=2)
    layer = catalog.software("accelerate").layers_of(model, ParallelPlan())[1]
    made = [tensor.name for tensor in layer.inputs]
    for operator in layer.operators:
        assert {*operator.reads} <= {*made}, operator
        made += [tensor.name for tensor in operator.makes]
    assert made.index("q output") < made.index("q_norm output") < made.index("k output") < made.index("k_norm output")


@pytest.mark.parametrize(
    ("changes", "training", "plan", "wanted"),
    [
        ({"lora_rank": 0}, LORA, {}, "training.task = lora: ... model.lora_rank = 0"),
        ({}, {}, {}, "training.task = pretrain: ... model.lora_rank = 4 ... use lora"),
        ({"lora_targets": ["q"]}, LORA, {}, "model.lora_targets = q: ... matrix ... gpt; use"),
        ({"lora_rank": 0, "lora_targets": ["mlp"]}, {}, {}, "model.lora_targets = [mlp]: ... lora_rank = 0"),
        ({"lora_targets": ["blocks.3-4.up"]}, LORA, {}, "model.lora_targets = blocks.3-4.up: ... 4 ... 0 to 3"),
        ({"lora_targets": ["qkv"], "lora_rank_pattern": {"down": 2}}, LORA, {},
         "model.lora_rank_pattern = down: ... matrices ... adapters; add ... lora_targets"),
        ({"lora_rank": 65}, LORA, {}, "model.lora_rank = 65: ... dimension ... 64"),
        ({"frozen": ["embedding"]}, LORA, {}, "model.frozen = [embedding]: ... without adapters"),
        ({"lora_rank": 0, "lora_dropout": 0.1}, {}, {}, "model.lora_dropout = 0.1: is of the inputs of adapters"),
        ({"lora_rank": 0, "frozen": ["wing"]}, {}, {}, "model.frozen = wing: is no part of a model of family gpt"),
        ({"lora_rank": 0, "frozen": ["embedding", "blocks", "head"]}, {}, {}, "model.frozen = [embedding, blocks, "
         "head]: freezes all weights"),
        ({"lora_rank": 0, "input_require_grads": True}, {}, {},
         "model.input_require_grads = true: ... weights ... trained"),
        ({"lora_rank": 0, "frozen": ["blocks.0"]}, {}, {"pp": 2}, "plan.pp = 2: ... (model.frozen) is not modeled"),
        ({"lora_targets": ["head"]}, LORA, {}, "model.lora_targets = [head]: ... not modeled"),
        ({"lora_modules_to_save": ["head"], "tied_embeddings": False}, LORA | {"precision": "bf16"}, {"dp_shard": 2},
         "model.lora_modules_to_save = [head]: ... (2 ... 4"),
        ({}, LORA, {"pp": 2, "schedule": "zb-h1"}, "plan.schedule = zb-h1: ... (model.lora_rank) is not modeled"),
    ],
)  # fmt: skip
def test_refused_by_name(changes: Any, training: Any, plan: Any, wanted: str) -> None:
    model = ModelSpec(**{**GPT.model_dump(exclude_defaults=True), **changes})
    assert any(says(refusal, wanted) for refusal in problems(model, plan, **training))


def test_trained_parameters_are_those_that_peft_counts() -> None:
    """Ranks by pattern, some layers alone, and experts left out, by hand: A and B have r (n + k) elements."""
    llama = adapted("llama3-8b", lora_rank=16, lora_targets=["blocks.0-7.qkv", "mlp"], lora_rank_pattern={"mlp": 8})
    h, kv, i = 4096, 1024, 14336
    attention = 8 * 16 * ((h + h) + 2 * (h + kv))
    assert llama.num_trained_parameters == attention + 32 * 8 * 3 * (h + i)
    mixtral = adapted("mixtral-8x7b", lora_rank=16)  # all linear layers: the experts and the router are none
    assert mixtral.num_trained_parameters == 32 * 16 * (2 * (h + h) + 2 * (h + kv))


@pytest.mark.parametrize(
    ("frozen", "trained"),
    [
        (["embedding"], 8_030_261_248 - 128_256 * 4096),
        (["blocks", "embedding"], 128_256 * 4096 + 4096),
        (["blocks.0-30", "embedding", "head"], (8_030_261_248 - 2 * 128_256 * 4096 - 4096) // 32),
        (["norms"], 8_030_261_248 - 64 * 4096),
    ],
)
def test_frozen_parts_are_those_that_are_named(frozen: list[str], trained: int) -> None:
    """Llama 3 8B, 8,030,261,248 parameters, of which 2 x 128,256 x 4,096 are the embedding and the head."""
    model = adapted("llama3-8b", frozen=frozen)
    assert (model.num_parameters, model.num_trained_parameters) == (8_030_261_248, trained)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_saved_modules_are_as_wide_as_their_originals(optimizer: str) -> None:
    """PEFT casts adapters alone to FP32 (tuners/tuners_utils.py, cast_adapter_dtype); torch's states follow weights."""

    def bytes_by_kind(*saved: str) -> list[int]:
        options = {"lora_rank": 8, "lora_modules_to_save": list(saved), "task": "lora", "optimizer": optimizer}
        options |= {"zero_grad_set_to_none": False, "precision": "bf16", "device": "h100-sxm", "num_devices": 1}
        memory = simplan.predict("llama3-8b", {**options, "global_batch_size": 1, "seq_len": 512}).worst_memory
        kinds = MemoryCategory.PARAMETERS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER
        return [memory.by_category[kind] for kind in kinds]

    more = [b - a for a, b in zip(bytes_by_kind(), bytes_by_kind("embedding", "head"), strict=True)]
    number = 2 * 128_256 * 4096
    weight = torch.nn.Parameter(torch.zeros(64, 4096, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    adam = torch.optim.AdamW([weight])
    adam.step()
    states = sum(value.nbytes for value in adam.state[weight].values() if value.dim())
    of_bitsandbytes = 2 * (number + 4 * number // 256)  # a byte per element, and FP32 per block
    assert more[0] == weight.element_size() * number
    assert more[1] == weight.grad.element_size() * (number + number // 2)  # that of the head, before it is added
    assert more[2] == (states * number // weight.numel() if optimizer == "adamw" else of_bitsandbytes)


def test_scores_next_to_logits_cost_memory_in_forward_alone() -> None:
    """TRL's AutoModelForCausalLMWithValueHead: lm_logits.float() next to the logits, for a loss that reads values."""
    options: dict[str, Any] = {"task": "reward", "lora_rank": 8, "precision": "bf16", "device": "h100-sxm"}
    options |= {"num_devices": 1, "global_batch_size": 1, "seq_len": 512, "software": "accelerate"}
    alone = simplan.predict("llama3.2-1b", options)
    both = simplan.predict("llama3.2-1b", {**options, "training.preference": {"logits": True}})
    logits = 2 * 512 * 128_256 * (2 + 4)
    assert both.worst_memory.by_category[MemoryCategory.LOGITS] == logits
    assert both.job.model.num_trained_parameters == alone.job.model.num_trained_parameters
    head = both.job.model.layers[-1]
    assert head.flops() - alone.job.model.layers[-1].flops() == 2 * 512 * 2048 * 128_256
    assert head.backward_flops() == alone.job.model.layers[-1].backward_flops()


def test_routers_and_experts_have_only_some_adapters() -> None:
    """PEFT, tuners/lora/layer.py: ParamWrapper refuses DoRA and dropout."""
    for targets, more, wanted in (
        (["router"], {"lora_dropout": 0.1}, "an adapter of router with model.lora_dropout, which PEFT refuses"),
        (["experts_up"], {"lora_dora": True}, "an adapter of experts_up with model.lora_dora, which PEFT refuses"),
        (["experts_up"], {"lora_dropout": 0.1}, "an adapter of experts_up with model.lora_dropout"),
    ):
        model = adapted("mixtral-8x7b", lora_rank=8, lora_targets=targets, **more)
        assert any(wanted in refusal for refusal in problems(model, {}, cluster="dgx-h100", task="lora")), wanted
    router = adapted("mixtral-8x7b", lora_rank=8, lora_targets=["router"])
    assert router.num_trained_parameters == 32 * 8 * (4096 + 8)
    assert problems(router, {}, cluster="dgx-h100", task="lora") == []
    experts = adapted("mixtral-8x7b", lora_rank=8, lora_targets=["experts_down"])
    assert experts.num_trained_parameters == 32 * 8 * 8 * (4096 + 14336)
    assert problems(experts, {}, cluster="dgx-h100", task="lora") == []


def test_families_without_adapters_say_so() -> None:
    with pytest.raises(ValueError, match=r"is for models of family .*, and family = bert"):
        ModelSpec(family="bert", vocab_size=100, lora_rank=4, **SIZES)
    bert = ModelSpec(family="bert", vocab_size=100, **SIZES)
    assert any("those of family bert are not modeled yet" in refusal for refusal in problems(bert, task="lora"))


def test_software_that_has_no_states_for_adapters_says_so() -> None:
    [refusal] = problems(GPT, cluster="dgx-a100-80gb", software="nemo-2022", precision="fp16", task="lora")
    assert says(refusal, "training.task = lora: ", "nemo-2022", "not modeled")


@pytest.mark.parametrize(
    ("software", "sentence"),
    [
        ("nemo", "plan.zero_stage = 3: ... ZeRO ... nemo is not modeled ... use 0 or 1"),
        (
            "megatron-bridge",
            "plan.zero_stage = 3: ZeRO-3 ... megatron-bridge is not modeled ... use 0 or 1",
        ),
    ],
)
def test_sharded_adapters_are_rejected_for_their_zero_stage(software: str, sentence: str) -> None:
    llama = catalog.model("llama3-8b").model_copy(update={"lora_rank": 16})
    [refusal] = problems(llama, {"dp_shard": 4}, cluster="dgx-a100-80gb", software=software, task="lora")
    assert says(refusal, sentence)
    assert problems(llama, {"tp": 4}, cluster="dgx-a100-80gb", software=software, task="lora") == []


@pytest.mark.parametrize("software", catalog.names("software"))
def test_what_a_framework_makes_of_layers_stays_frozen(software: str) -> None:
    """Trained weights are those of the model, also where a framework stacks or reorders matrices."""
    sizes = SIZES | {"vocab_size": 96, "num_key_value_heads": 2, "lora_rank": 4}
    experts = {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 32, "lora_targets": ["attention"]}
    models = [
        ModelSpec(family="gpt", **SIZES, vocab_size=96, lora_rank=4),
        ModelSpec(family="llama", intermediate_size=96, **sizes),
        ModelSpec(family="moe", **sizes, **experts),
        ModelSpec(family="moe", **sizes, **experts, qk_norm="head"),
    ]
    profile = catalog.software(software)
    for model in models:
        layers = profile.layers_of(model, ParallelPlan())
        assert sum(layer.num_trained for layer in layers) == model.num_trained_parameters, model.family
