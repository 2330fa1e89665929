"""Mixture of experts and latent attention: active parameters, closed forms, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from simplan import catalog
from simplan.model.layer import Attention, CollectiveKind, Gemm, LayerCollective, LayerKind, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.parts.experts import places_of
from simplan.plan.shard import Shard
from tests.jobs import problems
from tests.support.problems import says

SIZES: dict[str, Any] = {
    "family": "moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "top_k": 2,
    "moe_intermediate_size": 96,
    "vocab_size": 128,
    "seq_len": 32,
}
LATENT = {
    **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "family": "deepseek",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}


def model_of(**fields: Any) -> ModelSpec:
    return ModelSpec(**{**SIZES, **fields})


def gemms(layer: LayerSpec) -> dict[str, Gemm]:
    return {kernel.name: kernel for kernel in layer.kernels if isinstance(kernel, Gemm)}


ACTIVE = {  # billions of parameters that a token uses, as the reports and model cards have them
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "olmoe-1b-7b": 1.3,
    "deepseek-moe-16b": 2.8,
    "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1,
    "deepseek-v2-lite": 2.4,
    "deepseek-v2": 21,
    "deepseek-v3": 37,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_flops_are_those_of_the_active_experts(name: str) -> None:
    """Two FLOPs a token for each active weight; embeddings are counted or not, as their authors like it."""
    model = catalog.model(name)
    cores = [kernel for layer in model.layers for kernel in layer.kernels if isinstance(kernel, Attention)]
    matmuls = sum(layer.flops() for layer in model.layers) - sum(core.flops for core in cores)
    active = matmuls / 2 / model.seq_len
    table = model.vocab_size * model.hidden_size
    counts = [(active + more * table) / 1e9 for more in (-1, 0, 1)]
    assert any(math.isclose(count, ACTIVE[name], rel_tol=0.03) for count in counts), counts


@pytest.mark.parametrize(("factor", "places"), [(1.0, 8), (1.25, 10), (1.01, 9), (0.1, 1), (0.01, 1), (4.0, 32)])
def test_places_are_a_multiple_of_the_even_share(factor: float, places: int) -> None:
    """32 tokens with 2 experts each ask for 64 places, 8 of each of the 8 experts."""
    assert places_of(32, 2, 8, factor) == places


def test_a_tenth_is_not_rounded_up_by_a_bit() -> None:
    """1.1 x 100 is 110.00000000000001 in binary."""
    assert places_of(100, 1, 1, 1.1) == 110


def test_capacity_is_computed_and_active_experts_are_counted() -> None:
    even, wide = model_of().layers[1], model_of(capacity_factor=2.5).layers[1]
    assert even.flops() == wide.flops()
    for name in ("experts_gate", "experts_up", "experts_down"):
        even_gemm, other = gemms(even)[name], gemms(wide)[name]
        assert even_gemm.computed_flops == even_gemm.flops == other.flops == 2 * 32 * 2 * 96 * 64
        assert other.computed_flops == 2.5 * even_gemm.flops
    dropping = model_of(capacity_factor=0.5, drop_tokens=True).layers[1]
    assert gemms(dropping)["experts_up"].flops == gemms(even)["experts_up"].flops // 2


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_expert_parallel_ranks_have_some_experts_and_work_on_as_many_rows(ep: int) -> None:
    model = model_of(capacity_factor=1.5)
    whole, part = model.layers[1], model.layers_of(Shard(ep=ep))[1]
    for full, other in zip(whole.parameters, part.parameters, strict=True):
        assert other.expert == full.name.startswith("experts_")
        assert full.num_elements == other.num_elements * (ep if other.expert else 1)
    assert whole.flops() == part.flops()
    exchanged = [kernel for kernel in part.kernels if isinstance(kernel, LayerCollective)]
    everywhere = CollectiveKind.ALL_TO_ALL
    # all of the 8 x 12 places, of 64 numbers each, go there and back
    assert [(e.axis, e.forward, e.backward, e.elements) for e in exchanged] == [
        ("ep", everywhere, everywhere, 96 * 64)
    ] * 2
    names = [kernel.name for kernel in part.kernels]
    assert names.index("expert inputs") < names.index("experts_gate") < names.index("expert outputs")
    assert whole.key != part.key


def test_only_blocks_with_experts_differ_between_ranks() -> None:
    whole, part = model_of(num_dense_layers=1), model_of(num_dense_layers=1).layers_of(Shard(ep=2))
    same = [full.key == other.key for full, other in zip(whole.layers, part, strict=True)]
    assert same == [True, True, False, False, False, True]
    assert "gate" in gemms(whole.layers[1])
    assert "experts_gate" in gemms(whole.layers[2])


@pytest.mark.parametrize("fields", [{"shared_expert_intermediate_size": 32}, {"capacity_factor": 1.5}, {"top_k": 3}])
def test_every_switch_is_in_the_key(fields: dict[str, Any]) -> None:
    assert model_of(**fields).layers[1].key != model_of().layers[1].key


def test_attention_of_narrow_values() -> None:
    """Scores have the width of keys, what they weigh that of values; the kernel pads values to the width of keys."""
    block = ModelSpec(**LATENT).layers[1]
    (core,) = (kernel for kernel in block.kernels if isinstance(kernel, Attention))
    assert core.flops == 32 * 32 * 8 * (16 + 10)
    assert core.computed_flops == 32 * 32 * 8 * (16 + 16)
    assert sum(p.num_elements for p in block.parameters if p.name.startswith(("q.", "kv_", "proj"))) == (
        64 * 8 * 16 + 64 * 20 + 16 + 16 * 8 * 22 + 64 * 80
    )


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "etp"), [(2, 1, 4, 1), (4, 1, 1, 1), (4, 1, 2, 4), (2, 2, 8, 1), (2, 1, 1, 2)]
)
def test_ranks_that_split_attention_route_their_own_tokens(tp: int, cp: int, ep: int, etp: int) -> None:
    """32 tokens with 2 experts each on tp x cp ranks; an expert's matrices are split over etp ranks and no others."""
    fields = {"shared_expert_intermediate_size": 48}
    whole = model_of(**fields).layers[1]
    shard = Shard(tp=tp, sequence_parallel=True, cp=cp, cp_comm="all_gather", ep=ep, etp=etp)
    part = model_of(**fields).layers_of(shard)[1]
    tokens_of_rank = 32 // (tp * cp)
    rows = tokens_of_rank * 2 * etp
    assert gemms(part)["router"].m == tokens_of_rank
    assert (gemms(part)["experts_down"].m, gemms(part)["experts_down"].k) == (rows, 96 // etp)
    assert (gemms(part)["shared_up"].m, gemms(part)["shared_up"].n) == (32 // cp, 48 // tp)
    elements = {p.name: p.num_elements for p in whole.parameters}
    for p in part.parameters:
        split = (
            ep * etp if p.name.startswith("experts_") else 1 if "norm" in p.name or p.name == "router.weight" else tp
        )
        assert p.num_elements * split == elements[p.name], p.name
        assert p.expert == (p.name.startswith("experts_") and (ep > 1 or etp < tp)), p.name
    assert next(p for p in part.parameters if p.name == "router.weight").partial_gradient
    exchanged = {
        (e.axis, e.forward): e.elements for e in part.kernels if isinstance(e, LayerCollective) and "expert" in e.name
    }
    places = 8 * places_of(tokens_of_rank, 2, 8, 1.0) * 64
    wanted = {("ep", CollectiveKind.ALL_TO_ALL): places} if ep > 1 else {}
    if etp > 1:
        wanted |= {("etp", kind): etp * places for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)}
    assert exchanged == wanted
    assert part.flops() * tp * cp == whole.flops() + _repeated_keys_flops(whole, part) * tp * cp


def _repeated_keys_flops(whole: LayerSpec, part: LayerSpec) -> int:
    """What gathered keys add: FLOPs of causal attention are counted as a half of those of each rank's queries."""
    cores = [sum(k.flops for k in layer.kernels if isinstance(k, Attention)) for layer in (whole, part)]
    ranks = 32 // gemms(part)["router"].m
    return cores[1] - cores[0] // ranks


@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_latent_attention_gathers_its_narrow_vectors(q_lora_rank: int | None) -> None:
    """Tensor-parallel ranks make them of own tokens, and have some of the heads; nothing of the hidden size moves."""
    model = ModelSpec(**LATENT, q_lora_rank=q_lora_rank)
    whole, part = model.layers[1], model.layers_of(Shard(tp=4, sequence_parallel=True))[1]
    assert {name: gemm.m for name, gemm in gemms(part).items() if name in ("kv_a", "q_a", "kv_b", "proj")} == {
        "kv_a": 8, "kv_b": 32, "proj": 32, **({"q_a": 8} if q_lora_rank else {}),
    }  # fmt: skip
    gathered = [
        k.elements for k in part.kernels if isinstance(k, LayerCollective) and k.forward is CollectiveKind.ALL_GATHER
    ]
    queries = 32 * (q_lora_rank or 64)
    assert gathered == [queries, 32 * 4, 32 * 16]
    matmuls = [sum(gemm.flops for gemm in gemms(layer).values()) for layer in (whole, part)]
    assert matmuls[1] * 4 == matmuls[0]
    partial = {p.name for p in part.parameters if p.partial_gradient}
    narrow = {"kv_a.weight", "kv_a_norm.weight", "router.weight", "norm1.weight", "norm2.weight"}
    assert partial == narrow | ({"q_a.weight", "q_a_norm.weight"} if q_lora_rank else set())


@pytest.mark.parametrize(
    "plan",
    [
        {"dp_replicate": 4, "ep": 4},
        {"dp_replicate": 4, "ep": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 2, "dp_replicate": 2, "ep": 4},
        {"dp_shard": 4, "zero_stage": 1, "ep": 4},
        {"pp": 2, "dp_shard": 2, "ep": 2},
        {"cp": 2},
        {"dp_shard": 4},
        {"tp": 2},
        {"tp": 2, "etp": 2, "ep": 2, "dp_replicate": 2},
        {"tp": 2, "ep": 4, "dp_replicate": 2},
        {"cp": 2, "dp_shard": 2, "ep": 4},
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 2, "dp_replicate": 2, "tp": 2},
    ],
)
def test_valid_plans_pass(plan: dict[str, Any]) -> None:
    assert problems(model_of(), plan) == []


@pytest.mark.parametrize(
    ("fields", "plan", "sentence"),
    [
        ({}, {"dp_replicate": 3, "ep": 3}, "plan.ep = 3: ... divide model.num_experts = 8: ... use 2 or 4"),
        ({}, {"dp_replicate": 2, "ep": 4}, "plan.ep = 4: ... divide dp_replicate x dp_shard = 2: ... use 2"),
        ({}, {"tp": 2, "etp": 2, "cp": 2, "ep": 4},
         "plan.ep = 4: ... divide dp_replicate x dp_shard x cp x tp ... etp = 2: ... use 2"),
        ({"moe_intermediate_size": 33, "intermediate_size": 96}, {"tp": 2, "etp": 2},
         "plan.etp = 2: ... divide model.moe_intermediate_size = 33: ... use 1 or 3"),
        ({"shared_expert_intermediate_size": 49}, {"tp": 2},
         "plan.tp = 2: ... divide model.shared_expert_intermediate_size = 49: ... use 1 or 7"),
        ({"capacity_factor": 0.9}, {},
         "model.capacity_factor = 0.9: ... 1 ... balanced ... use 1 ... model.drop_tokens = true"),
        ({"capacity_factor": 1.25, "expert_imbalance": 1.6}, {},
         "model.capacity_factor = 1.25: ... 1.6 ... expert_imbalance = 1.6; use 1.6 ... model.drop_tokens = true"),
        ({"top_k": 9}, {}, "model.top_k = 9: must be at most num_experts = 8; use 8"),
        ({"num_dense_layers": 5}, {}, "model.num_dense_layers = 5: ... most num_hidden_layers = 4; use 4"),
        ({"shared_expert_gate": True}, {},
         "model.shared_expert_gate = true: ... shared_expert_intermediate_size = 0; remove ... "
         "shared_expert_intermediate_size"),
        ({"head_dim": 7}, {}, "model.head_dim = 7: ... rotary positions ... use 6 or 8"),
    ],
)  # fmt: skip
def test_refused(fields: dict[str, Any], plan: dict[str, Any], sentence: str) -> None:
    [refusal] = problems(model_of(**fields), plan)
    assert says(refusal, sentence)


@pytest.mark.parametrize(
    ("family", "plan", "sentence"),
    [
        ("moe", {"dp_shard": 4, "zero_stage": 1, "ep": 2},
         "plan.ep = 2: ... dp_shard = 4 ... not modeled ... use ... multiple of 4 ... dp_shard"),
        ("moe", {"dp_shard": 3, "dp_replicate": 2, "ep": 2},
         "plan.ep = 2: ... 2 ... not modeled ... use 1 or 3 ... multiple of 3"),
        ("moe", {"tp": 2, "sequence_parallel": False}, "plan.sequence_parallel = false: ... not modeled ... use true"),
        ("moe", {"tp": 4, "etp": 2}, "plan.etp = 2: ... not modeled ... use 1 or 4"),
        ("moe", {"tp": 2, "dp_shard": 2, "zero_stage": 1, "ep": 2},
         "plan.ep = 2: ... dp_shard x tp = 4 ... not modeled ... use ... multiple of 4 ... dp_shard"),
        ("deepseek", {"cp": 2}, "plan.cp = 2: ... not modeled ... use 1"),
        ("moe", {"dp_replicate": 2, "ep": 2, "grad_sync": "microbatch"},
         "plan.grad_sync = microbatch: ... ep ... 1 is not modeled ... use"),
        ("moe", {"pp": 2, "schedule": "zb-h1"},
         "plan.schedule = zb-h1: ... not modeled ... use 1f1b or interleaved_1f1b"),
    ],
)  # fmt: skip
def test_not_modelled(family: str, plan: dict[str, Any], sentence: str) -> None:
    model = model_of() if family == "moe" else ModelSpec(**LATENT)
    assert any(says(refusal, sentence) for refusal in problems(model, plan))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"dp_replicate": 2, "ep": 2}, "plan.ep = 2: spreads ... llama"),
        ({"tp": 2, "etp": 2}, "plan.etp = 2: ... experts ... llama"),
    ],
)
def test_models_without_experts_are_not_spread(plan: dict[str, Any], sentence: str) -> None:
    [refusal] = problems("llama3-8b", plan)
    assert says(refusal, sentence)


def test_layers_before_and_after_are_llamas() -> None:
    kinds = [layer.kind for layer in model_of().layers]
    assert kinds == [LayerKind.EMBEDDING, *[LayerKind.BLOCK] * 4, LayerKind.HEAD]
