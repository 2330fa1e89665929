"""Llama's architecture with a mixture of experts in place of the MLP: Mixtral, Qwen-MoE, OLMoE, DeepSeek-MoE, gpt-oss.

The first ``num_dense_layers`` blocks have an MLP like Llama's blocks. Model FLOPs count the work of the experts that
tokens use. Cost estimates cover the work on all capacity slots (``simplan.model.parts.experts``). Load-balancing
losses, and routers that choose within groups of experts, are not modeled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from simplan.model.families.family import PACKED, TOKENS, TRANSFORMER, Defaults, Family, transformer_defaults
from simplan.model.families.llama import ATTENTION, attention_of
from simplan.model.families.mtp import MTP, depth_layers
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.parts.embedding_and_head import token_table
from simplan.model.parts.experts import expert_mlp, experts_form, shared_expert_mlp, sum_of_experts
from simplan.model.parts.keys import block_key, embedding_key
from simplan.model.parts.mlp import gated_mlp
from simplan.model.parts.part import LayerPart, NormKind, hidden_input, layer_of, norm, residual
from simplan.model.parts.prenorm import vocabulary_head
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["EXPERTS", "MOE", "AttentionOf", "sparse_layers", "with_experts"]

EXPERTS = frozenset({
    "num_experts", "top_k", "moe_intermediate_size", "num_dense_layers", "shared_expert_intermediate_size",
    "shared_expert_gate", "router_bias", "expert_bias", "capacity_factor", "expert_imbalance", "drop_tokens",
})  # fmt: skip
"""Fields of every mixture of experts."""

AttentionOf = Callable[["ModelSpec", RankShare, int], tuple[LayerPart, list[str]]]
"""Function from a model, sizes and a window to the attention of a block, and its addition to the block's key."""

_NORM = NormKind(statistics=1, bias=False)


def sparse_layers(model: ModelSpec, shard: Shard, attention: AttentionOf) -> tuple[LayerSpec, ...]:
    """Embedding, dense blocks, blocks with experts, layers for multi-token prediction if any, and head.

    Args:
        model: The model.
        shard: Split of the layers.
        attention: Builder of the blocks' attention.
    """
    share = share_of(model, shard)
    embedding = layer_of(
        embedding_key(model, share),
        LayerKind.EMBEDDING,
        [token_table(share)],
        inputs=(),
        output_shapes=share.hidden_shapes,
    )
    forms = [(number >= model.num_dense_layers, window) for number, window in enumerate(model.windows)]
    parts = {form: _block(model, share, *form, attention) for form in set(forms)}
    blocks = {
        form: layer_of(key, LayerKind.BLOCK, of_block, inputs=(hidden_input(share),), output_shapes=share.hidden_shapes)
        for form, (key, of_block) in parts.items()
    }
    later = depth_layers(model, share, _NORM, *parts[forms[-1]])
    return (embedding, *(blocks[form] for form in forms), *later, vocabulary_head(model, share, _NORM))


def _block(
    model: ModelSpec, share: RankShare, sparse: bool, window: int, attention: AttentionOf
) -> tuple[str, list[LayerPart]]:
    """Key and parts of a block."""
    attended, more = attention(model, share, window)
    form = experts_form(model)
    if sparse:
        split = [f"ep{share.shard.ep}"] * (share.shard.ep > 1) + [f"etp{share.shard.etp}"] * (share.shard.etp > 1)
        key = block_key(model, share, *more, form.key, *split)
        mlp, branch = [shared_expert_mlp(form, share), expert_mlp(form, share)], "combined output"
        if form.shared_width:
            mlp.append(sum_of_experts(form, share))
            branch = "sum of experts"
    else:
        key = block_key(model, share, *more)
        mlp, branch = [gated_mlp("norm2 output", share)], "down output"
    return key, [
        norm("norm1", "input", _NORM, share),
        attended,
        residual("residual1", "input", "proj output", share),
        norm("norm2", "residual1", _NORM, share),
        *mlp,
        residual("residual2", "residual1", branch, share),
    ]


def with_experts(defaults: Defaults) -> Defaults:
    """Defaults extended by the width of dense blocks, if any: that of an expert."""

    def found(given: Mapping[str, Any]) -> dict[str, Any]:
        width = given.get("moe_intermediate_size")
        return defaults(given) | ({"intermediate_size": width} if isinstance(width, int) else {})

    return found


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    return sparse_layers(model, shard, attention_of)


MOE = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | PACKED | ATTENTION | EXPERTS | MTP | {"attention_sinks"},
    defaults=with_experts(transformer_defaults(tied_embeddings=False)),
    gated_mlp=True,
    rotary="head_dim",
)
"""Jiang et al. 2024 (Mixtral), Yang et al. 2024 (Qwen2), Muennighoff et al. 2024 (OLMoE), Dai et al. 2024."""
