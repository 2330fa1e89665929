"""Framework implementations of expert dispatch, where they differ from copies by eager torch modules.

===========  =======================================================  ================================================
dispatch     all-to-all of                                            additional copies
===========  =======================================================  ================================================
copies       every capacity slot of every expert                      tokens to slots, slots by expert; and back, where
                                                                      results are summed, and weighted unless the
                                                                      activation is
all_to_all   every capacity slot of every expert                      each is one kernel, which reads or writes a token
                                                                      once
deepep       a token once for each rank that has some of its experts  to slots after the all-to-all, and back
hybridep     a token once for each rank that has some of its experts  none: the all-to-all itself does them
===========  =======================================================  ================================================

``all_to_all`` is Megatron Core's dispatcher with moe_permute_fusion, whose kernels are Transformer Engine's
(transformer_engine/pytorch/permutation.py). All algorithms except ``copies`` multiply by the weights of experts in
the activation (megatron/core/transformer/moe/experts.py, bias_act_func with permuted_probs, at 23e00ed), so that
expert outputs are not saved for backward. So does Megatron Core from core_v0.13.0 (2025-07) on with ``copies``, its
dispatcher without moe_permute_fusion (``weighted_activations``). ``deepep`` (deepseek-ai/DeepEP) and ``hybridep``
(its branch hybrid-ep) are the backends of Megatron Core's flex dispatcher
(megatron/core/transformer/moe/fused_a2a.py). With E experts on R ranks, of which a token uses k at random, it goes to
R (1 - C(E - E/R, k) / C(E, k)) of them (``ExpertDraw``). Between nodes a token is sent once to each destination node
and forwarded there (deepseek-ai/DeepEP, README: "asymmetric-domain bandwidth forwarding"). Results are summed within
a node before they return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from simplan.model.layer import ExpertDraw, Gemm, LayerCollective, LayerSpec, Operator, Pointwise
from simplan.model.parts.experts import DOWN, GATE_AND_UP

ExpertDispatch = Literal["copies", "all_to_all", "deepep", "hybridep"]
SM_FRACTION: Mapping[ExpertDispatch, float] = {
    "copies": 0.0,
    "all_to_all": 16 / 132,
    "deepep": 20 / 132,
    "hybridep": 32 / 148,
}
"""Fraction of the SMs that expert all-to-all occupies: 20 of an H100's (NVIDIA/Megatron-LM, core_v0.15.2 to v0.18.0,
transformer_config.py, moe_deepep_num_sms), 32 of a B200's (NVIDIA-NeMo/Megatron-Bridge, v0.2.0 to v0.6.0,
scripts/performance, moe_hybridep_num_sms)."""

_SORTS = ("sort by expert", "sort by rank")
_MOVES = ("dispatch", *_SORTS)
_BIAS_KERNELS = (2, 7)  # per expert, in forward and in backward


def dispatched(
    operators: tuple[Operator, ...], way: ExpertDispatch, *, weighted_activations: bool = False
) -> tuple[Operator, ...]:
    """Operators of a layer with experts, with one dispatch algorithm.

    Args:
        weighted_activations: ``copies`` multiplies by the weights of experts in the activation.
    """
    kernels = {operator.kernel.name: operator.kernel for operator in operators if operator.kernel is not None}
    router, gate = kernels["router"], kernels[GATE_AND_UP[0]]
    assert isinstance(router, Gemm)
    assert isinstance(gate, Gemm)
    if way == "copies":
        return tuple(_summed(operators)) if weighted_activations else operators
    tokens, whole = router.m, router.m * router.k
    num_ranks = router.n // gate.num_groups
    operators = tuple(_summed(operators))
    if way == "all_to_all" or num_ranks == 1:
        return tuple(_in_one_kernel(operator, whole) for operator in operators)
    chosen = next(t.elements for o in operators for t in o.makes if t.name == "chosen experts")
    draw = ExpertDraw(router.n, chosen // tokens)
    sent = round(whole * draw.places(num_ranks))
    found: list[Operator] = []
    skipped: list[str] = []
    for operator in operators:
        kernel = operator.kernel
        match kernel:
            case LayerCollective(axis="ep"):
                kernel = replace(kernel, elements=min(sent, kernel.elements), draw=draw)
            case Pointwise(name="combine"):
                kernel = replace(kernel, reads=sent, writes=whole, moves=True)
            case Pointwise(name=name) if name in _SORTS and way == "deepep":
                places = kernel.reads
                reads, writes = (sent, places) if name == _SORTS[0] else (places, sent)
                kernel = replace(kernel, reads=reads, writes=writes)
            case Pointwise(name=name) if name in _MOVES:
                skipped += (tensor.name for tensor in operator.makes)
        found.append(replace(operator, kernel=kernel))
    return _left_out(found, skipped)


def _summed(operators: Iterable[Operator]) -> Iterator[Operator]:
    """Operators with expert results unpermuted and summed in one kernel: the results are already weighted."""
    picked: Operator | None = None
    for operator in operators:
        if isinstance(operator.kernel, Pointwise) and operator.kernel.name == "combine":
            picked = operator
        elif picked is not None and operator.reads == ("their weights",):
            pass
        elif picked is not None and picked.makes[0].name in operator.reads:
            yield replace(picked, makes=operator.makes)
        else:
            yield operator


def _left_out(operators: Sequence[Operator], names: Sequence[str]) -> tuple[Operator, ...]:
    """Operators without copies that the all-to-all next to them does; the all-to-all then makes the copies' results."""
    found: list[Operator] = []
    for operator in operators:
        made = [tensor for tensor in operator.makes if tensor.name in names]
        if made and found and found[-1].makes and found[-1].makes[0].name in operator.reads:
            found[-1] = replace(found[-1], makes=tuple(made))
        elif made:
            found.append(replace(operator, kernel=None))  # the first copy, before the all-to-all
        else:
            found.append(operator)
    return tuple(found)


def one_by_one(operators: tuple[Operator, ...], streams: int) -> tuple[Operator, ...]:
    """Operators with a separate kernel, on one of several CUDA streams, for every expert's matmul."""
    return tuple(
        replace(o, kernel=replace(o.kernel, streams=streams))
        if isinstance(o.kernel, Gemm) and o.kernel.name in (*GATE_AND_UP, DOWN)
        else o
        for o in operators
    )


def with_biases_apart(layer: LayerSpec, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Experts with separate kernels for the last bias, and for the limits of activations.

    Megatron-LM at d7288711 (2026-04): megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias multiplies the
    bias of the last matrix by the weights of tokens (which makes it FP32), adds it, concatenates the results of the
    experts and casts them back: 28 bytes read or written per value, and 40 in backward. fusions/fused_bias_geglu.py
    limits both halves before the activation (gpt-oss, the one model with such biases) and concatenates them: 8 and 10
    values. A kernel counts twice in backward unless it only moves elements, so both are stated as two. The biases of
    the first matrices are fused into the matmul. Each expert's bias is weighted and added by separate kernels: two in
    forward and seven in backward. The seven are a cast, three that weight, sum and cast the bias's gradient, one that
    adds it to those of other microbatches, and two for the gradients of the weights of tokens.
    """
    if not any(parameter.name == f"{DOWN}.bias" for parameter in layer.parameters):
        return operators
    found: list[Operator] = []

    def add(name: str, values: int, like: Operator, *, moves: bool = False, launches: tuple[int, int] = (1, 1)) -> None:
        kernel = Pointwise(name, values, values, moves=moves, launches=launches)
        found.append(Operator(kernel=kernel, roles=like.roles))

    for operator in operators:
        kernel = operator.kernel
        if isinstance(kernel, Pointwise) and kernel.name == "experts_silu_multiply":
            values = kernel.writes // 2
            add("experts_limit", values, operator)
            add("experts_join_halves", 3 * values, operator, moves=True)
        found.append(operator)
        if isinstance(kernel, Gemm) and kernel.name == DOWN:
            values, (forward, backward) = kernel.m * kernel.n, _BIAS_KERNELS
            launches = (forward * kernel.num_groups, backward * kernel.num_groups)
            add("experts_weigh_bias", 3 * values, operator, launches=launches)
            add("experts_join_outputs", 4 * values, operator, moves=True)
    return tuple(found)


def with_fused_experts(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Experts whose activation, and its cast to FP8, is fused into the matmul before it.

    In backward, output gradients of the first two matrices come quantized from the kernel that makes them.
    """
    found: list[Operator] = []
    for operator in operators:
        kernel = operator.kernel
        match kernel:
            case Gemm(name=name) if name in GATE_AND_UP:
                kernel = replace(kernel, cast_before=("gradient",))
            case Gemm(name=name) if name == DOWN:
                kernel = replace(kernel, cast_before=("input",))
            case Pointwise(name="experts_silu_multiply"):
                kernel = None
        found.append(replace(operator, kernel=kernel))
    return tuple(found)


def _in_one_kernel(operator: Operator, whole: int) -> Operator:
    """A copy that reads or writes a token once for all of its capacity slots."""
    kernel = operator.kernel
    match kernel:
        case Pointwise(name="dispatch"):
            kernel = replace(kernel, reads=whole)
        case Pointwise(name="combine"):
            kernel = replace(kernel, reads=(kernel.writes - whole) // 2, writes=whole, moves=True)
    return replace(operator, kernel=kernel)
