"""Layers of all families: their modules against what LayerSpec says of them, as torch itself accounts for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.distributed.mesh import ParallelDims
from executor.models.model import build_stage
from executor.train.data import model_batch
from simplan.model.model import ModelSpec
from simplan.plan.plan import Recompute
from tests.executor.models.family_models import PLAIN, VARIANTS, variant
from tests.executor.models.layer_runs import (
    SHARDS,
    STATES,
    LayerRun,
    assert_parameters_and_order_of_gradients,
    counted_flops,
)

CPU = torch.device("cpu")


def shards_of(name: str) -> list[str]:
    """In which ways a model can be split."""
    if name in ("bert", "gemma2"):
        return ["whole", "tensor", "sequence"]
    return ["whole", "tensor"] if name == "vit" else list(SHARDS)


QUICK = ("qk-norm", "mpt", "neox", "gemma2", "bert", "vit")
NAMES = (*PLAIN, *VARIANTS)


def quick(name: str, shard: str, precision: str, recompute: str = "none") -> list[Any]:
    """Marks: in every run of the tests whole layers are looked at in mixed precision, and their parts in fp32.

    GPT's and Llama's whole layers are in every precision, and their parts in mixed precision.
    """
    if name in PLAIN:
        quickly = shard == "whole" or precision == "autocast"
    else:
        usual = precision == ("autocast" if shard == "whole" else "fp32")
        quickly = name in QUICK and usual and recompute != "selective_op"
    return [] if quickly else [pytest.mark.slow]


AT_THE_LAST_SUM = ("bert", "tensor", "full", "autocast")
"""Its worst moment is at the end of what runs again: the sum that is normed then, beside all that it is made of."""
KEPT = [
    pytest.param(name, shard, index, recompute, precision, marks=quick(name, shard, precision, recompute))
    for name in NAMES
    for shard in shards_of(name)
    for index, modes in ((0, ("none",)), (1, ("none", "selective", "selective_op", "full")), (-1, ("none",)))
    for recompute in modes
    for precision in STATES
]
PEAKS = [
    pytest.param(
        *case,
        marks=[] if case == AT_THE_LAST_SUM else [pytest.mark.slow] if shard == "tensor" else quick_marks,
    )
    for name in NAMES
    for shard in ("whole", "tensor", "sequence", "a2a")
    if shard in shards_of(name)
    for recompute in ("none", "full", "selective_op")
    for precision in STATES
    for case in [(name, shard, recompute, precision)]
    for quick_marks in [quick(name, shard, precision, recompute)]
]


@pytest.mark.parametrize(("name", "shard", "index", "recompute", "precision"), KEPT)
def test_kept_bytes_are_those_of_the_layer(
    name: str, shard: str, index: int, recompute: Recompute, precision: str
) -> None:
    """To the byte, by torch's trace of allocations."""
    LayerRun(variant(name), index, recompute, precision, SHARDS[shard]).assert_kept()


@pytest.mark.parametrize(("name", "shard", "recompute", "precision"), PEAKS)
def test_peak_is_that_of_the_layer(name: str, shard: str, recompute: Recompute, precision: str) -> None:
    """Of a block."""
    if (name, shard, recompute) == ("neox", "a2a", "selective_op") and precision != "autocast":
        pytest.xfail("the peak is inside the exchange, which has one copy more than is known: 5.4 % in fp32")
    LayerRun(variant(name), 1, recompute, precision, SHARDS[shard]).assert_peak()


@pytest.mark.parametrize("spec", [*map(variant, NAMES), *(variant(n, tied_embeddings=True) for n in PLAIN)], ids=str)
def test_parameters_and_order_of_gradients_are_those_of_the_layers(spec: ModelSpec) -> None:
    assert_parameters_and_order_of_gradients(spec)


LARGE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816, "vocab_size": 8192,
              "seq_len": 512, "qkv_bias": True, "qk_norm": "head"},
    "mpt": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "gpt": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "neox": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "gemma2": {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128,
               "intermediate_size": 3072, "vocab_size": 8192, "seq_len": 512},
    "bert": {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192, "seq_len": 512},
    "vit": {"hidden_size": 768, "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_classes": 1000},
}  # fmt: skip


@pytest.mark.parametrize("family", LARGE)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    spec = ModelSpec(family=family, num_hidden_layers=2, **LARGE[family])
    wanted = 2 * sum(layer.flops(full_attention=True) for layer in spec.layers)
    assert counted_flops(spec) == pytest.approx(wanted, rel=0.005)
    if family == "vit":  # images have no gradient
        wanted = 2 * sum(layer.backward_flops() for layer in spec.layers)
        assert counted_flops(spec, backward=True) == pytest.approx(wanted, rel=0.005)


@pytest.mark.parametrize("shard", ["whole", "tensor", "all_gather", "a2a"])
@pytest.mark.parametrize("name", ["mpt", "window"])
def test_tables_of_scores_are_the_constants_of_the_layer(name: str, shard: str) -> None:
    """One for all blocks of a stage, with a row for every query and, with ALiBi, for every head."""
    spec, parallel = variant(name), ParallelDims.silent(SHARDS[shard])
    stage: Any = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, 0, parallel)
    inputs, _ = model_batch(spec, seed=0, step=0, first_sample=0, num_samples=1)
    stage(parallel.local_tokens(inputs))
    tables = {id(core): core._table for core in (stage.layers[index].attention._core._core for index in ("1", "2"))}
    wanted = [t.elements for t in spec.layers_of(SHARDS[shard])[1].constants if t.name == "attention mask"]
    assert [table.numel() for table in tables.values()] == wanted
