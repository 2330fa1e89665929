"""DeepSeek-V2 and V3: multi-head latent attention and a mixture of experts.

V3's corrections of the scores that choose experts, which get no gradient, are not modeled. V3's layer that predicts a
second token is present if ``mtp_num_layers`` is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.model.families.family import PACKED, TOKENS, TRANSFORMER, Family, longest
from simplan.model.families.moe import EXPERTS, expert_defaults, sparse_layers
from simplan.model.families.mtp import MTP
from simplan.model.parts.mla import latent_attention, latent_key
from simplan.model.parts.part import LayerPart
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

__all__ = ["DEEPSEEK"]


def _attention(model: ModelSpec, share: RankShare, window: int) -> tuple[LayerPart, list[str]]:
    assert not window
    return latent_attention(model, share), [latent_key(model)]


DEEPSEEK = Family(
    layers=lambda model, shard: sparse_layers(model, shard, _attention),
    fields=(TRANSFORMER - {"num_key_value_heads", "head_dim"})
    | TOKENS
    | PACKED
    | EXPERTS
    | MTP
    | {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"},
    defaults=lambda given: longest(given) | expert_defaults(given),
    gated_mlp=True,
    rotary="qk_rope_head_dim",
    whole_attention="multi-head latent attention",
)
"""DeepSeek-AI 2024 (arXiv:2405.04434 and arXiv:2412.19437)."""
