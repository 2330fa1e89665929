"""Gemma 2's architecture: norms before and after attention and MLP, scores and logits under a scaled tanh.

Hidden states begin as rows of the embedding times sqrt(hidden_size), and logits use the same rows. Every second block
has a window. The tanh of the scores prevents fused attention kernels (Hugging Face's eager attention, and
Gemma2DotProductAttention of NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/models/gemma/gemma2_provider.py). RMSNorms
multiply by 1 + weight; training learns the sum all the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.model.families.family import LORA, TOKENS, TRANSFORMER, Family, transformer_defaults
from simplan.model.layer import Gemm, LayerKind, LayerSpec, Operator, ParameterSpec, Pointwise, Tensor
from simplan.model.parts.attention import AttentionForm, self_attention
from simplan.model.parts.embedding_and_head import output_distribution, token_table
from simplan.model.parts.keys import block_key, embedding_key, head_key
from simplan.model.parts.mlp import gated_mlp
from simplan.model.parts.part import LayerPart, NormKind, hidden_input, layer_of, norm, norm_operator, residual
from simplan.model.share import RankShare, share_of

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["GEMMA2"]

_NORM = NormKind(statistics=1, bias=False)


def _layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    share = share_of(model, shard)
    own = share.own_tokens * share.hidden
    scale = Operator(
        kernel=Pointwise("scale embedding", own, own),
        reads=("wte output",),
        makes=(Tensor("scaled embedding", own, residual=True),),
    )
    embedding = layer_of(
        embedding_key(model, share),
        LayerKind.EMBEDDING,
        [token_table(share), LayerPart(operators=(scale,))],
        inputs=(),
        output_shapes=share.hidden_shapes,
    )
    blocks = {window: _block(model, share, window) for window in set(model.windows)}
    return (embedding, *(blocks[window] for window in model.windows), _head(model, share))


def _block(model: ModelSpec, share: RankShare, window: int) -> LayerSpec:
    form = AttentionForm(fused=False, rotated=1.0, soft_cap=True, window=window)
    return layer_of(
        block_key(model, share, *[f"w{window}"] * (window > 0)),
        LayerKind.BLOCK,
        [
            norm("norm1", "input", _NORM, share),
            self_attention("norm1 output", form, share),
            _norm_after("norm2", "proj output", share),
            residual("residual1", "input", "norm2 output", share),
            norm("norm3", "residual1", _NORM, share),
            gated_mlp("norm3 output", share, activation="gelu"),
            _norm_after("norm4", "down output", share),
            residual("residual2", "residual1", "norm4 output", share),
        ],
        inputs=(hidden_input(share),),
        output_shapes=share.hidden_shapes,
    )


def _norm_after(name: str, branch: str, share: RankShare) -> LayerPart:
    """A norm of a branch's output, in the precision of the output."""
    weight = ParameterSpec(f"{name}.weight", (share.hidden,), share.partial)
    made = Tensor(f"{name} output", share.own_tokens * share.hidden)
    return LayerPart(
        parameters=(weight,),
        operators=(norm_operator(name, branch, _NORM, made, share.own_tokens, [weight]),),
    )


def _head(model: ModelSpec, share: RankShare) -> LayerSpec:
    return layer_of(
        head_key(model, share),
        LayerKind.HEAD,
        [norm("norm", "input", _NORM, share), _capped(output_distribution("norm output", share), share)],
        inputs=(hidden_input(share),),
        output_shapes=share.logits_shapes,
        tied=("lm_head.weight",) if model.tied_embeddings else (),
    )


def _capped(distribution: LayerPart, share: RankShare) -> LayerPart:
    """An output distribution whose logits pass through a scaled tanh, which saves its result for backward."""
    elements = share.tokens * share.vocab
    words = ("scaled logits", "logits under tanh", "capped logits")
    made = [Tensor(word, elements, logits=True) for word in words]
    sources = ("logits", *words[:2])
    caps = [
        Operator(
            kernel=Pointwise("cap logits", 3 * elements, 3 * elements) if number == 0 else None,
            reads=(source,),
            makes=(tensor,),
            saves=(tensor.name,) if number == 1 else (),
        )
        for number, (source, tensor) in enumerate(zip(sources, made, strict=True))
    ]
    operators: list[Operator] = []
    for operator in distribution.operators:
        last = operators[-1] if operators else None
        if last is not None and isinstance(last.kernel, Gemm):
            operators += caps
        reads = tuple(words[-1] if name == "logits" else name for name in operator.reads)
        operators.append(replace(operator, reads=reads))
    return replace(distribution, operators=tuple(operators))


GEMMA2 = Family(
    layers=_layers,
    fields=TRANSFORMER | TOKENS | LORA | {"sliding_window", "sliding_window_pattern"},
    defaults=transformer_defaults(tied_embeddings=True, sliding_window=4096, sliding_window_pattern=2),
    gated_mlp=True,
    rotary="head_dim",
    soft_cap=True,
    whole_attention="capped scores",
)
"""Gemma Team 2024 (arXiv:2408.00118); ``Gemma2ForCausalLM`` of Hugging Face's transformers."""
