"""LayerSpecs of a captured model, and which of its blocks are FSDP units of their own."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from math import prod

from simplan.model.adapters import rotated
from simplan.model.captured.adapters import ROTATED
from simplan.model.captured.facts import (
    CapturedLayer,
    CapturedModel,
    CapturedOperator,
    CapturedParameter,
    CapturedTensor,
    Width,
)
from simplan.model.captured.kernels import SUMS, kernel_of, word
from simplan.model.captured.linear import linear_calls
from simplan.model.kernel import CollectiveKind, Kernel, LayerCollective
from simplan.model.layer import Gemm, LayerKind, LayerSpec, Operator, ParameterSpec, Role, Tensor

CAPTURED = "captured-"
"""Begin of the keys of captured layers."""
_WEIGHT = ".weight"
_UNQUANTIZED = frozenset({Role.UNQUANTIZED})
FsdpUnits = tuple[str, ...] | int | None
"""Names of classes, or the least number of parameters; None for all blocks (``ParallelPlan.fsdp_units``)."""


@lru_cache(maxsize=64)
def captured_layers(model: CapturedModel) -> tuple[LayerSpec, ...]:
    """All layers in order; equal layers are one object."""
    order = model.graph.order
    made: dict[tuple[int, LayerKind, bool, bool], LayerSpec] = {}
    found = []
    flowing: tuple[bool, ...] = ()
    for place, number in enumerate(order):
        is_last = place == len(order) - 1
        kind = LayerKind.HEAD if is_last else LayerKind.BLOCK if place else LayerKind.EMBEDDING
        in_root, needs_gradient = not model.module_of(place), any(flowing)
        key = number, kind, in_root, needs_gradient
        if key not in made:
            unused = model.unused if is_last else ()
            calls = () if in_root else linear_calls(model)[place]
            linears = frozenset(linear.place for linear in calls if linear.has_low_precision)
            captured = model.graph.layers[number]
            made[key] = _layer(captured, kind, unused, linears, needs_gradient=needs_gradient, in_root=in_root)
        flowing = _outputs_with_gradients(model.graph.layers[number], flowing)
        found.append(made[key])
    return tuple(found)


def _outputs_with_gradients(layer: CapturedLayer, flowing: Sequence[bool]) -> tuple[bool, ...]:
    """By output of a layer, whether a trained weight is in it or before it; ``flowing`` says so of its inputs."""
    names = {tensor.name for tensor, flows in zip(layer.inputs, flowing, strict=False) if flows}
    names |= {t.name for each in layer.operators if each.trains or each.propagates for t in each.makes}
    return tuple(name in names for name in layer.outputs)


def _layer(
    captured: CapturedLayer,
    kind: LayerKind,
    unused: tuple[CapturedParameter, ...],
    linears: Set[int],
    *,
    needs_gradient: bool,
    in_root: bool,
) -> LayerSpec:
    outputs = () if kind is LayerKind.HEAD else captured.outputs
    tensors = {tensor.name: tensor for tensor in (*captured.inputs, *(t for o in captured.operators for t in o.makes))}
    words = captured.model_dump_json() + "".join(parameter.model_dump_json() for parameter in unused)
    where = "-root" * in_root + "-frozen inputs" * (kind is not LayerKind.EMBEDDING and not needs_gradient)
    return LayerSpec(
        key=f"{CAPTURED}{kind}{where}:{hashlib.sha256(words.encode()).hexdigest()[:16]}",
        kind=kind,
        parameters=tuple(
            ParameterSpec(p.name, p.shape, partial_gradient=p.partial, frozen=p.frozen, in_root=p.elsewhere)
            for p in (*captured.parameters, *(p.model_copy(update={"frozen": True}) for p in unused))
        ),
        operators=tuple(_operators(captured, linears, flows=needs_gradient)),
        inputs=tuple(_tensor(tensor, elsewhere=tensor.name in captured.elsewhere) for tensor in captured.inputs),
        outputs=outputs,
        output_shapes=captured.output_shapes if outputs else ((1,),),
        passed_outputs=captured.passed if outputs else (),
        matmul_dtype_outputs=tuple(i for i, name in enumerate(outputs) if tensors[name].width == "compute"),
        buffers=tuple(map(_tensor, captured.buffers)),
        tied=captured.tied,
        needs_input_gradient=needs_gradient,
        in_root=in_root,
    )


def _operators(layer: CapturedLayer, linears: Set[int], *, flows: bool) -> Iterator[Operator]:
    """Operators of a layer.

    Args:
        linears: Places of linear layers that low precision has kernels for.
        flows: Inputs of the layer have gradients.
    """
    taken: set[str] = set()
    flowing = {tensor.name for tensor in layer.inputs} if flows else set()
    tensors = {t.name: t for t in (*layer.inputs, *(t for each in layer.operators for t in each.makes))}
    for number, operator in enumerate(layer.operators):
        name = _kernel_name(operator, number, taken)
        taken.add(name)
        kernel = _kernel(operator, name)
        made = Operator(
            kernel=kernel,
            reads=operator.reads,
            makes=tuple(_tensor(tensor, forwarded=tensor.name in layer.forwarded) for tensor in operator.makes),
            saves=operator.saves,
            parameters=operator.parameters,
            is_cast=operator.is_cast,
            in_place=operator.in_place,
            joins=tuple(_joined(operator, tensors)),
            passes=operator.passes or word(operator) in SUMS,
            backward_scratch=tuple(_scratch(operator)),
            detached=not (operator.trains or operator.propagates),
            roles=_UNQUANTIZED if isinstance(kernel, Gemm) and number not in linears else frozenset(),
        )
        if isinstance(kernel, Gemm) and operator.module.endswith(ROTATED):
            numbers = next(p.shape[-1] for p in layer.parameters if p.name == f"{kernel.name}.oft_r.weight")
            size = (1 + math.isqrt(1 + 8 * numbers)) // 2  # size (size - 1) / 2 numbers
            yield from rotated(made, kernel, size, propagates=not flowing.isdisjoint(operator.reads))
        else:
            yield made
        if operator.trains or operator.propagates:
            flowing.update(tensor.name for tensor in operator.makes)


def _joined(operator: CapturedOperator, tensors: Mapping[str, CapturedTensor]) -> Iterator[str]:
    """Tensors that are larger than any operand, so that parts of them are read."""
    largest = max(map(prod, operator.operands), default=0)
    if operator.propagates or operator.trains:
        yield from (name for name in operator.reads if name in tensors and tensors[name].elements > largest)


def _kernel(operator: CapturedOperator, name: str) -> Kernel | None:
    said = operator.collective
    if said is None:
        return None if operator.is_cast else kernel_of(operator, name)
    forward, backward = (None if kind is None else CollectiveKind(kind) for kind in (said.forward, said.backward))
    return LayerCollective(
        name,
        "tp",
        forward,
        backward,
        said.elements,
        _bytes(said.width),
        residual=said.width == "wide",
        reorders=said.reorders,
    )


def _scratch(operator: CapturedOperator) -> Iterator[Tensor]:
    """Part of an embedding's gradient that backward makes for other tensor-parallel ranks."""
    if operator.gradient_scratch:
        yield Tensor("gradient of other ranks", operator.gradient_scratch, residual=True, per_microbatch=True)


def _kernel_name(operator: CapturedOperator, number: int, taken: set[str]) -> str:
    """The module of a weight, as in families; else the operator's own name with its place."""
    weight = next((name for name in operator.parameters if name.endswith(_WEIGHT)), "")
    name = weight.removesuffix(_WEIGHT)
    return name if name and name not in taken else f"{word(operator)} {number}"


def _tensor(tensor: CapturedTensor, *, elsewhere: bool = False, forwarded: bool = False) -> Tensor:
    return Tensor(
        tensor.name,
        tensor.elements,
        _bytes(tensor.width),
        residual=tensor.width == "wide",
        per_microbatch=tensor.per_microbatch,
        elsewhere=elsewhere,
        forwarded=forwarded,
    )


def _bytes(width: Width) -> int | None:
    return width if isinstance(width, int) else None


def blocks_in_root(model: CapturedModel, layers: Sequence[LayerSpec], units: FsdpUnits) -> frozenset[int]:
    """Indices of layers that are blocks and no units, so that FSDP's root unit has their weights.

    By class as torch's ``transformer_auto_wrap_policy``, by size as its ``size_based_auto_wrap_policy``.
    """
    blocks = [index for index, layer in enumerate(layers) if not layer.in_root]
    match units:
        case None:
            return frozenset()
        case int():
            return frozenset(index for index in blocks if _num_own(layers[index]) < units)
        case _:
            return frozenset(index for index in blocks if model.class_of(index) not in units)


def _num_own(layer: LayerSpec) -> int:
    return sum(parameter.num_elements for parameter in layer.parameters if not parameter.in_root)


def other_large_modules(model: CapturedModel, layers: Sequence[LayerSpec], size: int) -> Iterator[str]:
    """Names of modules of at least so many parameters that are no blocks: inside of one, or outside of all."""
    seen = set()
    for index, layer in enumerate(layers):
        path = model.module_of(index)
        totals: Counter[str] = Counter()
        for parameter in layer.parameters:
            *parents, _ = parameter.name.split(".")
            own = path if path and not parameter.in_root else ""
            for end in range(1, len(parents) + 1):
                totals[".".join([own, *parents[:end]] if own else parents[:end])] += parameter.num_elements
        for name, number in totals.items():
            if number >= size and name not in seen and not any(block.startswith(f"{name}.") for block in model.modules):
                seen.add(name)
                yield name
