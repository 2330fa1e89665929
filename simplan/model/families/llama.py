"""Llama's architecture: RMSNorm, rotary grouped-query attention, RMSNorm, gated SiLU MLP; no biases.

``decoder_layers`` puts pre-norm blocks of any kind between embedding and head.

Switches cover Qwen2.5 (biases of q, k and v), Qwen3 (norms of queries and keys) and Mistral 7B v0.1 (sliding window).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from simplan.model.families.family import LORA, PACKED, TOKENS, TRANSFORMER, Family, transformer_defaults
from simplan.model.families.mtp import MTP, depth_head, depth_layers
from simplan.model.layer import LayerSpec
from simplan.model.parts.attention import AttentionForm, Biases, self_attention
from simplan.model.parts.embedding_and_head import embedding_layer, head_layer, output_distribution
from simplan.model.parts.mlp import gated_mlp
from simplan.model.parts.part import RMS_NORM, Block, LayerPart, NormKind, block_key, block_layer, norm, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

ATTENTION = frozenset({"attention_bias", "qkv_bias", "qk_norm", "sliding_window", "sliding_window_pattern"})
"""Fields that switch Llama's attention."""


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    blocks = {window: _block(model, share, window) for window in set(model.windows)}
    return decoder_layers(model, share, RMS_NORM, [blocks[window] for window in model.windows])


def attention_of(model: ModelSpec, share: RankShare, window: int) -> tuple[LayerPart, list[str]]:
    """Attention of a block with a window (0 for none), and its addition to the block's key."""
    biased: Biases = "all" if model.attention_bias else "qkv" if model.qkv_bias else "none"
    form = AttentionForm(
        fused=False,
        bias=biased,
        rotated=1.0,
        qk_norm=model.qk_norm or "none",
        window=window,
        sinks=model.attention_sinks,
    )
    switches = [f"bias:{biased}"] * (biased != "none") + [f"w{window}"] * (window > 0) + ["sinks"] * form.sinks
    if form.qk_norm != "none":
        switches.insert(int(biased != "none"), "qknorm" if form.qk_norm == "head" else "qknorm:projection")
    return self_attention("norm1 output", form, share), switches


def _block(model: ModelSpec, share: RankShare, window: int) -> Block:
    attention, switches = attention_of(model, share, window)
    return block_key(model, share, *switches), [
        norm("norm1", "input", RMS_NORM, share),
        attention,
        residual("residual1", "input", "proj output", share),
        norm("norm2", "residual1", RMS_NORM, share),
        gated_mlp("norm2 output", share),
        residual("residual2", "residual1", "down output", share),
    ]


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


LLAMA = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | PACKED | ATTENTION | MTP,
    defaults=partial(transformer_defaults, tied_embeddings=False),
    gated_mlp=True,
    rotary="head_dim",
)
"""Touvron et al. 2023."""
