"""Builds the layers of GPT and Llama models.

Kernels and saved tensors are those of the executor's modules run eagerly in torch, which the tests compare with
torch's own accounting; parameter counts are compared with the published ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplan.spec.layer import Attention, Gemm, LayerKind, LayerSpec, Lookup, ParameterSpec, Pointwise, Saved

if TYPE_CHECKING:  # the model unfolds into layers and so imports this module
    from simplan.spec.model import ModelSpec

__all__ = ["gpt_layers", "llama_layers"]

_LOSS_BYTES = 4  # the cross-entropy runs in fp32 whatever the precision


def gpt_layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    """The GPT-2 architecture: (LayerNorm, attention, LayerNorm, GELU MLP) blocks with biases, learned positions."""
    s, h = model.seq_len, model.hidden_size
    embedding = LayerSpec(
        key=f"gpt-embedding:h{h},v{model.vocab_size},p{model.max_position_embeddings},s{s}",
        kind=LayerKind.EMBEDDING,
        parameters=(
            ParameterSpec("wte.weight", (model.vocab_size, h)),
            ParameterSpec("wpe.weight", (model.max_position_embeddings, h)),
        ),
        kernels=(Lookup("wte", s, h), Lookup("wpe", s, h), Pointwise("add", 2 * s * h, s * h)),
        saved=(),
        output_elements=s * h,
        gradient_order=(1, 0),
    )
    block = _gpt_block(model)
    head = _head(model, "gpt", norm_bias=True)
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


def llama_layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    """The Llama architecture: (RMSNorm, rotary attention, RMSNorm, gated SiLU MLP) blocks without biases."""
    s, h = model.seq_len, model.hidden_size
    embedding = LayerSpec(
        key=f"llama-embedding:h{h},v{model.vocab_size},s{s}",
        kind=LayerKind.EMBEDDING,
        parameters=(ParameterSpec("wte.weight", (model.vocab_size, h)),),
        kernels=(Lookup("wte", s, h),),
        saved=(),
        output_elements=s * h,
        gradient_order=(0,),
    )
    block = _llama_block(model)
    head = _head(model, "llama", norm_bias=False)
    return (embedding, *(block for _ in range(model.num_hidden_layers)), head)


def _attention_core(model: ModelSpec) -> Attention:
    return Attention(model.num_attention_heads, model.num_key_value_heads, model.head_dim, model.seq_len)


def _gpt_block(model: ModelSpec) -> LayerSpec:
    s, h, i = model.seq_len, model.hidden_size, model.intermediate_size
    q = model.num_attention_heads * model.head_dim
    kv = model.num_key_value_heads * model.head_dim
    parameters = (
        ParameterSpec("norm1.weight", (h,)),
        ParameterSpec("norm1.bias", (h,)),
        ParameterSpec("qkv.weight", (q + 2 * kv, h)),
        ParameterSpec("qkv.bias", (q + 2 * kv,)),
        ParameterSpec("proj.weight", (h, q)),
        ParameterSpec("proj.bias", (h,)),
        ParameterSpec("norm2.weight", (h,)),
        ParameterSpec("norm2.bias", (h,)),
        ParameterSpec("up.weight", (i, h)),
        ParameterSpec("up.bias", (i,)),
        ParameterSpec("down.weight", (h, i)),
        ParameterSpec("down.bias", (h,)),
    )
    return LayerSpec(
        key=(f"gpt-block:h{h},a{model.num_attention_heads},kv{model.num_key_value_heads},d{model.head_dim},i{i},s{s}"),
        kind=LayerKind.BLOCK,
        parameters=parameters,
        kernels=(
            Pointwise("norm1", s * h, s * h),
            Gemm("qkv", s, q + 2 * kv, h),
            _attention_core(model),
            Gemm("proj", s, h, q),
            Pointwise("residual1", 2 * s * h, s * h),
            Pointwise("norm2", s * h, s * h),
            Gemm("up", s, i, h),
            Pointwise("gelu", s * i, s * i),
            Gemm("down", s, h, i),
            Pointwise("residual2", 2 * s * h, s * h),
        ),
        saved=(
            Saved("input", s * h),
            Saved("norm1 statistics", 2 * s, 4),
            Saved("norm1 output", s * h),
            Saved("qkv output", s * (q + 2 * kv)),
            Saved("attention output", s * q),
            Saved("attention logsumexp", s * model.num_attention_heads, 4),
            Saved("residual1", s * h),
            Saved("norm2 statistics", 2 * s, 4),
            Saved("norm2 output", s * h),
            Saved("up output", s * i),
            Saved("gelu output", s * i),
        ),
        output_elements=s * h,
        gradient_order=(11, 10, 9, 8, 6, 7, 5, 4, 3, 2, 0, 1),
    )


def _llama_block(model: ModelSpec) -> LayerSpec:
    s, h, i = model.seq_len, model.hidden_size, model.intermediate_size
    q = model.num_attention_heads * model.head_dim
    kv = model.num_key_value_heads * model.head_dim
    parameters = (
        ParameterSpec("norm1.weight", (h,)),
        ParameterSpec("q.weight", (q, h)),
        ParameterSpec("k.weight", (kv, h)),
        ParameterSpec("v.weight", (kv, h)),
        ParameterSpec("proj.weight", (h, q)),
        ParameterSpec("norm2.weight", (h,)),
        ParameterSpec("gate.weight", (i, h)),
        ParameterSpec("up.weight", (i, h)),
        ParameterSpec("down.weight", (h, i)),
    )
    return LayerSpec(
        key=(
            f"llama-block:h{h},a{model.num_attention_heads},kv{model.num_key_value_heads},d{model.head_dim},i{i},s{s}"
        ),
        kind=LayerKind.BLOCK,
        parameters=parameters,
        kernels=(
            Pointwise("norm1", s * h, s * h),
            Gemm("q", s, q, h),
            Gemm("k", s, kv, h),
            Gemm("v", s, kv, h),
            Pointwise("rotary", 2 * s * (q + kv), 2 * s * (q + kv)),
            _attention_core(model),
            Gemm("proj", s, h, q),
            Pointwise("residual1", 2 * s * h, s * h),
            Pointwise("norm2", s * h, s * h),
            Gemm("gate", s, i, h),
            Gemm("up", s, i, h),
            Pointwise("silu_multiply", 3 * s * i, 2 * s * i),
            Gemm("down", s, h, i),
            Pointwise("residual2", 2 * s * h, s * h),
        ),
        saved=(
            Saved("input", s * h),
            Saved("norm1 statistics", s, 4),
            Saved("norm1 output", s * h),
            Saved("q, k rotated and v", s * (q + 2 * kv)),
            Saved("attention output", s * q),
            Saved("attention logsumexp", s * model.num_attention_heads, 4),
            Saved("residual1", s * h),
            Saved("norm2 statistics", s, 4),
            Saved("norm2 output", s * h),
            Saved("gate output", s * i),
            Saved("silu output", s * i),
            Saved("up output", s * i),
            Saved("gated product", s * i),
        ),
        output_elements=s * h,
        gradient_order=(8, 7, 6, 5, 4, 3, 2, 1, 0),
    )


def _head(model: ModelSpec, family: str, *, norm_bias: bool) -> LayerSpec:
    """Final norm, output projection and cross-entropy."""
    s, h, v = model.seq_len, model.hidden_size, model.vocab_size
    norm = [ParameterSpec("norm.weight", (h,))]
    if norm_bias:
        norm.append(ParameterSpec("norm.bias", (h,)))
    parameters = (*norm, ParameterSpec("lm_head.weight", (v, h)))
    return LayerSpec(
        key=f"{family}-head:h{h},v{v},s{s}",
        kind=LayerKind.HEAD,
        parameters=parameters,
        kernels=(
            Pointwise("norm", s * h, s * h),
            Gemm("lm_head", s, v, h),
            Pointwise("cross_entropy", 2 * s * v, s * v),
        ),
        saved=(
            Saved("input", s * h),
            Saved("norm statistics", (2 if norm_bias else 1) * s, 4),
            Saved("norm output", s * h),
            Saved("log-probabilities", s * v, _LOSS_BYTES, logits=True),
        ),
        output_elements=0,
        tied=("lm_head.weight",) if model.tied_embeddings else (),
        gradient_order=(len(parameters) - 1, *range(len(norm))),
    )
