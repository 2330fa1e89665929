"""Layers for multi-token prediction: published sizes, what ranks exchange, what runs again, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from simplan import catalog
from simplan.model.layer import CollectiveKind, LayerCollective, LayerSpec
from simplan.model.low_precision import linear_format, quantized_linears
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation, recompute_of
from simplan.plan.plan import ParallelPlan
from simplan.plan.shard import Shard
from tests.jobs import problems
from tests.support.problems import says

H, TOKENS, VOCAB = 64, 32, 96
DENSE: dict[str, Any] = {
    "family": "llama",
    "num_hidden_layers": 3,
    "hidden_size": H,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "seq_len": TOKENS,
}
LATENT: dict[str, Any] = {
    **DENSE,
    "family": "deepseek",
    "num_dense_layers": 1,
    "num_experts": 8,
    "top_k": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def model(sizes: dict[str, Any] = DENSE, *, depths: int = 1, **changes: Any) -> ModelSpec:
    return ModelSpec.model_validate({**sizes, "mtp_num_layers": depths, **changes})


def later(spec: ModelSpec, shard: Shard | None = None) -> list[LayerSpec]:
    return [layer for layer in spec.layers_of(shard or Shard()) if layer.mtp_depth]


def test_deepseek_v3_has_as_many_parameters_as_were_published() -> None:
    """685B: "671B of the Main Model weights and 14B of the Multi-Token Prediction (MTP) Module weights".

    (README.md of deepseek-ai/DeepSeek-V3; exactly, safetensors.total of the Hugging Face API is 684,489,845,504.) The
    module's weights there include copies of embedding and output projection, and every router, now 59, has corrections
    of its scores, which get no gradient.
    """
    fields = catalog.model_fields("deepseek-v3")
    main, whole = (ModelSpec.model_validate(fields | {"mtp_num_layers": depths}) for depths in (0, 1))
    copies, corrections = 2 * main.vocab_size * main.hidden_size, 59 * main.num_experts
    assert whole.num_parameters + copies + corrections == 684_489_845_504
    assert round((whole.num_parameters - main.num_parameters + copies) / 1e9, 1) == 13.5  # printed as 14


@pytest.mark.parametrize("sizes", [DENSE, LATENT])
@pytest.mark.parametrize("depths", [1, 3])
def test_each_is_a_block_more_with_a_projection_and_a_head(sizes: dict[str, Any], depths: int) -> None:
    """FLOPs as Megatron counts them for its utilization, norms aside.

    (NVIDIA-NeMo/Megatron-Bridge at v0.3.0, src/megatron/bridge/training/utils/flop_utils.py.)
    """
    with_heads, blocks = model(sizes, depths=depths), model(sizes, depths=0, num_hidden_layers=3 + depths)
    more = with_heads.flops_per_sequence() - blocks.flops_per_sequence()
    assert more == depths * 3 * 2 * TOKENS * (2 * H * H + H * VOCAB)
    assert with_heads.num_parameters - blocks.num_parameters == depths * (2 * H * H + 3 * H)


@pytest.mark.parametrize(("depths", "tokens_per_s", "tflop_per_s"), [(0, 3848, 961), (1, 6338, 1648)])
def test_deepseek_v3_has_the_flops_of_published_runs(depths: int, tokens_per_s: float, tflop_per_s: float) -> None:
    """Megatron Bridge's tables of runs on GB300 without and with such a layer; routers are not counted there (0.25 %).

    (NVIDIA-NeMo/Megatron-Bridge at 067f987, docs/performance-summary-archive.md: 25.11, "w/o MTP", and 26.06.)
    """
    model = ModelSpec.model_validate(catalog.model_fields("deepseek-v3") | {"mtp_num_layers": depths})
    printed = tflop_per_s * 1e12 / tokens_per_s
    assert printed <= model.flops_per_sequence() / model.seq_len <= 1.004 * printed


@pytest.mark.parametrize("depths", [1, 2])
def test_hidden_states_are_kept_once(depths: int) -> None:
    """Those of every depth go to the next layer and to the head."""
    layers = model(depths=depths).layers[-1 - depths :]
    inputs = [tensor for layer in layers for tensor in layer.saved if tensor.name == "input"]
    assert [tensor.elements for tensor in inputs] == [TOKENS * H] * (1 + depths)
    assert [layer.output_bytes(2, 2) for layer in layers[:-1]] == [
        (2 * TOKENS * H, 2 * TOKENS * H * depth) for depth in range(1, 1 + depths)
    ]
    kept = {"logits": [tensor.elements for tensor in layers[-1].saved if tensor.logits]}
    assert kept == {"logits": [TOKENS * VOCAB] * (1 + depths)}


@pytest.mark.parametrize(("parallel", "gathered", "scattered", "reduced"), [(True, 5, 3, 0), (False, 1, 0, 3)])
def test_tensor_parallel_ranks_split_the_projection_by_columns(
    parallel: bool, gathered: int, scattered: int, reduced: int
) -> None:
    """In hidden sizes of all tokens, beyond what a block exchanges.

    With sequence parallelism parts of looked-up rows are summed and scattered, and their gradients gathered (1 + 1);
    norms side by side are gathered, their gradients summed and scattered (2 + 2);
    what the columns give is gathered, as are its gradients (1 + 1). Without, rows are summed, and gradients of the
    norms, and columns are gathered.
    """
    shard = Shard(tp=4, sequence_parallel=parallel)
    block, layer = model(depths=0).layers_of(shard)[1], later(model(), shard)[0]
    moved = {kind: exchanged(layer, kind) - exchanged(block, kind) for kind in CollectiveKind}
    elements = TOKENS * H
    kinds = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE
    assert [moved[kind] for kind in kinds] == [gathered * elements, scattered * elements, reduced * elements]
    shapes = {parameter.name: parameter.shape for parameter in layer.parameters}
    assert shapes["eh_proj.weight"] == (H // 4, 2 * H)


def exchanged(layer: LayerSpec, kind: CollectiveKind) -> int:
    kernels = [kernel for kernel in layer.kernels if isinstance(kernel, LayerCollective)]
    return sum(kernel.elements * [kernel.forward, kernel.backward].count(kind) for kernel in kernels)


@pytest.mark.parametrize("sizes", [DENSE, LATENT])
def test_a_whole_layer_runs_again_from_its_input_and_the_embeddings(sizes: dict[str, Any]) -> None:
    """Which Megatron's checkpoint takes as arguments, so that no token is looked up again."""
    (layer,) = later(model(sizes))
    recomputed = recomputation(layer, "full")
    assert recomputed.saved == {"input", "wte output"}
    assert {layer.tensors[name].elements for name in recomputed.saved} == {TOKENS * H}
    names = [layer.kernels[index].name for index in recomputed.kernels]
    assert names[:4] == ["enorm", "hnorm", "concatenate", "eh_proj"]
    core = recomputation(layer, "selective")
    assert [layer.kernels[index].name for index in core.kernels] == ["attention"]


def test_of_the_first_blocks_of_a_stage_it_is_none() -> None:
    with_heads = model()
    some, whole = ParallelPlan(recompute="full", recompute_layers=3), ParallelPlan(recompute="full")
    block, layer = with_heads.layers[1], later(with_heads)[0]
    assert [recompute_of(layer_spec, plan, 0) for plan in (some, whole) for layer_spec in (block, layer)] == [
        "full", "none", "full", "full",
    ]  # fmt: skip


def test_it_is_not_in_4_bits() -> None:
    with_heads = model()
    formats = [linear_format(precision, None, "quantized") for precision in ("mxfp8", "nvfp4")]
    names = [[gemm.name for gemm in quantized_linears(later(with_heads)[0], form)] for form in formats]
    assert names == [["eh_proj", "q", "k", "v", "proj", "gate", "up", "down"], []]


@pytest.mark.parametrize(
    ("software", "sizes", "training", "plan", "sentence"),
    [
        ("torch", {}, {}, {}, "model.mtp_num_layers = 1: ... torch is not modeled ... use 0"),
        ("torchtitan", {}, {}, {}, "multi-token prediction with torchtitan is not modeled yet"),
        ("nemo", {}, {}, {}, "nemo is not modeled ... use 0 ... megatron-core"),
        ("megatron-bridge", {}, {}, {"zero_stage": 3}, "plan.zero_stage = 3: sharding of parameters with model.mtp"),
        ("megatron-core", {}, {}, {"pp": 2, "dp_shard": 1, "schedule": "zb-h1"}, "plan.schedule = zb-h1: a custom "
         "schedule"),
        ("megatron-bridge", {"lora_rank": 4}, {"task": "lora"}, {}, "model.lora_rank = 4: adapters with model.mtp"),
        ("megatron-core", {}, {}, {"offload_activations": True}, "plan.offload_activations = true: activations on the"),
        ("megatron-core", {"num_attention_heads": 12, "head_dim": 4, "hidden_size": 50, "intermediate_size": 96}, {}, {
         "dp_shard": 1, "tp": 4}, "plan.tp = 4: ... divide model.hidden_size = 50"),
    ],
)  # fmt: skip
def test_unmodelled_options_are_refused_by_name(
    software: str, sizes: dict[str, Any], training: dict[str, Any], plan: dict[str, Any], sentence: str
) -> None:
    refusals = problems(model(**sizes), {"dp_shard": 2, "zero_stage": 1, **plan}, software=software, **training)
    assert any(says(problem, sentence) for problem in refusals)


def test_beside_overlapped_exchanges_for_experts_there_is_one_at_most() -> None:
    software = catalog.software("megatron-core").model_copy(update={"expert_overlap": True})
    plan = ParallelPlan(dp_shard=2, zero_stage=1, ep=2)
    assert problems(model(LATENT), plan, software=software) == []
    [refusal] = problems(model(LATENT, depths=2), plan, software=software)
    assert says(refusal, "model.mtp_num_layers = 2: ", "at most 1", "software.expert_overlap")


def test_families_without_them_refuse_the_key() -> None:
    with pytest.raises(ValueError, match=r"llama, moe or deepseek.* family = gpt; remove it"):
        model(family="gpt")
