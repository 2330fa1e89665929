"""Memory of a stage: what it holds between steps, and what a forward or backward of one layer adds and frees.

The activations are those of eager torch modules (``LayerSpec.saved``). Workspace is what they need beside them; of the
moments at which it could be largest those are looked at that were found to matter in torch's trace of allocations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from simplan.program.adapter_footprint import adapted_moments, has_adapters
from simplan.program.attention_footprint import eager_attention_bytes
from simplan.program.compiled_footprint import compiled_moments
from simplan.program.convolution_footprint import convolution_moments, has_convolutions
from simplan.program.expert_footprint import copied_weight_bytes, expert_moments, has_experts
from simplan.program.head_footprint import head_moments, scatter_elements
from simplan.program.low_precision_footprint import backward_moments, forward_cast_bytes
from simplan.program.moment import Moment
from simplan.program.norm_footprint import norm_workspace
from simplan.program.program import MemoryCategory, MemoryEffect
from simplan.spec.layer import Exchange, Gemm, Kernel, LayerKind, LayerSpec, Lookup, Pointwise, Saved
from simplan.spec.recompute import Recomputation
from simplan.spec.software import StateBytes

__all__ = ["LayerFootprint", "Moment", "layer_footprint", "layers_effects", "owned_parameters"]


class LayerFootprint(NamedTuple):
    """Bytes of one layer for one microbatch.

    Attributes:
        activations: Kept from forward to backward, copies of weights among them.
        logits: The same, for the output distribution.
        forward: Moments of forward, in order; the head's last one is that of the loss.
        backward: Moments of backward, in order, beside what was kept; the head's first one is that of the loss.
        input_bytes: The part of ``activations`` that is the layer's input.
        output_bytes: What the layer hands on.
        left: Gradient of a weight that is tied to another layer: backward leaves it (or, negative, takes it up).
    """

    activations: int
    logits: int
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
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
    b = microbatch_size
    copies = sum(copied_weight_bytes(layer, k, state) for k in layer.kernels if isinstance(k, Gemm))
    whole_again = recomputation.from_start  # which copies weights again
    kept = b * _bytes((t for t in recomputation.saved if not (t.logits or t.of_microbatch)), state)
    kept += _bytes((t for t in recomputation.saved if t.of_microbatch), state) + (0 if whole_again else copies)
    logits = b * _bytes((t for t in recomputation.saved if t.logits), state)
    dropped = [t for t in layer.saved if t not in recomputation.saved and not _is_input(t, state)]
    rebuilt = b * (_bytes(dropped, state) - _bytes(_used_up(layer, recomputation), state)) + copies
    match layer.kind:
        case _ if has_convolutions(layer):
            forward, backward = convolution_moments(layer, b, state)
        case LayerKind.HEAD:
            forward, backward = head_moments(layer, b, state)
        case LayerKind.EMBEDDING:
            forward, backward = _embedding_moments(layer, b, state)
        case LayerKind.BLOCK if has_adapters(layer):
            forward, backward = adapted_moments(layer, b, state, recomputation)
        case LayerKind.BLOCK if has_experts(layer):
            forward, backward = expert_moments(layer, b, state, recomputation)
        case LayerKind.BLOCK:
            forward, backward = _block_moments(layer, b, state, recomputation)
    if layer.compiled:
        backward += tuple(compiled_moments(layer, b, state, recomputation))
    # a part that runs again alone is needed after the worst moment, unless that is its own, or it is of the second half
    late = [] if whole_again else _of_second_half(layer, dropped)
    again = rebuilt if whole_again else b * _bytes(late, state)
    alone = () if whole_again else [tensor for tensor in dropped if tensor not in late]
    backward += tuple(Moment(workspace) for workspace in eager_attention_bytes(layer, b, state, alone))
    made_bytes, passed_bytes = layer.output_bytes(state.activation, state.residual)
    again += b * passed_bytes  # their gradients
    return LayerFootprint(
        activations=kept,
        logits=logits,
        forward=forward,
        backward=tuple(moment._replace(workspace=moment.workspace + again) for moment in backward),
        input_bytes=b * _bytes((t for t in recomputation.saved if _is_input(t, state)), state),
        output_bytes=b * (made_bytes + passed_bytes),
    )


def _used_up(layer: LayerSpec, recomputation: Recomputation) -> Iterator[Saved]:
    """Kept results that only what runs again has a use for: they are gone when it has run."""
    before = [kernel.name for kernel in layer.kernels[: max(recomputation.kernels, default=0)]]
    return (t for t in recomputation.saved if t.made_by in before and t not in layer.saved)


def _of_second_half(layer: LayerSpec, tensors: Iterable[Saved]) -> list[Saved]:
    """Those that are made after the sum in the middle of a block, whose worst moment comes after that."""
    names = [kernel.name for kernel in layer.kernels]
    after = names[names.index("residual1") :] if "residual1" in names else []
    return [tensor for tensor in tensors if tensor.made_by in after]


def _bytes(tensors: Iterable[Saved], state: StateBytes) -> int:
    """Of one sequence."""
    return sum(t.num_bytes(state.activation, state.residual) for t in tensors)


def _is_input(tensor: Saved, state: StateBytes) -> bool:
    """Whether it is the layer's input itself, not a narrower copy of it."""
    return not tensor.made_by and (tensor.residual or tensor.as_given or state.activation == state.residual)


_Moments = tuple[Moment, ...]


def _block_moments(
    layer: LayerSpec, b: int, state: StateBytes, recomputation: Recomputation
) -> tuple[_Moments, _Moments]:
    """Forward ends with the output beside what is added to the residual stream; before, it has what it does not keep.

    Backward begins with the last matrix: gradients of output, input and weight; or has its worst moment right after,
    at the kernel before it, which holds the gradients of its inputs. Autocast makes the weight's gradient in 16 bits
    and then widens it.
    """
    wide, narrow = state.residual, state.activation
    last = next(k for k in reversed(layer.kernels) if isinstance(k, Gemm))
    inner, weight, output = b * last.m * last.k, last.n * last.k, b * layer.made_elements
    activation = next(k for k in _before(layer, last) if isinstance(k, Pointwise))
    source = next(k for k in _before(layer, activation) if isinstance(k, Gemm))
    writes = b * activation.writes
    if all(tensor.made_by != source.name for tensor in layer.saved):
        writes += inner  # its backward needs its result, which so is not gone yet
    scattered = layer.made_elements < last.m * last.n
    result = scatter_elements(b * last.m * last.n, output, b) if scattered else output
    widened_branch = narrow + (wide if narrow < wide else 0)
    # a norm after the last sum keeps it, and its output comes when the branch is gone
    ending = output * (max(wide, widened_branch) if _keeps_sum(layer, last) else wide + widened_branch)
    copied, cast = copied_weight_bytes(layer, last, state), forward_cast_bytes(layer, last, b, state)
    forward = max(ending, cast + result * narrow)
    dropped = b * _dropped_in_forward(layer, recomputation, state)
    if dropped:
        multiplied = dropped - (writes - inner) * narrow + copied + cast + result * narrow
        forward = max(ending + output * wide, dropped, multiplied)
    narrowed = output * (narrow if narrow < wide else 0)
    incoming = b * last.m * last.n * narrow if scattered else narrowed
    widened = weight * state.gradient if copied else 0
    incoming_gradient = output * wide - b * _kept_after(layer, last, state)
    again = []
    if recomputation.from_start and _keeps_sum(layer, last):  # it runs again up to the last sum
        carried = output * wide if narrow < wide else 0  # of the norm before, which is kept in 16 bits alone
        again.append(Moment(output * (wide + widened_branch) + carried))
    return (Moment(forward),), (
        Moment(incoming_gradient + incoming + inner * narrow, gradients=weight * state.product),
        Moment(incoming_gradient + writes * narrow - copied),
        Moment(incoming_gradient, gradients=widened),
        *backward_moments(layer, last, b, state, incoming_gradient + incoming),
        *(Moment(b * workspace) for workspace in _norms_after(layer, last, state)),
        *again,
    )


def _norms_after(layer: LayerSpec, last: Gemm, state: StateBytes) -> Iterator[int]:
    """What the backward of a norm after the last matrix needs, of one sequence: gradients after and before it."""
    for kernel in layer.kernels[layer.kernels.index(last) + 1 :]:
        if any(parameter.name == f"{kernel.name}.weight" for parameter in layer.parameters):
            handed = layer.made_elements * state.residual
            yield handed + max(handed, norm_workspace(layer, kernel, state)) - _handed_on(layer, state)


def _handed_on(layer: LayerSpec, state: StateBytes) -> int:
    """What a layer keeps for those after it, of one sequence: gone when its backward begins."""
    return _bytes((tensor for tensor in layer.saved if tensor.handed_on), state)


def _kept_after(layer: LayerSpec, last: Gemm, state: StateBytes) -> int:
    """What a norm after the last matrix keeps, of one sequence: gone when backward comes to the matrix."""
    after = {kernel.name for kernel in layer.kernels[layer.kernels.index(last) + 1 :]}
    return _bytes((tensor for tensor in layer.saved if tensor.made_by in after), state)


def _keeps_sum(layer: LayerSpec, last: Gemm) -> bool:
    """Whether what comes after the last matrix is kept: the sum, where it is normed."""
    after = {kernel.name for kernel in layer.kernels[layer.kernels.index(last) + 1 :]}
    return any(tensor.made_by in after and tensor.residual for tensor in layer.saved)


def _before(layer: LayerSpec, kernel: Kernel) -> Iterator[Kernel]:
    """The kernels before one, the nearest first."""
    return reversed(layer.kernels[: layer.kernels.index(kernel)])


def _dropped_in_forward(layer: LayerSpec, recomputation: Recomputation, state: StateBytes) -> int:
    """What forward makes for its second half and does not keep, of one sequence."""
    names = [kernel.name for kernel in layer.kernels]
    second_half = names[names.index("residual1") :]
    dropped = [t for t in layer.saved if t not in recomputation.saved and t.made_by in second_half]
    return _bytes((t for t in dropped if not t.made_by.startswith("norm")), state)


def _embedding_moments(layer: LayerSpec, b: int, state: StateBytes) -> tuple[_Moments, _Moments]:
    """Forward looks up tokens, then positions, and adds them; backward has the output's and the weight's gradients."""
    lookups = [k for k in layer.kernels if isinstance(k, Lookup)]
    if not lookups:
        return _patch_moments(layer, b, state)
    output, tokens = b * layer.output_elements, b * lookups[0].rows * lookups[0].width
    exchanged = any(isinstance(k, Exchange) for k in layer.kernels)
    forward = output
    if len(lookups) > 1:
        forward += output + lookups[1].rows * lookups[1].width
    forward -= b * sum(t.elements for t in layer.saved if t.residual)  # a sum that is kept for a norm
    weight = max((p.num_elements for p in layer.parameters if not p.frozen), default=0) * state.residual
    scattered = scatter_elements(tokens, output, b) if output < tokens else 0
    gradient = (output + (tokens if exchanged else 0)) if layer.num_trained else 0
    return (Moment(max(forward, scattered) * state.residual),), (
        Moment(scattered * state.residual if gradient else 0),
        Moment(gradient * state.residual, gradients=weight),
    )


def _patch_moments(layer: LayerSpec, b: int, state: StateBytes) -> tuple[_Moments, _Moments]:
    """Forward has patches, patches with the class token, and these with positions; backward the gradients of them."""
    (matrix,) = (k for k in layer.kernels if isinstance(k, Gemm))
    patches, output = b * matrix.m * matrix.n * state.activation, b * layer.output_elements * state.residual
    weight = matrix.n * matrix.k * state.activation
    return (Moment(patches + 2 * output),), (Moment(output + 2 * patches, gradients=weight),)


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
    worst_bytes, worst = -(2**62), (0, 0, 0, 0)
    for footprint in footprints:
        before = (activations, logits)
        activations += sign * footprint.activations
        logits += sign * footprint.logits
        held = (activations, logits) if forward else before
        for moment in footprint.forward if forward else footprint.backward:
            gone = min(0, moment.workspace)  # activations that are not there yet, or not any more
            workspace = moment.workspace - gone
            state = (held[0] + gone, held[1] + moment.logits, gradients + moment.gradients, workspace)
            if sum(state) > worst_bytes:
                worst_bytes, worst = sum(state), state
        gradients += 0 if forward else footprint.left
    effects = (
        MemoryEffect(MemoryCategory.ACTIVATIONS, worst[0], activations),
        MemoryEffect(MemoryCategory.LOGITS, worst[1], logits),
        MemoryEffect(MemoryCategory.GRADIENTS, worst[2], gradients),
        MemoryEffect(MemoryCategory.WORKSPACE, worst[3], 0),
    )
    return tuple(effect for effect in effects if effect.during_bytes or effect.after_bytes)


def owned_parameters(layers: Sequence[LayerSpec], *, trained: bool = False) -> list[int]:
    """Weights each layer of a stage brings; a head tied to an embedding of the same stage does not bring its copy.

    Args:
        layers: The stage.
        trained: Only those that are not frozen.
    """
    holds_embedding = any(layer.kind is LayerKind.EMBEDDING for layer in layers)
    found: dict[str, int] = {}  # layers that are alike bring as many
    for layer in layers:
        if layer.key not in found:
            found[layer.key] = sum(
                p.num_elements
                for p in layer.parameters
                if not ((holds_embedding and p.name in layer.tied) or (trained and p.frozen))
            )
    return [found[layer.key] for layer in layers]
