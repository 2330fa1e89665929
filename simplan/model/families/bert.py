"""BERT's architecture, for masked language modeling (Devlin et al. 2019).

Full attention, norms after the sums with attention and MLP (post-norm), and token types; without pooler, next-sentence
head and dropout. The loss covers the masked tokens. Logits are computed for all tokens, as in Hugging Face
transformers, or for gathered masked tokens alone (``max_predictions_per_seq``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from simplan.model.families.family import TOKENS, TRANSFORMER, Family, transformer_defaults
from simplan.model.layer import LayerSpec, Operator, Pointwise, Tensor
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import embedding_layer, head_layer, output_distribution, row_table
from simplan.model.parts.mlp import activated, gelu_mlp
from simplan.model.parts.part import LAYER_NORM, LayerPart, block_key, block_layer, cast, joined, linear, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

_ATTENTION = AttentionForm(fused=False, bias="all", causal=False)


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    rows, types = model.max_position_embeddings, model.type_vocab_size
    positions = [
        row_table("token_type", "wte output", types, share, add="add types"),
        row_table("wpe", "add types", rows, share, add="add positions"),
        norm("norm", "add positions", LAYER_NORM, share, for_matmuls=False),
    ]
    parts: list[LayerPart | Operator] = [
        _for_matmuls("input", share),
        self_attention("input for matmuls", _ATTENTION, share),
        residual("residual1", "input", "proj output", share),
        norm("norm1", "residual1", LAYER_NORM, share, for_matmuls=False),
        _for_matmuls("norm1 output", share),
        gelu_mlp("norm1 output for matmuls", share, bias=True),
        residual("residual2", "norm1 output", "down output", share),
        norm("norm2", "residual2", LAYER_NORM, share, for_matmuls=False),
    ]
    gathered, masked = _masked_tokens(model, share)
    ends: list[LayerPart | Operator] = [
        *gathered,
        _for_matmuls("masked tokens" if gathered else "input", masked),
        _transform(masked, "masked tokens" if gathered else "input"),
        norm("norm", "transformed", LAYER_NORM, masked),
        output_distribution("norm output", masked, bias=True),
    ]
    more = [f"predictions{masked.tokens}"] * bool(gathered)
    block = block_layer(block_key(model, share), parts, share)
    return (
        embedding_layer(model, share, positions, f"p{rows}", f"t{types}"),
        *(block for _ in range(model.num_hidden_layers)),
        replace(head_layer(model, share, ends, *more), output_shapes=masked.logits_shapes),
    )


def _for_matmuls(source: str, share: RankShare) -> Operator:
    """A tensor of the residual stream in the precision of matmuls."""
    return cast(source, Tensor(f"{source} for matmuls", share.own_tokens * share.hidden))


def _masked_tokens(model: ModelSpec, share: RankShare) -> tuple[list[Operator], RankShare]:
    """The gather of masked tokens before the head, and the sizes of the head; nothing is gathered for all tokens."""
    rows = min(model.max_predictions_per_seq, model.seq_len)
    if not rows:
        return [], share
    assert share.shard.tp == share.shard.cp == 1, "masked tokens lie on some ranks only"
    made = Tensor("masked tokens", rows * share.hidden, residual=True)
    gather = Operator(
        kernel=Pointwise("gather", made.elements, made.elements, moves=True), reads=("input",), makes=(made,)
    )
    return [gather], share._replace(tokens=rows, own_tokens=rows)


def _transform(share: RankShare, source: str) -> LayerPart:
    """A matrix and a GELU before the head's norm, which tensor-parallel ranks do not split."""
    n, h = share.own_tokens, share.hidden
    wide = Tensor("transformed", n * h, residual=True)  # a norm's input, which autocast upcasts
    return joined(
        linear("transform", f"{source} for matmuls", (n, h, h), bias=True, partial=(share.partial, share.partial)),
        activated("gelu", "transform output", n * h),
        cast("gelu output", wide),
    )


BERT = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | {"type_vocab_size", "max_predictions_per_seq"},
    defaults=partial(transformer_defaults, wide_mlp=True, tied_embeddings=True, type_vocab_size=2),
    task="masked_token",
    causal=False,
    position_rows=True,
)
"""Devlin et al. 2019; ``BertForMaskedLM`` of Hugging Face's transformers."""
