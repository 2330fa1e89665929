"""Llama's architecture with a mixture of experts in place of the MLP: Mixtral, Qwen-MoE, OLMoE, DeepSeek-MoE, gpt-oss.

The first ``num_dense_layers`` blocks have an MLP like Llama's blocks. Model FLOPs count the work of the experts that
tokens use. Cost estimates cover the work on all capacity slots (``simplan.model.parts.experts``). Load-balancing
losses, and routers that choose within groups of experts, are not modeled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from simplan.model.families.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults
from simplan.model.families.llama import ATTENTION, attention_of, decoder_layers
from simplan.model.families.mtp import MTP
from simplan.model.layer import LayerSpec
from simplan.model.parts.experts import expert_mlp, experts_key, shared_expert_mlp, sum_of_experts
from simplan.model.parts.mlp import gated_mlp
from simplan.model.parts.part import RMS_NORM, Block, LayerPart, block_key, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard
from typing import TYPE_CHECKING

from simplan.model.families.family import longest
from simplan.model.parts.mla import latent_attention, latent_key

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

EXPERTS = frozenset({
    "num_experts", "top_k", "moe_intermediate_size", "num_dense_layers", "shared_expert_intermediate_size",
    "shared_expert_gate", "router_bias", "expert_bias", "capacity_factor", "expert_imbalance", "drop_tokens",
})  # fmt: skip
"""Fields of every mixture of experts."""

AttentionOf = Callable[["ModelSpec", RankShare, int], tuple[LayerPart, list[str]]]
"""Function from a model, sizes and a window to the attention of a block, and its addition to the block's key."""


def sparse_layers(model: ModelSpec, shard: Shard, attention: AttentionOf) -> tuple[LayerSpec, ...]:
    """Layers of a decoder whose blocks after the first ``num_dense_layers`` have experts."""
    share = share_of(model, shard)
    forms = [(number >= model.num_dense_layers, window) for number, window in enumerate(model.windows)]
    blocks = {form: _block(model, share, *form, attention) for form in set(forms)}
    return decoder_layers(model, share, RMS_NORM, [blocks[form] for form in forms])


def _block(model: ModelSpec, share: RankShare, sparse: bool, window: int, attention: AttentionOf) -> Block:
    attended, more = attention(model, share, window)
    mlp, branch = [gated_mlp("norm2 output", share)], "down output"
    if sparse:
        split = [f"ep{share.shard.ep}"] * (share.shard.ep > 1) + [f"etp{share.shard.etp}"] * (share.shard.etp > 1)
        more = [*more, experts_key(model), *split]
        mlp, branch = [shared_expert_mlp(model, share), expert_mlp(model, share)], "combined output"
        if model.shared_expert_intermediate_size:
            mlp.append(sum_of_experts(model, share))
            branch = "sum of experts"
    return block_key(model, share, *more), [
        norm("norm1", "input", RMS_NORM, share),
        attended,
        residual("residual1", "input", "proj output", share),
        norm("norm2", "residual1", RMS_NORM, share),
        *mlp,
        residual("residual2", "residual1", branch, share),
    ]


def expert_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a mixture of experts: a separate head, and dense blocks, if any, as wide as an expert."""
    width = given.get("moe_intermediate_size")
    return {"tied_embeddings": False} | ({"intermediate_size": width} if isinstance(width, int) else {})


MOE = Family(
    layers=lambda model, shard: sparse_layers(model, shard, attention_of),
    fields=TRANSFORMER | TOKENS | PACKED | LORA | ATTENTION | EXPERTS | MTP | {"attention_sinks"},
    defaults=lambda given: transformer_defaults(given) | expert_defaults(given),
    gated_mlp=True,
    rotary="head_dim",
)
"""Jiang et al. 2024 (Mixtral), Yang et al. 2024 (Qwen2), Muennighoff et al. 2024 (OLMoE), Dai et al. 2024."""


def _attention(model: ModelSpec, share: RankShare, window: int) -> tuple[LayerPart, list[str]]:
    assert not window
    return latent_attention(model, share), [latent_key(model)]


DEEPSEEK = Family(
    layers=lambda model, shard: sparse_layers(model, shard, _attention),
    fields=(TRANSFORMER - {"num_key_value_heads", "head_dim"})
    | TOKENS
    | PACKED
    | LORA
    | EXPERTS
    | MTP
    | {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"},
    defaults=lambda given: longest(given) | expert_defaults(given),
    gated_mlp=True,
    rotary="qk_rope_head_dim",
    whole_attention="multi-head latent attention",
)
"""DeepSeek-AI 2024 (arXiv:2405.04434 and arXiv:2412.19437)."""
