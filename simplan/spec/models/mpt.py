"""MPT's architecture as released: GPT-2's blocks without any biases, and ALiBi in place of learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.spec.layer import LayerKind, LayerSpec
from simplan.spec.models.attention import AttentionForm, self_attention
from simplan.spec.models.ends import output_distribution, token_table
from simplan.spec.models.family import TOKENS, TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.spec.models.keys import block_key, embedding_key, head_key
from simplan.spec.models.mlp import gelu_mlp
from simplan.spec.models.part import NormKind, block_input, layer_of, norm, residual
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
        embedding_key(model, share), LayerKind.EMBEDDING, [token_table(share)], output_shapes=share.hidden_shapes
    )
    block = layer_of(
        block_key(model, share),
        LayerKind.BLOCK,
        [
            block_input(share),
            norm("norm1", _NORM, share),
            self_attention("norm1 output", _ATTENTION, share),
            residual("residual1", share, keeps_sum=True),
            norm("norm2", _NORM, share),
            gelu_mlp("norm2 output", share, bias=False),
            residual("residual2", share, keeps_sum=False),
        ],
        output_shapes=share.hidden_shapes,
    )
    head = layer_of(
        head_key(model, share),
        LayerKind.HEAD,
        [block_input(share), norm("norm", _NORM, share), output_distribution("norm output", share)],
        output_shapes=share.logits_shapes,
        tied=("lm_head.weight",) if model.tied_embeddings else (),
    )
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


MPT = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS,
    defaults=with_wide_mlp(transformer_defaults(tied_embeddings=True)),
    alibi=True,
)
"""MosaicML 2023, mosaicml/mpt-7b; the models of llm-foundry's benchmark are of the gpt family."""
