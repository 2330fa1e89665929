"""Gemma 2's architecture: norms before and after attention and MLP, scores and logits under a scaled tanh.

Hidden states begin as rows of the embedding times sqrt(hidden_size), and logits use the same rows. Every second block
has a window. The tanh of the scores prevents fused attention kernels (Hugging Face's eager attention, and
Gemma2DotProductAttention of NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/gemma/gemma2_provider.py). RMSNorms
multiply by 1 + weight; training learns the sum all the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from simplan.model.families.family import LORA, TOKENS, TRANSFORMER, Family, transformer_defaults
from simplan.model.layer import Gemm, LayerSpec, Operator, Pointwise, Tensor
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import embedding_layer, head_layer, output_distribution
from simplan.model.parts.mlp import gated_mlp
from simplan.model.parts.part import RMS_NORM, LayerPart, block_key, block_layer, norm, norm_of, residual, rewired
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    own = share.own_tokens * share.hidden
    scale = Operator(
        kernel=Pointwise("scale embedding", own, own),
        reads=("wte output",),
        makes=(Tensor("scaled embedding", own, residual=True),),
    )
    blocks = {window: _block(model, share, window) for window in set(model.windows)}
    distribution = _capped(output_distribution("norm output", share), share)
    return (
        embedding_layer(model, share, [scale]),
        *(blocks[window] for window in model.windows),
        head_layer(model, share, [norm("norm", "input", RMS_NORM, share), distribution]),
    )


def _block(model: ModelSpec, share: RankShare, window: int) -> LayerSpec:
    form = AttentionForm(fused=False, rotated=1.0, soft_cap=True, window=window)
    parts: list[LayerPart | Operator] = [
        norm("norm1", "input", RMS_NORM, share),
        self_attention("norm1 output", form, share),
        _norm_after("norm2", "proj output", share),
        residual("residual1", "input", "norm2 output", share),
        norm("norm3", "residual1", RMS_NORM, share),
        gated_mlp("norm3 output", share, activation="gelu"),
        _norm_after("norm4", "down output", share),
        residual("residual2", "residual1", "norm4 output", share),
    ]
    return block_layer(block_key(model, share, *[f"w{window}"] * (window > 0)), parts, share)


def _norm_after(name: str, branch: str, share: RankShare) -> LayerPart:
    """A norm of a branch's output, in the precision of the output."""
    own, h = share.own_tokens, share.hidden
    return norm_of(name, branch, RMS_NORM, Tensor(f"{name} output", own * h), (own, h), partial=share.partial)


def _capped(distribution: LayerPart, share: RankShare) -> LayerPart:
    """An output distribution whose logits pass through a scaled tanh, which saves its result for backward."""
    elements = share.tokens * share.vocab
    words = ("scaled logits", "logits under tanh", "capped logits")
    scaled, tanh, capped = (Tensor(word, elements, logits=True) for word in words)
    kernel = Pointwise("cap logits", 3 * elements, 3 * elements)
    caps = (
        Operator(kernel=kernel, reads=("logits",), makes=(scaled,)),
        Operator(reads=(scaled.name,), makes=(tanh,), saves=(tanh.name,)),
        Operator(reads=(tanh.name,), makes=(capped,)),
    )
    operators = rewired(distribution, "logits", capped.name).operators
    end = next(index for index, operator in enumerate(operators, 1) if isinstance(operator.kernel, Gemm))
    return replace(distribution, operators=(*operators[:end], *caps, *operators[end:]))


GEMMA2 = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | {"sliding_window", "sliding_window_pattern"},
    defaults=partial(transformer_defaults, tied_embeddings=True, sliding_window=4096, sliding_window_pattern=2),
    gated_mlp=True,
    rotary="head_dim",
    soft_cap=True,
    whole_attention="capped scores",
)
"""Gemma Team 2024 (arXiv:2408.00118); ``Gemma2ForCausalLM`` of Hugging Face's transformers."""
