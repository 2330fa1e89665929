"""Documents that share sequences: counts against closed forms, packings against bounds, rules in words."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from simplan import catalog
from simplan.model import packing as packing_module
from simplan.model.layer import Attention
from simplan.model.model import ModelSpec
from simplan.model.packing import NUM_DOCUMENTS, Histogram, Lognormal, Packing, represent
from simplan.plan.plan import ParallelPlan
from simplan.plan.shard import Shard
from tests.jobs import problems, tiny_model
from tests.support.problems import refuses, says

PACKINGS: tuple[Packing, ...] = ("greedy", "first_fit_decreasing")


def model_of(*lengths: int, **fields: Any) -> ModelSpec:
    sizes = {"num_key_value_heads": 2, "intermediate_size": 160, "seq_len": 100}
    return tiny_model("llama", **{**sizes, "document_lengths": lengths, **fields})


def core_of(model: ModelSpec) -> Attention:
    (core,) = (kernel for kernel in model.layers[1].kernels if isinstance(kernel, Attention))
    return core


def test_attention_is_that_of_the_documents() -> None:
    """4 h sum of squares, half of it where causal; the ten tokens of padding are computed and do not count."""
    core = core_of(model_of(50, 30, 10))
    squares = 50**2 + 30**2 + 10**2
    assert core.full_flops == 4 * 64 * squares
    assert core.flops == 2 * 64 * squares
    assert core.computed_flops == 2 * 64 * (squares + 10**2)
    assert core.calls == tuple(2 * 64 * n**2 for n in (50, 30, 10, 10))
    assert core.num_scores == 4 * squares


@pytest.mark.parametrize("software", ["megatron-core", "nemo", "megatron-bridge"])
def test_one_kernel_for_all_documents_keeps_what_it_keeps_of_one(software: str) -> None:
    """Transformer Engine's thd format: one call, the FLOPs of the documents, the tensors of a sequence."""
    stack = catalog.software(software)
    packed, whole = (stack.layers_of(model, ParallelPlan())[1] for model in (model_of(50, 30, 10), model_of()))
    (core,) = (kernel for kernel in packed.kernels if isinstance(kernel, Attention))
    assert core.calls == (core_of(model_of(50, 30, 10)).computed_flops,)
    assert sorted(tensor.num_bytes(2, 2) for tensor in packed.saved) == sorted(t.num_bytes(2, 2) for t in whole.saved)
    assert [kernel.name for kernel in packed.kernels] == [kernel.name for kernel in whole.kernels]


def test_a_window_ends_within_a_document() -> None:
    """Pairs of a query and a key, counted one by one with half of the diagonal, as the convention of causal halves."""
    core = core_of(model_of(50, 30, 5, sliding_window=20))
    pairs = sum(0.5 if i == j else 1.0 for n in (50, 30, 5) for i in range(n) for j in range(n) if 0 <= i - j < 20)
    edges = sum(0.5 * max(0, n - 20) for n in (50, 30, 5))  # the last key of a window counts half, too
    assert core.flops == pytest.approx(4 * 64 * (pairs + edges))
    assert model_of(20, 20, 20, 20, 20, sliding_window=20).windows == (0, 0)


def test_model_flops_leave_padding_out() -> None:
    """Equal to those of documents that are sequences of their own."""
    packed = model_of(50, 30, 10).flops_per_sequence()
    alone = sum(model_of(seq_len=n).flops_per_sequence() for n in (50, 30, 10))
    assert packed == alone
    assert model_of(50, 30, 10).document_share == 0.9


def test_one_document_that_fills_the_sequence_is_none() -> None:
    assert model_of(100).layers == model_of().layers
    assert [t.name for t in model_of(100).layers[1].saved] == [t.name for t in model_of().layers[1].saved]
    assert model_of(60, 40).layers != model_of().layers


def test_keys_differ_where_documents_do() -> None:
    """In another order they are as much work."""
    keys = {model_of(*lengths).layers[1].key for lengths in ((50, 30), (30, 50), (50, 20), (40, 40), (50, 30, 20))}
    assert len(keys) == 4


@pytest.mark.parametrize("packing", PACKINGS)
def test_lengths_that_divide_a_sequence_fill_it(packing: Packing) -> None:
    lengths, packs = represent(Histogram(histogram={256: 1.0}, packing=packing), 1024)
    assert lengths == (256,) * 4
    assert packs.document_share == packs.documents_per_pack / 4 == 1
    assert packs.relative_std == packs.relative_excess == 0
    assert packs.num_packs in (NUM_DOCUMENTS // 4, NUM_DOCUMENTS // 4 - 1)


def test_first_fit_decreasing_takes_the_longest_first() -> None:
    """Johnson's example: one of each fills a sequence, unless short ones have taken the room (Johnson et al. 1974)."""
    source: dict[str, Any] = {"histogram": {501: 1.0, 334: 1.0, 143: 1.0}}
    best, greedy = (represent(Histogram(packing=packing, **source), 1000) for packing in PACKINGS[::-1])
    assert best[0] == (501, 334, 143)
    in_order = packing_module._first_fit_decreasing(np.array([300, 300, 700, 500, 700]), 1000)
    assert in_order == [[700, 300], [700, 300], [500]]
    assert best[1].document_share > 0.8 > greedy[1].document_share


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_packs_of_a_lognormal_distribution(packing: Packing, seed: int) -> None:
    """Packs hold what was drawn: their mean is that of the distribution cut at both ends; half is the least share.

    A pack and the next one together hold more than a sequence, or the next would have been added.
    """
    source = Lognormal(distribution="lognormal", median=300, sigma=1.0, packing=packing, seed=seed)
    lengths, packs = represent(source, 8192)
    mean = 300 * math.exp(0.5)  # of the distribution; 0.05 % lie above 8192
    assert 8192 * packs.document_share / packs.documents_per_pack == pytest.approx(mean, rel=0.03)
    assert 0.5 < packs.document_share <= 1
    assert packs.cut_share == pytest.approx(0.5 * math.erfc(math.log(8192 / 300) / math.sqrt(2)), abs=5e-4)
    assert sum(lengths) <= 8192
    assert lengths == tuple(sorted(lengths, reverse=True))
    assert represent(source, 8192) == (lengths, packs)


def test_the_pack_that_is_taken_is_nearest_to_the_mean() -> None:
    """Greedy packs of two kinds of documents, packed again here by the definition."""
    source = Histogram(histogram={100: 3.0, 900: 1.0}, seed=7)
    lengths, packs = represent(source, 1000)
    drawn = source.draw(NUM_DOCUMENTS, np.random.default_rng(7))
    packs_by_hand: list[list[int]] = []
    for length in map(int, drawn):
        if not packs_by_hand or sum(packs_by_hand[-1]) + length > 1000:
            packs_by_hand.append([])
        packs_by_hand[-1].append(length)
    packs_by_hand.pop()
    pairs = [sum(n**2 for n in pack) + (1000 - sum(pack)) ** 2 for pack in packs_by_hand]
    mean = sum(pairs) / len(pairs)
    taken = sum(n**2 for n in lengths) + (1000 - sum(lengths)) ** 2
    assert abs(taken - mean) == min(abs(p - mean) for p in pairs)
    assert packs.num_packs == len(packs_by_hand)
    assert packs.relative_std == pytest.approx(float(np.std(pairs)) / mean)
    assert packs.relative_excess == pytest.approx(max(pairs) / mean - 1)
    assert Counter(lengths) in [Counter(pack) for pack in packs_by_hand]


def test_sequences_that_too_few_documents_fill_are_refused() -> None:
    with refuses("model.seq_len", "1000000", rule="makes sequences too long: 20,000 documents"):
        represent(Histogram(histogram={10: 1.0}), 1_000_000)


REFUSED: dict[str, tuple[ModelSpec, str]] = {
    "too many tokens": (
        model_of(60, 50),
        "model.document_lengths = [60, 50]: has 110 tokens, and a sequence has seq_len = 100; "
        "use shorter documents, or model.seq_len = 110",
    ),
    "nothing to predict": (
        model_of(1, 1, 1, 1, 1, 1, 1),
        "model.document_lengths = [1, 1, ..., 1]: has no document of two tokens, of which one could be predicted from "
        "the other; use longer documents",
    ),
    "more tokens than positions": (
        tiny_model(seq_len=100, max_position_embeddings=50, document_lengths=(20, 20)),
        "model.document_lengths = [20, 20]: the padding has 60 tokens, and max_position_embeddings = 50; "
        "set model.max_position_embeddings to 60",
    ),
}


def checked(model: ModelSpec, software: str = "torch", **plan: Any) -> list[str]:
    return problems(model, {"dp_replicate": 8, **plan}, task="sft", software=software)


@pytest.mark.parametrize("name", REFUSED)
def test_documents_that_cannot_be_are_refused(name: str) -> None:
    model, sentence = REFUSED[name]
    assert checked(model) == [sentence]
    with pytest.raises(ValueError, match="document_lengths"):
        model_of(50, 0)


def test_positions_need_reach_only_as_far_as_documents() -> None:
    assert checked(tiny_model(seq_len=100, max_position_embeddings=50, document_lengths=(50, 50))) == []


@pytest.mark.parametrize(
    ("lengths", "plan", "rule"),
    [
        ((50, 30), {"software": "torch"}, "several documents in a sequence with torch is not"),
        ((50, 30), {"cp_comm": "all_gather"}, "several documents in a sequence is not"),
        ((90, 3), {}, "documents ... 3"),
    ],
)
def test_context_parallelism_of_documents_is_refused_by_name(
    lengths: tuple[int, ...], plan: dict[str, Any], rule: str
) -> None:
    degrees: dict[str, Any] = {"dp_replicate": 4, "cp": 2, "cp_comm": "ring", "software": "megatron-bridge"}
    [refusal] = checked(model_of(*lengths), **degrees | plan)
    assert says(refusal, "context parallelism of ", rule)


@pytest.mark.parametrize("cp_comm", ["ring", "a2a"])
def test_ranks_of_context_parallelism_share_the_work_of_documents(cp_comm: str) -> None:
    """Both halves of the tokens have early and late ones of each document, so they have half of the scores each."""
    model = tiny_model(seq_len=96, num_attention_heads=4, num_key_value_heads=4, document_lengths=(64, 24, 8))

    def scores(cp: int) -> int:
        layers = model.layers_of(Shard(cp=cp, cp_comm=cp_comm))  # type: ignore[arg-type]
        return sum(kernel.computed_flops for kernel in layers[1].kernels if isinstance(kernel, Attention))

    assert 2 * scores(2) == scores(1)


def test_families_without_documents_refuse_them() -> None:
    with pytest.raises(ValueError, match="gpt, llama, mpt, moe, deepseek or neox"):
        tiny_model("bert", seq_len=100, document_lengths=(50, 50))
