"""Layers as in LitGPT (Lightning-AI/litgpt at 26857050, litgpt/model.py and litgpt/utils.py), where they differ.

- RMSNorm computes in FP32, also its product with the weight (model.py, ``RMSNorm``). Backward needs the input in FP32,
  and, if the weight is trained, the normalized input in FP32.
- Keys and values are copied for all heads of queries (model.py, ``CausalSelfAttention``).
- Queries, keys and values are one matrix. Where keys are not copied, values are a part of its result, all of which
  stays for backward. Adapters of them have one input; those of some of them save
  what B makes, which is copied into zeros (lora.py, ``LoRAQKVLinear.zero_pad``; torch 2.13,
  tools/autograd/derivatives.yaml: the backward of index_copy has the shape of its source).
- Lightning's Fabric hands logits on in FP32 (lightning 2.4, fabric/plugins/precision/half.py, ``convert_output``), and
  the training loop holds them until those of the next microbatch are there (finetune/lora.py, ``fit``). The
  cross-entropy runs chunk by chunk of 128 tokens (utils.py, ``chunked_cross_entropy``): all log-probabilities are
  saved, but a gradient of logits replaces those of its chunk. Backward computes those of all chunks before it comes to
  the projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simplan.model.implementations.attention import with_copied_keys
from simplan.model.kernel import LOSS, Chunks, Gemm, Pointwise
from simplan.model.layer import Attention, LayerKind, LayerSpec, Operator, Tensor
from simplan.model.parts.part import FP32_BYTES, cast

_CHUNK_TOKENS = 128
_NORM_LAUNCHES = (7, 16)


def as_litgpt(layer: LayerSpec) -> LayerSpec:
    """An unsharded layer as in LitGPT."""
    operators = tuple(found for operator in layer.operators for found in _operators(operator))
    if layer.kind is LayerKind.HEAD:
        operators = tuple(_with_loss_by_chunks(operators))
    if layer.kind is LayerKind.BLOCK and {"q", "k", "v"} <= {kernel.name for kernel in layer.kernels}:
        operators = tuple(_with_one_matrix(operators))
    return replace(layer, key=f"{layer.key},litgpt", operators=operators)


def _operators(operator: Operator) -> Iterator[Operator]:
    """Single operations of an operator."""
    match operator.kernel:
        case Pointwise(like="rms_norm"):
            yield from _rms_norm(operator, operator.kernel)
        case Attention() as core if core.num_heads > core.num_key_value_heads:
            yield from with_copied_keys(operator, core)
        case _:
            yield operator


def _rms_norm(operator: Operator, kernel: Pointwise) -> Iterator[Operator]:
    """x32 = x in FP32; r = rsqrt(mean(x32^2) + eps); y = x32 r times the weight, in the precision of x."""
    (source,), (result, statistics), size = operator.reads, operator.makes, kernel.writes
    name = kernel.name
    wide, normed, product, scratch = (
        Tensor(f"{name} {what}", size, FP32_BYTES)
        for what in ("input in FP32", "normalized in FP32", "result in FP32", "scratch")
    )
    trains = bool(operator.parameters)
    yield cast(source, wide)
    yield Operator(
        kernel=replace(kernel, reads=4 * size, writes=3 * size, launches=_NORM_LAUNCHES),
        reads=(wide.name,),
        makes=(normed, statistics),
        saves=(wide.name, statistics.name),
        forward_scratch=(scratch,),
        backward_scratch=(scratch, scratch),
        roles=operator.roles,
    )
    yield Operator(
        reads=(normed.name,),
        makes=(product,),
        saves=(normed.name,) if trains else (),
        parameters=operator.parameters,
        backward_scratch=(scratch,) if trains else (),
        roles=operator.roles,
    )
    yield cast(product.name, result)


def _with_loss_by_chunks(operators: tuple[Operator, ...]) -> Iterator[Operator]:
    """Operators of a head whose matmul makes FP32, and whose loss has gradients of one chunk at a time."""
    head = next((o.kernel for o in operators if isinstance(o.kernel, Gemm) and o.makes[0].logits), None)
    if head is None:  # a head of scores
        yield from operators
        return
    chunks = Chunks(head.m, number=-(-head.m // _CHUNK_TOKENS))
    of_loss = next(o for o in operators if isinstance(o.kernel, Pointwise) and o.kernel.name == LOSS)
    upcast = next(o for o in operators if o.is_cast and o.makes[0].name in of_loss.reads)
    (logits,) = upcast.reads
    before = Tensor("logits of the last microbatch", upcast.makes[0].elements, FP32_BYTES)
    for operator in operators:
        if operator is upcast:
            continue
        if any(tensor.name == logits for tensor in operator.makes):  # the matmul, or the sum with its adapter's result
            makes = (replace(operator.makes[0], bytes_per_element=FP32_BYTES, gradient_chunks=chunks),)
            operator = replace(operator, makes=makes, passes=False)
        elif operator is of_loss:
            scratch = tuple(replace(tensor, chunks=chunks) for tensor in operator.backward_scratch)
            operator = replace(operator, reads=(logits,), saves=(*operator.saves, logits), backward_scratch=scratch)
        if operator.kernel is head:
            scratch = (*operator.backward_scratch, Tensor("gradients of logits", before.elements))  # of all chunks
            operator = replace(operator, forward_scratch=(*operator.forward_scratch, before), backward_scratch=scratch)
        yield operator


def _with_one_matrix(operators: tuple[Operator, ...]) -> Iterator[Operator]:
    """Operators of a block whose queries, keys and values are of one matrix."""
    names = {operator.kernel.name for operator in operators if operator.kernel is not None}
    adapted = [part for part in "qkv" if f"{part}.lora_b" in names]
    is_part = "repeat_interleave" not in names
    dropped, rest = "", Tensor("", 0)
    for operator in operators:
        name = "" if operator.kernel is None else operator.kernel.name
        part, _, of_adapter = name.partition(".")
        if part in adapted and of_adapter == "lora_dropout":
            if dropped:
                continue
            dropped = operator.makes[0].name
        if part in adapted and of_adapter == "lora_a" and dropped:
            operator = replace(operator, reads=(dropped,), saves=(dropped,))
        if part in adapted and of_adapter == "lora_sum" and len(adapted) < len("qkv"):
            operator = replace(operator, saves=operator.reads[1:])
        if name == "v" and is_part:
            rest = Tensor("queries and keys next to values", 2 * operator.makes[0].elements)
            operator = replace(operator, makes=(*operator.makes, rest))
        if is_part and isinstance(operator.kernel, Attention):
            operator = replace(operator, saves=(*operator.saves, rest.name))
        yield operator
