"""MPT's architecture as released: GPT-2's blocks without any biases, and ALiBi in place of learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.spec.layer import LayerKind, LayerSpec
from simplan.spec.models.attention import AttentionForm
from simplan.spec.models.ends import token_table
from simplan.spec.models.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.spec.models.keys import embedding_key
from simplan.spec.models.part import NormKind, layer_of
from simplan.spec.models.prenorm import gelu_block, vocabulary_head
from simplan.spec.share import share_of

if TYPE_CHECKING:
    from simplan.spec.model import ModelSpec
    from simplan.spec.shard import Shard

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
