"""Memory of a stage: what it holds between steps, and what a forward or backward of one layer adds and frees.

The activations are those of eager torch modules (``LayerSpec.saved``). Workspace is what autograd needs beside them:
the incoming gradient, the widest gradient inside the layer and one weight gradient before it is accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simplan.program.program import MemoryCategory, MemoryEffect
from simplan.spec.layer import LayerKind, LayerSpec, Pointwise
from simplan.spec.software import SoftwareSpec, StateBytes
from simplan.spec.training import TrainingSpec

__all__ = ["LayerFootprint", "layer_footprint", "layers_effects", "owned_parameters", "resting_bytes"]

_LOSS_BYTES = 4
_ADAM_STATE_BYTES = 8  # two fp32 moments


class LayerFootprint(NamedTuple):
    """Bytes of one layer for one microbatch.

    Attributes:
        activations: Kept from forward to backward.
        logits: The same, for the output distribution.
        forward_workspace: Only while forward runs.
        backward_workspace: Only while backward runs.
        input_bytes: The part of ``activations`` that is the layer's input.
        output_bytes: What the layer hands on.
    """

    activations: int
    logits: int
    forward_workspace: int
    backward_workspace: int
    input_bytes: int
    output_bytes: int


def layer_footprint(layer: LayerSpec, microbatch_size: int, state: StateBytes) -> LayerFootprint:
    """Memory that one layer needs for one microbatch.

    Args:
        layer: The layer.
        microbatch_size: Sequences b.
        state: Element widths.
    """
    b = microbatch_size
    activations, logits = layer.saved_bytes(state.activation)
    output = layer.output_elements * state.activation
    largest_weight = max(p.num_elements for p in layer.parameters) * state.gradient
    widest = max((k.writes for k in layer.kernels if isinstance(k, Pointwise)), default=0)
    if layer.kind is LayerKind.HEAD:
        # forward: the logits, and their fp32 copy where they are narrower, beside the log-probabilities;
        # backward: the gradients before and after the softmax
        copies = state.activation + (_LOSS_BYTES if state.activation < _LOSS_BYTES else 0)
        forward_workspace = widest * copies
        backward_workspace = max(2 * widest * _LOSS_BYTES, widest * state.activation + largest_weight // b)
    elif layer.kind is LayerKind.EMBEDDING:
        forward_workspace = output
        backward_workspace = output + largest_weight // b
    else:
        forward_workspace = 2 * output
        backward_workspace = output + widest * state.activation + largest_weight // b
    kept_input = sum(t.elements for t in layer.saved if t.name == "input") * state.activation
    return LayerFootprint(
        b * activations, b * logits, b * forward_workspace, b * backward_workspace, b * kept_input, b * output
    )


def layers_effects(footprints: Sequence[LayerFootprint], *, forward: bool) -> tuple[MemoryEffect, ...]:
    """Memory effects of an operation that runs layers one after the other.

    ``during`` is the state at the worst of its layers, so one operation over many layers has the same peak as many
    operations over one.

    Args:
        footprints: Of the layers, in the order in which they run.
        forward: Each layer adds what it keeps before its workspace; in backward it frees it after.
    """
    sign = 1 if forward else -1
    activations = logits = 0
    worst = (-(2**62), 0, 0, 0)  # all bytes, then activations, logits and workspace
    for footprint in footprints:
        before = (activations, logits)
        activations += sign * footprint.activations
        logits += sign * footprint.logits
        held = (activations, logits) if forward else before
        workspace = footprint.forward_workspace if forward else footprint.backward_workspace
        worst = max(worst, (sum(held) + workspace, *held, workspace), key=lambda state: state[0])
    effects = [
        MemoryEffect(MemoryCategory.ACTIVATIONS, worst[1], activations),
        MemoryEffect(MemoryCategory.WORKSPACE, worst[3], 0),
    ]
    if logits:
        effects.append(MemoryEffect(MemoryCategory.LOGITS, worst[2], logits))
    return tuple(effects)


def owned_parameters(layers: Sequence[LayerSpec]) -> list[int]:
    """Weights each layer of a stage brings; a head tied to an embedding of the same stage does not bring its copy."""
    holds_embedding = any(layer.kind is LayerKind.EMBEDDING for layer in layers)
    return [
        sum(p.num_elements for p in layer.parameters if not (holds_embedding and p.name in layer.tied))
        for layer in layers
    ]


def resting_bytes(
    layers: Sequence[LayerSpec], training: TrainingSpec, software: SoftwareSpec, *, dp: int, receive_bytes: int
) -> dict[MemoryCategory, int]:
    """What a rank holds between steps.

    Args:
        layers: All layers of the rank's stages.
        training: For precision and optimizer.
        software: For element widths and buckets.
        dp: Data-parallel ranks.
        receive_bytes: Buffers preallocated for messages.
    """
    state = software.state_bytes[training.precision]  # type: ignore[index]
    elements = sum(owned_parameters(layers))
    states = _ADAM_STATE_BYTES if training.optimizer in ("adam", "adamw") else 0
    buckets = elements * state.gradient if dp > 1 and not software.gradient_as_bucket_view else 0
    return {
        MemoryCategory.PARAMETERS: elements * state.parameter,
        MemoryCategory.GRADIENTS: elements * state.gradient,
        MemoryCategory.OPTIMIZER: elements * (states + int(state.master)),
        MemoryCategory.BUFFERS: buckets + (receive_bytes if software.preallocated_receives else 0),
    }
