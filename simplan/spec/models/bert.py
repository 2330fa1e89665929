"""BERT's architecture, for masked language modelling (Devlin et al. 2019).

Full attention, sums that are normed after attention and MLP, types of tokens; without pooler, next-sentence head and
dropout. The loss is that of the masked tokens, but logits are computed for all of them, as Hugging Face does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.spec.layer import Gemm, LayerKind, LayerSpec, ParameterSpec, Pointwise, Saved
from simplan.spec.models.attention import AttentionForm, self_attention
from simplan.spec.models.ends import output_distribution, row_table, token_table
from simplan.spec.models.family import TOKENS, TRANSFORMER, Family, transformer_defaults, with_wide_mlp
from simplan.spec.models.keys import block_key, embedding_key, head_key
from simplan.spec.models.mlp import gelu_mlp
from simplan.spec.models.part import NormKind, Part, block_input, layer_of, norm, residual
from simplan.spec.share import Share, share_of

if TYPE_CHECKING:
    from simplan.spec.model import ModelSpec
    from simplan.spec.shard import Shard

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
            row_table("token_type", model.type_vocab_size, share, add="add types"),
            row_table("wpe", model.max_position_embeddings, share, add="add positions", keeps_sum=True),
            norm("norm", _NORM, share, keeps_output=False),
        ],
        output_shapes=share.hidden_shapes,
    )
    block = layer_of(
        block_key(model, share),
        LayerKind.BLOCK,
        [
            block_input(share, residual=False),
            self_attention("input", _ATTENTION, share),
            residual("residual1", share, keeps_sum=True),
            norm("norm1", _NORM, share),
            gelu_mlp("norm1 output", share, bias=True),
            residual("residual2", share, keeps_sum=True),
            norm("norm2", _NORM, share, keeps_output=False),
        ],
        output_shapes=share.hidden_shapes,
    )
    head = layer_of(
        head_key(model, share),
        LayerKind.HEAD,
        [
            block_input(share, residual=False),
            _transform(share),
            norm("norm", _NORM, share),
            output_distribution("norm output", share, bias=True),
        ],
        output_shapes=share.logits_shapes,
        tied=("lm_head.weight",) if model.tied_embeddings else (),
    )
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


def _transform(share: Share) -> Part:
    """A matrix and a GELU before the head's norm, which tensor-parallel ranks do not split."""
    n, h = share.own_tokens, share.hidden
    return Part(
        parameters=(
            ParameterSpec("transform.weight", (h, h), share.partial),
            ParameterSpec("transform.bias", (h,), share.partial),
        ),
        kernels=(Gemm("transform", n, h, h), Pointwise("gelu", n * h, n * h)),
        saved=(
            Saved("transform output", n * h, made_by="transform"),
            Saved("gelu output", n * h, made_by="gelu", residual=True),  # a norm's input, which autocast widens
        ),
        gradients=("transform.bias", "transform.weight"),
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
