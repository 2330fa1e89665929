"""Layers as in torchtune (pytorch/torchtune at bd2a0fc, torchtune/modules), where they differ.

- RMSNorm normalizes in FP32 and multiplies by its weight in the precision of its input (rms_norm.py).
- Rotation copies queries, then keys, to FP32, and stacks products of their halves (position_embeddings.py).
- Keys and values are copied for all heads of queries (attention.py, ``MultiHeadAttention``).
- Logits are handed on in FP32 (transformer.py, ``TransformerDecoder.unembed``), unless the loss computes them chunk by
  chunk (loss/cross_entropy_loss.py), where each chunk has a copy in FP32.

Compiled blocks (training/_compile.py) fuse norms and rotation, and read the copies of keys and values all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simplan.model.implementations.attention import with_copied_keys
from simplan.model.implementations.transformers_code import rms_norm
from simplan.model.kernel import LOSS, Pointwise
from simplan.model.layer import Attention, LayerSpec, Operator, Tensor
from simplan.model.parts.part import FP32_BYTES

_ROTATION_LAUNCHES = (9, 17)


def as_torchtune(layer: LayerSpec, *, compiled: bool, chunked: bool) -> LayerSpec:
    """An unsharded layer of Llama's kind as in torchtune.

    Args:
        compiled: Blocks and loss are compiled.
        chunked: The loss runs in chunks.
    """
    operators = tuple(found for operator in layer.operators for found in _operators(operator, compiled=compiled))
    if not compiled:
        operators = tuple(_rotated_one_by_one(operators))
    if not chunked:
        operators = tuple(_with_wide_logits(operators))
    if operators == layer.operators:
        return layer
    words = "torchtune" + ",compiled" * compiled + ",whole loss" * (not chunked)
    return replace(layer, key=f"{layer.key},{words}", operators=operators)


def _operators(operator: Operator, *, compiled: bool) -> Iterator[Operator]:
    """Single operations of an operator."""
    match operator.kernel:
        case Pointwise(like="rms_norm") if not compiled:
            yield from rms_norm(operator, operator.kernel)
        case Attention() as core if core.num_heads > core.num_key_value_heads:
            yield from with_copied_keys(operator, core)
        case _:
            yield operator


def _rotated_one_by_one(operators: tuple[Operator, ...]) -> Iterator[Operator]:
    """Operators with the rotation of queries before keys are made."""
    joint = next((o for o in operators if isinstance(o.kernel, Pointwise) and o.kernel.like == "rotary"), None)
    if joint is None:
        yield from operators
        return
    queries, keys = (_rotation(*pair) for pair in zip(joint.reads, joint.makes, strict=True))
    for operator in operators:
        yield keys if operator is joint else operator
        if any(tensor.name == joint.reads[0] for tensor in operator.makes):
            yield queries


def _rotation(source: str, result: Tensor) -> Operator:
    """x32 = x in FP32; products of even and odd elements with cosines and sines; their sums, stacked; their cast.

    At its peak forward has x32, the sums and the stacked sums, and backward the gradient in FP32, the sum of earlier
    parts of the gradient of x32, the next part and a product.
    """
    size = result.elements
    whole = Tensor(f"{result.name} scratch", size, FP32_BYTES)
    half = replace(whole, elements=size // 2)
    copy, other_half = replace(whole, widened=True), replace(half, widened=True)
    return Operator(
        kernel=Pointwise(f"rotary {source[0]}", 8 * size, 7 * size, like="rotary", launches=_ROTATION_LAUNCHES),
        reads=(source,),
        makes=(result,),
        forward_scratch=(whole, copy, other_half),
        backward_scratch=(whole, whole, half, copy),
    )


def _with_wide_logits(operators: tuple[Operator, ...]) -> Iterator[Operator]:
    """Operators of a head that makes FP32, for a loss that needs no copy of it."""
    loss = next((o for o in operators if isinstance(o.kernel, Pointwise) and o.kernel.name == LOSS), None)
    upcast = next((o for o in operators if loss is not None and o.is_cast and o.makes[0].name in loss.reads), None)
    for operator in operators:
        if upcast is not None and operator is loss:
            operator = replace(operator, reads=upcast.reads)
        elif upcast is not None and any(tensor.name == upcast.reads[0] for tensor in operator.makes):
            wide = replace(operator.makes[0], bytes_per_element=FP32_BYTES)
            operator = replace(operator, makes=(wide,), passes=False)
        if operator is not upcast:
            yield operator
