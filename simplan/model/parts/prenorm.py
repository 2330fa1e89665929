"""Shared pieces of pre-norm transformers: blocks with a GELU MLP, the head over a vocabulary, and whole decoders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from simplan.model.families.mtp import depth_head, depth_layers
from simplan.model.layer import LayerSpec
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import embedding_layer, head_layer, output_distribution
from simplan.model.parts.mlp import gelu_mlp
from simplan.model.parts.part import Block, LayerPart, NormKind, block_key, block_layer, norm, residual
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec


def decoder_layers(
    model: ModelSpec,
    share: RankShare,
    kind: NormKind,
    blocks: Sequence[Block],
    positions: Iterable[LayerPart] = (),
    *more: str,
) -> tuple[LayerSpec, ...]:
    """Embedding, blocks, layers for multi-token prediction if any, and head.

    Args:
        kind: Kind of the norms after the blocks.
        positions: Parts of the embedding after the lookup of tokens.
        more: Properties of these parts, for the embedding's key.
    """
    made = {key: block_layer(key, parts, share) for key, parts in dict(blocks).items()}
    return (
        embedding_layer(model, share, positions, *more),
        *(made[key] for key, _ in blocks),
        *(depth_layers(model, share, kind, blocks[-1]) if model.mtp_num_layers else ()),
        _head(model, share, kind),
    )


def _head(model: ModelSpec, share: RankShare, kind: NormKind) -> LayerSpec:
    """Norm and output distribution over the vocabulary, perhaps with the embedding's weights, also for later tokens."""
    parts = [norm("norm", "input", kind, share), output_distribution("norm output", share)]
    return depth_head(model, share, kind, parts) if model.mtp_num_layers else head_layer(model, share, parts)


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
