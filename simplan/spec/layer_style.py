"""How a framework computes the layers of a transformer, where it differs from eager torch modules.

Families of models build their layers as torch would run them (``simplan.spec.models``). A style changes what such a
layer keeps for backward: unfused attention has its scores as tensors, dropout keeps which elements it let through,
fused functions keep their inputs only; and what context-parallel ranks exchange. What it computes stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from simplan.spec.base import Count, Spec
from simplan.spec.expert_style import (
    ExpertDispatch,
    dispatched,
    one_by_one,
    with_biases_apart,
    with_fused_experts,
)
from simplan.spec.layer import Attention, CollectiveKind, Exchange, Kernel, LayerKind, LayerSpec, Pointwise, Saved

__all__ = ["LayerStyle", "Loss", "SplitBackward", "styled", "styled_layers"]

Loss = Literal["log_probabilities", "log_probabilities_of_parts", "probabilities", "gradients", "logits"]
SplitBackward = Literal["all", "products"]

_FP32_BYTES = 4
_MASK_BYTES = 1
_GATED = "silu output"
_JOIN = "join documents"
_SINKS = "sinks"
COMPILED = "compiled"
_KEPT_BY_LOSS: dict[Loss, tuple[str, int | None]] = {
    "log_probabilities": ("log-probabilities", _FP32_BYTES),
    "log_probabilities_of_parts": ("log-probabilities of parts", _FP32_BYTES),
    "probabilities": ("probabilities", _FP32_BYTES),
    "gradients": ("gradients of logits", None),
    "logits": ("logits", None),
}


class LayerStyle(Spec):
    """What differs.

    Attributes:
        attention: ``unfused``: scores are a tensor, their scaling, mask and softmax one kernel that keeps its result in
            the precision of activations (Megatron-LM's masked_softmax_fusion).
        dropout: Families whose models train with dropout after the embedding, after both branches of a block, and,
            where attention is unfused, of its weights: masks of one byte are kept. A fused kernel draws them again.
        joined_products: Matrices with one input are one: queries, keys and values, gate and up.
        fused_gates: The activation of a gated MLP times its other half is one function, which keeps its inputs.
        loss: What the cross-entropy keeps: the fp32 logarithms of probabilities beside the logits (torch); the same,
            and where the vocabulary is split DTensor's temporaries beside (torch's loss_parallel); the probabilities,
            in place of an fp32 copy of the logits, which become their gradients (Megatron-LM); or the gradients in
            place of the logits, in their precision (Transformer Engine's fused cross-entropy); or the logits alone,
            from which one kernel makes their gradients (torch.compile).
        repeated_keys: Before attention keys and values become as many heads as queries have, and these are what
            context-parallel ranks gather, in forward and again in backward; their gradients go round a ring in fp32
            (torch's context parallelism).
        narrow_values: Values that are narrower than keys are not padded.
        skips_keys: The kernel of attention in a window skips keys outside of it, for which torch has a table, and takes
            sinks into its softmax, which else scale its output afterwards.
        split_backward: What stays of a layer between the two parts of a backward: nearly ``all`` that forward kept
            (torch), or of each product with weights its input and the gradient of its output (``products``).
        gathered_keys: How queries of a part of a sequence attend to keys that are gathered from all context-parallel
            ranks: at once, with a table of those that count, or to the keys of one rank after the other, for which
            the kernel needs none.
        documents_in_one_call: One kernel attends for all documents of a sequence, and its outputs are one tensor.
        expert_dispatch: How tokens come to their experts (``simplan.spec.expert_style``), as the profile has it.
        expert_streams: Products of experts, and their casts, are kernels of their own, of which so many run at once;
            None for one kernel of all experts. Their last biases are then added apart.
        fused_experts: Activations of experts, and their casts to 8 bits, are part of the products before, likewise.
        eight_bit_attention: Fused attention is in 8 bits, likewise.
        compiled: Blocks are torch.compile's: a gate's activation is computed again in backward, and so is the sum in
            the middle of a block, from the branch that is added, where that is narrower. What products with weights
            have as input is kept, as backward would have to write it to memory all the same (the partitioner of
            torch 2.13, torch/_functorch/config.py: ban_recompute_materialized_backward).
        reruns_to_end: A block that backward runs again runs to its end, as an autograd function that calls it has it
            (Megatron's CheckpointFunction, torch's reentrant checkpoint); else up to the last tensor that is needed.
    """

    attention: Literal["fused", "unfused"] = "fused"
    dropout: Annotated[tuple[str, ...], Field(strict=False)] = ()
    joined_products: bool = False
    fused_gates: bool = False
    loss: Loss = "log_probabilities"
    repeated_keys: bool = False
    narrow_values: bool = False
    skips_keys: bool = False
    split_backward: SplitBackward = "all"
    gathered_keys: Literal["masked", "by_rank"] = "masked"
    documents_in_one_call: bool = False
    expert_dispatch: ExpertDispatch = Field(default="copies", exclude=True)
    expert_streams: Count | None = None
    fused_experts: bool = Field(default=False, exclude=True)
    eight_bit_attention: bool = Field(default=False, exclude=True)
    compiled: bool = False
    reruns_to_end: bool = False


def styled_layers(layers: Iterable[LayerSpec], style: LayerStyle, family: str) -> tuple[LayerSpec, ...]:
    """Layers of a model in a style; equal layers become one object.

    Args:
        layers: As the family builds them.
        style: Of the framework.
        family: Of the model.
    """
    made: dict[str, LayerSpec] = {}
    found = []
    for layer in layers:
        if layer.key not in made:
            made[layer.key] = styled(layer, style, dropout=family in style.dropout)
        found.append(made[layer.key])
    return tuple(found)


def styled(layer: LayerSpec, style: LayerStyle, *, dropout: bool) -> LayerSpec:
    """One layer in a style.

    Args:
        layer: As its family builds it.
        style: Of the framework.
        dropout: The model trains with dropout.
    """
    kernels, saved = dispatched(layer, style.expert_dispatch)
    if style.fused_experts:
        kernels, saved = with_fused_experts(kernels, saved)
    elif style.expert_streams:
        kernels = with_biases_apart(layer, one_by_one(kernels, style.expert_streams))
    other_experts = kernels != layer.kernels
    if style.attention == "unfused":
        cores = [k for k in kernels if isinstance(k, Attention) and not k.eager]
        kernels = tuple(
            replace(k, eager=True, fused_softmax=True, dropout=dropout) if k in cores else k for k in kernels
        )
        saved = list(_with_scores(saved, cores, dropout=dropout))
    if style.repeated_keys:
        kernels = tuple(_with_repeated_keys(kernels))
    in_one_call = style.documents_in_one_call and any(isinstance(k, Attention) and k.documents for k in kernels)
    if in_one_call:
        kernels, saved = _in_one_call(kernels, saved)
    if style.narrow_values:
        kernels, saved = _narrow_values(kernels, saved)
    skips = style.skips_keys and any(isinstance(k, Attention) and k.masked and k.window for k in kernels)
    if style.skips_keys:
        kernels, saved = _skipping_keys(kernels, saved)
    eight_bits = style.eight_bit_attention and any(isinstance(k, Attention) for k in kernels)
    if eight_bits:
        kernels = tuple(replace(k, eight_bits=True) if isinstance(k, Attention) else k for k in kernels)
    compiled = style.compiled and layer.kind is LayerKind.BLOCK
    if style.fused_gates or compiled:
        saved = [tensor for tensor in saved if not tensor.name.endswith(_GATED)]
    if compiled:
        saved = [replace(t, residual=False) if t.made_by == "residual1" else t for t in saved]
    if dropout:
        saved += _masks(layer)
    if style.loss != "log_probabilities":
        name, width = _KEPT_BY_LOSS[style.loss]
        saved = [replace(t, name=name, bytes_per_element=width) if t.logits else t for t in saved]
    constants = layer.constants
    if skips or (style.gathered_keys == "by_rank" and _is_masked_for_gathering(layer)):
        constants = tuple(table for table in constants if table.name != "attention mask")
    to_end = style.reruns_to_end and layer.kind is LayerKind.BLOCK
    changed = (kernels, tuple(saved), constants) != (layer.kernels, layer.saved, layer.constants)
    if not (compiled or to_end or changed):
        return layer
    words = [style.attention, "dropout" * dropout, "gates" * style.fused_gates, style.loss]
    words += ["repeated" * style.repeated_keys, "narrow" * style.narrow_values, "skips" * style.skips_keys]
    words += ["one call" * in_one_call, _expert_words(style) * other_experts]
    words += ["attention in 8 bits" * eight_bits]
    words += ["by rank" * (constants != layer.constants), COMPILED * compiled, "to end" * to_end]
    key = f"{layer.key},{'+'.join(word for word in words if word)}"
    return replace(
        layer,
        key=key,
        kernels=kernels,
        saved=tuple(saved),
        constants=constants,
        compiled=compiled,
        reruns_to_end=to_end,
    )


def _expert_words(style: LayerStyle) -> str:
    how = "fused" if style.fused_experts else f"{style.expert_streams or 'all'} at once"
    return f"experts by {style.expert_dispatch}, {how}"


def _is_masked_for_gathering(layer: LayerSpec) -> bool:
    """Whether attention in it has a table for no other reason than that keys are gathered."""
    cores = [kernel for kernel in layer.kernels if isinstance(kernel, Attention)]
    gathers = any(isinstance(k, Exchange) and k.axis == "cp" for k in layer.kernels)
    return gathers and bool(cores) and not any(core.masked for core in cores)


def _with_scores(saved: Iterable[Saved], cores: list[Attention], *, dropout: bool) -> Iterator[Saved]:
    """What unfused attention keeps in place of the logarithms of sums: weights, and what dropout makes of them."""
    for tensor in saved:
        core = next((core for core in cores if tensor.made_by == core.name), None)
        if core is None or not tensor.bytes_per_element:
            yield tensor
            continue
        yield Saved(f"{core.name} weights", core.num_scores, made_by=core.name)
        if dropout:
            yield Saved(f"{core.name} weights let through", core.num_scores, _MASK_BYTES, made_by=core.name)
            yield Saved(f"{core.name} weights after dropout", core.num_scores, made_by=core.name)


def _with_repeated_keys(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """The gather of keys and values for attention, and how gradients of these come home: as many hops as ranks."""
    core = next((k for k in kernels if isinstance(k, Attention)), None)
    for kernel in kernels:
        gathers = isinstance(kernel, Exchange) and kernel.axis == "cp" and kernel.forward is CollectiveKind.ALL_GATHER
        if core is None or not isinstance(kernel, Exchange) or not gathers:
            yield kernel
            continue
        elements = kernel.elements * core.num_heads // core.num_key_value_heads
        yield replace(kernel, backward=CollectiveKind.ALL_GATHER, elements=elements)
        yield Exchange("gradients of k and v", "cp", None, CollectiveKind.RING, elements, _FP32_BYTES)


def _in_one_call(kernels: tuple[Kernel, ...], saved: list[Saved]) -> tuple[tuple[Kernel, ...], list[Saved]]:
    """Attention of documents whose outputs need not be joined."""
    of_core = [replace(t, name="attention output") for t in saved if t.name == "outputs of documents"]
    kept = [t for t in saved if t.name != "outputs of documents" and not (of_core and t.made_by == _JOIN)]
    kept = [replace(tensor, made_by="attention") if tensor.made_by == _JOIN else tensor for tensor in kept]
    kernels = tuple(replace(k, one_call=True) if isinstance(k, Attention) and k.documents else k for k in kernels)
    return tuple(kernel for kernel in kernels if kernel.name != _JOIN), kept + of_core


def _skipping_keys(kernels: tuple[Kernel, ...], saved: list[Saved]) -> tuple[tuple[Kernel, ...], list[Saved]]:
    """Attention whose kernel knows of windows and sinks."""
    found = [
        replace(kernel, masked=False) if isinstance(kernel, Attention) and kernel.window else kernel
        for kernel in kernels
        if kernel.name != _SINKS
    ]
    return tuple(found), [tensor for tensor in saved if tensor.made_by != _SINKS]


def _narrow_values(kernels: tuple[Kernel, ...], saved: list[Saved]) -> tuple[tuple[Kernel, ...], list[Saved]]:
    """Multi-head latent attention whose kernel takes values as they are: nothing is padded, or cut off afterwards."""
    core = next((k for k in kernels if isinstance(k, Attention) and k.padded), None)
    if core is None:
        return kernels, saved
    padded, value = core.head_dim, core.value_head_dim
    narrowed = []
    for tensor in saved:
        if tensor.name == "q, k and padded v":
            elements = tensor.elements * (2 * padded + value) // (3 * padded)
            narrowed.append(replace(tensor, name="q, k and v", elements=elements))
        elif tensor.made_by == "cut values":
            narrowed.append(replace(tensor, made_by=core.name))
        elif tensor.name != "padded attention output":
            narrowed.append(tensor)
    kept = [replace(k, padded=False) if k is core else k for k in kernels]
    return tuple(k for k in kept if k.name != "cut values"), narrowed


def _masks(layer: LayerSpec) -> list[Saved]:
    """Of dropout where a branch joins the residual stream, and after the embedding."""
    match layer.kind:
        case LayerKind.BLOCK:
            ends = [k for k in layer.kernels if isinstance(k, Pointwise) and k.name.startswith("residual")]
            return [Saved(f"{k.name} mask", k.writes, _MASK_BYTES, made_by=k.name) for k in ends]
        case LayerKind.EMBEDDING:
            return [Saved("embedding mask", layer.output_elements, _MASK_BYTES, made_by=layer.kernels[-1].name)]
        case LayerKind.HEAD:
            return []
