"""Memory of a layer for one microbatch: bytes saved for backward, and peaks of forward and backward.

All values follow from the operators of the layer (``simplan.program.memory.liveness``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simplan.model.kernel import LOSS
from simplan.model.layer import Gemm, LayerKind, LayerSpec, ParameterSpec
from simplan.model.recompute import Recomputation
from simplan.program.memory.liveness import PeakPoint, backward_points, forward_points
from simplan.program.memory.tensors import LayerTensors
from simplan.program.program import MemoryCategory, MemoryEffect
from simplan.software.software import StateBytes


class LayerFootprint(NamedTuple):
    """Memory of one layer for one microbatch, in bytes.

    Attributes:
        activations: Saved for backward, including copies of weights, without logits.
        logits: Logits saved for backward.
        forward: Peak points of forward, in order; the head's last one is at the loss.
        backward: Peak points of backward, in order, excluding saved bytes; the head's first one is at the loss.
        input_bytes: The layer's input as part of ``activations``.
        left: Gradient of a tied weight that backward leaves for the other layer; negative for the layer that consumes
            it.
        left_logits: Likewise logits that the training loop holds until backward reaches the embedding.
        cached: Copies of weights that autocast caches until forward ends, although recomputation drops them.
    """

    activations: int
    logits: int
    forward: tuple[PeakPoint, ...]
    backward: tuple[PeakPoint, ...]
    input_bytes: int
    output_bytes: int
    left: int = 0
    left_logits: int = 0
    cached: int = 0


def cached_copies(layer: LayerSpec, microbatch_size: int, state: StateBytes, recomputation: Recomputation) -> int:
    """Bytes of copies of a layer's trained weights that autocast's cache holds and backward does not.

    The cache has copies of FP32 leaves with gradients (torch 2.13, aten/src/ATen/autocast_mode.cpp, ``cached_cast``).
    """
    tensors = LayerTensors(layer, microbatch_size, state, recomputation)
    trained = {kernel.name for kernel in layer.kernels if isinstance(kernel, Gemm) and kernel.trained}
    copies = () if tensors.saves_copies or not state.weight_copy else tensors.weight_copies.items()
    return sum(size for name, size in copies if name in trained)


def layer_footprint(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, recomputation: Recomputation
) -> LayerFootprint:
    """Computes the memory of one layer for one microbatch.

    Args:
        microbatch_size: Microbatch size b, in sequences.
        state: Bytes per element of tensors.
        recomputation: Tensors saved for backward, and kernels to recompute.
    """
    tensors = LayerTensors(layer, microbatch_size, state, recomputation)
    made_bytes, passed_bytes = layer.output_bytes(state.activation, state.residual)
    loss = _first_of_loss(layer)
    parts = range(loss), range(loss, len(layer.operators))
    return LayerFootprint(
        activations=tensors.saved_bytes,
        logits=tensors.saved_logits,
        forward=tuple(_peaks(forward_points(tensors), parts)),
        backward=tuple(_peaks(backward_points(tensors), parts[::-1])),
        input_bytes=tensors.input_bytes,
        output_bytes=microbatch_size * (made_bytes + passed_bytes),
    )


def passing_footprint(layer: LayerSpec, microbatch_size: int, state: StateBytes) -> LayerFootprint:
    """Computes the memory of a forward without gradients, after which nothing is saved.

    The caller holds the layer's inputs until it has the outputs, of a head until it has the logits. Autocast makes
    copies of wide frozen weights for one matmul each, and keeps none, since these weights need no gradient.

    Args:
        microbatch_size, state: See ``layer_footprint``.
    """
    inputs = frozenset(tensor.name for tensor in layer.inputs if not tensor.elsewhere)
    tensors = LayerTensors(layer, microbatch_size, state, Recomputation(inputs))
    held, held_logits = tensors.saved_bytes, tensors.saved_logits
    copied = state.weight_copy if state.frozen > state.weight_copy else 0
    loss, found = _first_of_loss(layer), []
    for index, point in forward_points(tensors):
        kernel = layer.operators[index].kernel
        copy = copied * kernel.weight_elements if isinstance(kernel, Gemm) and kernel.stored is None else 0
        inputs_bytes = held if index < loss else 0
        found.append((index, PeakPoint(point.workspace + inputs_bytes + copy, point.logits + held_logits)))
    made_bytes, passed_bytes = layer.output_bytes(state.activation, state.residual)
    return LayerFootprint(
        activations=0,
        logits=0,
        forward=tuple(_peaks(found, (range(loss), range(loss, len(layer.operators))))),
        backward=(),
        input_bytes=held,
        output_bytes=microbatch_size * (made_bytes + passed_bytes),
    )


def _first_of_loss(layer: LayerSpec) -> int:
    """Returns the index of the first operator after the logits; the number of operators without logits."""
    kernels = [operator.kernel.name if operator.kernel else "" for operator in layer.operators]
    if layer.kind is not LayerKind.HEAD or LOSS not in kernels:
        return len(layer.operators)
    loss = layer.operators[kernels.index(LOSS)].reads[0]
    return next(i for i, o in enumerate(layer.operators) if any(tensor.name == loss for tensor in o.makes))


def _peaks(points: Iterable[tuple[int, PeakPoint]], parts: Sequence[range]) -> Iterable[PeakPoint]:
    """Yields the largest point of each part of the operators that has any."""
    found = [*points]
    for part in parts:
        within = [point for index, point in found if index in part]
        if within:
            yield max(within, key=sum)


class WorstPoint:
    """The largest of the points added, including bytes held at that point."""

    def __init__(self) -> None:
        self._bytes, self._worst = -(2**62), (0, 0, 0, 0)

    def see(self, point: PeakPoint, activations: int, logits: int, gradients: int = 0) -> None:
        """Adds a point, and the bytes held at that point in addition to it."""
        gone = min(0, point.workspace)  # activations not yet allocated, or already freed
        state = (activations + gone, logits + point.logits, gradients + point.gradients, point.workspace - gone)
        if sum(state) > self._bytes:
            self._bytes, self._worst = sum(state), state

    def effects(self, activations: int, logits: int, gradients: int = 0) -> tuple[MemoryEffect, ...]:
        """Returns effects of an operation with this peak, after which the given bytes remain."""
        categories = (
            MemoryCategory.ACTIVATIONS,
            MemoryCategory.LOGITS,
            MemoryCategory.GRADIENTS,
            MemoryCategory.WORKSPACE,
        )
        effects = map(MemoryEffect, categories, self._worst, (activations, logits, gradients, 0))
        return tuple(effect for effect in effects if effect.during_bytes or effect.after_bytes)


def layers_effects(footprints: Sequence[LayerFootprint], *, forward: bool) -> tuple[MemoryEffect, ...]:
    """Returns memory effects of an operation that runs layers sequentially.

    ``during`` is the state at the worst of its layers, so one operation over many layers has the same peak as many
    operations over one.

    Args:
        footprints: Footprints of the layers, in the order in which they run.
        forward: True if each layer adds its saved bytes before its workspace; in backward it frees them after.
    """
    sign = 1 if forward else -1
    activations = logits = gradients = cached = 0
    worst = WorstPoint()
    for footprint in footprints:
        before = (activations, logits)
        activations += sign * footprint.activations
        logits += sign * footprint.logits
        cached += footprint.cached if forward else 0
        for each in footprint.forward if forward else footprint.backward:
            point = each._replace(workspace=each.workspace + cached) if cached else each
            worst.see(point, *((activations, logits) if forward else before), gradients)
        gradients += 0 if forward else footprint.left
        logits += 0 if forward else footprint.left_logits
    return worst.effects(activations, logits, gradients)


def brought_parameters(layers: Sequence[LayerSpec]) -> list[tuple[ParameterSpec, ...]]:
    """Returns the weights that each layer adds to its stage; a head tied to an embedding there adds no copy."""
    holds_embedding = any(layer.kind is LayerKind.EMBEDDING for layer in layers)
    found: dict[str, tuple[ParameterSpec, ...]] = {}  # equal layers add equal parameters
    for layer in layers:
        if layer.key not in found:
            shared = layer.tied if holds_embedding else ()
            found[layer.key] = tuple(p for p in layer.parameters if p.name not in shared)
    return [found[layer.key] for layer in layers]
