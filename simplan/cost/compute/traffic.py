"""Memory traffic and launches of the kernels of a layer, from the tensors that its operators read and make.

Eager code runs one kernel per operator, which reads and writes whole tensors. Autocast keeps the residual stream and
the loss in FP32, and every cast between two widths is a separate kernel. A compiler fuses the operators between two
GEMMs: only tensors from outside of the group, tensors used outside of it and tensors saved for backward pass through
memory (Ansel et al. 2024, PyTorch 2, section 4.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from simplan.model.kernel import LOSS, Attention, Gemm, Pointwise, in_forward
from simplan.model.layer import LayerSpec, Operator
from simplan.model.operator import saved_by

_BACKWARD_PASSES = 2  # of forward's bytes, for kernels that stand for several
_NORM_BYTES = (4, 28)
"""Bytes per element of a norm of single operations: 4 per byte of the element, and 28 in FP32. These are an upcast,
square, mean, scale, downcast and weights (torch 2.6, torch.nn.functional.rms_norm). Backward is twice that."""
_NORM_LAUNCHES = (6, 16)
_ROTARY_PASSES = (2.5, 3.25)
"""Bytes of a rotation of single operations, in forward and backward, relative to two kernels that read and write
everything: one half negated, both joined, two products and their sum (rotate_half of transformers)."""
_ROTARY_LAUNCHES = (10, 12)
"""Kernels of a rotation of queries and keys."""
_LOSS_PASSES = 2
"""Passes over the logits of a compiled loss: maximum and sum in forward; logits read and gradients written in
backward."""


KernelSet = Literal["single", "eager", "composed", "compiled"]
"""Kernels of memory-bound operators: ``single``, one for each; ``eager``, several for rotations, of which torch has no
kernel; ``composed``, several for RMSNorms as well; or ``compiled``, one for each group between GEMMs."""


class KernelTraffic(NamedTuple):
    """Memory-bound work of a kernel, with the operators that run as part of it or after it.

    Attributes:
        forward_bytes, backward_bytes: Bytes read and written for one sequence; for a GEMM or attention those of casts
            after it.
        bias_bytes: Bytes read to sum the gradient of a GEMM's bias.
        forward_launches, backward_launches: Launches of these kernels.
    """

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    bias_bytes: float = 0.0
    forward_launches: int = 0
    backward_launches: int = 0

    def plus(self, other: KernelTraffic) -> KernelTraffic:
        """Returns the sum of both."""
        return KernelTraffic(
            self.forward_bytes + other.forward_bytes,
            self.backward_bytes + other.backward_bytes,
            self.bias_bytes + other.bias_bytes,
            self.forward_launches + other.forward_launches,
            self.backward_launches + other.backward_launches,
        )


def layer_traffic(
    layer: LayerSpec, activation_bytes: int, residual_bytes: int, kernels: KernelSet
) -> tuple[KernelTraffic, ...]:
    """Returns the traffic of each kernel of a layer.

    Args:
        layer: The layer.
        activation_bytes, residual_bytes: Bytes per element of activations and of the residual stream.
        kernels: See ``KernelSet``.
    """
    found = [KernelTraffic()] * len(layer.kernels)
    widths = _Widths(layer, activation_bytes, residual_bytes)
    fuses = kernels == "compiled" and not layer.in_root  # what is outside of modules is not compiled
    for place, traffic in _fused(layer, widths) if fuses else _eager(layer, widths, kernels):
        found[place] = found[place].plus(traffic)
    for place, operator in zip(layer.places, layer.operators, strict=True):
        if isinstance(operator.kernel, Gemm) and len(operator.parameters) > 1:
            num_bytes = operator.kernel.m * operator.kernel.n * activation_bytes
            found[place] = found[place].plus(KernelTraffic(bias_bytes=num_bytes))
    for place, num_bytes in _joins(layer, widths, within_kernels=fuses):
        found[place] = found[place].plus(KernelTraffic(backward_bytes=num_bytes, backward_launches=1))
    return tuple(found)


class _Widths:
    """Sizes of a layer's tensors in bytes."""

    def __init__(self, layer: LayerSpec, activation_bytes: int, residual_bytes: int) -> None:
        self._layer, self._widths = layer, (activation_bytes, residual_bytes)
        self._storages = layer.storages(activation_bytes, residual_bytes)

    def num_bytes(self, names: Iterable[str]) -> int:
        """Bytes of tensors; parts and tensors that share memory count once."""
        return sum(self.of(name) for name in {self._own(name) for name in names})

    def of(self, name: str) -> int:
        """Bytes of a tensor; 0 for a constant of the layer."""
        tensor = self._layer.tensors.get(name)
        return 0 if tensor is None else tensor.num_bytes(*self._widths)

    def mean(self, names: Iterable[str]) -> float:
        """Mean bytes per element; those of activations without tensors."""
        tensors = [self._layer.tensors[name] for name in names if name in self._layer.tensors]
        elements = sum(tensor.elements for tensor in tensors)
        return sum(t.num_bytes(*self._widths) for t in tensors) / elements if elements else self._widths[0]

    def is_copy(self, operator: Operator) -> bool:
        """True if a cast changes the width."""
        if not operator.is_cast:
            return False
        source, result = self._layer.tensors[operator.reads[0]], operator.makes[0]
        return source.width(*self._widths) != result.width(*self._widths)

    def _own(self, name: str) -> str:
        """Name of the equally large tensor whose memory a tensor uses."""
        storage = self._storages.get(name)
        return name if storage is None or storage.elements != self._layer.tensors[name].elements else storage.name


def _eager(layer: LayerSpec, widths: _Widths, kernels: KernelSet) -> Iterator[tuple[int, KernelTraffic]]:
    """Yields index and traffic of every memory-bound kernel, and of casts and copies that are kernels as well."""
    within = False  # in unfused attention, whose cost includes the operators on scores
    forked = _forked_bytes(layer, widths)
    for place, operator, fork_bytes in zip(layer.places, layer.operators, forked, strict=True):
        kernel = operator.kernel
        if kernel is not None:
            within = isinstance(kernel, Attention) and kernel.eager
        if fork_bytes:
            yield place, KernelTraffic(backward_bytes=fork_bytes, backward_launches=1)
        if isinstance(kernel, Pointwise):
            num_bytes = kernel.reads * widths.mean(operator.reads) + kernel.writes * widths.mean(
                tensor.name for tensor in operator.makes[:1]
            )
            if (composed := _composed(operator, kernel, num_bytes, widths, kernels)) is not None:
                yield place, composed
                continue
            if in_forward(kernel):
                num_bytes += _forward_gradient_bytes(operator, num_bytes, widths)
                yield place, KernelTraffic(num_bytes, forward_launches=sum(kernel.launches))
                continue
            if kernel.moves or kernel.launches[0] > 1 or not operator.makes:
                backward_bytes = num_bytes * (1 if kernel.moves else _BACKWARD_PASSES)
            else:
                backward_bytes = _gradient_bytes(layer, operator, widths) + _sum_bytes(layer, [operator], widths)
            yield place, KernelTraffic(num_bytes, backward_bytes, 0.0, *kernel.launches)
        elif kernel is None and not within:
            if widths.is_copy(operator):
                num_bytes = widths.of(operator.reads[0]) + widths.of(operator.makes[0].name)
                seen = not operator.detached  # else an operator of its own casts the gradient
                yield place, KernelTraffic(num_bytes, num_bytes * seen, 0.0, 1, int(seen))
            elif operator.detached:
                continue
            elif operator.splits:
                yield place, KernelTraffic(backward_bytes=2 * widths.of(operator.reads[0]), backward_launches=1)
            elif operator.makes and not operator.is_cast and isinstance(layer.kernels[place], Pointwise):
                yield place, KernelTraffic(backward_bytes=_gradient_bytes(layer, operator, widths), backward_launches=1)


def _joins(layer: LayerSpec, widths: _Widths, *, within_kernels: bool) -> Iterator[tuple[int, int]]:
    """Yields place and bytes of copies that join gradients of parts of a tensor, such as queries, keys and values.

    Args:
        within_kernels: Fused kernels write the parts to their places.
    """
    joined: set[str] = set()
    for place, operator in zip(layer.places, layer.operators, strict=True):
        is_fused = within_kernels and (operator.kernel is None or isinstance(operator.kernel, Pointwise))
        for name in () if is_fused else operator.joins:
            if name in layer.needed and name not in joined:
                joined.add(name)
                yield place, 2 * widths.of(name)


def _composed(
    operator: Operator, kernel: Pointwise, num_bytes: float, widths: _Widths, kernels: KernelSet
) -> KernelTraffic | None:
    """Returns the traffic of an operator of several kernels, with ``num_bytes`` as one; None for an operator of one."""
    if operator.composed and kernels == "composed":
        num_bytes = kernel.writes * (_NORM_BYTES[0] * widths.mean(operator.reads) + _NORM_BYTES[1])
        return KernelTraffic(num_bytes, _BACKWARD_PASSES * num_bytes, 0.0, *_NORM_LAUNCHES)
    if kernel.like == "rotary" and kernels in ("eager", "composed"):
        forward_bytes, backward_bytes = (passes * num_bytes for passes in _ROTARY_PASSES)
        return KernelTraffic(forward_bytes, backward_bytes, 0.0, *_ROTARY_LAUNCHES)
    return None


def _gradient_bytes(layer: LayerSpec, operator: Operator, widths: _Widths) -> int:
    """Returns the bytes of an operator's backward: gradients of results and saved tensors read, gradients written.

    Gradients of a sum are the gradient of its result, cast where widths differ. Weights of norms take another pass over
    gradients and saved tensors. A loss fills a tensor with the gradients of log-probabilities first, and reads it.
    """
    result = operator.makes[0]
    gradients = widths.of(result.name)
    inputs = layer.needed.intersection(operator.reads)
    if operator.passes:
        width = gradients / result.elements
        return sum(
            gradients + widths.of(name) for name in inputs if widths.of(name) < width * layer.tensors[name].elements
        )
    read_bytes = gradients + widths.num_bytes(saved_by(operator, layer.needed))
    if operator.kernel is not None and operator.kernel.name == LOSS:
        read_bytes += 2 * gradients
    return (2 if operator.parameters else 1) * read_bytes + widths.num_bytes(inputs)


def _sum_bytes(layer: LayerSpec, operators: Iterable[Operator], widths: _Widths) -> int:
    """Returns the bytes that backward moves besides, to sum gradients of what was broadcast over rows.

    A shift of what was scaled just before, as conditions do, is summed in the kernel that sums the scale.
    """
    total, before = 0, ""
    for operator in operators:
        kernel = operator.kernel
        if not isinstance(kernel, Pointwise) or not kernel.sums:
            continue
        result = operator.makes[0]
        small = (n for n in layer.needed.intersection(operator.reads) if layer.tensors[n].elements < result.elements)
        if not any(small):
            continue
        if before not in operator.reads:
            total += kernel.sums * widths.of(result.name)
        before = result.name
    return total


def _forward_gradient_bytes(operator: Operator, num_bytes: float, widths: _Widths) -> float:
    """Returns the bytes of a backward that runs in forward, next to ``num_bytes`` of forward itself."""
    if operator.kernel is None or operator.kernel.name != LOSS:
        return num_bytes
    if not operator.makes:
        return widths.of(operator.reads[0])  # gradients written; a fused kernel has read the logits
    return 4 * widths.of(operator.makes[0].name) + widths.of(operator.reads[0])  # as ``_gradient_bytes``


def _forked_bytes(layer: LayerSpec, widths: _Widths) -> list[int]:
    """Returns the bytes, by operator, to add up gradients of tensors that several operators read."""
    found = []
    seen: set[str] = set()
    for operator in layer.operators:
        names = layer.needed.intersection(() if operator.detached else operator.reads)
        found.append(3 * sum(widths.of(name) for name in names & seen))
        seen |= names
    return found


def _fused(layer: LayerSpec, widths: _Widths) -> Iterator[tuple[int, KernelTraffic]]:
    """Yields index and traffic of every group of memory-bound operators, at the first kernel of the group."""
    group: list[int] = []
    within = False
    for index, operator in enumerate(layer.operators):
        kernel = operator.kernel
        within = isinstance(kernel, Attention) and kernel.eager if kernel is not None else within
        is_alone = isinstance(kernel, Pointwise) and kernel.fusion == "none"
        if isinstance(kernel, Pointwise) and kernel.fusion == "results":  # its statistics read the group's inputs first
            num_bytes = widths.num_bytes(operator.reads[:1])
            followed = _is_followed(layer.operators, index)  # the gradient of its result is written, and read again
            yield (
                layer.places[index],
                KernelTraffic(num_bytes, (5 if followed else 2) * num_bytes, 0.0, 1, 1 + followed),
            )
        if not is_alone and (isinstance(kernel, Pointwise) or (kernel is None and not within)):
            group.append(index)
            continue
        yield from _of_group(layer, group, widths)
        group = []
        if is_alone:
            yield from _of_group(layer, [index], widths)
    yield from _of_group(layer, group, widths)


def _is_followed(operators: Sequence[Operator], index: int) -> bool:
    """Returns True if an operator of the same group comes after a norm of images, such as its activation."""
    after = (operator.kernel for operator in operators[index + 1 :] if not operator.is_cast)
    kernel = next(after, None)
    return isinstance(kernel, Pointwise) and kernel.fusion == "all"


def _of_group(layer: LayerSpec, group: list[int], widths: _Widths) -> Iterator[tuple[int, KernelTraffic]]:
    operators = [layer.operators[index] for index in group]
    pointwise = [index for index in group if layer.operators[index].kernel is not None]
    if not any(not o.splits and (o.kernel is not None or widths.is_copy(o)) for o in operators):
        return
    place = layer.places[pointwise[0] if pointwise else group[0]]
    made = {tensor.name for operator in operators for tensor in operator.makes}
    read = {name for operator in operators for name in operator.reads} - made
    if any(o.kernel is not None and o.kernel.name == LOSS for o in operators):
        num_bytes = _LOSS_PASSES * max(widths.of(name) for name in read)
        if any(o.kernel is not None and in_forward(o.kernel) for o in operators):
            yield place, KernelTraffic(2 * num_bytes, forward_launches=2)
            return
        yield place, KernelTraffic(num_bytes, num_bytes, 0.0, 1, 1)
        return
    others = [operator for index, operator in enumerate(layer.operators) if index not in group]
    used = made.intersection(name for operator in others for name in operator.reads) | made.intersection(layer.outputs)
    saved = {name for operator in layer.operators for name in saved_by(operator, layer.needed)}
    kept = {name for operator in operators for name in saved_by(operator, layer.needed)}
    forward_bytes = widths.num_bytes(read) + widths.num_bytes(used | (made & saved))
    gradients = widths.num_bytes(used) + widths.num_bytes(read & layer.needed)
    trained, sum_bytes = any(operator.parameters for operator in operators), _sum_bytes(layer, operators, widths)
    backward_bytes = gradients + widths.num_bytes(kept) + sum_bytes
    yield place, KernelTraffic(forward_bytes, backward_bytes, 0.0, 1, 1 + trained + bool(sum_bytes))
