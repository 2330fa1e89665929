"""LoRA: published numbers of trained parameters, closed forms of its work, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from tests.jobs import problems

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_len": 32}
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
        ({"lora_rank": 0}, {"task": "lora"}, {}, "training.task = lora: trains adapters, and model.lora_rank = 0"),
        ({}, {}, {}, "training.task = pretrain: trains all weights, and model.lora_rank = 4 freezes them; use lora"),
        ({"lora_targets": ["q"]}, {"task": "lora"}, {}, "model.lora_targets = q: is no matrix of a block of family "
         "gpt; use qkv, proj, up, down, all"),
        ({"lora_rank": 0, "lora_targets": ["mlp"]}, {}, {}, "model.lora_targets = [mlp]: says which matrices have "
         "adapters, and lora_rank = 0"),
        ({}, {"task": "lora"}, {"pp": 2, "schedule": "zb-h1"}, "plan.schedule = zb-h1: a backward in two parts with "
         "adapters (model.lora_rank) is not modeled yet"),
    ],
)  # fmt: skip
def test_refused_by_name(changes: Any, training: Any, plan: Any, wanted: str) -> None:
    model = ModelSpec(**{**GPT.model_dump(exclude_defaults=True), **changes})
    assert any(found.startswith(wanted) for found in problems(model, plan, **training))


def test_families_without_adapters_say_so() -> None:
    with pytest.raises(
        ValueError, match="is for models of family gpt, llama, mpt, gemma2, neox or captured, and family = bert"
    ):
        ModelSpec(family="bert", vocab_size=100, lora_rank=4, **SIZES)
    bert = ModelSpec(family="bert", vocab_size=100, **SIZES)
    assert any("those of family bert are not modeled yet" in found for found in problems(bert, task="lora"))


def test_software_that_has_no_states_for_adapters_says_so() -> None:
    [found] = problems(GPT, cluster="dgx-a100-80gb", software="nemo-2022", precision="fp16", task="lora")
    assert found.startswith("training.task = lora: training adapters with nemo-2022 is not modeled")


@pytest.mark.parametrize(
    ("software", "sentence"),
    [
        ("nemo", "plan.zero_stage = 3: this ZeRO stage with nemo is not modeled yet; use 0 or 1"),
        (
            "megatron-bridge",
            "plan.zero_stage = 3: ZeRO-3 sharding of a model with adapters with megatron-bridge is not modeled yet; "
            "use 0 or 1",
        ),
    ],
)
def test_sharded_adapters_are_rejected_for_their_zero_stage(software: str, sentence: str) -> None:
    llama = catalog.model("llama3-8b").model_copy(update={"lora_rank": 16})
    assert problems(llama, {"dp_shard": 4}, cluster="dgx-a100-80gb", software=software, task="lora") == [sentence]
    assert problems(llama, {"tp": 4}, cluster="dgx-a100-80gb", software=software, task="lora") == []
