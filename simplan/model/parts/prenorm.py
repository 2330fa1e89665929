"""Shared pieces of pre-norm transformers: the block with a GELU MLP, and the head over a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.model.families.mtp import depth_heads, later_inputs
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import output_distribution
from simplan.model.parts.keys import block_key, head_key
from simplan.model.parts.mlp import gelu_mlp
from simplan.model.parts.part import NormKind, hidden_input, layer_of, norm, residual
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec

__all__ = ["gelu_block", "vocabulary_head"]


def gelu_block(model: ModelSpec, share: RankShare, kind: NormKind, form: AttentionForm, *, bias: bool) -> LayerSpec:
    """Norm, attention, norm, GELU MLP.

    Args:
        model: The model.
        share: Sizes.
        kind: Kind of both norms.
        form: Variant of the attention.
        bias: The MLP has biases.
    """
    return layer_of(
        block_key(model, share),
        LayerKind.BLOCK,
        [
            norm("norm1", "input", kind, share),
            self_attention("norm1 output", form, share),
            residual("residual1", "input", "proj output", share),
            norm("norm2", "residual1", kind, share),
            gelu_mlp("norm2 output", share, bias=bias),
            residual("residual2", "residual1", "down output", share),
        ],
        inputs=(hidden_input(share),),
        output_shapes=share.hidden_shapes,
    )


def vocabulary_head(model: ModelSpec, share: RankShare, kind: NormKind) -> LayerSpec:
    """Norm and output distribution over the vocabulary, perhaps with the embedding's weights, also for later tokens.

    The head saves only the last of its inputs: earlier layers make the others and save them.
    """
    before, after = depth_heads(model, share, kind)
    copies = ("mtp_wte.weight",) if model.mtp_num_layers else ()
    return layer_of(
        head_key(model, share, *([f"mtp{model.mtp_num_layers}"] if model.mtp_num_layers else [])),
        LayerKind.HEAD,
        [*before, norm("norm", "input", kind, share), output_distribution("norm output", share), *after],
        inputs=(*later_inputs(model, share), hidden_input(share)),
        output_shapes=share.logits_shapes,
        tied=("lm_head.weight",) if model.tied_embeddings else copies,
    )
