"""CUDA graphs: which kernels of a layer are replayed from a recording, and which tensors then never move.

A graph is launched once for all kernels in it, where the host otherwise launches each. The names are Megatron Core's
(NVIDIA/Megatron-LM at d98e8a6, 2026-08: docs/user-guide/features/cuda_graph.md; megatron/core/transformer/
transformer_config.py, cuda_graph_modules), whose per-layer graphs Transformer Engine captures (make_graphed_callables):
one for the forward of a layer, and one for its backward, for every microbatch that is under way.

===============  ==================================================================================================
attn             the first half of a block, its norm and its sum among it
mlp              the second half of a block without experts
moe_router       the norm of the second half, the expert that all tokens go to, and the choice of experts
moe_preprocess   what is done with that choice before tokens are sent, copies of tokens among it
full_iteration   forward and backward of all microbatches, in one graph; not the optimizer
===============  ==================================================================================================

What a graph gives is in a buffer of its own until backward has been there; so is, once for all graphs of a rank, what
comes back (TransformerEngine at d0067d0d: transformer_engine/pytorch/graph.py, static_outputs and
static_grad_outputs_dict with _reuse_graph_input_output_buffers). What goes in takes the place of what the first kernel
would keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from simplan.spec.layer import Exchange, LayerGraph, LayerKind, LayerSpec, Saved

__all__ = ["CudaGraph", "captured", "graphed"]

CudaGraph = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "full_iteration"]

_EXPERTS, _SHARED_DOWN = "experts_", "shared_down"
_FIRST, _MIDDLE, _SECOND, _END = "norm1", "residual1", "norm2", "residual2"
_NORMED = "norm2 output"


def graphed(layer: LayerSpec, graphs: Sequence[CudaGraph]) -> LayerSpec:
    """A layer of which graphs have a part, or the layer itself.

    Args:
        layer: As one rank has and computes it.
        graphs: What is captured; ``simplan.rules.graphs`` has seen that it goes together.
    """
    whole = "full_iteration" in graphs
    parts = [[kernel.name for kernel in layer.kernels]] if whole else [captured(layer, part) for part in graphs]
    names = frozenset(name for part in parts for name in part)
    if not names:
        return layer
    graph = LayerGraph(names, () if whole else tuple(_outputs(layer, names)), alone=not whole)
    return replace(layer, key=f"{layer.key},{'+'.join(sorted(graphs))} in a graph", graph=graph)


def captured(layer: LayerSpec, part: CudaGraph) -> list[str]:
    """Names of a block's kernels that such a graph has, its exchanges among them; none where it has no such part."""
    names = [kernel.name for kernel in layer.kernels]
    if layer.kind is not LayerKind.BLOCK or not {_FIRST, _MIDDLE, _SECOND, _END} <= set(names):
        return []
    middle, end = names.index(_MIDDLE) + 1, names.index(_END) + 1
    second = names[middle:end]
    has_experts = any(name.startswith(_EXPERTS) for name in second)
    match part:
        case "attn":
            return names[names.index(_FIRST) : middle]
        case "mlp":
            return [] if has_experts else second
        case "moe_router" | "moe_preprocess" if has_experts:
            routed = second.index("routing") + 1
            return second[:routed] if part == "moe_router" else second[routed : _sent(layer) - middle]
        case _:
            return []


def _sent(layer: LayerSpec) -> int:
    """Index of what sends tokens to their experts, or of the experts' first kernel where all are on every rank."""
    names = [kernel.name for kernel in layer.kernels]
    sending = (i for i, k in enumerate(layer.kernels) if isinstance(k, Exchange) and k.axis in ("ep", "etp"))
    return min(*sending, next(i for i, name in enumerate(names) if name.startswith(_EXPERTS)), len(names))


def _outputs(layer: LayerSpec, names: frozenset[str]) -> Iterator[Saved]:
    """What a block's graph gives to what comes after it, for one sequence."""
    if _END in names:
        yield Saved("block output", layer.made_elements, made_by=_END, residual=True)
        return
    middle = next(tensor for tensor in layer.saved if tensor.made_by == _MIDDLE)
    yield middle
    if _SECOND not in names:
        return
    yield next((t for t in layer.saved if t.name == _NORMED), replace(middle, name=_NORMED, made_by=_SECOND))
    if _SHARED_DOWN in names:
        yield Saved("shared expert output", middle.elements, made_by=_SHARED_DOWN)
