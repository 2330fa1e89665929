"""Memory of a split backward: what its first part (I, gradients of activations) leaves to its second (W, of weights).

torch runs W from the gradients that reached each operation with weights (``torch.distributed.pipelining._backward``),
so I leaves these beside nearly all that forward kept: only what none but operations after the last weight needed, the
log-probabilities, goes when I is done. W takes the weights in the order of the module's parameters. Once it is past an
operation it lets go of the gradient that was left for it and of what it alone kept; the rest stays until W is done.

Kernels and the weights they use are found by their names: ``qkv`` uses ``qkv.weight`` and ``qkv.bias``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from simplan.program.expert_footprint import copied_weight_bytes
from simplan.program.footprint import LayerFootprint, Moment
from simplan.program.norm_footprint import norm_workspace
from simplan.program.program import MemoryCategory, MemoryEffect, Phase
from simplan.spec.layer import CollectiveKind, Exchange, Gemm, Kernel, LayerKind, LayerSpec, Lookup, Pointwise, Saved
from simplan.spec.software import StateBytes

__all__ = ["SplitFootprint", "split_effects", "split_footprint", "weighted_kernels"]

_FP32_BYTES = 4  # the loss and the statistics of norms are fp32 whatever the precision


class SplitFootprint(NamedTuple):
    """Bytes of one layer for one microbatch whose backward runs in two parts.

    Attributes:
        activations, logits: Kept from forward to I; those of the LayerFootprint.
        gradients, logits_gradients: What I adds: gradients of the outputs of operations with weights.
        dropped, dropped_logits: What of that which forward kept is gone when I is done.
        released: What is gone when W is past this layer, of activations and their gradients; the rest goes at its end.
        input: Moments of I, beside what was kept and what I leaves of this layer and those behind it.
        weight: Moments of W, beside what is held when it comes to this layer.
    """

    activations: int
    logits: int
    gradients: int
    logits_gradients: int
    dropped: int
    dropped_logits: int
    released: int
    input: tuple[Moment, ...]
    weight: tuple[Moment, ...]

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
    b = microbatch_size
    weighted = weighted_kernels(layer)
    if not weighted:
        return SplitFootprint(footprint.activations, footprint.logits, 0, 0, 0, 0, 0, footprint.backward, ())
    left = [b * _left(kernel, state) for kernel in weighted]
    output = b * layer.made_elements * state.residual
    passes = bool(output) and left[-1] == output
    logits_gradients = left.pop() if layer.kind is LayerKind.HEAD else 0
    gradients = sum(left)
    if receives and passes:  # after the last weight there are only additions: the output's gradient is the same tensor
        gradients -= output
    ends_stage = receives or layer.kind is LayerKind.HEAD  # else what follows holds on to it
    after = {kernel.name for kernel in layer.kernels[layer.kernels.index(weighted[-1]) + 1 :]} if ends_stage else set()
    dropped = [tensor for tensor in layer.saved if tensor.made_by in after]
    weight, released = _weight_moments(layer, b, state)
    return SplitFootprint(
        activations=footprint.activations,
        logits=footprint.logits,
        gradients=gradients,
        logits_gradients=logits_gradients,
        dropped=b * _bytes((t for t in dropped if not t.logits), state),
        dropped_logits=b * _bytes((t for t in dropped if t.logits), state),
        released=released,
        input=_input_moments(layer, b, state, footprint),
        weight=weight,
    )


def weighted_kernels(layer: LayerSpec) -> list[Kernel]:
    """The kernels that use weights, in the order of the module's parameters: W has work for these alone.

    Weights of the layer itself, which are just added to something, have no kernel.
    """
    kernels = {kernel.name: kernel for kernel in layer.kernels}
    trained = [p.name for p in layer.parameters if not p.frozen]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in trained if "." in name))
    unknown = [module for module in modules if module not in kernels]
    assert not unknown, f"{layer.key}: no kernel is called {unknown}, as the modules with weights are"
    return [kernels[module] for module in modules]


def _left(kernel: Kernel, state: StateBytes) -> int:
    """Bytes of the gradient of a kernel's output, of one sequence; under autocast only matrix products are in 16 bits.

    Tensor-parallel ranks that gather this gradient have it of all tokens.
    """
    match kernel:
        case Gemm(m=m, n=n):
            return m * n * state.activation
        case Pointwise(writes=writes):
            return writes * state.residual
        case Lookup(rows=rows, width=width):
            return rows * width * state.residual
        case _:
            raise AssertionError(f"{kernel.name} has no weights")


def _bytes(tensors: Iterable[Saved], state: StateBytes) -> int:
    """Of one sequence."""
    return sum(t.num_bytes(state.activation, state.residual) for t in tensors)


def _input_moments(layer: LayerSpec, b: int, state: StateBytes, footprint: LayerFootprint) -> tuple[Moment, ...]:
    """The end of a layer, where the gradients of its input are added up; in a head the loss, in others the exchanges.

    Under autocast the gradient of the residual stream is not one of those that are left, and a layer that begins with
    a matrix has the gradient of its input in 16 bits first. Logits in 16 bits have gradients in 32 first.
    """
    weighted = weighted_kernels(layer)
    first = weighted[0]
    narrows = state.activation < state.residual
    if isinstance(first, Gemm):
        arriving = b * first.m * first.k * state.residual
        temporary = arriving + (b * first.m * first.k * state.activation if narrows else 0)
    else:
        arriving = b * _left(first, state)
        temporary = max(arriving, b * norm_workspace(layer, first, state))
    if layer.kind is LayerKind.HEAD:
        left = b * _left(weighted[-1], state)
        wide = left // state.activation * _FP32_BYTES if state.activation < _FP32_BYTES else 0
        loss = max(footprint.backward[0].logits - left, wide)
        others = b * sum(_left(kernel, state) for kernel in weighted[:-1])
        return Moment(-others, loss), Moment(temporary)
    beside = arriving if narrows else 0
    end = Moment(max(2 * arriving, beside + temporary))
    exchanges = [beside + b * workspace for workspace in _exchange_workspaces(layer, state)]
    return (end, *map(Moment, exchanges))


def _exchange_workspaces(layer: LayerSpec, state: StateBytes) -> Iterator[int]:
    """By exchange of context-parallel ranks, its buffers less what the kernels before it have not left yet.

    An all-to-all has the gradients in the order of the sequence, in that of the ranks, as sent and as received. A
    reduce-scatter has those of all keys, the same by ranks, and beside them those of the queries and what it gives.
    """
    num_buffers = {CollectiveKind.ALL_TO_ALL: 4, CollectiveKind.REDUCE_SCATTER: 3}
    for index, kernel in enumerate(layer.kernels):
        if isinstance(kernel, Exchange) and kernel.axis == "cp" and kernel.backward in num_buffers:
            before = sum(_left(k, state) for k in weighted_kernels(layer) if layer.kernels.index(k) < index)
            yield num_buffers[kernel.backward] * kernel.elements * state.activation - before


def _weight_moments(layer: LayerSpec, b: int, state: StateBytes) -> tuple[tuple[Moment, ...], int]:
    """One for each operation with weights, and what is gone at the end.

    A matrix's gradient lives until the next one is there. Autocast makes it in 16 bits and widens it once what forward
    kept for it, the weight's copy among it, is gone.
    """
    moments = []
    gone = last_gradient = 0
    for kernel in weighted_kernels(layer):
        kept = b * _bytes(_kept_alone(layer, kernel), state)
        product = gradient = 0
        if isinstance(kernel, Gemm):
            copies = copied_weight_bytes(layer, kernel, state)
            kept += copies
            product = gradient = kernel.weight_elements * state.product
            if copies:
                gradient = kernel.weight_elements * state.gradient
                product += max(0, gradient - kept)
        workspace = b * norm_workspace(layer, kernel, state)
        moments.append(Moment(workspace - gone, gradients=last_gradient + product))
        gone += b * _left(kernel, state) + kept
        last_gradient = gradient
    return tuple(moments), gone


def _kept_alone(layer: LayerSpec, kernel: Kernel) -> list[Saved]:
    """What forward kept for one operation with weights: a norm's statistics, sums of residuals, a matrix's input.

    Not the input of the layer, which may be a receive buffer, nor that of a matrix which another operation keeps too.
    """
    found = [t for t in layer.saved if t.made_by == kernel.name and t.bytes_per_element]
    before = [k for k in layer.kernels[: layer.kernels.index(kernel)] if not isinstance(k, Exchange)]
    if not before or not isinstance(before[-1], Pointwise):
        return found
    made = [t for t in layer.saved if t.made_by == before[-1].name and not t.bytes_per_element]
    if isinstance(kernel, Gemm):
        return found + [t for t in made if t.elements == kernel.m * kernel.k][:1]
    return found + [t for t in made if t.residual]


def split_effects(footprints: Sequence[SplitFootprint], phase: Phase) -> tuple[MemoryEffect, ...]:
    """Memory effects of I or W of layers one after the other, as ``layers_effects`` has those of whole passes.

    ``during`` is the state at the worst moment of all layers, after which there is what I leaves, or nothing.

    Args:
        footprints: Of the layers, in the order in which they run: in I the last one first, in W the first one first.
        phase: ``BACKWARD_INPUT`` or ``BACKWARD_WEIGHT``.
    """
    assert phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    activations = logits = 0
    worst = (0, 0, 0, 0)
    worst_bytes = -(2**62)
    for footprint in footprints:
        if phase is Phase.BACKWARD_INPUT:
            activations += footprint.gradients
            logits += footprint.logits_gradients
        for moment in footprint.input if phase is Phase.BACKWARD_INPUT else footprint.weight:
            gone = min(0, moment.workspace)  # activations that are not there yet, or not any more
            state = (activations + gone, logits + moment.logits, moment.gradients, moment.workspace - gone)
            if sum(state) > worst_bytes:
                worst_bytes, worst = sum(state), state
        if phase is Phase.BACKWARD_WEIGHT:
            activations -= footprint.released
    if phase is Phase.BACKWARD_INPUT:
        left = (sum(f.gradients - f.dropped for f in footprints), logits - sum(f.dropped_logits for f in footprints))
    else:
        left = (-sum(f.between_activations for f in footprints), -sum(f.between_logits for f in footprints))
    effects = (
        MemoryEffect(MemoryCategory.ACTIVATIONS, worst[0], left[0]),
        MemoryEffect(MemoryCategory.LOGITS, worst[1], left[1]),
        MemoryEffect(MemoryCategory.GRADIENTS, worst[2], 0),
        MemoryEffect(MemoryCategory.WORKSPACE, worst[3], 0),
    )
    return tuple(effect for effect in effects if effect.during_bytes or effect.after_bytes)
