"""BERT's architecture, for masked language modeling (Devlin et al. 2019).

Full attention, norms after the sums with attention and MLP (post-norm), and token types; without pooler, next-sentence
head and dropout. The loss covers the masked tokens, but logits are computed for all tokens, as in Hugging Face
transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.model.families.family import TOKENS, TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.model.layer import LayerKind, LayerSpec, Tensor
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import output_distribution, row_table, token_table
from simplan.model.parts.keys import block_key, embedding_key, head_key
from simplan.model.parts.mlp import activated, gelu_mlp
from simplan.model.parts.part import LayerPart, NormKind, cast, hidden_input, joined, layer_of, linear, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["BERT"]

_NORM = NormKind(statistics=2, bias=True)
_ATTENTION = AttentionForm(fused=False, bias="all", causal=False)


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    embedding = layer_of(
        embedding_key(model, share, f"p{model.max_position_embeddings}", f"t{model.type_vocab_size}"),
        LayerKind.EMBEDDING,
        [
            token_table(share),
            row_table("token_type", "wte output", model.type_vocab_size, share, add="add types"),
            row_table("wpe", "add types", model.max_position_embeddings, share, add="add positions"),
            norm("norm", "add positions", _NORM, share, for_matmuls=False),
        ],
        inputs=(),
        output_shapes=share.hidden_shapes,
    )
    block = layer_of(
        block_key(model, share),
        LayerKind.BLOCK,
        [
            _for_matmuls("input", share),
            self_attention("input for matmuls", _ATTENTION, share),
            residual("residual1", "input", "proj output", share),
            norm("norm1", "residual1", _NORM, share, for_matmuls=False),
            _for_matmuls("norm1 output", share),
            gelu_mlp("norm1 output for matmuls", share, bias=True),
            residual("residual2", "norm1 output", "down output", share),
            norm("norm2", "residual2", _NORM, share, for_matmuls=False),
        ],
        inputs=(hidden_input(share),),
        output_shapes=share.hidden_shapes,
    )
    head = layer_of(
        head_key(model, share),
        LayerKind.HEAD,
        [
            _for_matmuls("input", share),
            _transform(share),
            norm("norm", "transformed", _NORM, share),
            output_distribution("norm output", share, bias=True),
        ],
        inputs=(hidden_input(share),),
        output_shapes=share.logits_shapes,
        tied=("lm_head.weight",) if model.tied_embeddings else (),
    )
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


def _for_matmuls(source: str, share: RankShare) -> LayerPart:
    """A tensor of the residual stream in the precision of matmuls."""
    return LayerPart(operators=(cast(source, Tensor(f"{source} for matmuls", share.own_tokens * share.hidden)),))


def _transform(share: RankShare) -> LayerPart:
    """A matrix and a GELU before the head's norm, which tensor-parallel ranks do not split."""
    n, h = share.own_tokens, share.hidden
    wide = Tensor("transformed", n * h, residual=True)  # a norm's input, which autocast upcasts
    return joined(
        linear("transform", "input for matmuls", (n, h, h), bias=True, partial=(share.partial, share.partial)),
        activated("gelu", "transform output", n * h),
        LayerPart(operators=(cast("gelu output", wide),)),
    )


BERT = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | {"type_vocab_size"},
    defaults=with_wide_mlp(transformer_defaults(tied_embeddings=True, type_vocab_size=2)),
    task="masked_token",
    causal=False,
    position_rows=True,
)
"""Devlin et al. 2019; ``BertForMaskedLM`` of Hugging Face's transformers."""
