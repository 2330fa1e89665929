"""Builds the layers of GPT and Llama models, whole or as one tensor- and context-parallel rank has them.

Kernels, exchanges and saved tensors are those of the executor's modules run eagerly in torch, which the tests compare
with torch's own accounting; parameter counts are compared with the published ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.spec.layer import (
    CollectiveKind,
    Exchange,
    Gemm,
    Kernel,
    LayerKind,
    LayerSpec,
    Lookup,
    ParameterSpec,
    Pointwise,
    Saved,
)
from simplan.spec.share import (
    Share,
    attention_constants,
    attention_kernels,
    attention_saved,
    column_exchanges,
    row_kernels,
    share_of,
)

if TYPE_CHECKING:  # the model unfolds into layers and so imports this module
    from simplan.spec.model import ModelSpec
    from simplan.spec.shard import Shard

__all__ = ["gpt_layers", "llama_layers"]

_FP32_BYTES = 4  # the cross-entropy and the statistics of norms are fp32 whatever the precision
_INDEX_BYTES = 8
_MASK_BYTES = 1


def gpt_layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    """The GPT-2 architecture: (LayerNorm, attention, LayerNorm, GELU MLP) blocks with biases, learned positions."""
    share = share_of(model, shard)
    h, own = model.hidden_size, share.own_tokens * model.hidden_size
    embedding = LayerSpec(
        key=f"gpt-embedding:h{h},v{model.vocab_size},p{model.max_position_embeddings},s{model.seq_len}{share.suffix}",
        kind=LayerKind.EMBEDDING,
        parameters=(
            ParameterSpec("wte.weight", (share.vocab, h)),
            ParameterSpec("wpe.weight", (model.max_position_embeddings, h), share.partial),
        ),
        kernels=(*_token_lookup(share), Lookup("wpe", share.own_tokens, h), Pointwise("add", 2 * own, own)),
        saved=_token_saved(share),
        output_elements=own,
        gradient_order=(1, 0),
    )
    block = _gpt_block(model, share)
    return (embedding, *(block for _ in range(model.num_hidden_layers)), _head(model, share))


def llama_layers(model: ModelSpec, shard: Shard) -> tuple[LayerSpec, ...]:
    """The Llama architecture: (RMSNorm, rotary attention, RMSNorm, gated SiLU MLP) blocks without biases."""
    share = share_of(model, shard)
    h = model.hidden_size
    embedding = LayerSpec(
        key=f"llama-embedding:h{h},v{model.vocab_size},s{model.seq_len}{share.suffix}",
        kind=LayerKind.EMBEDDING,
        parameters=(ParameterSpec("wte.weight", (share.vocab, h)),),
        kernels=_token_lookup(share),
        saved=_token_saved(share),
        output_elements=share.own_tokens * h,
        gradient_order=(0,),
    )
    block = _llama_block(model, share)
    return (embedding, *(block for _ in range(model.num_hidden_layers)), _head(model, share))


def _token_lookup(share: Share) -> tuple[Kernel, ...]:
    """Each tensor-parallel rank looks up the tokens of its part of the vocabulary; the sum has them all."""
    return (Lookup("wte", share.tokens, share.hidden), *row_kernels("wte output", share, residual=True))


def _token_saved(share: Share) -> tuple[Saved, ...]:
    if share.shard.tp == 1:
        return ()
    return (
        Saved("tokens in the own part of the vocabulary", share.tokens, _INDEX_BYTES, made_by="wte"),
        Saved("which tokens are not", share.tokens, _MASK_BYTES, made_by="wte"),
    )


def _block_key(model: ModelSpec, share: Share) -> str:
    heads = f"a{model.num_attention_heads},kv{model.num_key_value_heads},d{model.head_dim}"
    sizes = f"h{model.hidden_size},{heads},i{model.intermediate_size},s{model.seq_len}"
    return f"{model.family}-block:{sizes}{share.suffix}"


def _gpt_block(model: ModelSpec, share: Share) -> LayerSpec:
    n, h, i, qkv = share.tokens, share.hidden, share.intermediate, share.q + 2 * share.kv
    own = share.own_tokens * h
    parameters = (
        ParameterSpec("norm1.weight", (h,), share.partial),
        ParameterSpec("norm1.bias", (h,), share.partial),
        ParameterSpec("qkv.weight", (qkv, h)),
        ParameterSpec("qkv.bias", (qkv,)),
        ParameterSpec("proj.weight", (h, share.q)),
        ParameterSpec("proj.bias", (h,), share.partial),
        ParameterSpec("norm2.weight", (h,), share.partial),
        ParameterSpec("norm2.bias", (h,), share.partial),
        ParameterSpec("up.weight", (i, h)),
        ParameterSpec("up.bias", (i,)),
        ParameterSpec("down.weight", (h, i)),
        ParameterSpec("down.bias", (h,), share.partial),
    )
    before_qkv, after_qkv = column_exchanges("norm1 output", share)
    before_up, after_up = column_exchanges("norm2 output", share)
    return LayerSpec(
        key=_block_key(model, share),
        kind=LayerKind.BLOCK,
        parameters=parameters,
        constants=attention_constants(share),
        kernels=(
            Pointwise("norm1", own, own),
            *before_qkv,
            Gemm("qkv", n, qkv, h),
            *after_qkv,
            *attention_kernels(share),
            Gemm("proj", n, h, share.q),
            *row_kernels("proj output", share, bias=True),
            Pointwise("residual1", 2 * own, own),
            Pointwise("norm2", own, own),
            *before_up,
            Gemm("up", n, i, h),
            *after_up,
            Pointwise("gelu", n * i, n * i),
            Gemm("down", n, h, i),
            *row_kernels("down output", share, bias=True),
            Pointwise("residual2", 2 * own, own),
        ),
        saved=(
            Saved("input", own, residual=True),
            Saved("norm1 statistics", 2 * share.own_tokens, _FP32_BYTES, made_by="norm1"),
            Saved("norm1 output", own, made_by="norm1"),
            *attention_saved(share, fused=True),
            Saved("residual1", own, made_by="residual1", residual=True),
            Saved("norm2 statistics", 2 * share.own_tokens, _FP32_BYTES, made_by="norm2"),
            Saved("norm2 output", own, made_by="norm2"),
            Saved("up output", n * i, made_by="up"),
            Saved("gelu output", n * i, made_by="gelu"),
        ),
        output_elements=own,
        gradient_order=(11, 10, 9, 8, 6, 7, 5, 4, 3, 2, 0, 1),
    )


def _llama_block(model: ModelSpec, share: Share) -> LayerSpec:
    n, h, i, q, kv = share.tokens, share.hidden, share.intermediate, share.q, share.kv
    own = share.own_tokens * h
    parameters = (
        ParameterSpec("norm1.weight", (h,), share.partial),
        ParameterSpec("q.weight", (q, h)),
        ParameterSpec("k.weight", (kv, h)),
        ParameterSpec("v.weight", (kv, h)),
        ParameterSpec("proj.weight", (h, q)),
        ParameterSpec("norm2.weight", (h,), share.partial),
        ParameterSpec("gate.weight", (i, h)),
        ParameterSpec("up.weight", (i, h)),
        ParameterSpec("down.weight", (h, i)),
    )
    before_qkv, after_qkv = column_exchanges("norm1 output", share)
    before_up, after_up = column_exchanges("norm2 output", share)
    return LayerSpec(
        key=_block_key(model, share),
        kind=LayerKind.BLOCK,
        parameters=parameters,
        constants=(Saved("rotary tables", 2 * n * model.head_dim, 4), *attention_constants(share)),
        kernels=(
            Pointwise("norm1", own, own),
            *before_qkv,
            Gemm("q", n, q, h),
            Gemm("k", n, kv, h),
            Gemm("v", n, kv, h),
            *after_qkv,
            Pointwise("rotary", 2 * n * (q + kv), 2 * n * (q + kv)),
            *attention_kernels(share),
            Gemm("proj", n, h, q),
            *row_kernels("proj output", share),
            Pointwise("residual1", 2 * own, own),
            Pointwise("norm2", own, own),
            *before_up,
            Gemm("gate", n, i, h),
            Gemm("up", n, i, h),
            *after_up,
            Pointwise("silu_multiply", 3 * n * i, 2 * n * i),
            Gemm("down", n, h, i),
            *row_kernels("down output", share),
            Pointwise("residual2", 2 * own, own),
        ),
        saved=(
            Saved("input", own, residual=True),
            Saved("norm1 statistics", share.own_tokens, _FP32_BYTES, made_by="norm1"),
            Saved("norm1 output", own, made_by="norm1"),
            *attention_saved(share, fused=False),
            Saved("residual1", own, made_by="residual1", residual=True),
            Saved("norm2 statistics", share.own_tokens, _FP32_BYTES, made_by="norm2"),
            Saved("norm2 output", own, made_by="norm2"),
            Saved("gate output", n * i, made_by="gate"),
            Saved("silu output", n * i, made_by="silu_multiply"),
            Saved("up output", n * i, made_by="up"),
            Saved("gated product", n * i, made_by="silu_multiply"),
        ),
        output_elements=own,
        # tokens are gathered once for all matrices that use them, which then get their gradients in one operation
        gradient_order=(8, 6, 7, 5, 4, 1, 2, 3, 0) if share.partial else (8, 7, 6, 5, 4, 3, 2, 1, 0),
    )


def _head(model: ModelSpec, share: Share) -> LayerSpec:
    """Final norm, output projection and cross-entropy.

    Tensor-parallel ranks have their part of the vocabulary of all logits; the largest logit of every token, then its
    sum of exponentials together with the logit of its target, are all-reduced (Shoeybi et al. 2019, section 3).
    """
    n, h, v, own = share.tokens, share.hidden, share.vocab, share.own_tokens * share.hidden
    has_bias = model.family == "gpt"
    norm = [ParameterSpec("norm.weight", (h,), share.partial)]
    if has_bias:
        norm.append(ParameterSpec("norm.bias", (h,), share.partial))
    parameters = (*norm, ParameterSpec("lm_head.weight", (v, h)))
    before, after = column_exchanges("norm output", share)
    loss: list[Kernel] = [Pointwise("cross_entropy", 2 * n * v, n * v)]
    if share.shard.tp > 1:
        reduce = CollectiveKind.ALL_REDUCE
        loss.insert(0, Exchange("largest logits", "tp", reduce, None, n, _FP32_BYTES))
        loss.append(Exchange("targets' logits and sums", "tp", reduce, None, 2 * n, _FP32_BYTES))
    return LayerSpec(
        key=f"{model.family}-head:h{h},v{model.vocab_size},s{model.seq_len}{share.suffix}",
        kind=LayerKind.HEAD,
        parameters=parameters,
        kernels=(Pointwise("norm", own, own), *before, Gemm("lm_head", n, v, h), *after, *loss),
        saved=(
            Saved("input", own, residual=True),
            Saved("norm statistics", (2 if has_bias else 1) * share.own_tokens, _FP32_BYTES, made_by="norm"),
            Saved("norm output", own, made_by="norm"),
            Saved("log-probabilities", n * v, _FP32_BYTES, logits=True, made_by="cross_entropy"),
        ),
        output_elements=0,
        tied=("lm_head.weight",) if model.tied_embeddings else (),
        gradient_order=(len(parameters) - 1, *range(len(norm))),
    )
