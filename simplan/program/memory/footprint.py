"""Memory of a layer for one microbatch: what it saves between forward and backward, and the peaks of both.

All of it follows from the operators of the layer (``simplan.program.memory.liveness``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from simplan.model.kernel import LOSS
from simplan.model.layer import LayerKind, LayerSpec, ParameterSpec
from simplan.model.recompute import Recomputation
from simplan.program.memory.liveness import PeakPoint, backward_points, forward_points
from simplan.program.memory.tensors import LayerTensors
from simplan.program.program import MemoryCategory, MemoryEffect
from simplan.software.software import StateBytes

__all__ = ["LayerFootprint", "WorstPoint", "brought_parameters", "layer_footprint", "layers_effects"]


class LayerFootprint(NamedTuple):
    """Bytes of one layer for one microbatch.

    Attributes:
        activations: Kept from forward to backward, copies of weights among them.
        logits: The same, for the output distribution.
        forward: PeakPoints of forward, in order; the head's last one is that of the loss.
        backward: PeakPoints of backward, in order, beside what was kept; the head's first one is that of the loss.
        input_bytes: The part of ``activations`` that is the layer's input.
        output_bytes: What the layer hands on.
        left: Gradient of a weight that is tied to another layer: backward leaves it (or, negative, takes it up).
    """

    activations: int
    logits: int
    forward: tuple[PeakPoint, ...]
    backward: tuple[PeakPoint, ...]
    input_bytes: int
    output_bytes: int
    left: int = 0

    @property
    def forward_workspace(self) -> int:
        """Bytes beside what is kept, at the worst moment of forward."""
        return max(map(sum, self.forward))

    @property
    def backward_workspace(self) -> int:
        """Bytes beside what was kept, at the worst moment of backward."""
        return max(map(sum, self.backward))


def layer_footprint(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, recomputation: Recomputation
) -> LayerFootprint:
    """Memory that one layer needs for one microbatch.

    Args:
        layer: The layer.
        microbatch_size: Sequences b.
        state: Element widths.
        recomputation: What of the layer is kept.
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


def _first_of_loss(layer: LayerSpec) -> int:
    """Index of the first operator after the logits are there; all of a layer that is no head come before."""
    if layer.kind is not LayerKind.HEAD:
        return len(layer.operators)
    kernels = [operator.kernel.name if operator.kernel else "" for operator in layer.operators]
    loss = layer.operators[kernels.index(LOSS)].reads[0]
    return next(i for i, o in enumerate(layer.operators) if any(tensor.name == loss for tensor in o.makes))


def _peaks(points: Iterable[tuple[int, PeakPoint]], parts: Sequence[range]) -> Iterable[PeakPoint]:
    """The largest point of each part of the operators, if it has any."""
    found = [*points]
    for part in parts:
        within = [point for index, point in found if index in part]
        if within:
            yield max(within, key=sum)


class WorstPoint:
    """The worst of the points that are seen, each beside what is held at the time."""

    def __init__(self) -> None:
        self._bytes, self._worst = -(2**62), (0, 0, 0, 0)

    def see(self, point: PeakPoint, activations: int, logits: int, gradients: int = 0) -> None:
        """Takes a point, and bytes held beside it."""
        gone = min(0, point.workspace)  # activations that are not there yet, or not any more
        state = (activations + gone, logits + point.logits, gradients + point.gradients, point.workspace - gone)
        if sum(state) > self._bytes:
            self._bytes, self._worst = sum(state), state

    def effects(self, activations: int, logits: int, gradients: int = 0) -> tuple[MemoryEffect, ...]:
        """Effects of an operation with this worst point, which leaves so many bytes."""
        categories = (
            MemoryCategory.ACTIVATIONS,
            MemoryCategory.LOGITS,
            MemoryCategory.GRADIENTS,
            MemoryCategory.WORKSPACE,
        )
        effects = map(MemoryEffect, categories, self._worst, (activations, logits, gradients, 0))
        return tuple(effect for effect in effects if effect.during_bytes or effect.after_bytes)


def layers_effects(footprints: Sequence[LayerFootprint], *, forward: bool) -> tuple[MemoryEffect, ...]:
    """Memory effects of an operation that runs layers one after the other.

    ``during`` is the state at the worst of its layers, so one operation over many layers has the same peak as many
    operations over one.

    Args:
        footprints: Of the layers, in the order in which they run.
        forward: Each layer adds what it keeps before its workspace; in backward it frees it after.
    """
    sign = 1 if forward else -1
    activations = logits = gradients = 0
    worst = WorstPoint()
    for footprint in footprints:
        before = (activations, logits)
        activations += sign * footprint.activations
        logits += sign * footprint.logits
        for point in footprint.forward if forward else footprint.backward:
            worst.see(point, *((activations, logits) if forward else before), gradients)
        gradients += 0 if forward else footprint.left
    return worst.effects(activations, logits, gradients)


def brought_parameters(layers: Sequence[LayerSpec]) -> list[tuple[ParameterSpec, ...]]:
    """Weights each layer of a stage brings; a head tied to an embedding of the same stage does not bring its copy."""
    holds_embedding = any(layer.kind is LayerKind.EMBEDDING for layer in layers)
    found: dict[str, tuple[ParameterSpec, ...]] = {}  # layers that are alike bring as many
    for layer in layers:
        if layer.key not in found:
            shared = layer.tied if holds_embedding else ()
            found[layer.key] = tuple(p for p in layer.parameters if p.name not in shared)
    return [found[layer.key] for layer in layers]
