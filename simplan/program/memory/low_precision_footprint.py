"""Memory of FP8 and FP4 linear layers: tensors saved for backward, and quantized operands while kernels run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from simplan.model.kernel import Pointwise
from simplan.model.layer import Gemm, LayerSpec, Operator, Tensor
from simplan.model.low_precision import LinearFormat, joins, quantized_linears
from simplan.software.software import StateBytes

_EAGER_BYTES = 8
"""Bytes per element of an eager cast, in addition to the quantized tensor: the scaled FP32 operand, and its clamp."""

_POST_SCALE_BYTES = 4
"""Bytes per element, in FP32, of a result that is scaled per row and column after its matmul."""


def keeping_quantized(layer: LayerSpec, form: LinearFormat | None, *, joined: bool = False) -> LayerSpec:
    """Returns the layer with quantized inputs of linear layers saved instead of BF16 ones, if the format does so.

    Each linear layer has a separate copy, along columns, also if several have the same input, unless they are fused.
    Tensors that another operator saves as well, such as the output of the attention core, stay. A frozen matrix saves
    no input. In eager mode only the time of saving differs.

    Args:
        layer: Layer as built by its family: matmuls save their inputs unquantized.
        form: Format of linear layers; None for no quantization.
        joined: True if matrices with the same input are fused.
    """
    if form is None:
        return layer
    quantized = [gemm.name for gemm in quantized_linears(layer, form) if gemm.trained]
    if form.kept == "wide" and layer.compiled and not form.wide_weight_gradient:
        return _saving_what_casts_read(layer, form, quantized)
    if form.kept == "wide" and not form.eager:
        return layer
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
        rows = layer.tensors[wide].elements // gemm.k  # of all-gathered tokens a rank keeps its own
        copy = Tensor(f"{gemm.name} input in {form.precision}", form.quantized_bytes(gemm.k, rows), 1)
        operators.append(replace(operator, makes=(*operator.makes, copy), saves=(copy.name,)))
        before = operator
    return replace(layer, operators=tuple(operators))


def _saving_what_casts_read(layer: LayerSpec, form: LinearFormat, quantized: Collection[str]) -> LayerSpec:
    """Returns a compiled layer, in which the cast of a quantized input in backward makes the input itself, if it can.

    It can where the input follows from tensors that other operators save (a norm, an activation). A BF16 matmul needs
    it in memory, so it is saved (``LayerImplementation.compiled``). An input that another operator saves anyway, such
    as the output of the attention core, is saved quantized as well. Measured: torchao 0.18, partitioner of torch 2.13.
    """
    gemms = {
        index: operator.kernel
        for index, operator in enumerate(layer.operators)
        if isinstance(operator.kernel, Gemm) and operator.kernel.name in quantized
    }
    others = {name for index, operator in enumerate(layer.operators) if index not in gemms for name in operator.saves}
    made_again, there = set[str](), others | {tensor.name for tensor in layer.inputs}
    for operator in layer.operators:
        if (operator.kernel is None or isinstance(operator.kernel, Pointwise)) and there.issuperset(operator.reads):
            made_again |= {tensor.name for tensor in operator.makes} - there
            there |= made_again
    operators = list(layer.operators)
    for index, gemm in gemms.items():
        operator = operators[index]
        wide = {name for name in operator.saves if name not in made_again}
        copies = [
            Tensor(f"{gemm.name} input in {form.precision}", form.quantized_bytes(gemm.k, gemm.m), 1)
            for _ in wide & others
        ]
        names = tuple(copy.name for copy in copies) or tuple(wide)
        operators[index] = replace(operator, makes=(*operator.makes, *copies), saves=names)
    return replace(layer, operators=tuple(operators))


def kept_weight_bytes(form: LinearFormat, gemm: Gemm) -> int:
    """Returns the bytes saved of a weight per microbatch: its quantized copy along columns, or 0."""
    keeps = form.kept == "quantized" and form.weights == "microbatch" and gemm.propagates
    return _along_columns(form, gemm) if keeps else 0


def _along_rows(form: LinearFormat, gemm: Gemm) -> int:
    """Returns the bytes of a GEMM's weights quantized along the reduction dimension of forward."""
    return gemm.num_groups * form.quantized_bytes(gemm.n, gemm.k, weight=True)


def _along_columns(form: LinearFormat, gemm: Gemm) -> int:
    """Returns the bytes of a GEMM's weights quantized along the reduction dimension of the input gradient."""
    return gemm.num_groups * form.quantized_bytes(gemm.k, gemm.n, weight=True)


def persistent_weight_bytes(layer: LayerSpec, state: StateBytes) -> int:
    """Returns the bytes of a layer's quantized weights between steps, minus the BF16 weights that they replace."""
    form = state.linear
    if form is None or form.weights == "microbatch":
        return 0
    found = 0
    for gemm in quantized_linears(layer, form):
        found += _along_rows(form, gemm)
        found += _along_columns(form, gemm) if gemm.propagates and form.keeps_columns and not form.has_one_copy else 0
        if form.weights == "stored":
            found -= gemm.weight_elements * (state.parameter if gemm.trained else state.frozen)
    return found


def forward_scratch_bytes(layer: LayerSpec, gemm: Gemm, b: int, state: StateBytes) -> int:
    """Returns the bytes of one matmul's input and weight quantized along rows, held until it is done; 0 without format.

    A weight that is quantized less often than per microbatch is resident anyway and not counted.
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
    has_bias = any(f".{parameter.name}".endswith(f".{gemm.name}.bias") for parameter in layer.parameters)
    return max(both, input_cast - result, weight_cast - result, result if has_bias else 0)


def backward_scratch(layer: LayerSpec, gemm: Gemm, b: int, state: StateBytes) -> Iterator[tuple[int, int]]:
    """Yields, for the two matmuls of backward, extra bytes next to BF16 gradients, and bytes of the weight gradient.

    The gradient is quantized along rows and columns together. The matmul for the input gradient reads the gradient's
    rows and the weight's columns. The matmul for the weight gradient then reads the columns of gradient and input. Its
    result has the dtype in which the weight is all-gathered or stored. A frozen matrix has only the first matmul, and
    none if no trained parameter precedes it. Yields nothing without a format.

    Args:
        b: Microbatch size, in sequences.
        state: Bytes per element of tensors.
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
    """Yields the bytes of ``backward_scratch`` for torchao's eager autograd function, which holds all operands.

    Kernels need the first operand in rows and the second in columns, so the weight, and then gradient and input, are
    copied. Results with a scale per row are multiplied by it after the matmul. The gradient of the weight is in the
    dtype of the activations; autograd casts it to the dtype of the weight.
    """
    rows, elements = b * gemm.m, gemm.weight_elements
    gradient, weight = form.quantized_bytes(rows, gemm.n), _along_columns(form, gemm)
    inputs, result = form.quantized_bytes(gemm.k, rows), rows * gemm.k
    later = result * state.activation if gemm.propagates else 0  # counted, but not allocated before its matmul
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
