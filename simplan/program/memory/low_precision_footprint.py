"""Memory of linear layers in 8 or 4 bits: what they keep for backward, and their quantized operands while they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simplan.model.fused_gemms import joins
from simplan.model.layer import Gemm, LayerSpec, Operator, Tensor
from simplan.model.low_precision import LinearFormat, quantized_linears
from simplan.software.software import StateBytes

__all__ = [
    "backward_scratch",
    "copied_weight_bytes",
    "forward_scratch_bytes",
    "keeping_quantized",
    "kept_weight_bytes",
    "resting_weight_bytes",
]


_EAGER_BYTES = 8
"""An eager cast's per element, beside the quantized one: the operand in FP32 scaled, and that clamped."""

_POST_SCALE_BYTES = 4
"""Per element of a result that is scaled per row and column after its matmul, in FP32."""


def keeping_quantized(layer: LayerSpec, form: LinearFormat | None, *, joined: bool = False) -> LayerSpec:
    """The layer, with quantized inputs of linear layers saved in place of those in 16 bits, where a format does so.

    Each linear layer has a copy of its own, along columns, also where several have one input, unless these are one.
    What something else saves as well, such as the output of the attention core, stays. A frozen matrix saves no input.
    In eager mode only the time of saving is another.

    Args:
        layer: As its family built it: matmuls save their inputs as they are.
        form: How linear layers are quantized; None for not at all.
        joined: Matrices with one input are one.
    """
    if form is None or (form.kept == "wide" and not form.eager):
        return layer
    quantized = [gemm.name for gemm in quantized_linears(layer, form) if gemm.trained]
    if form.eager:
        return replace(layer, late_savers=tuple(quantized))
    operators: list[Operator] = []
    before: Operator | None = None
    for operator in layer.operators:
        gemm = operator.kernel
        if not isinstance(gemm, Gemm) or gemm.name not in quantized:
            operators.append(operator)
            before = operator if gemm is not None else before
            continue
        if joined and before is not None and isinstance(before.kernel, Gemm) and joins(before.kernel, gemm):
            operators.append(replace(operator, saves=()))
            continue
        (wide,) = operator.saves
        rows = layer.tensors[wide].elements // gemm.k  # of gathered tokens a rank keeps its own
        copy = Tensor(f"{gemm.name} input in {form.precision}", form.quantized_bytes(gemm.k, rows), 1)
        operators.append(replace(operator, makes=(*operator.makes, copy), saves=(copy.name,)))
        before = operator
    return replace(layer, operators=tuple(operators))


def copied_weight_bytes(layer: LayerSpec, kernel: Gemm, state: StateBytes) -> int:
    """The copy of a matrix that forward makes, in the precision of the activations, and saves for backward.

    FSDP gathers weights in that precision; experts that it leaves alone are copied. Frozen weights are in it already,
    and a weight that backward makes no gradient with is not kept. Linear layers in a lower precision quantize weights
    as they are.
    """
    if state.linear is not None and kernel in quantized_linears(layer, state.linear):
        return kept_weight_bytes(state.linear, kernel)
    if not (kernel.trained and kernel.propagates):
        return 0
    spread = not state.gathers_experts and any(p.expert and p.name == f"{kernel.name}.weight" for p in layer.parameters)
    narrows = spread and state.gathered != state.parameter
    return kernel.weight_elements * (state.weight_copy or (state.gathered if narrows else 0))


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


def forward_scratch_bytes(layer: LayerSpec, gemm: Gemm, b: int, state: StateBytes) -> int:
    """Input and weight of one matmul along rows, which are there until it is done; 0 in 16 bits.

    A weight that is quantized less often than that is there anyway.
    """
    form = state.linear
    if form is None or gemm not in quantized_linears(layer, form):
        return 0
    weight = _along_rows(form, gemm) if form.weights == "microbatch" else 0
    rows = b * gemm.m
    both = form.quantized_bytes(rows, gemm.k) + weight
    if not form.eager:
        return both
    result = rows * gemm.n * state.activation
    input_cast = both - weight + _EAGER_BYTES * rows * gemm.k
    weight_cast = both + _EAGER_BYTES * gemm.weight_elements
    has_bias = any(parameter.name.split(".")[-2:] == [gemm.name, "bias"] for parameter in layer.parameters)
    return max(both, input_cast - result, weight_cast - result, result if has_bias else 0)


def backward_scratch(layer: LayerSpec, gemm: Gemm, b: int, state: StateBytes) -> Iterator[tuple[int, int]]:
    """Of the two matmuls of backward, bytes beside gradients in 16 bits, and of the weight's gradient.

    The gradient is quantized along rows and columns at once. The matmul for the input's gradient takes the rows and
    the weight's columns; then, beside its result, the one for the weight's gradient takes the gradient's columns
    and the input's. The result is in the precision that the weight is gathered or kept in. A frozen matrix has the
    first one alone, and none where nothing trained is below it. Nothing in 16 bits.

    Args:
        layer, gemm: Which matmul.
        b: Sequences of a microbatch.
        state: Element widths.
    """
    form = state.linear
    if form is None or not (gemm.trained or gemm.propagates) or gemm not in quantized_linears(layer, form):
        return
    if form.eager:
        yield from _eager_backward(form, gemm, b, state)
        return
    rows = b * gemm.m
    gradient = form.quantized_bytes(rows, gemm.n)
    wide = form.kept == "wide"
    weight = _along_columns(form, gemm) if wide and form.weights == "microbatch" else 0
    again = form.quantized_bytes(gemm.k, rows) if wide else 0
    if not gemm.trained:
        yield gradient + weight, 0
        return
    copies, beside = (1, 0) if form.wide_weight_gradient else (2, gradient + again)
    yield copies * gradient + weight, 0
    yield beside, gemm.weight_elements * state.gathered


def _eager_backward(form: LinearFormat, gemm: Gemm, b: int, state: StateBytes) -> Iterator[tuple[int, int]]:
    """The same of torchao's autograd function in eager mode, whose quantized operands all stay until it returns.

    Kernels want the first operand in rows and the second in columns, so that the weight, and then gradient and input,
    are copied. Results with a scale per row are multiplied by it after the matmul. The gradient of the weight is in the
    precision of the activations, and autograd casts it to that of the weight.
    """
    rows, elements = b * gemm.m, gemm.weight_elements
    gradient, weight = form.quantized_bytes(rows, gemm.n), _along_columns(form, gemm)
    inputs, result = form.quantized_bytes(gemm.k, rows), rows * gemm.k
    later = result * state.activation if gemm.propagates else 0  # counted, but not there before its matmul
    post_scale = 0 if form.has_one_scale else _POST_SCALE_BYTES
    yield gradient + _EAGER_BYTES * rows * gemm.n - later, 0
    yield gradient + weight + _EAGER_BYTES * elements - later, 0
    yield gradient + 2 * weight + post_scale * result, 0
    if form.wide_weight_gradient:
        yield gradient + weight, elements * state.activation
    else:
        yield 2 * gradient + weight + _EAGER_BYTES * rows * gemm.n, 0
        yield 2 * gradient + weight + inputs + _EAGER_BYTES * rows * gemm.k, 0
        yield 3 * gradient + weight + 2 * inputs + post_scale * elements, elements * state.activation
    if state.gathered != state.activation:
        yield 0, elements * (state.activation + state.gradient)
