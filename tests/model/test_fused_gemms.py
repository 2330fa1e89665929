"""Matrices with one input as one product: nothing is lost, and nothing else is joined."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.model.fused_gemms import fused_gemms
from simplan.model.layer import Gemm
from simplan.model.model import ModelSpec
from simplan.plan.shard import Shard


def gemms(model: ModelSpec, tp: int = 1) -> list[Gemm]:
    block = model.layers_of(Shard(tp=tp, sequence_parallel=tp > 1))[-2]
    return [kernel for kernel in block.kernels if isinstance(kernel, Gemm)]


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b", "qwen3-30b-a3b", "deepseek-v3"])
def test_work_and_weights_stay_the_same(name: str) -> None:
    before, after = gemms(catalog.model(name)), fused_gemms(gemms(catalog.model(name)))
    assert sum(gemm.flops for gemm in after) == sum(gemm.flops for gemm in before)
    assert sum(gemm.weight_elements for gemm in after) == sum(gemm.weight_elements for gemm in before)


def test_queries_keys_and_values_of_llama_are_one_and_so_are_gate_and_up() -> None:
    """Llama 3 70B over 4 ranks: 8192 x (8192 + 2 * 1024) / 4, 8192 x 2 * 28672 / 4; hidden size and heads agree."""
    found = fused_gemms(gemms(catalog.model("llama3-70b"), tp=4))
    assert [(gemm.name, gemm.n, gemm.k) for gemm in found] == [
        ("q+k+v", 2560, 8192),
        ("proj", 8192, 2048),
        ("gate+up", 14336, 8192),
        ("down", 8192, 7168),
    ]


def test_adapters_are_joined_apart_from_what_they_stand_beside() -> None:
    fields = catalog.model("llama2-7b").model_dump(exclude_defaults=True)
    adapted = ModelSpec(**fields, lora_rank=16, lora_targets=("qkv",))
    found = {gemm.name: gemm for gemm in fused_gemms(gemms(adapted))}
    assert list(found)[:3] == ["q+k+v", "q.lora_a+k.lora_a+v.lora_a", "q.lora_b+k.lora_b+v.lora_b"]
    assert not found["q+k+v"].trained
    assert found["q.lora_b+k.lora_b+v.lora_b"].trained
