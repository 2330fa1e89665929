"""Recomputation of activations: tensors that a layer saves in each mode, and kernels that its backward recomputes.

The modes ``none``, ``selective`` and ``full`` are those of the executor's modules. The others are those of the
frameworks whose published runs use them. Of embedding and head, only a loss in recomputed chunks is.
``simplan.model.recompute_modules`` has single modules of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from simplan.model.layer import (
    Attention,
    CollectiveKind,
    Gemm,
    LayerCollective,
    LayerKind,
    LayerSpec,
    Role,
    has_backward,
)
from simplan.model.recompute_modules import (
    Recomputation,
    RecomputeGroup,
    kernels_where,
    recomputed_modules,
    token_lookups,
)
from simplan.plan.plan import ParallelPlan, Recompute, RecomputeModule

__all__ = ["Recomputation", "RecomputeGroup", "recomputation", "recompute_of"]

_ALL_TO_ALL = CollectiveKind.ALL_TO_ALL
_LAYER_STRIDE = 2  # torchtitan's usual one for selective_layer
_UNCOUNTED = {Role.GATING, Role.EXPERTS}  # by selective_op: torchtitan's gate, and grouped GEMMs, no aten.mm


def recompute_of(layer: LayerSpec, plan: ParallelPlan, place: int) -> Recompute:
    """Recomputation mode of a layer, the block with index ``place`` (from 0) in its stage.

    Multi-token prediction is not recomputed where recomputation is limited to the first blocks of a stage
    (NVIDIA/Megatron-LM at d98e8a6, megatron/core/transformer/multi_token_prediction.py, ``_checkpointed_forward``).
    """
    return "none" if layer.mtp_depth and plan.recompute_layers is not None else plan.recompute_at(place)


def recomputation(
    layer: LayerSpec, mode: Recompute, block_index: int = 0, modules: Sequence[RecomputeModule] | None = None
) -> Recomputation:
    """Tensors that a layer saves and kernels that it recomputes in one mode.

    ``full`` saves the input. ``selective`` recomputes single modules and saves everything except the tensors that only
    they need: the attention core (Korthikanti et al. 2022), or named modules. ``selective_op`` is torchtitan's per-op
    policy. It saves the results of every second matmul, beginning with the first, of a fused attention core, of
    reduce-scatters and of all-to-alls. Some of these results are not needed. Routers and grouped GEMMs of experts are
    recomputed and do not count. ``selective_layer`` recomputes every second block in full, not the first (torchtitan).
    ``minimal`` saves the results of matmuls, summed over ranks, as far as backward needs them (MaxText).
    ``qkv_proj_offloaded`` offloads q, k and v to host memory, without counting the transfers, and recomputes the rest
    (MaxText). In the last two modes XLA merges tensor-parallel collectives with the matmuls that they feed or sum, so
    that collectives are repeated only with these.

    Args:
        block_index: Index of the block in the model, from 0; matters to ``selective_layer`` only.
    """
    unchanged = Recomputation(frozenset(tensor.name for tensor in layer.saved))
    if layer.kind is not LayerKind.BLOCK:
        return unchanged if layer.loss_chunks is None else _of_chunks(layer, unchanged)
    match mode:
        case "none":
            return unchanged
        case "full":
            return _keeping(layer, ())
        case "selective":
            return recomputed_modules(layer, ("core_attn",) if modules is None else modules)
        case "selective_layer":
            return _keeping(layer, ()) if block_index % _LAYER_STRIDE else unchanged
        case "selective_op":
            counted = [index for index in _gemms(layer) if _UNCOUNTED.isdisjoint(layer.roles[index])]
            kept = {index for number, index in enumerate(counted) if number % 2 == 0}
            kept |= kernels_where(layer, lambda k: isinstance(k, Attention) and not k.eager)
            kept |= kernels_where(
                layer, lambda k: _is_scattered(k) or (isinstance(k, LayerCollective) and k.forward is _ALL_TO_ALL)
            )
            return _keeping(layer, kept)
        case "minimal":
            matmuls = _gemms(layer)[:-1]
            parts = [index for index in matmuls if _is_summed(layer.kernels[index + 1])]
            sums = [index + 1 for index in parts]  # JAX saves a matmul over ranks as one array, its sum
            found = _keeping(layer, {*matmuls, *sums} - {*parts}, parts)
            return _without_lone_collectives(layer, found)
        case "qkv_proj_offloaded":
            first_attention = min(kernels_where(layer, lambda k: isinstance(k, Attention)))
            on_host = [index for index in _gemms(layer) if index < first_attention]
            return _without_lone_collectives(layer, _keeping(layer, (), on_host))


def _of_chunks(layer: LayerSpec, unchanged: Recomputation) -> Recomputation:
    """Recompute the logits and the loss of every chunk, unless forward computed the gradients."""
    assert layer.loss_chunks is not None
    if layer.loss_chunks.in_forward:
        return unchanged
    saved = frozenset(name for name in unchanged.saved if not layer.tensors[name].logits)
    again = tuple(sorted(kernels_where(layer, lambda k: getattr(k, "chunks", None) is not None)))
    return Recomputation(saved, (RecomputeGroup(again, again[-1]),))


def _keeping(layer: LayerSpec, kept: Iterable[int], elsewhere: Iterable[int] = ()) -> Recomputation:
    """Save the input and the results of some kernels; recompute the others as far as backward needs them.

    Args:
        kept: Indices of kernels whose results are saved.
        elsewhere: Indices of kernels whose results are saved, but not on the device.
    """
    # the input itself, not its quantized copies
    inputs = {tensor.name for tensor in layer.inputs if not tensor.elsewhere}
    kept = {*kept, *token_lookups(layer)}  # embeddings enter the recomputation like the input
    names = inputs.union(*(_results(layer, index) for index in kept))
    remade = {layer.makers[tensor.name] for tensor in layer.saved if tensor.name in layer.makers} - kept
    remade |= kernels_where(layer, lambda kernel: isinstance(kernel, Gemm) and kernel.name in layer.late_savers)
    runs_back = any(has_backward(kernel) for kernel in layer.kernels)
    if not runs_back or not (layer.full_recompute_pass or remade):  # below the first adapter, or in a frozen tower
        return Recomputation(frozenset(tensor.name for tensor in layer.saved))
    # torch ends the recomputation with the last tensor that backward needs, others with the layer's result
    last = max(index for index in range(len(layer.kernels)) if layer.full_recompute_pass or index in remade)
    gemms = [(index, kernel) for index, kernel in enumerate(layer.kernels) if isinstance(kernel, Gemm)]
    if any(not gemm.trained for _, gemm in gemms):  # a frozen weight is such a tensor, too
        last = max(last, max(index for index, gemm in gemms if gemm.backward_matmuls) - 1)
    skipped = kept.union(elsewhere)
    again = tuple(
        index
        for index, kernel in enumerate(layer.kernels[: last + 1])
        if index not in skipped and not (isinstance(kernel, LayerCollective) and kernel.forward is None)
    )
    # a ring's attention kernels make one result together; a norm at the end needs its input before the last matmul
    rerun = RecomputeGroup(again, max(last, gemms[-1][0]))
    return Recomputation(frozenset(names), (rerun,), from_start=True)


def _is_summed(kernel: object) -> bool:
    """True if a kernel sums partial results of a matmul over ranks."""
    return isinstance(kernel, LayerCollective) and kernel.forward in (
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_REDUCE,
    )


def _is_scattered(kernel: object) -> bool:
    """True if ranks sum and scatter partial results of a branch or of experts."""
    axes = ("tp", "etp")
    return (
        isinstance(kernel, LayerCollective) and kernel.axis in axes and kernel.forward is CollectiveKind.REDUCE_SCATTER
    )


def _without_lone_collectives(layer: LayerSpec, kept: Recomputation) -> Recomputation:
    """Leave out tensor-parallel collectives of matmuls that are not recomputed."""

    def runs(index: int) -> bool:
        kernel = layer.kernels[index]
        if not isinstance(kernel, LayerCollective) or kernel.axis != "tp":
            return True
        gathers = kernel.forward is CollectiveKind.ALL_GATHER
        near = range(index + 1, len(layer.kernels)) if gathers else range(index - 1, -1, -1)
        matmuls = takewhile(lambda other: isinstance(layer.kernels[other], Gemm), near)
        return any(matmul in kept.kernels for matmul in matmuls)

    reruns = (rerun._replace(kernels=tuple(filter(runs, rerun.kernels))) for rerun in kept.reruns)
    return kept._replace(reruns=tuple(reruns))


def _results(layer: LayerSpec, index: int) -> set[str]:
    """Names of a kernel's results: all of a matmul or collective, else those that backward needs."""
    operators = [operator for operator, place in zip(layer.operators, layer.places, strict=True) if place == index]
    if isinstance(layer.kernels[index], Gemm | LayerCollective):
        return {tensor.name for operator in operators if operator.kernel is not None for tensor in operator.makes}
    made = {tensor.name for operator in operators for tensor in operator.makes}
    return made & {tensor.name for tensor in layer.saved}


def _gemms(layer: LayerSpec) -> list[int]:
    return sorted(kernels_where(layer, lambda kernel: isinstance(kernel, Gemm)))
