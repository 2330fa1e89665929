"""Recomputation of activations: what a layer still keeps in each mode, and what its backward runs again.

The modes ``none``, ``selective`` and ``full`` are those of the executor's modules, the others those of the frameworks
whose published runs use them. Embedding and head are never recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from simplan.spec.layer import Attention, CollectiveKind, Exchange, Gemm, LayerKind, LayerSpec, Lookup, Saved
from simplan.spec.plan import Recompute

__all__ = ["Recomputation", "recomputation"]

_LAYER_STRIDE = 2  # torchtitan's usual one for selective_layer
_UNCOUNTED = ("router", "experts_")  # to selective_op: torchtitan's gate, and grouped products, which are no aten.mm


class Recomputation(NamedTuple):
    """What recomputation makes of a layer.

    Attributes:
        saved: What forward keeps for backward.
        kernels: Indices into ``LayerSpec.kernels`` of what runs again in backward, in order.
        needed_by: Index of the kernel before whose backward they run: the first that asks for a tensor that was not
            kept. Backward of the kernels after it comes first.
        from_start: The layer runs again from its input on, but for what was kept; else parts of it alone.
    """

    saved: tuple[Saved, ...]
    kernels: tuple[int, ...]
    needed_by: int = -1
    from_start: bool = False


def recomputation(layer: LayerSpec, mode: Recompute, block_index: int = 0) -> Recomputation:
    """What a layer keeps and repeats.

    ``full`` keeps the input. ``selective`` keeps all but what the attention core keeps for itself alone
    (Korthikanti et al. 2022). ``selective_op`` keeps the results of every second matrix product beginning with the
    first, of the attention core, of reduce-scatters and of what experts are sent and give back (torchtitan's per-op
    policy), of which some are not needed; routers and products of experts run again and do not count.
    ``selective_layer`` repeats every second block in full, the first not (torchtitan). ``minimal`` keeps the results of
    matrix products, added up over ranks, as far as backward needs them (MaxText). ``qkv_proj_offloaded`` has q, k and v
    on the host, whose transfers are not counted, and repeats the rest (MaxText). There XLA makes exchanges of
    tensor-parallel ranks part of the products that they feed or sum up, so that they run again only with these.

    Args:
        layer: The layer.
        mode: ``ParallelPlan.recompute``.
        block_index: Which of the model's blocks it is, from 0; matters to ``selective_layer`` only.
    """
    if layer.kind is not LayerKind.BLOCK:
        return Recomputation(layer.saved, ())
    match mode:
        case "none":
            return Recomputation(layer.saved, ())
        case "full":
            return _keeping(layer, ())
        case "selective":
            return _selective(layer)
        case "selective_layer":
            return _keeping(layer, ()) if block_index % _LAYER_STRIDE else Recomputation(layer.saved, ())
        case "selective_op":
            counted = [index for index in _gemms(layer) if not layer.kernels[index].name.startswith(_UNCOUNTED)]
            kept = {index for number, index in enumerate(counted) if number % 2 == 0}
            kept |= _where(layer, lambda k: isinstance(k, Attention))
            kept |= _where(layer, lambda k: _is_scattered(k) or (isinstance(k, Exchange) and k.axis == "ep"))
            return _keeping(layer, sorted(kept))
        case "minimal":
            products = _gemms(layer)[:-1]
            parts = [index for index in products if _is_summed(layer.kernels[index + 1])]
            sums = [index + 1 for index in parts]  # a product over ranks is kept as the one array that it is to JAX
            found = _keeping(layer, sorted({*products, *sums} - {*parts}), parts)
            return _without_lone_exchanges(layer, found)
        case "qkv_proj_offloaded":
            first_attention = min(_where(layer, lambda k: isinstance(k, Attention)))
            on_host = [index for index in _gemms(layer) if index < first_attention]
            return _without_lone_exchanges(layer, _keeping(layer, (), on_host))


def _selective(layer: LayerSpec) -> Recomputation:
    """Drops what only the attention core needs; its output is kept by the projection, where it is its input."""
    cores = _where(layer, lambda kernel: isinstance(kernel, Attention | Lookup))  # a bias is looked up for its core
    if all(isinstance(core := layer.kernels[index], Attention) and not core.propagates for index in cores):
        return Recomputation(layer.saved, ())
    first, last = min(cores), max(cores)
    again = tuple(
        index
        for index in range(first, last + 1)
        if index in cores or getattr(layer.kernels[index], "forward", None) is not None
    )
    names = {layer.kernels[index].name for index in cores}
    reader = next(kernel for kernel in layer.kernels[last:] if isinstance(kernel, Gemm))
    keeps = reader.trained or any(kernel.name == f"{reader.name}.lora_a" for kernel in layer.kernels)
    keeps &= not layer.compiled  # torch.compile computes the projection's input again as well
    saved = tuple(t for t in layer.saved if t.made_by not in names or (keeps and t.name == f"{t.made_by} output"))
    return Recomputation(saved, again, last)


def _keeping(layer: LayerSpec, kept: tuple[int, ...] | list[int], elsewhere: list[int] | None = None) -> Recomputation:
    """Keeps the input and the results of some kernels; the others run again as far as saved tensors need them.

    Args:
        layer: The layer.
        kept: Indices of kernels whose results are kept.
        elsewhere: Indices of kernels whose results are kept, but not on the device.
    """
    # the input itself, not what matrix products made of it
    inputs = [tensor for tensor in layer.saved if not tensor.made_by]
    if not inputs:  # backward has no use for it, but forward run again has
        inputs = [Saved("input", layer.output_elements)]
    saved = [replace(tensor, residual=True) for tensor in inputs]
    names = {layer.kernels[index].name for index in kept}
    for index in kept:
        saved += _results(layer, index)
    makers = {tensor.made_by for tensor in layer.saved} - names
    # torch ends the second forward with the last tensor that backward needs
    last = max(index for index, kernel in enumerate(layer.kernels) if kernel.name in makers)
    if any(not kernel.trained for kernel in layer.kernels if isinstance(kernel, Gemm)):
        last = max(last, _last_product(layer) - 1)  # a frozen weight is such a tensor, too
    skipped = {*kept, *(elsewhere or ())}
    again = tuple(
        index
        for index, kernel in enumerate(layer.kernels[: last + 1])
        if index not in skipped and not (isinstance(kernel, Exchange) and kernel.forward is None)
    )
    # a ring's attention kernels make one result together; a norm at the end needs its input before the last product
    return Recomputation(tuple(dict.fromkeys(saved)), again, max(last, _gemms(layer)[-1]), from_start=True)


def _is_summed(kernel: object) -> bool:
    """Whether a kernel adds up what ranks have of a product."""
    return isinstance(kernel, Exchange) and kernel.forward in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


def _is_scattered(kernel: object) -> bool:
    """Whether tensor-parallel ranks sum up what they have of a layer's branch, each for its own tokens."""
    return isinstance(kernel, Exchange) and kernel.axis == "tp" and kernel.forward is CollectiveKind.REDUCE_SCATTER


def _without_lone_exchanges(layer: LayerSpec, kept: Recomputation) -> Recomputation:
    """Leaves out tensor-parallel exchanges of products that do not run again."""

    def runs(index: int) -> bool:
        kernel = layer.kernels[index]
        if not isinstance(kernel, Exchange) or kernel.axis != "tp":
            return True
        gathers = kernel.forward is CollectiveKind.ALL_GATHER
        near = range(index + 1, len(layer.kernels)) if gathers else range(index - 1, -1, -1)
        products = takewhile(lambda other: isinstance(layer.kernels[other], Gemm), near)
        return any(product in kept.kernels for product in products)

    return kept._replace(kernels=tuple(index for index in kept.kernels if runs(index)))


def _results(layer: LayerSpec, index: int) -> list[Saved]:
    """What a kernel gives, as tensors to keep."""
    kernel = layer.kernels[index]
    match kernel:
        case Gemm():
            return [Saved(f"{kernel.name} output", kernel.m * kernel.n, made_by=kernel.name)]
        case Exchange():
            made = [tensor for tensor in layer.saved if tensor.made_by == kernel.name]
            elements = kernel.elements if kernel.axis == "ep" else layer.output_elements
            return made or [Saved(kernel.name, elements, made_by=kernel.name)]
        case _:
            return [tensor for tensor in layer.saved if tensor.made_by == kernel.name]


def _last_product(layer: LayerSpec) -> int:
    """Index of the last matrix that backward has a product of."""
    return max(_where(layer, lambda kernel: isinstance(kernel, Gemm) and kernel.backward_products > 0))


def _gemms(layer: LayerSpec) -> list[int]:
    return sorted(_where(layer, lambda kernel: isinstance(kernel, Gemm)))


def _where(layer: LayerSpec, holds: Callable[[object], bool]) -> set[int]:
    return {index for index, kernel in enumerate(layer.kernels) if holds(kernel)}
