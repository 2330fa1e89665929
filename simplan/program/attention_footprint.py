"""Memory in the backward of attention whose scores are tensors of their own (``Attention.eager``).

Its worst moment is the backward of the softmax: the gradients of the weights and of the scores are there, in fp32,
beside the softmax's result, while all that came after it in forward is gone already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from simplan.spec.layer import Attention, Gemm, LayerSpec, Saved
from simplan.spec.software import StateBytes

__all__ = ["eager_attention_bytes"]

_FP32_BYTES = 4


def eager_attention_bytes(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, dropped: Collection[Saved]
) -> Iterator[int]:
    """Bytes beside all that the layer keeps, at the worst moment of each attention.

    Args:
        layer: A block.
        microbatch_size: Sequences b.
        state: Element widths.
        dropped: What is not kept because cores of attention run again, each before its own backward; nothing where
            the layer runs again as a whole.
    """
    b = microbatch_size
    for index, core in enumerate(layer.kernels):
        if not isinstance(core, Attention) or not core.eager:
            continue
        after = {kernel.name for kernel in layer.kernels[index + 1 :]}
        if core.fused_softmax:
            yield _fused_softmax_bytes(layer, core, after, b, state, dropped)
            continue
        gone = [t for t in layer.saved if t.made_by in after or (t.made_by == core.name and not t.bytes_per_element)]
        again = [t for t in dropped if t.made_by == core.name and t not in gone]
        held = _bytes(again, state) - _bytes((t for t in gone if t not in dropped), state)
        if again:  # from queries, keys and values that are kept, and copied in the order of heads
            tokens = core.seq_len + 2 * (core.num_keys or core.seq_len)
            held += tokens * core.num_heads * core.head_dim * state.activation
        copies = state.weight_copy * sum(k.weight_elements for k in layer.kernels[index:] if isinstance(k, Gemm))
        # the values are gone as well, and their gradient, which is as large, is there
        stream = b * layer.made_elements * state.residual
        yield stream + 2 * b * core.num_scores * _FP32_BYTES + b * held - copies


def _fused_softmax_bytes(
    layer: LayerSpec, core: Attention, after: Collection[str], b: int, state: StateBytes, dropped: Collection[Saved]
) -> int:
    """Gradients of the weights that values are multiplied with, and what dropout's backward makes of them.

    With dropout the weights after it are gone by then; without, nothing of the core is, and the gradient is changed in
    place.
    """
    own = [tensor for tensor in layer.saved if tensor.made_by == core.name]
    weights_after = [tensor for tensor in own if tensor.name.endswith("weights after dropout")]
    gone = [tensor for tensor in layer.saved if tensor.made_by in after and tensor not in dropped]
    again = [tensor for tensor in own if tensor in dropped]
    made = b * core.num_scores * state.activation * (2 if weights_after else 1)
    return (
        b * layer.made_elements * state.residual
        + made
        + b * (_bytes(again, state) - _bytes(gone, state) - _bytes(weights_after, state))
    )


def _bytes(tensors: Iterable[Saved], state: StateBytes) -> int:
    """Of one sequence."""
    return sum(tensor.num_bytes(state.activation, state.residual) for tensor in tensors)
