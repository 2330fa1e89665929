"""Memory of a split backward: what its first part (I, gradients of activations) leaves to its second (W, of weights).

torch runs W from the gradients that reached each operator with weights (``torch.distributed.pipelining._backward``), so
I leaves these beside nearly all that forward saved: only what none but operators after the last weight needed, the
log-probabilities, goes when I is done. W takes the weights in the order of the module's parameters. Once it is past an
operator it frees the gradient that was left for it and what it alone saved; the rest stays until W is done.

The zero-bubble fork of Megatron-LM (Qi et al. 2024, section 3.1) leaves less (``products_footprint``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simplan.model.layer import Gemm, Kernel, LayerKind, LayerSpec, Lookup, Operator
from simplan.model.recompute import Recomputation
from simplan.program.memory.footprint import LayerFootprint, WorstPoint
from simplan.program.memory.liveness import PeakPoint, input_backward
from simplan.program.memory.tensors import LayerTensors
from simplan.program.program import MemoryEffect, Phase
from simplan.software.software import StateBytes

__all__ = ["SplitFootprint", "products_footprint", "split_effects", "split_footprint", "weighted_kernels"]


class SplitFootprint(NamedTuple):
    """Bytes of one layer for one microbatch whose backward runs in two parts.

    Attributes:
        activations, logits: Kept from forward to I; those of the LayerFootprint.
        gradients, logits_gradients: What I adds: gradients of the outputs of operations with weights.
        dropped, dropped_logits: What of that which forward kept is gone when I is done.
        released: What is gone when W is past this layer, of activations and their gradients; the rest goes at its end.
        input: Peak points of I, beside what was kept and what I leaves of this layer and those behind it.
        weight: Peak points of W, beside what is held when it comes to this layer.
    """

    activations: int
    logits: int
    gradients: int
    logits_gradients: int
    dropped: int
    dropped_logits: int
    released: int
    input: tuple[PeakPoint, ...]
    weight: tuple[PeakPoint, ...]

    @property
    def between_activations(self) -> int:
        """Held from I to W: activations and gradients of activations."""
        return self.activations + self.gradients - self.dropped

    @property
    def between_logits(self) -> int:
        """The same of the output distribution."""
        return self.logits + self.logits_gradients - self.dropped_logits


def split_footprint(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, footprint: LayerFootprint, *, receives: bool = False
) -> SplitFootprint:
    """What a split backward of one layer leaves and needs.

    Not for layers of the first stage, whose whole backward torch runs in W.

    Args:
        layer: The layer.
        microbatch_size: Sequences b.
        state: Element widths.
        footprint: Of the same layer, as it is when its backward is in one piece.
        receives: The gradient of its output is in a receive buffer, which is counted there.
    """
    if not any(operator.trains for operator in layer.operators):
        return SplitFootprint(footprint.activations, footprint.logits, 0, 0, 0, 0, 0, footprint.backward, ())
    tensors = _whole(layer, microbatch_size, state)
    split = input_backward(tensors, receives=receives)
    ends_stage = receives or layer.kind is LayerKind.HEAD  # else what follows holds on to it
    trains = [index for index, operator in enumerate(layer.operators) if operator.trains]
    savers = tensors.last_savers
    dropped = {root: size for root, size in tensors.saved.items() if savers.get(root, -1) > trains[-1] and ends_stage}
    dropped_logits = sum(size for root, size in dropped.items() if layer.tensors[root].logits)
    weight, released = _weight_points(layer, tensors, split.left)
    return SplitFootprint(
        activations=footprint.activations,
        logits=footprint.logits,
        gradients=split.gradients,
        logits_gradients=split.logits_gradients,
        dropped=sum(dropped.values()) - dropped_logits,
        dropped_logits=dropped_logits,
        released=released,
        input=tuple(
            PeakPoint(point.workspace - split.gradients, point.logits - split.logits_gradients)
            for point in split.points
        ),
        weight=weight,
    )


def _whole(layer: LayerSpec, microbatch_size: int, state: StateBytes) -> LayerTensors:
    """Of a layer that runs nothing again."""
    return LayerTensors(layer, microbatch_size, state, Recomputation(frozenset(tensor.name for tensor in layer.saved)))


def weighted_kernels(layer: LayerSpec) -> list[Kernel]:
    """The kernels that use weights, in the order of the module's parameters: W has work for these alone.

    Weights of the layer itself, which are just added to something, have no kernel.
    """
    by_parameter = {name: o.kernel for o in layer.operators if o.trains and o.kernel for name in o.parameters}
    named = (by_parameter[p.name] for p in layer.parameters if p.name in by_parameter and "." in p.name)
    return list({id(kernel): kernel for kernel in named}.values())


def _weight_points(layer: LayerSpec, tensors: LayerTensors, left: dict[int, int]) -> tuple[tuple[PeakPoint, ...], int]:
    """One point for each operator with weights, and what is gone at the end.

    A weight's gradient lives until the next one is there. Autocast makes it in 16 bits and widens it once what forward
    saved for it, the weight's copy among it, is gone.

    Args:
        layer: The layer.
        tensors: Its tensors.
        left: By operator, bytes of the gradient that I left for it.
    """
    place = {p.name: number for number, p in enumerate(layer.parameters)}
    trained = [(i, o) for i, o in enumerate(layer.operators) if o.trains and o.parameters]
    order = sorted(trained, key=lambda pair: min(place[name] for name in pair[1].parameters))
    last = _last_uses(layer, tensors, [index for index, _ in order])
    points, gone, last_gradient = [], 0, 0
    for index, operator in order:
        kept = sum(tensors.saved[root] for root, user in last.items() if user == index)
        product = gradient = 0
        kernel = operator.kernel
        if isinstance(kernel, Gemm):
            copies = tensors.weight_copies.get(kernel.name, 0)
            kept += copies
            product = gradient = kernel.weight_elements * tensors.state.product
            if copies:
                gradient = kernel.weight_elements * tensors.state.gradient
                product += max(0, gradient - kept)
        points.append(PeakPoint(_weight_scratch_bytes(tensors, operator) - gone, gradients=last_gradient + product))
        gone += left.get(index, 0) + kept
        last_gradient = gradient
    return tuple(points), gone


def _weight_scratch_bytes(tensors: LayerTensors, operator: Operator) -> int:
    """Beside gradients while W makes those of an operator's weights: what the whole of a norm takes."""
    if isinstance(operator.kernel, Gemm | Lookup) or not operator.backward_scratch:
        return 0
    read = sum(tensors.bytes_of(tensors.roots[name]) for name in operator.reads)
    return tensors.scratch_bytes(operator, forward=False) + read


def _last_uses(layer: LayerSpec, tensors: LayerTensors, order: Sequence[int]) -> dict[str, int]:
    """By saved tensor that W alone needs, the last operator with weights that does; no inputs, which may be buffers.

    Args:
        layer: The layer.
        tensors: Its tensors.
        order: Operators with weights, as W takes them.
    """
    users: dict[str, set[int]] = {}
    for index in range(len(layer.operators)):
        for root in tensors.saved_roots(index):
            users.setdefault(root, set()).add(index)
    inputs = {tensor.name for tensor in layer.inputs}
    alone = {root: of for root, of in users.items() if of <= {*order} and root in tensors.saved and root not in inputs}
    return {root: max(of, key=order.index) for root, of in alone.items() if not layer.tensors[root].logits}


def products_footprint(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, footprint: LayerFootprint
) -> SplitFootprint:
    """A split backward that leaves the matmuls for gradients of weights to its second part, and nothing else.

    A matrix stores its input and the gradient of its output, from which W makes the gradient of the weight; all else is
    done, and gone, with I. With h the hidden size of a GPT these are 32 bytes of the 34 s b h that forward saves
    without scores (Qi et al. 2024).

    Args:
        layer: The layer.
        microbatch_size: Sequences b.
        state: Element widths.
        footprint: Of the same layer, as it is when its backward is in one piece.
    """
    b, width, tensors = microbatch_size, state.activation, _whole(layer, microbatch_size, state)
    kernels = [(index, operator.kernel) for index, operator in enumerate(layer.operators)]
    trained = [(index, kernel) for index, kernel in kernels if isinstance(kernel, Gemm) and kernel.trained]
    matrices = [matrix for _, matrix in trained]
    inputs = {root for index, _ in trained for root in tensors.saved_roots(index)}
    kept = sum(tensors.saved.get(root, 0) for root in inputs)
    left = b * sum(matrix.m * matrix.n for matrix in matrices) * width
    logits_left = b * matrices[-1].m * matrices[-1].n * width if layer.kind is LayerKind.HEAD else 0
    gradients = left - logits_left
    dropped = max(0, footprint.activations - kept)
    # a point of the whole backward has some of what I leaves; its end has the gradient of the layer's input
    points = [
        PeakPoint(point.workspace - gradients, point.logits - logits_left, point.gradients)
        for point in footprint.backward
    ]
    points.append(PeakPoint(footprint.input_bytes - dropped))
    return SplitFootprint(
        activations=footprint.activations,
        logits=footprint.logits,
        gradients=gradients,
        logits_gradients=logits_left,
        dropped=dropped,
        dropped_logits=footprint.logits,
        released=footprint.activations + gradients - dropped,
        input=tuple(points),
        weight=tuple(PeakPoint(gradients=matrix.weight_elements * state.product) for matrix in matrices),
    )


def split_effects(footprints: Sequence[SplitFootprint], phase: Phase) -> tuple[MemoryEffect, ...]:
    """Memory effects of I or W of layers one after the other, as ``layers_effects`` has those of whole passes.

    ``during`` is the state at the worst moment of all layers, after which there is what I leaves, or nothing.

    Args:
        footprints: Of the layers, in the order in which they run: in I the last one first, in W the first one first.
        phase: ``BACKWARD_INPUT`` or ``BACKWARD_WEIGHT``.
    """
    assert phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    activations = logits = 0
    worst = WorstPoint()
    for footprint in footprints:
        if phase is Phase.BACKWARD_INPUT:
            activations += footprint.gradients
            logits += footprint.logits_gradients
        for point in footprint.input if phase is Phase.BACKWARD_INPUT else footprint.weight:
            worst.see(point, activations, logits)
        if phase is Phase.BACKWARD_WEIGHT:
            activations -= footprint.released
    if phase is Phase.BACKWARD_INPUT:
        dropped = sum(footprint.dropped_logits for footprint in footprints)
        return worst.effects(sum(f.gradients - f.dropped for f in footprints), logits - dropped)
    return worst.effects(-sum(f.between_activations for f in footprints), -sum(f.between_logits for f in footprints))
