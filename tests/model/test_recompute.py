"""What recomputation keeps and repeats, against what each framework documents."""

from __future__ import annotations

import pytest

from simplan.model.layer import LayerCollective, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.plan.plan import Recompute
from simplan.plan.shard import Shard

LLAMA = ModelSpec(
    family="llama",
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=96,
    vocab_size=128,
    seq_len=32,
)
MODES: tuple[Recompute, ...] = (
    "none", "selective", "selective_op", "selective_layer", "full", "minimal", "qkv_proj_offloaded",
)  # fmt: skip
NORM1, ATTENTION, MLP = ["norm1"], ["rotary", "attention"], ["gate", "up", "silu_multiply"]


def block_of(shard: Shard | None = None) -> LayerSpec:
    return LLAMA.layers_of(shard or Shard())[1]


def kept(layer: LayerSpec, mode: Recompute, block_index: int = 0) -> list[str]:
    names = recomputation(layer, mode, block_index).saved
    return [name for name in layer.tensors if name in names]


def again(layer: LayerSpec, mode: Recompute, block_index: int = 0) -> list[str]:
    return [layer.kernels[index].name for index in recomputation(layer, mode, block_index).kernels]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [0, -1])
def test_embedding_and_head_are_never_recomputed(mode: Recompute, index: int) -> None:
    layer = LLAMA.layers[index]
    assert recomputation(layer, mode, 1) == recomputation(layer, "none")
    assert recomputation(layer, "none").saved == {tensor.name for tensor in layer.saved}


def test_full_keeps_the_input_and_ends_before_the_last_product() -> None:
    assert kept(block_of(), "full") == ["input"]
    assert again(block_of(), "full") == [*NORM1, "q", "k", "v", *ATTENTION, "proj", "residual1", "norm2", *MLP]


@pytest.mark.parametrize(("mode", "names"), [("minimal", []), ("qkv_proj_offloaded", ["proj output", "norm2 output"])])
def test_under_xla_exchanges_run_again_with_their_products(mode: Recompute, names: list[str]) -> None:
    assert [
        name for name in again(block_of(Shard(tp=2, sequence_parallel=True)), mode) if name.endswith(" output")
    ] == names


def test_full_exchanges_again_what_forward_exchanged() -> None:
    layer = block_of(Shard(tp=2, sequence_parallel=True))
    names = again(layer, "full")
    repeated = [n for n in names if any(isinstance(k, LayerCollective) and k.name == n for k in layer.kernels)]
    assert repeated == ["norm1 output", "proj output", "norm2 output"]


def test_selective_repeats_the_attention_core_alone() -> None:
    assert again(block_of(), "selective") == ["attention"]
    dropped = set(kept(block_of(), "none")) - set(kept(block_of(), "selective"))
    assert dropped == {"attention logsumexp"}


def test_selective_op_keeps_every_second_product_attention_and_scattered_sums() -> None:
    """torchtitan's policy saves products 1, 3, 5, 7 of q, k, v, proj, gate, up, down."""
    results = ["q output", "v output", "attention output", "attention logsumexp", "gate output", "down output"]
    assert kept(block_of(), "selective_op") == ["input", *results]
    assert again(block_of(), "selective_op") == [
        *NORM1, "k", "rotary", "proj", "residual1", "norm2", "up", "silu_multiply"
    ]  # fmt: skip
    split = block_of(Shard(tp=2, sequence_parallel=True))
    assert "proj output" in kept(split, "selective_op")
    assert "proj output" not in again(split, "selective_op")


def test_selective_op_keeps_what_experts_are_sent_and_give_back_and_no_product_of_theirs() -> None:
    """Nor the router's; products of the shared expert count on after the attention's: gate is the fifth."""
    fields = {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 32}
    model = ModelSpec(**{**LLAMA.model_dump(exclude_unset=True), "family": "moe", **fields})
    layer = model.layers_of(Shard(ep=2))[1]
    matmuls = ["q output", "v output", "attention output", "attention logsumexp", "shared_gate output"]
    assert kept(layer, "selective_op") == [
        "input",
        *matmuls,
        "shared_down output",
        "after expert inputs",
        "results of places",
    ]
    runs = again(layer, "selective_op")
    assert {"shared_up", "router", "dispatch", "experts_gate", "experts_up", "experts_down", "combine"} < set(runs)
    assert {"shared_gate", "expert inputs", "expert outputs"}.isdisjoint(runs)


def test_selective_layer_repeats_every_second_block() -> None:
    for index in range(4):
        like: Recompute = "full" if index % 2 else "none"
        assert recomputation(block_of(), "selective_layer", index) == recomputation(block_of(), like)


def test_minimal_keeps_products_that_backward_needs() -> None:
    """MaxText's policy saves q, k, v, the projection and both MLP products; attention runs again."""
    matmuls = ["q output", "k output", "v output", "proj output", "gate output", "up output"]
    assert kept(block_of(), "minimal") == ["input", *matmuls]
    assert again(block_of(), "minimal") == [*NORM1, *ATTENTION, "residual1", "norm2", "silu_multiply"]


def test_minimal_keeps_a_product_over_ranks_once_they_have_added_it_up() -> None:
    """JAX's policy sees one array, of which a rank keeps its part; the sum is not taken again."""
    split = block_of(Shard(tp=2, sequence_parallel=True))
    assert "proj output" in recomputation(split, "minimal").saved
    assert split.tensors["proj output"].elements == split.output_elements == block_of().output_elements // 2
    assert "proj" not in again(split, "minimal")
    assert "proj output" not in again(split, "minimal")


def test_offloaded_products_are_neither_on_the_device_nor_repeated() -> None:
    assert kept(block_of(), "qkv_proj_offloaded") == ["input"]
    assert not {"q", "k", "v"} & set(again(block_of(), "qkv_proj_offloaded"))
    assert "proj" in again(block_of(), "qkv_proj_offloaded")
