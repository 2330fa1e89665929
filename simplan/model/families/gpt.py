"""GPT-2's architecture: LayerNorm, attention with one fused projection, LayerNorm, GELU MLP; biases throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.model.families.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.parts.attention import AttentionForm
from simplan.model.parts.embedding_and_head import row_table, token_table
from simplan.model.parts.keys import embedding_key
from simplan.model.parts.part import NormKind, layer_of
from simplan.model.parts.prenorm import gelu_block, vocabulary_head
from simplan.model.share import share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["GPT"]

_NORM = NormKind(statistics=2, bias=True)
_ATTENTION = AttentionForm(fused=True, bias="all")


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    embedding = layer_of(
        embedding_key(model, share, f"p{model.max_position_embeddings}"),
        LayerKind.EMBEDDING,
        [token_table(share), row_table("wpe", "wte output", model.max_position_embeddings, share)],
        inputs=(),
        output_shapes=share.hidden_shapes,
    )
    block = gelu_block(model, share, _NORM, _ATTENTION, bias=True)
    head = vocabulary_head(model, share, _NORM)
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


GPT = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | PACKED,
    defaults=with_wide_mlp(transformer_defaults(tied_embeddings=True)),
    position_rows=True,
)
"""Radford et al. 2019; llm-foundry's MPT benchmark models are of this family too."""
