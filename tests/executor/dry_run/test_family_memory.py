"""Predicted peak memory of whole models against torch's own, tensor by tensor (fake ones).

Models of all families, packed documents, and models with adapters.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from tests.executor.dry_run.accounting import peaks
from tests.support.slow import slow_except

TOTAL = 0.03
_SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12}
_TOKENS: dict[str, Any] = {"vocab_size": 8192, "seq_len": 320}
_LLAMA: dict[str, Any] = {"family": "llama", "num_key_value_heads": 4, "intermediate_size": 2048, **_TOKENS}
PLAIN: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert", **_TOKENS},
    "mpt": {"family": "mpt", **_TOKENS},
    "neox": {"family": "neox", **_TOKENS},
    "gemma2": {"family": "gemma2", "num_key_value_heads": 4, "intermediate_size": 2048, "sliding_window": 128,
               **_TOKENS},
    "vit": {"family": "vit", "image_size": 224, "patch_size": 16, "num_classes": 1000},
    "llama": {**_LLAMA, "qk_norm": "head", "qkv_bias": True, "sliding_window": 128},
}  # fmt: skip
MODELS = {
    **PLAIN,
    **{
        f"{name}{suffix}": {**fields, **documents}
        for name, fields in (("gpt", {"family": "gpt", **_TOKENS}), ("llama", _LLAMA), ("mpt", PLAIN["mpt"]))
        for suffix, documents in (("-plain", {}), ("-packed", {"document_lengths": (150, 100, 8, 2)}))
    },
}
USUAL = {"llama-plain": ("q", "v"), "gpt-plain": ("qkv",), "mpt-plain": ("qkv",)}
"""Targets of adapters in addition to all matrices."""

# plan, microbatches, pipeline rank
STRATEGIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "one-device": ({}, 1, 0),
    "ddp": ({"dp_replicate": 4}, 2, 0),
    "zero1": ({"dp_shard": 4, "zero_stage": 1}, 2, 0),
    "zero2": ({"dp_shard": 4, "zero_stage": 2}, 2, 0),
    "zero3": ({"dp_shard": 4}, 1, 0),
    "zero3-accumulation": ({"dp_shard": 4}, 2, 0),
    "hsdp": ({"dp_shard": 2, "dp_replicate": 2}, 1, 0),
    "full": ({"recompute": "full", "microbatch_size": 8}, 1, 0),
    "selective": ({"recompute": "selective", "microbatch_size": 4}, 1, 0),
    "1f1b-first": ({"pp": 2}, 4, 0),
    "1f1b-last": ({"pp": 2}, 4, 1),
    "1f1b-zero3": ({"pp": 2, "dp_shard": 2}, 4, 0),
    "interleaved": ({"pp": 2, "virtual_stages": 2}, 4, 0),
    "zb-h1-first": ({"pp": 2, "schedule": "zb-h1"}, 4, 0),
    "zb-h1-last": ({"pp": 2, "schedule": "zb-h1"}, 4, 1),
    "tp": ({"tp": 2, "sequence_parallel": False}, 1, 0),
    "tp-sequence": ({"tp": 2}, 2, 0),
    "tp-full": ({"tp": 2, "sequence_parallel": False, "recompute": "full", "microbatch_size": 1}, 1, 0),
    "cp": ({"cp": 2, "cp_comm": "all_gather", "microbatch_size": 4}, 1, 0),
    "cp-zero3": ({"cp": 2, "cp_comm": "all_gather", "dp_shard": 2}, 2, 0),
}
OF_PLAIN = ("one-device", "ddp", "zero3", "full", "1f1b-first", "1f1b-last", "tp", "tp-full")
OF_PACKED = ("one-device", "ddp", "zero3", "full", "selective", "1f1b-first", "1f1b-last", "zb-h1-first", "zb-h1-last",
             "tp", "tp-sequence")  # fmt: skip
OF_ADAPTERS = tuple(STRATEGIES.keys() - {"zb-h1-first", "zb-h1-last", "tp-full", "zero3"})
OF_PACKED_ADAPTERS = ("one-device", "1f1b-first", "zero3", "tp-sequence", "full", "selective")
QUICK = {
    ("vit", "1f1b-last", (), "fp32"),
    ("neox", "zero3", (), "fp32"),
    ("gemma2", "one-device", (), "bf16"),
    ("gpt-plain", "zero3-accumulation", ("qkv",), "fp32"),
    ("llama-packed", "tp-sequence", ("q", "v"), "fp32"),
}


def cases() -> list[Any]:
    """Every family and strategy in fp32 and in mixed precision; packed documents in one of them by turns.

    Models with adapters have one of three choices of targets by turns. ``test_lora`` has all choices for each layer.
    """
    strategies: set[Any] = {
        (name, strategy, (), precision) for name in PLAIN for strategy in OF_PLAIN for precision in ("fp32", "bf16")
    }
    packed = [name for name in MODELS if name.endswith("-packed")]
    for place, (name, strategy) in enumerate(product(packed, OF_PACKED)):
        strategies.add((name, strategy, (), ("bf16", "fp32")[place % 2]))
    adapted = [*product(USUAL, sorted(OF_ADAPTERS)), *product(packed, OF_PACKED_ADAPTERS)]
    for place, (name, strategy) in enumerate(adapted):
        targets = (("all",), USUAL[name.replace("packed", "plain")], ("down",))[place % 3]
        strategies |= {(name, strategy, targets, precision) for precision in ("fp32", "bf16")}
    return slow_except(QUICK, sorted(strategies | QUICK))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the output of a matmul with a bias is a view
@pytest.mark.parametrize(("name", "strategy", "targets", "precision"), cases())
def test_peak_is_torchs(name: str, strategy: str, targets: tuple[str, ...], precision: Any) -> None:
    fields, plan = {**_SIZES, **MODELS[name]}, ParallelPlan(**STRATEGIES[strategy][0])
    if plan.shards_parameters and fields["family"] in ("gpt", "bert", "mpt", "gemma2"):  # as in test_memory_accounting
        fields["tied_embeddings"] = False
    if targets:
        fields |= {"lora_rank": 8, "lora_targets": targets}
    task: dict[str, Any] = {"task": "lora"} if targets else {}
    predicted, torchs = peaks(ModelSpec(**fields), *STRATEGIES[strategy], precision, **task)
    assert predicted == pytest.approx(torchs, rel=TOTAL)
