"""Megatron Bridge's keys and values beside simplan's, for reading and for writing.

Options without an effect: ``tables/bridge.yaml``.
Sources: see ``simplan.interop.frameworks.bridge.reading``; layouts of pipelines: NVIDIA/Megatron-LM, core_v0.16.0,
megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simplan.interop.configuration import SettingMapping
from simplan.interop.frameworks.megatron_core import Words

WORDS = Words("model.", "model.", "ddp.", "optimizer.", "train.", "model.")

MODEL_MATCHES = (
    SettingMapping("model.num_layers", "model.num_hidden_layers"),
    SettingMapping("model.hidden_size", "model.hidden_size"),
    SettingMapping("model.ffn_hidden_size", "model.intermediate_size"),
    SettingMapping("model.num_attention_heads", "model.num_attention_heads"),
    SettingMapping("model.num_query_groups", "model.num_key_value_heads"),
    SettingMapping("model.kv_channels", "model.head_dim"),
    SettingMapping("model.vocab_size", "model.vocab_size"),
    SettingMapping("model.mtp_num_layers", "model.mtp_num_layers"),
)
EXPERT_MATCHES = (
    SettingMapping("model.num_moe_experts", "model.num_experts"),
    SettingMapping("model.moe_router_topk", "model.top_k"),
    SettingMapping("model.moe_ffn_hidden_size", "model.moe_intermediate_size"),
    SettingMapping("model.moe_shared_expert_intermediate_size", "model.shared_expert_intermediate_size"),
    SettingMapping("model.moe_shared_expert_gate", "model.shared_expert_gate"),
)
LATENT_MATCHES = (
    SettingMapping("model.q_lora_rank", "model.q_lora_rank"),
    SettingMapping("model.kv_lora_rank", "model.kv_lora_rank"),
    SettingMapping("model.qk_head_dim", "model.qk_nope_head_dim"),
    SettingMapping("model.qk_pos_emb_head_dim", "model.qk_rope_head_dim"),
    SettingMapping("model.v_head_dim", "model.v_head_dim"),
)
PRECISIONS: Mapping[str, tuple[str, str | None]] = {
    "tensorwise": ("fp8", "tensorwise"),
    "delayed": ("fp8", "delayed"),
    "blockwise": ("fp8", "blockwise"),
    "mxfp8": ("mxfp8", None),
}
"""``fp8_recipe`` -> ``training.precision`` and ``training.fp8_recipe``."""
RECIPES: Mapping[str, tuple[str, str | None]] = {
    "bf16_mixed": ("bf16", None),
    "fp16_mixed": ("fp16", None),
    "bf16_with_fp8_delayed_scaling_mixed": ("fp8", "delayed"),
    "bf16_with_fp8_current_scaling_mixed": ("fp8", "tensorwise"),
    "bf16_with_fp8_subchannel_scaling_mixed": ("fp8", "blockwise"),
    "bf16_with_mxfp8_mixed": ("mxfp8", None),
    "bf16_with_nvfp4_mixed": ("nvfp4", None),
}
"""Name of a mixed precision -> ``training.precision`` and ``training.fp8_recipe``."""
DISPATCHERS: Mapping[tuple[Any, Any], str] = {("flex", "deepep"): "deepep", ("flex", "hybridep"): "hybridep"}
"""Token dispatcher and its backend -> ``software.expert_dispatch``."""

_MAX_LAYOUT = 10_000
_REPEATED = re.compile(r"\(([Etm L|]*)\)\*?(\d{1,4})|([EtmL|])\*(\d{1,4})")


def blocks_of_layout(layout: Any) -> tuple[int, ...] | None:
    """Blocks of each stage of a layout: ``Et*3|(t*4|)*6t*4L``; None for other layouts.

    >>> blocks_of_layout("Et|(tt|)*3mL")
    (1, 2, 2, 2, 0)
    """
    if not isinstance(layout, str):
        return None
    text = layout.replace(" ", "").replace(",", "")
    for _ in range(20):
        longer = _REPEATED.sub(lambda match: (match[1] or match[3] or "") * int(match[2] or match[4]), text, count=100)
        if longer == text or len(longer) > _MAX_LAYOUT:
            break
        text = longer
    stages = text.split("|")
    known = not set(text) - set("EtmL|") and "E" in stages[0] and "L" in stages[-1]
    return tuple(stage.count("t") for stage in stages) if known and len(text) <= _MAX_LAYOUT else None


def layout_of_blocks(blocks: tuple[int, ...], mtp: int) -> str:
    """Layout with given blocks of each stage, and further layers for later tokens on the last.

    >>> layout_of_blocks((1, 2, 0), 1)
    'Et|tt|mL'
    """
    stages = ["t" * number for number in blocks]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp + "L"
    return "|".join(stages)
