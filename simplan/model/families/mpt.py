"""MPT's architecture as released: GPT-2's blocks without any biases, and ALiBi in place of learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.model.families.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.parts.attention import AttentionForm
from simplan.model.parts.embedding_and_head import token_table
from simplan.model.parts.keys import embedding_key
from simplan.model.parts.part import NormKind, layer_of
from simplan.model.parts.prenorm import gelu_block, vocabulary_head
from simplan.model.share import share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["MPT"]

_NORM = NormKind(statistics=2, bias=False)
_ATTENTION = AttentionForm(fused=True, alibi=True)


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    embedding = layer_of(
        embedding_key(model, share),
        LayerKind.EMBEDDING,
        [token_table(share)],
        inputs=(),
        output_shapes=share.hidden_shapes,
    )
    block = gelu_block(model, share, _NORM, _ATTENTION, bias=False)
    head = vocabulary_head(model, share, _NORM)
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


MPT = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | PACKED,
    defaults=with_wide_mlp(transformer_defaults(tied_embeddings=True)),
    alibi=True,
)
"""MosaicML 2023, mosaicml/mpt-7b; the models of llm-foundry's benchmark are of the gpt family."""
