"""Memory of linear layers in 8 or 4 bits: what they keep for backward, and their quantized operands while they run."""

from __future__ import annotations

from dataclasses import replace

from simplan.program.moment import Moment
from simplan.spec.joined import joins
from simplan.spec.layer import Exchange, Gemm, LayerSpec, Pointwise, Saved
from simplan.spec.low_precision import LinearFormat, quantized_linears
from simplan.spec.software import StateBytes

__all__ = [
    "backward_moments",
    "forward_cast_bytes",
    "keeping_quantized",
    "kept_weight_bytes",
    "resting_weight_bytes",
]

_KEEP_THEIR_RESULT = ("relu",)  # their own backward reads it


def keeping_quantized(layer: LayerSpec, form: LinearFormat | None, *, joined: bool = False) -> LayerSpec:
    """The layer, with quantized inputs of linear layers kept in place of those in 16 bits, where a format does so.

    Each linear layer has a copy of its own, along columns, also where several have one input, unless these are one.
    What something else keeps as well, such as the output of the attention core, stays. A frozen matrix keeps no input.

    Args:
        layer: As its builder made it: it keeps inputs of matrix products as they are.
        form: How linear layers are quantized; None for not at all.
        joined: Matrices with one input are one.
    """
    if form is None or form.kept == "wide":
        return layer
    saved = list(layer.saved)
    routed = any(kernel.name == "router" for kernel in layer.kernels)  # which reads in 16 bits what others quantize
    for gemm in quantized_linears(layer, form):
        if not gemm.trained:
            continue
        place = layer.kernels.index(gemm)
        before = layer.kernels[place - 1] if place else None
        if joined and isinstance(before, Gemm) and joins(before, gemm):
            continue
        wide = _made_for(layer, gemm)
        if wide in saved and not (routed and wide is not None and wide.made_by == "norm2"):
            saved.remove(wide)
        rows = gemm.m if wide is None else wide.elements // gemm.k  # of gathered tokens a rank keeps its own
        num_bytes = form.quantized_bytes(gemm.k, rows)
        saved.append(Saved(f"{gemm.name} input in {form.precision}", num_bytes, 1, made_by=gemm.name))
    return replace(layer, saved=tuple(saved))


def _made_for(layer: LayerSpec, gemm: Gemm) -> Saved | None:
    """What the kernel before a matrix product makes for products alone."""
    makers = set()
    for kernel in reversed(layer.kernels[: layer.kernels.index(gemm)]):
        if isinstance(kernel, Gemm):
            continue  # of the same input
        if not isinstance(kernel, Pointwise | Exchange) or kernel.name in _KEEP_THEIR_RESULT:
            return None
        if isinstance(kernel, Pointwise):
            makers.add(kernel.name)
            break
        if kernel.axis in ("ep", "etp"):
            makers.add(kernel.name)
    made = [t for t in layer.saved if t.made_by in makers and not t.bytes_per_element and not t.residual]
    whole = gemm.m * gemm.k
    return next((t for t in made if t.elements % gemm.k == 0 and whole % t.elements == 0), None)


def kept_weight_bytes(form: LinearFormat, gemm: Gemm) -> int:
    """What forward keeps of a weight for one microbatch: nothing, or its quantized copy along columns."""
    keeps = form.kept == "quantized" and form.weights == "microbatch" and gemm.propagates
    return _along_columns(form, gemm) if keeps else 0


def _along_rows(form: LinearFormat, gemm: Gemm) -> int:
    """All weights of a product, quantized along the dimension that forward adds up."""
    return gemm.num_groups * form.quantized_bytes(gemm.n, gemm.k, weight=True)


def _along_columns(form: LinearFormat, gemm: Gemm) -> int:
    """The same along the one that backward adds up for the gradient of the input."""
    return gemm.num_groups * form.quantized_bytes(gemm.k, gemm.n, weight=True)


def resting_weight_bytes(layer: LayerSpec, state: StateBytes) -> int:
    """What the quantized weights of a layer take between steps, less the weights in 16 bits that they stand for."""
    form = state.linear
    if form is None or form.weights == "microbatch":
        return 0
    found = 0
    for gemm in quantized_linears(layer, form):
        found += _along_rows(form, gemm) + (_along_columns(form, gemm) if gemm.propagates else 0)
        if form.weights == "stored":
            found -= gemm.weight_elements * (state.parameter if gemm.trained else state.frozen)
    return found


def forward_cast_bytes(layer: LayerSpec, gemm: Gemm, b: int, state: StateBytes) -> int:
    """Input and weight of one product along rows, which are there until it is done; 0 in 16 bits.

    A weight that is quantized less often than that is there anyway.
    """
    form = state.linear
    if form is None or gemm not in quantized_linears(layer, form):
        return 0
    weight = _along_rows(form, gemm) if form.weights == "microbatch" else 0
    return form.quantized_bytes(b * gemm.m, gemm.k) + weight


def backward_moments(layer: LayerSpec, gemm: Gemm, b: int, state: StateBytes, held: int) -> tuple[Moment, ...]:
    """Moments of the two products in backward; nothing where they are in 16 bits.

    The gradient is quantized along rows and columns at once. The product for the input's gradient takes the rows and
    the weight's columns; then, beside its result, the product for the weight's gradient takes the gradient's columns
    and the input's. The result is in the precision that the weight is gathered or kept in. A frozen matrix has the
    first product alone, and none where nothing trained is below it.

    Args:
        layer, gemm: Which product.
        b: Sequences of a microbatch.
        state: Element widths.
        held: Bytes beside what was kept, gradient of the output among them.
    """
    form = state.linear
    if form is None or not (gemm.trained or gemm.propagates) or gemm not in quantized_linears(layer, form):
        return ()
    rows = b * gemm.m
    gradient, result = form.quantized_bytes(rows, gemm.n), rows * gemm.k * state.activation
    wide = form.kept == "wide"
    again_weight = wide and form.weights == "microbatch"
    weight = _along_columns(form, gemm) if again_weight else 0
    again = form.quantized_bytes(gemm.k, rows) if wide else 0
    if not gemm.trained:
        return (Moment(held + gradient + weight + result),)
    copies, beside = (1, 0) if form.wide_weight_gradient else (2, gradient + again)
    return (
        Moment(held + copies * gradient + weight + result),
        Moment(held + beside + result, gradients=gemm.weight_elements * state.gathered),
    )
