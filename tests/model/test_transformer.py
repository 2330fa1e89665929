"""Layers as one rank has them: closed forms from the papers, and sums over ranks that give the whole."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layer
from simplan.model.layer import Attention, CollectiveKind, Gemm, LayerCollective, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.parts.attention import MASK
from simplan.plan.plan import ParallelPlan
from simplan.plan.shard import Shard
from tests.jobs import tiny_model

_K = CollectiveKind
SEQ_LEN, HIDDEN, TP = 64, 128, 4


def model_of(family: str) -> ModelSpec:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16 if family == "gpt" else 8}
    return tiny_model(family, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, seq_len=SEQ_LEN, **heads)


def collectives(layer: LayerSpec) -> list[LayerCollective]:
    return [kernel for kernel in layer.kernels if isinstance(kernel, LayerCollective)]


SHARDS = [
    Shard(),
    Shard(tp=TP),
    Shard(tp=TP, sequence_parallel=True),
    Shard(cp=4),
    Shard(cp=4, cp_comm="all_gather"),
    Shard(cp=4, cp_comm="a2a"),
    Shard(tp=2, sequence_parallel=True, cp=2, cp_comm="a2a"),
]


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_ranks_together_do_the_work_of_one(family: str, shard: Shard) -> None:
    """Nothing but norms, residuals and biases is done twice: the FLOPs of all ranks sum to those of the whole."""
    model = model_of(family)
    for whole, part in zip(model.layers, model.layers_of(shard), strict=True):
        for full in (False, True):
            if shard.cp > 1 and shard.cp_comm == "ring" and full:
                continue  # half of every part's scores are masked, so that only the causal count means anything
            expected = whole.flops(full_attention=full)
            assert part.flops(full_attention=full) * shard.tp * shard.cp == expected


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_matrices_are_split_evenly(family: str) -> None:
    model = model_of(family)
    for whole, part in zip(model.layers, model.layers_of(Shard(tp=TP)), strict=True):
        for before, after in zip(whole.parameters, part.parameters, strict=True):
            split = (len(before.shape) > 1 and before.name != "wpe.weight") or before.name in ("qkv.bias", "up.bias")
            assert before.num_elements == after.num_elements * (TP if split else 1), before.name


def of_megatron(family: str) -> LayerSpec:
    """A block with sequence parallelism whose tokens are gathered again in backward."""
    block = model_of(family).layers_of(Shard(tp=TP, sequence_parallel=True))[1]
    return implemented_layer(block, LayerImplementation(regathers_tokens=True), dropout=False)


def test_dtensors_save_gathered_tokens() -> None:
    """Beyond Megatron's, inputs of attention and MLP of all tokens instead of a part (s b h (1 - 1/t), 16 bit)."""
    block, of_core = model_of("gpt").layers_of(Shard(tp=TP, sequence_parallel=True))[1], of_megatron("gpt")
    assert block.saved_bytes(2)[0] - of_core.saved_bytes(2)[0] == 2 * 2 * SEQ_LEN * HIDDEN * (TP - 1) // TP
    assert [e.backward for e in collectives(block)] == [_K.REDUCE_SCATTER, _K.ALL_GATHER] * 2


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_tensor_parallel_block_all_reduces_four_times(family: str) -> None:
    """Shoeybi et al. 2019, figure 4: two in forward and two in backward, of s h elements each."""
    issued = collectives(model_of(family).layers_of(Shard(tp=TP))[1])
    assert [e.forward for e in issued if e.forward] == [_K.ALL_REDUCE] * 2
    assert [e.backward for e in issued if e.backward] == [_K.ALL_REDUCE] * 2
    assert {e.elements for e in issued} == {SEQ_LEN * HIDDEN}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_sequence_parallelism_replaces_each_all_reduce_by_two_halves(family: str) -> None:
    """Korthikanti et al. 2022, section 4.2: and gathers twice more in backward, since inputs are kept in parts."""
    issued = collectives(of_megatron(family))
    forward = [e.forward for e in issued if e.forward]
    backward = [e.backward for e in reversed(issued) if e.backward]
    assert forward == [_K.ALL_GATHER, _K.REDUCE_SCATTER] * 2
    assert backward == [_K.ALL_GATHER, _K.ALL_GATHER, _K.REDUCE_SCATTER] * 2
    assert {e.elements for e in issued} == {SEQ_LEN * HIDDEN}


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_sends_keys_and_values_and_brings_their_gradients_home(cp: int) -> None:
    """cp - 1 times k and v in forward and again in backward, cp times their gradients."""
    block = model_of("llama").layers_of(Shard(cp=cp))[1]
    issued, once = collectives(block), 2 * SEQ_LEN // cp * 8 * 8
    assert sum(e.elements for e in issued if e.forward is _K.RING) == (cp - 1) * once
    assert sum(e.elements for e in issued if e.backward is _K.RING) == (cp - 1 + cp) * once
    assert sum(isinstance(kernel, Attention) for kernel in block.kernels) == cp
    assert [e.beside_previous for e in issued if e.forward] == [True] * (cp - 1)


def test_layers_of_different_splits_have_different_keys() -> None:
    keys = [layer.key for shard in SHARDS for layer in model_of("llama").layers_of(shard)[:2]]
    assert len(set(keys)) == len(keys)


def test_context_parallel_ranks_have_whole_matrices_and_few_tokens() -> None:
    for kernel in model_of("llama").layers_of(Shard(cp=4, cp_comm="a2a"))[1].kernels:
        if isinstance(kernel, Gemm):
            assert kernel.m == SEQ_LEN // 4


@pytest.mark.parametrize(
    ("software", "is_masked"),
    [("torch", True), ("megatron-core", False), ("megatron-bridge", False), ("nemo", False), ("torchtitan", False)],
)
def test_gathered_keys_have_a_mask_tensor_where_one_call_reads_all(software: str, is_masked: bool) -> None:
    """Of TransformerEngine and torchtitan every call is causal; a rank's mask has its queries times all keys."""
    model, plan = model_of("llama"), ParallelPlan(cp=4, cp_comm="all_gather")
    layers = catalog.software(software).layers_of(model, plan)
    masks = {table.elements for layer in layers for table in layer.constants if table.name == MASK}
    assert masks == ({model.seq_len // 4 * model.seq_len} if is_masked else set())
