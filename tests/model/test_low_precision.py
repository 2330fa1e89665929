"""Linear layers: formats in low precision against their definitions and torchao's counts, and fused GEMMs."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.model.layer import Gemm
from simplan.model.low_precision import LinearFormat, casts, fused_gemms, linear_format, linears
from simplan.model.model import ModelSpec
from simplan.plan.shard import Shard
from tests.jobs import problems, tiny_model
from tests.support.problems import says

LLAMA = catalog.model("llama3-8b")


def form(precision: Any, recipe: Any = None, kept: Any = "wide") -> LinearFormat:
    return linear_format(precision, recipe, kept)


@pytest.mark.parametrize(
    ("precision", "recipe", "bits"),
    [
        ("fp8", None, 8),
        ("fp8", "rowwise", 8 + 32 / 4096),
        ("fp8", "blockwise", 8.25),
        ("mxfp8", None, 8.25),
        ("nvfp4", None, 4.5),
    ],
)
def test_bits_of_an_element_and_its_share_of_the_scales(precision: str, recipe: str | None, bits: float) -> None:
    """mxfp8: 8 bits and an 8-bit scale for 32 (OCP MX 1.0); nvfp4: 4 and 8 for 16 (arXiv:2509.25149); DeepSeek-V3:
    fp32 for 128."""
    made = form(precision, recipe).quantized_bytes(4096, 4096)
    assert made == pytest.approx(4096 * 4096 * bits / 8, abs=4)


def test_blocks_of_deepseeks_weights_are_128_by_128() -> None:
    assert form("fp8", "blockwise").quantized_bytes(256, 384, weight=True) == 256 * 384 + 2 * 3 * 4


# bytes an element over forward and backward, of torchao/testing/training/roofline_utils.py at 36027d82: input (and
# gradient) and weight
TORCHAO = {
    ("fp8", "tensorwise"): (2 + 2 + 2 * 1, 2 + (2 + 1) + (2 + 1)),
    ("fp8", "rowwise"): ((2 + 1 + 2) + (2 + 1), (2 + 1) + 2 * 2 + (2 + 1)),
    ("fp8", "rowwise_with_gw_hp"): (2 + 1, (2 + 1) + (2 + 1)),
    ("mxfp8", None): ((2 + 1) + (2 + 1), (2 + 1) + (2 + 1)),
}
AGAIN = {
    ("fp8", "tensorwise"): (2 + 2, 2),  # reads for the largest element, and the input for its second copy, once more
    ("fp8", "rowwise"): (2, 0),  # the input is read once more, in backward
    ("fp8", "rowwise_with_gw_hp"): (0, 2),  # the largest element of the weight is looked for once more
    ("mxfp8", None): (0, 0),
}
"""What is more where nothing but 16-bit tensors are kept from forward to backward."""


@pytest.mark.parametrize("case", list(TORCHAO))
def test_casts_move_the_bytes_that_torchao_counts(case: tuple[str, str | None]) -> None:
    moved = {"input": 0, "weight": 0, "gradient": 0}
    for cast in casts(form(*case)):
        moved[cast.operand] += 2 * (cast.reads + cast.wide_writes) + cast.writes
    (activation, weight), again = TORCHAO[case], AGAIN[case]
    assert moved == {"input": activation + again[0], "weight": weight + again[1], "gradient": activation}


@pytest.mark.parametrize(
    ("trained", "propagates", "copies"),
    [
        (True, True, {"input": 2, "weight": 2, "gradient": 2}),
        (False, True, {"input": 1, "weight": 2, "gradient": 1}),
        (False, False, {"input": 1, "weight": 1}),
    ],
)
def test_operands_that_no_backward_product_takes_are_not_quantized(
    trained: bool, propagates: bool, copies: dict[str, int]
) -> None:
    """Each product takes two operands: forward input and weight, then gradient and weight, gradient and input."""
    made = list(casts(form("fp8", kept="quantized"), trained=trained, propagates=propagates))
    assert {cast.operand: cast.writes for cast in made} == copies
    assert sum(copies.values()) == 2 * (1 + trained + propagates)


def test_kept_quantized_operands_are_not_cast_again() -> None:
    """nvfp4_linear of torchao: one pass for the largest, one that writes rows and columns, of each of the three."""
    assert [(c.operand, c.backward, c.reads, c.writes) for c in casts(form("nvfp4", kept="quantized"))] == [
        ("input", False, 2, 2),
        ("weight", False, 2, 2),
        ("gradient", True, 2, 2),
    ]


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        ("gpt2-124m", {"qkv", "proj", "up", "down"}),
        ("llama3-8b", {"q", "k", "v", "proj", "gate", "up", "down"}),
        ("mixtral-8x7b", {"q", "k", "v", "proj"}),
    ],
)
def test_linear_layers_of_blocks_only(preset: str, names: set[str]) -> None:
    layers = catalog.model(preset).layers_of(Shard())
    assert {gemm.name for gemm in linears(layers[1])} == names
    assert not linears(layers[0])
    assert not linears(layers[-1])


def gpt(**fields: Any) -> ModelSpec:
    return tiny_model(**{"hidden_size": 1024, "num_attention_heads": 16, "seq_len": 320, **fields})


@pytest.mark.parametrize(
    ("training", "plan", "model", "sentence"),
    [
        ({"precision": "fp8", "fp8_recipe": "delayed"}, {}, LLAMA,
         "training.fp8_recipe = delayed: linear ... torch ... use ... rowwise_with_gw_hp"),
        ({"precision": "mxfp8", "fp8_recipe": "rowwise"}, {}, LLAMA,
         "training.fp8_recipe = rowwise: ... training.precision = fp8 ... mxfp8; remove"),
        ({"precision": "fp8"}, {"pp": 4, "schedule": "zb-h1"}, LLAMA,
         "plan.schedule = zb-h1: ... not modeled with training.precision = fp8: ... use 1f1b ... bf16"),
        ({"precision": "fp8"}, {}, catalog.model("resnet-50"), "training.precision = fp8: is not modeled ... use bf16"),
        ({"precision": "fp8"}, {}, gpt(intermediate_size=4100),
         "model = 4100 inputs of down: ... fp8 ... 16; use training.precision = bf16"),
        ({"precision": "nvfp4"}, {}, gpt(),
         "plan.microbatch_size = 1: ... 320 ... nvfp4 (nvfp4) ... multiple of 128; use ... multiple of 2"),
    ],
)  # fmt: skip
def test_unmodelled_and_impossible_options_are_refused_by_name(
    training: dict[str, Any], plan: dict[str, Any], model: ModelSpec, sentence: str
) -> None:
    [refusal] = problems(model, plan, cluster="dgx-b200", **training)
    assert says(refusal, sentence)


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
    fused = fused_gemms(gemms(catalog.model("llama3-70b"), tp=4))
    assert [(gemm.name, gemm.n, gemm.k) for gemm in fused] == [
        ("q+k+v", 2560, 8192),
        ("proj", 8192, 2048),
        ("gate+up", 14336, 8192),
        ("down", 8192, 7168),
    ]


def test_adapters_are_joined_apart_from_what_they_stand_beside() -> None:
    fields = catalog.model("llama2-7b").model_dump(exclude_defaults=True)
    adapted = ModelSpec(**fields, lora_rank=16, lora_targets=("qkv",))
    fused = {gemm.name: gemm for gemm in fused_gemms(gemms(adapted))}
    assert list(fused)[:3] == ["q+k+v", "q.lora_a+k.lora_a+v.lora_a", "q.lora_b+k.lora_b+v.lora_b"]
    assert not fused["q+k+v"].trained
    assert fused["q.lora_b+k.lora_b+v.lora_b"].trained
