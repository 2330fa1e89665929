"""DeepSeek-V2 and V3: multi-head latent attention and a mixture of experts.

V3's corrections of the scores that choose experts, which get no gradient, are not modeled. V3's layer that predicts a
second token is present if ``mtp_num_layers`` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from simplan.model.families.family import PACKED, TOKENS, TRANSFORMER, Family, longest
from simplan.model.families.moe import EXPERTS, sparse_layers, with_experts
from simplan.model.families.mtp import MTP
from simplan.model.layer import LayerSpec
from simplan.model.parts.mla import latent_attention, latent_form
from simplan.model.parts.part import LayerPart
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["DEEPSEEK"]


def _attention(model: ModelSpec, share: RankShare, window: int) -> tuple[LayerPart, list[str]]:
    assert not window
    form = latent_form(model)
    return latent_attention(form, share), [form.key]


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    return sparse_layers(model, shard, _attention)


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"tied_embeddings": False} | longest(given)


DEEPSEEK = Family(
    layers=_layers,
    fields=(TRANSFORMER - {"num_key_value_heads", "head_dim"})
    | TOKENS
    | PACKED
    | EXPERTS
    | MTP
    | {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"},
    defaults=with_experts(_defaults),
    gated_mlp=True,
    rotary="qk_rope_head_dim",
    whole_attention="multi-head latent attention",
)
"""DeepSeek-AI 2024 (arXiv:2405.04434 and arXiv:2412.19437)."""
