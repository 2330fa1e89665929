"""Memory in forward and backward of layers of convolutions, batch norms and ReLUs in place (ResNets).

The output of such a layer is counted with the layer after it, whose input it is. Its own last operation needs it as
well, in the beginning of its backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from simplan.program.moment import Moment
from simplan.spec.layer import Gemm, Kernel, LayerKind, LayerSpec, Pointwise
from simplan.spec.software import StateBytes

__all__ = ["convolution_moments", "has_convolutions"]

_SHORTCUT = "shortcut"
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
    output = b * layer.made_elements * state.activation
    backward = _Backward(layer, b, state)
    if layer.kind is LayerKind.EMBEDDING:
        backward.chain(layer.kernels, output)
        return (Moment(output),), tuple(backward.moments)
    branch = [kernel for kernel in layer.kernels[:-2] if not kernel.name.startswith(_SHORTCUT)]
    shortcut = [kernel for kernel in layer.kernels[:-2] if kernel.name.startswith(_SHORTCUT)]
    backward.moments.append(Moment(3 * output))  # the result of the last ReLU, gradients after and before it
    backward.beside = output
    if shortcut:
        given = backward.chain(shortcut, output, keeps=True)
        backward.beside = given
    backward.chain(branch, output, keeps=not shortcut)
    return (Moment(output * (2 if shortcut else 1)),), tuple(backward.moments)


class _Backward:
    """Walks backward through operations that follow each other, from what is kept on, and notes what is there.

    Attributes:
        moments: So far.
        beside: Bytes of gradients that other branches hold.
        gone: Bytes of what was kept and is gone.
    """

    def __init__(self, layer: LayerSpec, b: int, state: StateBytes) -> None:
        self._layer, self._b, self._state = layer, b, state
        self.moments: list[Moment] = []
        self.beside = 0
        self.gone = 0

    def chain(self, kernels: Sequence[Kernel], gradient: int, *, keeps: bool = False) -> int:
        """Walks through kernels, the last one first; gives the bytes of the gradient of their input.

        Args:
            kernels: In the order of forward.
            gradient: Bytes of the gradient of their output.
            keeps: That gradient is among those beside.
        """
        for kernel in reversed(kernels):
            arriving = 0 if keeps else gradient
            keeps = False
            assert isinstance(kernel, Gemm | Pointwise)
            if isinstance(kernel, Gemm):
                gradient = self._convolution(kernel, arriving)
            else:
                gradient = self._pointwise(kernel, arriving)
            self.gone += self._kept_by(kernel)
        return gradient

    def _convolution(self, kernel: Gemm, arriving: int) -> int:
        """Gradients of its output, input (but of images) and weight; autocast then widens the last one."""
        state = self._state
        is_first = self._layer.kind is LayerKind.EMBEDDING
        leaving = 0 if is_first else self._b * kernel.input_elements * state.activation
        weight = kernel.weight_elements
        held = self.beside + leaving - self.gone
        self.moments.append(Moment(held + arriving, gradients=weight * state.activation))
        self.gone += weight * state.weight_copy
        if state.weight_copy:
            self.moments.append(
                Moment(held - weight * state.weight_copy, gradients=weight * (state.activation + state.gradient))
            )
        return leaving

    def _pointwise(self, kernel: Pointwise, arriving: int) -> int:
        """Gradients of its output and its input, which of all but a pooling are as large."""
        before = self._layer.kernels[self._layer.kernels.index(kernel) - 1]
        elements = before.writes if isinstance(before, Pointwise) else kernel.writes
        leaving = self._b * elements * self._state.activation
        self.moments.append(Moment(self.beside + arriving + leaving - self.gone))
        return leaving

    def _kept_by(self, kernel: Kernel) -> int:
        """What is gone once the backward of a kernel is: its result, if that is kept for it, or its input."""
        state, kernels = self._state, self._layer.kernels
        names = {kernel.name}
        if isinstance(kernel, Gemm):
            names = set()  # its input is the result of a ReLU, which needs it too
        elif kernel.name.startswith(("bn", _SHORTCUT)):
            names.add(kernels[kernels.index(kernel) - 1].name)
        found = [tensor for tensor in self._layer.saved if tensor.made_by in names]
        return sum(
            tensor.num_bytes(state.activation, state.residual) * (1 if tensor.of_microbatch else self._b)
            for tensor in found
        )
