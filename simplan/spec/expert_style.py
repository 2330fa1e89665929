"""How a framework brings tokens to their experts, where it differs from copies by eager torch modules.

===========  =======================================================  ================================================
dispatch     what is exchanged                                        copies beside it
===========  =======================================================  ================================================
copies       every place of every expert                              tokens to places, places by expert; and back,
                                                                      where results are weighed and added up
all_to_all   the same                                                 each is one kernel, that reads or writes a token
                                                                      once
deepep       a token once for each rank that has some of its experts  there to places, and back
hybridep     the same                                                 none: the exchange itself does them
===========  =======================================================  ================================================

``all_to_all`` is Megatron Core's dispatcher with moe_permute_fusion, whose kernels are Transformer Engine's
(transformer_engine/pytorch/permutation.py); weights of experts are multiplied where their activation is computed
(megatron/core/transformer/moe/experts.py, bias_act_func with permuted_probs, at 23e00ed), in all ways but ``copies``,
so that what experts give is not kept for backward.
``deepep`` (deepseek-ai/DeepEP) and ``hybridep`` (its branch hybrid-ep) are the backends of its flex dispatcher
(megatron/core/transformer/moe/fused_a2a.py). With E experts on R ranks, of which a token takes k at random, it goes to
R (1 - C(E - E/R, k) / C(E, k)) of them (``ExpertDraw``). Between nodes it is sent once to each of these, in
whatever rank, and on from there (deepseek-ai/DeepEP, README: "asymmetric-domain bandwidth forwarding"), and what comes
back is added up in a node before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from simplan.spec.layer import Exchange, ExpertDraw, Gemm, Kernel, LayerSpec, Pointwise, Saved

__all__ = [
    "TAKEN_SHARE",
    "ExpertDispatch",
    "dispatched",
    "one_by_one",
    "with_biases_apart",
    "with_fused_experts",
]

ExpertDispatch = Literal["copies", "all_to_all", "deepep", "hybridep"]
TAKEN_SHARE: Mapping[ExpertDispatch, float] = {
    "copies": 0.0,
    "all_to_all": 16 / 132,
    "deepep": 20 / 132,
    "hybridep": 32 / 148,
}
"""Part of the multiprocessors that exchanges run on: 20 of an H100's (NVIDIA/Megatron-LM, core_v0.15.2 to v0.18.0,
transformer_config.py, moe_deepep_num_sms), 32 of a B200's (NVIDIA-NeMo/Megatron-Bridge, v0.2.0 to v0.6.0,
scripts/performance, moe_hybridep_num_sms)."""

_SORTS = ("sort by expert", "sort by rank")
_MOVES = ("dispatch", *_SORTS)
_PRODUCTS = ("experts_gate", "experts_up", "experts_down")
_BIAS_KERNELS = (2, 7)
_INPUTS = ("expert inputs", "gathered expert inputs")


def dispatched(layer: LayerSpec, way: ExpertDispatch) -> tuple[tuple[Kernel, ...], list[Saved]]:
    """Kernels of a layer that brings tokens to its experts in this way, and what it keeps.

    Args:
        layer: As ``simplan.spec.models.experts`` has it, or without experts.
        way: How.
    """
    kernels = {kernel.name: kernel for kernel in layer.kernels}
    router, gate = kernels.get("router"), kernels.get("experts_gate")
    if way == "copies" or not isinstance(router, Gemm) or not isinstance(gate, Gemm):
        return layer.kernels, list(layer.saved)
    tokens, whole = router.m, router.m * router.k
    num_ranks = router.n // gate.num_groups
    saved = [tensor for tensor in layer.saved if tensor.made_by != "combine"]
    if way == "all_to_all" or num_ranks == 1:
        return tuple(_in_one_kernel(kernel, whole) for kernel in layer.kernels), saved
    top_k = next(tensor.elements for tensor in layer.saved if tensor.name == "chosen experts") // tokens
    draw = ExpertDraw(router.n, top_k)
    sent = round(whole * draw.places(num_ranks))
    found: list[Kernel] = []
    for kernel in layer.kernels:
        match kernel:
            case Exchange(axis="ep"):
                found.append(replace(kernel, elements=min(sent, kernel.elements), draw=draw))
            case Pointwise(name="combine"):
                found.append(replace(kernel, reads=sent, writes=whole, moves=True))
            case Pointwise(name=name) if name in _SORTS and way == "deepep":
                places = kernel.reads
                reads, writes = (sent, places) if name == _SORTS[0] else (places, sent)
                found.append(replace(kernel, reads=reads, writes=writes))
            case Pointwise(name=name) if name in _MOVES:
                pass
            case _:
                found.append(kernel)
    if way == "deepep":
        return tuple(found), saved
    inputs = next(k.name for k in reversed(found) if isinstance(k, Exchange) and k.name in _INPUTS)
    return tuple(found), [replace(t, made_by=inputs) if t.made_by in _MOVES else t for t in saved]


def one_by_one(kernels: tuple[Kernel, ...], streams: int) -> tuple[Kernel, ...]:
    """With every expert's product a kernel of its own.

    Args:
        kernels: Of a layer.
        streams: How many run at once.
    """
    experts = [k for k in kernels if isinstance(k, Gemm) and k.name in _PRODUCTS]
    return tuple(replace(k, streams=streams) if k in experts else k for k in kernels)


def with_biases_apart(layer: LayerSpec, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """Experts with biases whose last one, and limits of whose activations, are passes of their own.

    Megatron-LM at d7288711 (2026-04): megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias multiplies the
    bias of the last matrix by the weights of tokens, which makes it fp32, adds it, joins what it got for each expert
    and casts it back: 28 bytes a value that are read or written, and 40 in backward. fusions/fused_bias_geglu.py limits
    both halves before the activation (gpt-oss, the one model with such biases) and joins them: 8 and 10 values. A pass
    counts twice in backward but for what only moves, so both are stated as two. The biases of the first matrices are
    part of the product. Each expert's bias is weighed and added by kernels of its own: two in forward, and in backward
    seven: a cast, three that weigh, sum and cast the bias's gradient and one that adds it to those of other
    microbatches, two for the gradients of the weights of tokens.

    Args:
        layer: As ``simplan.spec.models.experts`` has it.
        kernels: Its kernels, as they are by now.
    """
    if not any(parameter.name == "experts_down.bias" for parameter in layer.parameters):
        return kernels
    found: list[Kernel] = []
    for kernel in kernels:
        if isinstance(kernel, Pointwise) and kernel.name == "experts_silu_multiply":
            values = kernel.writes // 2
            found += [
                Pointwise("experts_limit", values, values),
                Pointwise("experts_join_halves", 3 * values, 3 * values, moves=True),
            ]
        found.append(kernel)
        if isinstance(kernel, Gemm) and kernel.name == "experts_down":
            values = kernel.m * kernel.n
            found += [
                Pointwise("experts_weigh_bias", 3 * values, 3 * values, launches=_of_each(kernel.num_groups)),
                Pointwise("experts_join_outputs", 4 * values, 4 * values, moves=True),
            ]
    return tuple(found)


def _of_each(experts: int) -> tuple[int, int]:
    """Kernels that weigh and add a bias, and that take it back, of so many experts."""
    forward, backward = _BIAS_KERNELS
    return forward * experts, backward * experts


def with_fused_experts(kernels: tuple[Kernel, ...], saved: Iterable[Saved]) -> tuple[tuple[Kernel, ...], list[Saved]]:
    """Experts whose activation, and its cast where products are in 8 bits, are part of the product before it.

    Of backward likewise: gradients of the first two matrices' outputs come quantized from the kernel that makes them.

    Args:
        kernels, saved: Of a layer.
    """
    found: list[Kernel] = []
    for kernel in kernels:
        match kernel:
            case Gemm(name="experts_gate" | "experts_up"):
                found.append(replace(kernel, cast_before=("gradient",)))
            case Gemm(name="experts_down"):
                found.append(replace(kernel, cast_before=("input",)))
            case Pointwise(name="experts_silu_multiply"):
                pass
            case _:
                found.append(kernel)
    made = {"experts_silu_multiply": "experts_up"}
    return tuple(found), [replace(tensor, made_by=made.get(tensor.made_by, tensor.made_by)) for tensor in saved]


def _in_one_kernel(kernel: Kernel, whole: int) -> Kernel:
    """A copy that reads, or writes, a token once for all of its places."""
    match kernel:
        case Pointwise(name="dispatch"):
            return replace(kernel, reads=whole)
        case Pointwise(name="combine"):
            return replace(kernel, reads=(kernel.writes - whole) // 2, writes=whole, moves=True)
        case _:
            return kernel
