"""Predicted peak memory of whole models with adapters against torch's own, tensor by tensor (fake ones)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from tests.executor.conftest import MakeJob
from tests.executor.dry_run.accounting import peaks

TOTAL = 0.03
_SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192,
                          "seq_len": 320, "lora_rank": 8}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama", "num_key_value_heads": 4, "intermediate_size": 2048},
    "mpt": {"family": "mpt"},
}
USUAL = {"llama": ("q", "v"), "gpt": ("qkv",), "mpt": ("qkv",)}  # beside all of them

# plan, microbatches, pipeline rank
STRATEGIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "one-device": ({}, 1, 0),
    "ddp": ({"dp_replicate": 4}, 2, 0),
    "zero1": ({"dp_shard": 4, "zero_stage": 1}, 2, 0),
    "zero2": ({"dp_shard": 4, "zero_stage": 2}, 2, 0),
    "zero3": ({"dp_shard": 4}, 2, 0),
    "hsdp": ({"dp_shard": 2, "dp_replicate": 2}, 1, 0),
    "full": ({"recompute": "full", "microbatch_size": 8}, 1, 0),
    "selective": ({"recompute": "selective", "microbatch_size": 4}, 1, 0),
    "1f1b-first": ({"pp": 2}, 4, 0),
    "1f1b-last": ({"pp": 2}, 4, 1),
    "1f1b-zero3": ({"pp": 2, "dp_shard": 2}, 4, 0),
    "interleaved": ({"pp": 2, "virtual_stages": 2}, 4, 0),
    "tp": ({"tp": 2, "sequence_parallel": False}, 1, 0),
    "tp-sequence": ({"tp": 2}, 2, 0),
    "cp": ({"cp": 2, "cp_comm": "all_gather", "microbatch_size": 4}, 1, 0),
    "packed": ({"microbatch_size": 4}, 1, 0),
    "packed-1f1b-first": ({"pp": 2}, 4, 0),
    "packed-zero3": ({"dp_shard": 4}, 1, 0),
    "packed-tp": ({"tp": 2}, 1, 0),
    "packed-full": ({"recompute": "full", "microbatch_size": 4}, 1, 0),
    "packed-selective": ({"recompute": "selective", "microbatch_size": 4}, 1, 0),
    "cp-zero3": ({"cp": 2, "cp_comm": "all_gather", "dp_shard": 2}, 2, 0),
}
QUICK = {
    ("llama", "1f1b-last", ("all",), "bf16"),
    ("gpt", "zero3", ("qkv",), "fp32"),
    ("llama", "packed-tp", ("q", "v"), "fp32"),
}


def cases() -> list[Any]:
    """Every model with every strategy in both precisions; in turn with one of three choices of targets.

    Each choice meets each model, strategy and precision. What adapters add to a layer, ``test_lora`` holds for all.
    """
    found = set(QUICK)
    for place, (name, strategy) in enumerate(product(MODELS, STRATEGIES)):
        targets = (("all",), USUAL[name], ("down",))[place % 3]
        found |= {(name, strategy, targets, precision) for precision in ("fp32", "bf16")}
    return [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in sorted(found)]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the output of a product with a bias is a view
@pytest.mark.parametrize(("name", "strategy", "targets", "precision"), cases())
def test_peak_is_torchs(make_job: MakeJob, name: str, strategy: str, targets: tuple[str, ...], precision: Any) -> None:
    changes = STRATEGIES[strategy]
    documents = {"document_lengths": (150, 100, 8, 2)} if strategy.startswith("packed") else {}
    untied = ParallelPlan(**changes[0]).shards_parameters and name != "llama"  # as in test_memory_accounting
    ends = {"tied_embeddings": False} if untied else {}
    model = ModelSpec(**{**_SIZES, **MODELS[name], **documents, "lora_targets": targets, **ends})
    predicted, torchs = peaks(make_job, model, *changes, precision, task="lora")
    assert predicted == pytest.approx(torchs, rel=TOTAL)
