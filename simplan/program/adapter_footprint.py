"""Moments of most memory in a block with adapters (``simplan.spec.adapters``), all other weights frozen.

Forward has the product of a matrix, that of its adapter and their sum at once. Backward scales the gradient of the sum
for the adapter, and has two gradients of a matrix's input, the adapter's first, until they are added; what the adapter
kept is gone by then. Frozen weights, and so the residual stream, are as wide as activations.
"""

from __future__ import annotations

from simplan.program.moment import Moment
from simplan.spec.layer import Gemm, LayerSpec, Pointwise
from simplan.spec.recompute import Recomputation
from simplan.spec.software import StateBytes

__all__ = ["adapted_moments", "has_adapters"]

_AT_ONCE = 3  # a product, that of the adapter, and their sum


def has_adapters(layer: LayerSpec) -> bool:
    """Whether the layer is a block with adapters."""
    return any(kernel.name.endswith(".lora_a") for kernel in layer.kernels)


def adapted_moments(
    layer: LayerSpec, b: int, state: StateBytes, recomputation: Recomputation
) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """Moments of forward, beside what it keeps, and of backward, beside what was kept.

    Args:
        layer: The block.
        b: Sequences of a microbatch.
        state: Element widths.
        recomputation: What of it is kept.
    """
    width = state.activation
    assert state.residual == width, "the base model is in the precision of computing"
    kernels = {kernel.name: kernel for kernel in layer.kernels}
    down, source = kernels["down"], kernels["up"]
    assert isinstance(down, Gemm)
    assert isinstance(source, Gemm)
    inner, whole, output = (
        b * elements * width for elements in (down.m * down.k, down.m * down.n, layer.output_elements)
    )
    num_sources = 2 if "gate" in kernels else 1
    results = _AT_ONCE if "down.lora_a" in kernels else 1
    sources = _AT_ONCE if "up.lora_a" in kernels else 1
    kept = {tensor.name for tensor in recomputation.saved}
    of_mlp = sum(name in kept for name in ("gate output", "silu output", "up output", "gated product", "gelu output"))
    scattered = whole * (2 if b > 1 else 1) + output if output < whole else 0
    alive = 0 if "residual1" in kept else output
    held = num_sources + 1  # inputs of the last matrix's input, and that itself
    forward = max(
        alive + 2 * output,
        alive + (num_sources - 1 + sources - of_mlp) * inner,
        alive + (2 * num_sources - of_mlp) * inner,
        alive + (held - of_mlp) * inner + max(results * whole, whole + scattered),
    )
    return (Moment(forward),), _backward(layer, b, state, output, inner, whole)


def _backward(layer: LayerSpec, b: int, state: StateBytes, output: int, inner: int, whole: int) -> tuple[Moment, ...]:
    """From the gradient of the output to those of the inputs of the last pointwise kernel."""
    width = state.activation
    kernels = {kernel.name: kernel for kernel in layer.kernels}
    incoming = output + (whole if output < whole else 0)
    activation = kernels["silu_multiply" if "gate" in kernels else "gelu"]
    assert isinstance(activation, Pointwise)
    inputs = b * activation.writes * width if activation.propagates else 0
    moments = []
    released = 0
    adapter = kernels.get("down.lora_a")
    if isinstance(adapter, Gemm):
        released = inner
        narrow = b * adapter.m * adapter.n * width
        gradient = max(adapter.k, layer.output_elements // adapter.m) * adapter.n * state.gradient
        moments = [
            Moment(incoming + whole + narrow, gradients=gradient),
            Moment(incoming + narrow + inner, gradients=gradient),
        ]
        if activation.propagates:
            moments += [Moment(incoming + 2 * inner - released), Moment(output + 3 * inner - released)]
    if activation.propagates:
        moments += [Moment(incoming + inner), Moment(output + inner + inputs - released)]
    return tuple(moments) or (Moment(output),)
