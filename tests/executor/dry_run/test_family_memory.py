"""Predicted peak memory of whole models of all families against torch's own, tensor by tensor (fake ones)."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from tests.executor.conftest import MakeJob
from tests.executor.dry_run.accounting import peaks

TOTAL = 0.03
_SIZES = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12}
_TOKENS = {"vocab_size": 8192, "seq_len": 320}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", **_TOKENS},
    "mpt": {"family": "mpt", **_TOKENS},
    "neox": {"family": "neox", **_TOKENS},
    "gemma2": {"family": "gemma2", "num_key_value_heads": 4, "intermediate_size": 2048, "sliding_window": 128,
               **_TOKENS},
    "vit": {"family": "vit", "image_size": 224, "patch_size": 16, "num_classes": 1000},
    "llama": {"family": "llama", "num_key_value_heads": 4, "intermediate_size": 2048, "qk_norm": "head",
              "qkv_bias": True, "sliding_window": 128, **_TOKENS},
}  # fmt: skip

# plan, microbatches, pipeline rank
STRATEGIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "one-device": ({}, 1, 0),
    "ddp": ({"dp_replicate": 4}, 2, 0),
    "zero3": ({"dp_shard": 4}, 1, 0),
    "full": ({"recompute": "full", "microbatch_size": 8}, 1, 0),
    "1f1b-first": ({"pp": 2}, 4, 0),
    "1f1b-last": ({"pp": 2}, 4, 1),
    "tp": ({"tp": 2, "sequence_parallel": False}, 1, 0),
    "tp-full": ({"tp": 2, "sequence_parallel": False, "recompute": "full", "microbatch_size": 1}, 1, 0),
}
QUICK = {
    ("bert", "one-device", "bf16"),
    ("vit", "1f1b-last", "fp32"),
    ("mpt", "ddp", "fp32"),
    ("llama", "zero3", "fp32"),
    ("neox", "zero3", "fp32"),
    ("gemma2", "one-device", "bf16"),
}


def cases() -> list[Any]:
    """Every family and strategy in fp32 and in mixed precision."""
    found = [
        (name, strategy, precision) for name in MODELS for strategy in STRATEGIES for precision in ("fp32", "bf16")
    ]
    return [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in found]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the output of a product with a bias is a view
@pytest.mark.parametrize(("name", "strategy", "precision"), cases())
def test_peak_is_torchs(make_job: MakeJob, name: str, strategy: str, precision: Any) -> None:
    changes, num_microbatches, pp_rank = STRATEGIES[strategy]
    shards = ParallelPlan(**changes).shards_parameters
    untied = shards and MODELS[name]["family"] in ("bert", "mpt", "gemma2")  # as in test_memory_accounting
    model = ModelSpec(**{**_SIZES, **MODELS[name], **({"tied_embeddings": False} if untied else {})})
    predicted, torchs = peaks(make_job, model, changes, num_microbatches, pp_rank, precision)
    assert predicted == pytest.approx(torchs, rel=TOTAL)
