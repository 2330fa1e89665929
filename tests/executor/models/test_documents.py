"""Sequences that several documents share: against each document alone, torch's own counts, and one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor.models.model import build_stage
from executor.train.data import IGNORED, model_batch
from simplan.model.layer import Attention
from simplan.model.model import ModelSpec
from simplan.plan.plan import Recompute
from tests.executor.conftest import make_job
from tests.executor.models.layer_runs import assert_kept_and_peak, counted_flops
from tests.executor.train.test_equality import assert_equal_to_one_process, run_in_float64
from tests.support.slow import slow_except

CPU = torch.device("cpu")
RELATIVE = 1e-9
LENGTHS = (29, 3, 1, 20)  # of 64 tokens
_SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 500}
_LATENT: dict[str, Any] = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                           "v_head_dim": 16}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 48, "capacity_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "intermediate_size": 256},
    "llama": {"family": "llama", "num_key_value_heads": 4, "intermediate_size": 256},
    "window": {"family": "llama", "num_key_value_heads": 4, "intermediate_size": 256, "sliding_window": 8},
    "mpt": {"family": "mpt", "intermediate_size": 256},
    "moe": {"family": "moe", **_EXPERTS},
    "deepseek": {"family": "deepseek", **_EXPERTS, **_LATENT},
}


def packed(name: str, **fields: Any) -> ModelSpec:
    """A small model whose sequences of 64 tokens hold four documents and eleven tokens of padding."""
    sizes: dict[str, Any] = {"seq_len": 64, "document_lengths": LENGTHS, "max_position_embeddings": 64}
    return ModelSpec(**{**_SIZES, **sizes, **FAMILIES[name], **fields})


def loss_sums(spec: ModelSpec, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of all tokens (batch, tokens), 0 without a target, and gradients of their sum."""
    stage = build_stage(spec, range(len(spec.layers)), torch.float64, CPU, seed=3)
    logits = stage(tokens)
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    losses.sum().backward()  # type: ignore[no-untyped-call]
    return losses.detach(), {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pack_equals_each_document_alone(name: str) -> None:
    """Losses of every token, and gradients, of documents that each were a sequence of their own length."""
    spec = packed(name)
    tokens, targets = model_batch(spec, seed=1, step=0, first_sample=0, num_samples=2)
    losses, gradients = loss_sums(spec, tokens, targets)
    assert (targets[:, sum(LENGTHS) :] == IGNORED).all()
    summed: dict[str, Tensor] = {}
    start = 0
    for length in LENGTHS:
        alone = packed(name, seq_len=length, document_lengths=())
        document = tokens[:, start : start + length]
        followers = torch.cat((document[:, 1:], torch.full((2, 1), IGNORED)), 1)
        wanted, part = loss_sums(alone, document, followers)
        torch.testing.assert_close(losses[:, start : start + length], wanted, rtol=RELATIVE, atol=0)
        summed = {key: summed.get(key, torch.zeros_like(value)) + value for key, value in part.items()}
        start += length
    for key, wanted in summed.items():
        assert float((gradients[key] - wanted).abs().max()) < RELATIVE * float(wanted.abs().max()), key


@pytest.mark.parametrize("name", ["mpt", "window"])
def test_the_table_of_scores_is_that_of_the_longest_document(name: str) -> None:
    spec = packed(name)
    stage: Any = build_stage(spec, range(len(spec.layers)), torch.float32, CPU, 0)
    stage(model_batch(spec, seed=0, step=0, first_sample=0, num_samples=1)[0])
    tables = {id(core): core._table for core in (stage.layers[i].attention._core._core._core for i in ("1", "2"))}
    wanted = [t.elements for t in spec.layers[1].constants if t.name == "attention mask"]
    assert [table.numel() for table in tables.values()] == wanted


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if precision == "autocast" else [pytest.mark.slow])
        for name in FAMILIES
        for precision in ("fp32", "autocast", "cast")
        if precision != "cast" or name not in ("gpt", "mpt")  # LayerNorm's statistics are fp32 on CUDA only
    ],
)
def test_kept_bytes_and_peak_of_a_block(name: str, recompute: Recompute, precision: str) -> None:
    assert_kept_and_peak(packed(name), 1, recompute, precision)


LARGE: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "num_key_value_heads": 4, "intermediate_size": 2048},
    "mpt": {"family": "mpt"},
}
_LARGE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192,
                          "seq_len": 320, "document_lengths": (150, 100, 8, 2)}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """torch counts the whole squares of all calls, the padding's too, and products of all tokens."""
    spec = ModelSpec(**_LARGE, **LARGE[name])  # 60 of 320 tokens are padding
    padding = spec.num_hidden_layers * 4 * 60**2 * 768
    wanted = 2 * (sum(layer.flops(full_attention=True) for layer in spec.layers) + padding)
    assert counted_flops(spec) == pytest.approx(wanted, rel=1e-6)
    cores = [kernel for layer in spec.layers for kernel in layer.kernels if isinstance(kernel, Attention)]
    counted = sum(core.full_flops for core in cores)
    assert counted + padding == spec.num_hidden_layers * 4 * (150**2 + 100**2 + 8**2 + 2**2 + 60**2) * 768


RANKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("gpt", "none", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "fsdp": ("llama", "none", {"dp_shard": 2}),
    "1f1b": ("gpt", "1f1b", {"pp": 2}),
    "zb-h1": ("llama", "zb-h1", {"pp": 2}),
    "tp": ("llama", "none", {"tp": 2, "sequence_parallel": False}),
    "tp-sequence": ("gpt", "none", {"tp": 2}),
    "alibi": ("mpt", "none", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "experts": ("moe", "none", {"dp_replicate": 2, "bucket_bytes": 40_000}),
    "latent": ("deepseek", "1f1b", {"pp": 2}),
    "recompute": ("window", "none", {"dp_shard": 2, "recompute": "selective"}),
}
"""Family, schedule and plan."""


@pytest.mark.parametrize("name", slow_except(["1f1b"], RANKS))
def test_two_ranks_equal_one_process(name: str, tmp_path: Path) -> None:
    """Losses and gradients of every step in float64."""
    family, schedule, plan = RANKS[name]
    job = make_job(schedule, model=packed(family), plan=plan, dtype="fp64", num_steps=1)
    assert_equal_to_one_process(run_in_float64(job, tmp_path))
