"""Memory of a split backward: tensors that I (input gradients) leaves for W (weight gradients).

torch runs W from the gradients that reached each operator with weights (``torch.distributed.pipelining._backward``). I
therefore leaves these gradients and nearly all saved tensors. Only tensors needed by operators after the last weight
alone, the log-probabilities, are freed at the end of I. W visits the weights in the order of the module's parameters.
After an operator, W frees the gradient left for it and the tensors that it alone saved; the rest is held until the end
of W.

The zero-bubble fork of Megatron-LM (Qi et al. 2024, section 3.1) leaves less (``matmul_split_footprint``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simplan.model.layer import Gemm, Kernel, LayerKind, LayerSpec, Lookup, Operator
from simplan.model.recompute import Recomputation
from simplan.program.memory.footprint import LayerFootprint, WorstPoint
from simplan.program.memory.liveness import PeakPoint, Storage, input_backward
from simplan.program.memory.tensors import LayerTensors
from simplan.program.program import MemoryEffect, Phase
from simplan.software.software import StateBytes


class SplitFootprint(NamedTuple):
    """Bytes of one layer for one microbatch with a split backward.

    Attributes:
        activations, logits: Held from forward to I; as in the LayerFootprint.
        gradients, logits_gradients: Added by I: gradients of the outputs of operators with weights.
        dropped, dropped_logits: Saved bytes that are freed at the end of I.
        released: Activations and their gradients that are freed once W has passed this layer; the rest is freed at its
            end.
        input: Peak points of I, in addition to saved bytes and bytes that I leaves of this layer and the layers behind
            it.
        weight: Peak points of W, in addition to bytes held when it reaches this layer.
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
        """Bytes held from I to W: activations and gradients of activations."""
        return self.activations + self.gradients - self.dropped

    @property
    def between_logits(self) -> int:
        """Bytes of logits and their gradients held from I to W."""
        return self.logits + self.logits_gradients - self.dropped_logits


def split_footprint(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, footprint: LayerFootprint, *, receives: bool = False
) -> SplitFootprint:
    """Computes the memory of a split backward of one layer.

    Does not apply to layers of the first stage, whose full backward torch runs in W.

    Args:
        microbatch_size: Microbatch size b, in sequences.
        state: Bytes per element of tensors.
        footprint: Footprint of the same layer with a full backward.
        receives: True if the gradient of its output is in a receive buffer and counted there.
    """
    if not any(operator.trains for operator in layer.operators):
        return SplitFootprint(footprint.activations, footprint.logits, 0, 0, 0, 0, 0, footprint.backward, ())
    tensors = _whole(layer, microbatch_size, state)
    points, remaining = input_backward(tensors, receives=receives)
    left = {id(storage): storage for storage in remaining.values()}.values()
    gradients = sum(storage.counted_bytes for storage in left if not storage.logits)
    logits_gradients = sum(storage.counted_bytes for storage in left if storage.logits)
    ends_stage = receives or layer.kind is LayerKind.HEAD  # otherwise the next layer still references it
    trains = [index for index, operator in enumerate(layer.operators) if operator.trains]
    savers = tensors.last_savers
    dropped = {root: size for root, size in tensors.saved.items() if savers.get(root, -1) > trains[-1] and ends_stage}
    dropped_logits = sum(size for root, size in dropped.items() if layer.tensors[root].logits)
    weight, released = _weight_points(layer, tensors, remaining)
    return SplitFootprint(
        activations=footprint.activations,
        logits=footprint.logits,
        gradients=gradients,
        logits_gradients=logits_gradients,
        dropped=sum(dropped.values()) - dropped_logits,
        dropped_logits=dropped_logits,
        released=released,
        input=tuple(PeakPoint(each.workspace - gradients, each.logits - logits_gradients) for each in points),
        weight=weight,
    )


def _whole(layer: LayerSpec, microbatch_size: int, state: StateBytes) -> LayerTensors:
    """Returns the tensors of a layer without recomputation."""
    return LayerTensors(layer, microbatch_size, state, Recomputation(frozenset(tensor.name for tensor in layer.saved)))


def weighted_kernels(layer: LayerSpec) -> list[Kernel]:
    """Returns the kernels that use weights, in the order of the module's parameters: W has work for these alone.

    Weights of the layer itself, which are only added to a tensor, have no kernel.
    """
    by_parameter = {name: o.kernel for o in layer.operators if o.trains and o.kernel for name in o.parameters}
    named = (by_parameter[p.name] for p in layer.parameters if p.name in by_parameter and "." in p.name)
    return list({id(kernel): kernel for kernel in named}.values())


def _weight_points(
    layer: LayerSpec, tensors: LayerTensors, left: dict[int, Storage]
) -> tuple[tuple[PeakPoint, ...], int]:
    """Returns one peak point per operator with weights, and the bytes freed at the end.

    A weight's gradient lives until the next one is computed. Autocast computes the gradient in BF16 or FP16 and upcasts
    it after the tensors saved for it, including the weight's copy, are freed.

    Args:
        left: Operator -> gradient that I left for it.
    """
    place = {p.name: number for number, p in enumerate(layer.parameters)}
    trained = [(i, o) for i, o in enumerate(layer.operators) if o.trains and o.parameters]
    order = sorted(trained, key=lambda pair: min(place[name] for name in pair[1].parameters))
    last = _last_uses(layer, tensors, [index for index, _ in order])
    points, gone, last_gradient = [], 0, 0
    for index, operator in order:
        kept = sum(tensors.saved[root] for root, user in last.items() if user == index)
        matmul_gradient = gradient = 0
        kernel = operator.kernel
        if isinstance(kernel, Gemm):
            copies = tensors.weight_copies.get(kernel.name, 0)
            kept += copies
            matmul_gradient = gradient = kernel.weight_elements * tensors.state.matmul_gradient
            if copies:
                gradient = kernel.weight_elements * tensors.state.gradient
                matmul_gradient += max(0, gradient - kept)
        points.append(
            PeakPoint(_weight_scratch_bytes(tensors, operator) - gone, gradients=last_gradient + matmul_gradient)
        )
        gone += kept + (left[index].num_bytes if index in left else 0)
        last_gradient = gradient
    return tuple(points), gone


def _weight_scratch_bytes(tensors: LayerTensors, operator: Operator) -> int:
    """Returns scratch bytes next to gradients while W handles an operator: those of a norm's full backward."""
    if isinstance(operator.kernel, Gemm | Lookup) or not operator.backward_scratch:
        return 0
    read = sum(tensors.bytes_of(tensors.roots[name]) for name in operator.reads)
    return tensors.scratch_bytes(operator, forward=False) + read


def _last_uses(layer: LayerSpec, tensors: LayerTensors, order: Sequence[int]) -> dict[str, int]:
    """Returns saved tensor -> last operator with weights that needs it, for tensors that W alone needs.

    Inputs of the layer, which may be buffers, and logits are excluded.

    Args:
        order: Operators with weights, in the order of W.
    """
    users: dict[str, set[int]] = {}
    for index in range(len(layer.operators)):
        for root in tensors.saved_roots(index):
            users.setdefault(root, set()).add(index)
    inputs = {tensor.name for tensor in layer.inputs}
    alone = {root: of for root, of in users.items() if of <= {*order} and root in tensors.saved and root not in inputs}
    return {root: max(of, key=order.index) for root, of in alone.items() if not layer.tensors[root].logits}


def matmul_split_footprint(
    layer: LayerSpec, microbatch_size: int, state: StateBytes, footprint: LayerFootprint
) -> SplitFootprint:
    """Computes the memory of a split backward whose second half has only the matmuls for gradients of weights.

    A matrix saves its input and the gradient of its output, from which W computes the gradient of the weight. All other
    work is done, and its memory freed, in I. For a GPT with sequence length s, microbatch size b and hidden size h,
    forward saves 34 s b h bytes without attention scores. I leaves 32 s b h of these bytes (Qi et al. 2024).

    Args:
        microbatch_size: Microbatch size b, in sequences.
        state: Bytes per element of tensors.
        footprint: Footprint of the same layer with a full backward.
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
    # a point of the full backward has some of what I leaves; its end has the gradient of the layer's input
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
        weight=tuple(PeakPoint(gradients=matrix.weight_elements * state.matmul_gradient) for matrix in matrices),
    )


def split_effects(footprints: Sequence[SplitFootprint], phase: Phase) -> tuple[MemoryEffect, ...]:
    """Returns memory effects of I or W of layers run sequentially, as ``layers_effects`` does for full passes.

    ``during`` is the state at the peak point of all layers; afterwards the bytes that I leaves remain, or none.

    Args:
        footprints: Footprints of the layers, in the order in which they run: in I the last layer first, in W the first.
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
