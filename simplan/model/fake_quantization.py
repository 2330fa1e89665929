"""Simulated quantization of linear layers (quantization-aware training), as torchao runs it in eager mode.

Forward rounds the weight and the input of a linear layer to few bits and back, and multiplies the results. Weights and
their gradients keep their width, and gradients pass through the rounding (Jacob et al. 2018, arXiv:1712.05877). A
weight is rounded once per microbatch, not per token; every linear layer rounds its input for itself.

Integers and FP8 are single operations of torch, of which autograd saves operands (torchao 0.18.0,
quantization/qat/fake_quantizer.py, linear.py). MXFP4 is one autograd function: it saves packed operands, and unpacks
them for the matmuls of forward and again for those of backward (prototype/qat/mx.py; prototype/mx_formats/mx_tensor.py,
``_addmm_mx_dispatch``, KernelPreference.EMULATED). ``quantize_`` replaces every ``nn.Linear``, the output head among
them; a loss in chunks reads the head's weight as it is. With adapters, the matrices below them are rounded, which
autograd does not follow, while adapters read their input as it is (torchtune at bd2a0fc, modules/peft/lora.py,
``QATLoRALinear``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pydantic import Field

from simplan.base import Count, Spec
from simplan.model.kernel import OperandKernels
from simplan.model.layer import Gemm, LayerSpec, Operator, Role, Tensor

FakeWeights = Literal["int4", "int4_fp8", "intx_int4", "fp8", "mxfp4"]
FakeActivations = Literal["int8", "fp8", "mxfp4"]

_USUAL_GROUP, MX_BLOCK = 128, 32
GROUPED: tuple[FakeWeights, ...] = ("int4", "int4_fp8", "intx_int4")
"""Formats of weights with a scale per group of inputs."""


class FakeQuantization(Spec):
    """Simulated quantization of the linear layers of a run."""

    weights: FakeWeights = Field(
        description=(
            "int4 (torchao's Int4WeightFakeQuantizer), int4_fp8 (the same, rounded to fp8 before), intx_int4 "
            "(IntxFakeQuantizer, as in torchtune), fp8, or mxfp4"
        )
    )
    activations: FakeActivations | None = Field(
        None, description="format of inputs: int8 per token, fp8 per token or, with weights in mxfp4, mxfp4"
    )
    group_size: Count | None = Field(None, description="inputs per scale of a weight in int4; default: 128")

    def __str__(self) -> str:
        """See ``words``."""
        return self.words

    @property
    def words(self) -> str:
        """Formats in words."""
        group = f" in groups of {self.inputs_per_scale}" if self.weights in GROUPED else ""
        return f"weights as {self.weights}{group}" + (f", inputs as {self.activations}" if self.activations else "")

    @property
    def inputs_per_scale(self) -> int:
        """Inputs of a weight that share a scale, where not a whole row does."""
        return MX_BLOCK if self.weights == "mxfp4" else self.group_size or _USUAL_GROUP


class _Pair(NamedTuple):
    """A number for operands of 2 bytes per element, and for operands of 4."""

    narrow: int
    wide: int

    def of(self, width: int) -> int:
        """The number for a width in bytes."""
        return self.wide if width > 2 else self.narrow


class _Steps(NamedTuple):
    """Single operations of torch that simulate a format, in bytes per element of the operand where not said otherwise.

    Attributes:
        saved: Saved by autograd, without the operand itself and the result.
        group_saved, row_saved: Saved per group or row.
        kept: Scales and zero points per group or row that the module keeps as attributes.
        forward, backward: Temporaries at the peak of forward, and of backward with the gradient that it returns.
        forward_traffic, backward_traffic: Read and written.
        kernels: Operations of forward and of backward.
        saves_operand: Autograd saves the operand, too.
    """

    saved: _Pair
    group_saved: _Pair
    row_saved: _Pair
    forward: _Pair
    backward: _Pair
    forward_traffic: _Pair
    backward_traffic: _Pair
    kernels: tuple[int, int]
    kept: int = 0
    saves_operand: bool = False


_ZERO = _Pair(0, 0)
_OF_INTX = _Pair(8, 8)  # a scale and a zero point in FP32
_STEPS: dict[str, _Steps] = {
    # the FP32 copy, differences to the smallest, quotients and rounded numbers; four numbers per group
    "int4": _Steps(
        _Pair(16, 12), _Pair(16, 16), _ZERO, _Pair(6, 4), _Pair(10, 8), _Pair(78, 66), _Pair(174, 162), (16, 38)
    ),
    # those of fp8, and of 16 bits again: absolute values, quotients, rounded numbers, products
    "int4_fp8": _Steps(
        _Pair(22, 28), _Pair(10, 20), _Pair(6, 8), _Pair(2, 4), _Pair(5, 8), _Pair(87, 116), _Pair(202, 264), (25, 56)
    ),
    # rounded numbers before they are clamped; the module keeps scale and zero point
    "intx_int4": _Steps(
        _Pair(4, 4), _OF_INTX, _ZERO, _Pair(12, 8), _Pair(8, 6), _Pair(59, 68), _Pair(62, 38), (24, 9), kept=8
    ),
    # absolute values, the quotient and the clamped number in FP32, and its FP32 copy
    "fp8": _Steps(
        _Pair(14, 12), _ZERO, _Pair(6, 8), _Pair(5, 1), _Pair(10, 8), _Pair(52, 46), _Pair(139, 147), (10, 26),
        saves_operand=True,
    ),
    "int8": _Steps(
        _Pair(4, 4), _ZERO, _OF_INTX, _Pair(12, 8), _Pair(8, 6), _Pair(56, 64), _Pair(62, 38), (25, 9), kept=8
    ),
}  # fmt: skip
"""Formats of single operations, as torch allocates and dispatches them; a test counts both again."""

_MX_UNPACKING_BYTES = 30
"""Bytes per element of MXFP4 at the peak of unpacking: indices, signs and numbers of 4 bits in INT32 and FP32."""
_MX_TRAFFIC = (290, 118)
_MX_KERNELS = (88, 34)


@dataclass(frozen=True, slots=True)
class SimulatedLinears:
    """Simulated quantization in one run.

    Attributes:
        weight_bytes, activation_bytes: Bytes per element of weights where forward reads them, and of activations.
        microbatch_size: Sequences of a microbatch.
    """

    form: FakeQuantization
    weight_bytes: int
    activation_bytes: int
    microbatch_size: int

    @property
    def kernels(self) -> OperandKernels:
        """Kernels of a linear layer."""
        if self.form.weights == "mxfp4":
            return OperandKernels(_MX_TRAFFIC, _MX_TRAFFIC, _MX_KERNELS, _MX_KERNELS)
        weights = _STEPS[self.form.weights]
        traffic = weights.forward_traffic.of(self.weight_bytes), weights.backward_traffic.of(self.weight_bytes)
        if self.form.activations is None:
            return OperandKernels(traffic, None, weights.kernels, (0, 0))
        inputs, width = _STEPS[self.form.activations], self.activation_bytes
        of_inputs = inputs.forward_traffic.of(width), inputs.backward_traffic.of(width)
        return OperandKernels(traffic, of_inputs, weights.kernels, inputs.kernels)


def with_fake_quantization(layer: LayerSpec, simulated: SimulatedLinears) -> LayerSpec:
    """A layer whose linear layers simulate few bits; the layer itself if it has none."""
    form, gemms = simulated.form, fake_quantized(layer)
    if not gemms:
        return layer
    names, make = {gemm.name for gemm in gemms}, _packed if form.weights == "mxfp4" else _rounded
    operators: list[Operator] = []
    read: list[str] = []  # inputs that autograd no longer saves, and the caller of a module holds until it returns
    for operator in layer.operators:
        kernel = operator.kernel
        if not isinstance(kernel, Gemm) or kernel.name not in names:
            operators.append(operator)
            continue
        read += operator.reads[:1]
        for made in make(operator, kernel, simulated):
            if made.kernel is not None and Role.ROW_PARALLEL in operator.roles:
                operators.append(Operator(reads=tuple(dict.fromkeys(read)), detached=True, roles=operator.roles))
                read.clear()
            operators.append(made)
    widths = simulated.weight_bytes, simulated.activation_bytes
    words = form.weights, form.activations or "", form.inputs_per_scale, *widths, simulated.microbatch_size
    attributes = tuple(table for gemm in gemms for table in _kept_scales(gemm, simulated))
    key = f"{layer.key},simulated:{':'.join(map(str, words))}"
    # an autograd function saves its operands when it has run
    late = tuple(names) if make is _packed else ()
    return replace(
        layer, key=key, operators=tuple(operators), attributes=attributes, late_savers=layer.late_savers + late
    )


def fake_quantized(layer: LayerSpec) -> list[Gemm]:
    """Matmuls of the linear layers of a layer, trained or below an adapter.

    Experts, routers and heads whose loss is in chunks are none.
    """
    kernels = list(zip(layer.kernels, layer.roles, strict=True))
    names = {kernel.name for kernel, _ in kernels}
    gemms = [kernel for kernel, roles in kernels if isinstance(kernel, Gemm) and roles.isdisjoint(_NO_LINEAR)]
    return [
        gemm
        for gemm in gemms
        if (gemm.trained or f"{gemm.name}.lora_a" in names)
        and gemm.num_groups == 1
        and not (gemm.chunks or gemm.image_elements)
    ]


_NO_LINEAR = frozenset({Role.GATING, Role.EXPERTS, Role.UNQUANTIZED, Role.ADAPTER})


def _kept_scales(gemm: Gemm, simulated: SimulatedLinears) -> Iterator[Tensor]:
    """Scales and zero points that modules keep from one microbatch to the next, of whole weights on every rank."""
    form = simulated.form
    weights, inputs = _STEPS.get(form.weights), _STEPS.get(form.activations or "")
    if weights is not None and weights.kept:
        groups = gemm.weight_elements // form.inputs_per_scale
        yield Tensor(f"{gemm.name} scales of the weight", weights.kept * groups, 1, per_microbatch=True)
    if inputs is not None and inputs.kept:
        rows = simulated.microbatch_size * gemm.m
        yield Tensor(f"{gemm.name} scales of the input", inputs.kept * rows, 1, per_microbatch=True)


def _rounded(operator: Operator, gemm: Gemm, simulated: SimulatedLinears) -> Iterator[Operator]:
    """A linear layer whose operands single operations round; autograd saves what these and the matmul read."""
    form, name, source = simulated.form, gemm.name, operator.reads[0]
    if form.activations is not None:
        steps, width = _STEPS[form.activations], simulated.activation_bytes
        result, saved = Tensor(f"{name} rounded input", gemm.m * gemm.k), f"{name} input while rounded"
        size = gemm.m * (steps.saved.of(width) * gemm.k + steps.row_saved.of(width))
        yield Operator(
            reads=(source,),
            makes=(result, Tensor(saved, size, 1)),
            saves=(saved, *((source,) if steps.saves_operand else ())),
            forward_scratch=(Tensor(f"{name} input, forward", gemm.m * gemm.k * steps.forward.of(width), 1),),
            # without the gradient of the input, which is a tensor of its own
            backward_scratch=(
                Tensor(f"{name} input, backward", gemm.m * gemm.k * (steps.backward.of(width) - width), 1),
            ),
            roles=operator.roles,
        )
        source = result.name
    steps, width, elements = _STEPS[form.weights], simulated.weight_bytes, gemm.weight_elements

    def of_weight(what: str, num_bytes: int) -> Tensor:
        return Tensor(f"{name} weight {what}", num_bytes, 1, per_microbatch=True)

    groups = elements // form.inputs_per_scale
    size = elements * steps.saved.of(width) + groups * steps.group_saved.of(width) + gemm.n * steps.row_saved.of(width)
    saved_weight, rounded = of_weight("while rounded", size), of_weight("rounded", elements * width)
    rounding = Operator(
        makes=(rounded,),
        forward_scratch=(of_weight("forward", elements * steps.forward.of(width)),),
        roles=operator.roles,
    )
    kernels = simulated.kernels
    if gemm.trained:
        scratch = of_weight("backward", elements * steps.backward.of(width))
        yield replace(
            rounding,
            makes=(rounded, saved_weight),
            saves=(saved_weight.name,),
            parameters=operator.parameters,
            backward_scratch=(scratch,),
        )
    else:
        only_forward = (kernels.weights[0], 0), (kernels.weight_kernels[0], 0)
        kernels = replace(kernels, weights=only_forward[0], weight_kernels=only_forward[1])
        yield rounding
    yield replace(
        operator,
        kernel=replace(gemm, trained=False, operands=kernels),
        reads=(source, rounded.name),
        saves=(*((source,) if gemm.trained else ()), rounded.name),
        saves_for=((rounded.name, source),),
        parameters=(),
    )


def _packed(operator: Operator, gemm: Gemm, simulated: SimulatedLinears) -> Iterator[Operator]:
    """A linear layer in MXFP4: an autograd function that packs both operands and unpacks them for every matmul."""
    name, source, (result, *others) = gemm.name, operator.reads[0], operator.makes
    operands: list[tuple[str, int, int, bool]] = [
        ("input", gemm.m * gemm.k, simulated.activation_bytes, False),
        ("weight", gemm.weight_elements, simulated.weight_bytes, True),
    ]
    packed = [
        Tensor(f"{name} {what} in MXFP4", elements // 2 + elements // MX_BLOCK, 1, per_microbatch=once)
        for what, elements, _, once in operands
    ]
    unpacked = [
        Tensor(f"{name} {what} unpacked", elements, width, per_microbatch=once)
        for what, elements, width, once in operands
    ]
    scratch = [
        Tensor(f"{name} {what} while unpacked", elements * _MX_UNPACKING_BYTES, 1, per_microbatch=once)
        for what, elements, _, once in operands
    ]
    roles = operator.roles
    yield Operator(reads=(source,), makes=tuple(packed), detached=True, roles=roles)
    for number, (before, after, beside) in enumerate(zip(packed, unpacked, scratch, strict=True)):
        less = replace(beside, elements=beside.elements - after.elements * operands[number][2])
        yield Operator(reads=(before.name,), makes=(after,), forward_scratch=(less,), detached=True, roles=roles)
    product = replace(result, name=f"{name} result, unpacked")
    yield replace(
        operator,
        kernel=replace(gemm, operands=simulated.kernels),
        reads=(source, *(tensor.name for tensor in unpacked)),
        makes=(product, *others),
        saves=tuple(tensor.name for tensor in packed),
        backward_scratch=tuple(unpacked),
    )
    handed = replace(result, name=f"{name} result, handed on")  # backward unpacks the input, then the weight next to it
    unpacking = Operator(in_place=True, passes=True, reads=(product.name,), makes=(handed,), roles=roles)
    yield replace(unpacking, backward_scratch=(unpacked[0], scratch[1]))
    yield replace(unpacking, reads=(handed.name,), makes=(result,), backward_scratch=(scratch[0],))
