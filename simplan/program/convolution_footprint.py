"""Memory in forward and backward of layers of convolutions, batch norms and ReLUs in place (ResNets).

The output of such a layer is counted with the layer after it, whose input it is. Its own ReLU needs it as well, in the
beginning of its backward.
"""

from __future__ import annotations

from simplan.program.moment import Moment
from simplan.spec.layer import Gemm, LayerKind, LayerSpec
from simplan.spec.software import StateBytes

__all__ = ["convolution_moments", "has_convolutions"]

_Moments = tuple[Moment, ...]


def has_convolutions(layer: LayerSpec) -> bool:
    """Whether it is a stem or a block of convolutions."""
    return any(isinstance(kernel, Gemm) and kernel.image_elements for kernel in layer.kernels)


def convolution_moments(layer: LayerSpec, b: int, state: StateBytes) -> tuple[_Moments, _Moments]:
    """Moments beside what is kept.

    Args:
        layer: A stem or a block.
        b: Sequences, here images.
        state: Element widths.
    """
    if layer.kind is LayerKind.EMBEDDING:
        return _stem_moments(layer, b, state)
    return _block_moments(layer, b, state)


def _block_moments(layer: LayerSpec, b: int, state: StateBytes) -> tuple[_Moments, _Moments]:
    """Forward ends with its output and, before they are added, that of a convolution of the input.

    Backward begins with the last ReLU: its result and the gradients after and before it. The gradient of the sum is then
    held until the branch begins with its last norm, beside the gradient of the input that came through a shortcut.
    """
    output = b * layer.made_elements * state.activation
    shortcut = b * sum(k.m * k.n for k in _convolutions(layer) if k.name == "shortcut") * state.activation
    given = b * sum(t.elements for t in layer.saved if not t.made_by) * state.activation if shortcut else 0
    return (Moment(output + shortcut),), (Moment(3 * output), Moment(2 * output + given - shortcut))


def _stem_moments(layer: LayerSpec, b: int, state: StateBytes) -> tuple[_Moments, _Moments]:
    """Backward has gradients after and before the maxima; then, with their places gone, after and before the ReLU."""
    (convolution,) = _convolutions(layer)
    made = b * convolution.m * convolution.n * state.activation
    output = b * layer.made_elements * state.activation
    places = b * sum(t.elements * (t.bytes_per_element or 0) for t in layer.saved if t.made_by == "maxpool")
    return (Moment(output),), (Moment(output + made), Moment(2 * made - places))


def _convolutions(layer: LayerSpec) -> list[Gemm]:
    return [kernel for kernel in layer.kernels if isinstance(kernel, Gemm) and kernel.image_elements]
