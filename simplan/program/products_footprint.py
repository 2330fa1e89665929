"""Memory of a split backward that leaves the products for gradients of weights to its second part, and nothing else.

So does the zero-bubble fork of Megatron-LM (Qi et al. 2024, section 3.1): a matrix stores its input and the gradient of
its output, from which W makes the gradient of the weight; all else is done, and gone, with the first part, I. With h
the hidden size of a GPT these are 32 bytes of the 34 s b h that forward keeps without scores.
"""

from __future__ import annotations

from simplan.program.footprint import LayerFootprint
from simplan.program.moment import Moment
from simplan.program.split_footprint import SplitFootprint
from simplan.spec.layer import Exchange, Gemm, LayerKind, LayerSpec, Saved
from simplan.spec.software import StateBytes

__all__ = ["products_footprint"]


def products_footprint(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, footprint: LayerFootprint
) -> SplitFootprint:
    """What such a backward of one layer leaves and needs.

    Args:
        layer: The layer.
        microbatch_size: Sequences b.
        state: Element widths.
        footprint: Of the same layer, as it is when its backward is in one piece.
    """
    b, width = microbatch_size, state.activation
    matrices = [kernel for kernel in layer.kernels if isinstance(kernel, Gemm) and kernel.trained]
    inputs = dict.fromkeys(tensor for matrix in matrices if (tensor := _input_of(layer, matrix)) is not None)
    kept = b * sum(tensor.num_bytes(width, state.residual) for tensor in inputs)
    left = b * sum(matrix.m * matrix.n for matrix in matrices) * width
    logits_left = b * matrices[-1].m * matrices[-1].n * width if layer.kind is LayerKind.HEAD else 0
    gradients = left - logits_left
    dropped = max(0, footprint.activations - kept)
    # a moment of the whole backward has some of what I leaves; its end has the gradient of the layer's input
    moments = [
        Moment(moment.workspace - gradients, moment.logits - logits_left, moment.gradients)
        for moment in footprint.backward
    ]
    moments.append(Moment(footprint.input_bytes - dropped))
    weights = tuple(Moment(gradients=matrix.weight_elements * state.product) for matrix in matrices)
    return SplitFootprint(
        activations=footprint.activations,
        logits=footprint.logits,
        gradients=gradients,
        logits_gradients=logits_left,
        dropped=dropped,
        dropped_logits=footprint.logits,
        released=footprint.activations + gradients - dropped,
        input=tuple(moments),
        weight=weights,
    )


def _input_of(layer: LayerSpec, matrix: Gemm) -> Saved | None:
    """The tensor that a matrix is applied to, or the part of it that this rank keeps; None where nothing is kept."""
    before = [k for k in layer.kernels[: layer.kernels.index(matrix)] if not isinstance(k, Exchange | Gemm)]
    maker = before[-1].name if before else ""
    made = [tensor for tensor in layer.saved if tensor.made_by == maker and not tensor.bytes_per_element]
    named = [tensor for tensor in made if tensor.name.endswith((" output", "product", "input"))]
    return named[-1] if named else None
