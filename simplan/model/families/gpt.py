"""GPT-2's architecture: LayerNorm, attention with one fused projection, LayerNorm, GELU MLP; biases throughout.

MPT as released has the same blocks without any biases, and ALiBi in place of learned positions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simplan.model.families.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults
from simplan.model.families.llama import decoder_layers
from simplan.model.layer import LayerSpec
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import row_table
from simplan.model.parts.mlp import gelu_mlp
from simplan.model.parts.part import LAYER_NORM, Block, NormKind, block_key, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard


def _gpt_layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    block = gelu_block(model, share, LAYER_NORM, AttentionForm(fused=True, bias="all"))
    rows = model.max_position_embeddings
    positions = row_table("wpe", "wte output", rows, share)
    return decoder_layers(model, share, LAYER_NORM, [block] * model.num_hidden_layers, [positions], f"p{rows}")


def _mpt_layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share, kind = share_of(model, shard), LAYER_NORM._replace(bias=False)
    block = gelu_block(model, share, kind, AttentionForm(fused=True, alibi=True))
    return decoder_layers(model, share, kind, [block] * model.num_hidden_layers)


def gelu_block(model: ModelSpec, share: RankShare, kind: NormKind, form: AttentionForm) -> Block:
    """Norm, attention, norm, GELU MLP; the MLP has biases if the norms have."""
    return block_key(model, share), [
        norm("norm1", "input", kind, share),
        self_attention("norm1 output", form, share),
        residual("residual1", "input", "proj output", share),
        norm("norm2", "residual1", kind, share),
        gelu_mlp("norm2 output", share, bias=kind.bias),
        residual("residual2", "residual1", "down output", share),
    ]


GPT = Family(
    layers=_gpt_layers,
    fields=TRANSFORMER | TOKENS | LORA | PACKED,
    defaults=partial(transformer_defaults, wide_mlp=True, tied_embeddings=True),
    position_rows=True,
)
"""Radford et al. 2019; llm-foundry's MPT benchmark models are of this family too."""

MPT = Family(layers=_mpt_layers, fields=GPT.fields, defaults=GPT.defaults, alibi=True)
"""MosaicML 2023, mosaicml/mpt-7b; the models of llm-foundry's benchmark are of the gpt family."""
