"""Gemma's architectures, three generations.

Hidden states begin as rows of the embedding times sqrt(hidden_size), and logits use the same rows. Gates are GELU.
RMSNorms multiply by 1 + weight; training learns the sum all the same.

- Gemma: otherwise Llama's blocks.
- Gemma 2: norms before and after attention and MLP; every second block has a window; scores and logits pass through a
  scaled tanh, that of the scores prevents fused attention kernels (Hugging Face's eager attention, and
  Gemma2DotProductAttention of NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/gemma/gemma2_provider.py).
- Gemma 3: Gemma 2's norms, norms of queries and keys, five of six blocks with a window, and no tanh. Blocks with a
  window have rotary tables of another base; here all share one.
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


def _layers(model: ModelSpec, shard: Shard, *, capped: bool = False, sandwich: bool = True) -> tuple[LayerSpec, ...]:
    """Layers of a generation.

    Args:
        capped: Scores and logits pass through a scaled tanh.
        sandwich: Norms after attention and MLP, too.
    """
    share = share_of(model, shard)
    own = share.own_tokens * share.hidden
    scale = Operator(
        kernel=Pointwise("scale embedding", own, own),
        reads=("wte output",),
        makes=(Tensor("scaled embedding", own, residual=True),),
    )
    block = _sandwich_block if sandwich else _block
    blocks = {
        window: block(model, share, _form(model, window, capped=capped), *[f"w{window}"] * (window > 0))
        for window in set(model.windows)
    }
    distribution = output_distribution("norm output", share)
    distribution = _capped(distribution, share) if capped else distribution
    return (
        embedding_layer(model, share, [scale]),
        *(blocks[window] for window in model.windows),
        head_layer(model, share, [norm("norm", "input", RMS_NORM, share), distribution]),
    )


def _form(model: ModelSpec, window: int, *, capped: bool) -> AttentionForm:
    return AttentionForm(fused=False, rotated=1.0, soft_cap=capped, qk_norm=model.qk_norm or "none", window=window)


def _block(model: ModelSpec, share: RankShare, form: AttentionForm, *switches: str) -> LayerSpec:
    """Llama's block with GELU."""
    parts: list[LayerPart | Operator] = [
        norm("norm1", "input", RMS_NORM, share),
        self_attention("norm1 output", form, share),
        residual("residual1", "input", "proj output", share),
        norm("norm2", "residual1", RMS_NORM, share),
        gated_mlp("norm2 output", share, activation="gelu"),
        residual("residual2", "residual1", "down output", share),
    ]
    return block_layer(block_key(model, share, *switches), parts, share)


def _sandwich_block(model: ModelSpec, share: RankShare, form: AttentionForm, *switches: str) -> LayerSpec:
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
    return block_layer(block_key(model, share, *switches), parts, share)


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


_WINDOWS = {"sliding_window", "sliding_window_pattern"}

GEMMA = Family(
    layers=partial(_layers, sandwich=False),
    fields=TRANSFORMER | TOKENS | LORA,
    defaults=partial(transformer_defaults, tied_embeddings=True),
    gated_mlp=True,
    rotary="head_dim",
)
"""Gemma Team 2024 (arXiv:2403.08295); ``GemmaForCausalLM`` of Hugging Face's transformers."""

GEMMA2 = Family(
    layers=partial(_layers, capped=True),
    fields=TRANSFORMER | TOKENS | LORA | _WINDOWS,
    defaults=partial(transformer_defaults, tied_embeddings=True, sliding_window=4096, sliding_window_pattern=2),
    gated_mlp=True,
    rotary="head_dim",
    soft_cap=True,
    whole_attention="capped scores",
)
"""Gemma Team 2024 (arXiv:2408.00118); ``Gemma2ForCausalLM``."""

GEMMA3 = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | _WINDOWS | {"qk_norm"},
    defaults=partial(
        transformer_defaults, tied_embeddings=True, sliding_window=1024, sliding_window_pattern=6, qk_norm="head"
    ),
    gated_mlp=True,
    rotary="head_dim",
)
"""Gemma Team 2025 (arXiv:2503.19786); ``Gemma3ForCausalLM``, the text model."""
