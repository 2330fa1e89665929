"""Mixture of experts: a router, experts of which every token uses a few, and experts that all tokens share.

Tokens are routed in groups, each of which is one sequence (Lepikhin et al. 2021, GShard, section 3.1). Every expert
takes at most as many tokens of a group as it has capacity slots, and computes all slots, filled or not. So all sizes
are fixed beforehand, and dropped tokens do not depend on how a batch is split. Each expert-parallel rank holds some of
the experts. One all-to-all dispatches the tokens of all of these ranks to the experts, and another one returns the
results. A token that uses several experts of one rank is sent there once per expert.

With tensor parallelism (with sequence parallelism) and context parallelism, every rank routes its own tokens, which are
a part of each sequence and so a separate group. Tensor-parallel ranks hold equal routers, whose gradients are partial,
and split the shared expert like any MLP. Experts are split by ``etp``, not by ``tp``: ranks that split an expert
all-gather their tokens before it, and reduce-scatter its results (Liu et al. 2025, arXiv:2504.14960, section 3.2).

The weights of the chosen experts are the softmax of their scores (Jiang et al. 2024, Mixtral). Routers with another
normalization cost the same, except for the scores of all experts, which some of them save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.model.layer import CollectiveKind, Gemm, LayerCollective, Operator, ParameterSpec, Pointwise, Role, Tensor
from simplan.model.parts.mlp import column_linears, gated, row_linear
from simplan.model.parts.part import FP32_BYTES, INDEX_BYTES, MASK_BYTES, LayerPart, joined, linear, matmul, with_role
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

GATE_AND_UP, DOWN = ("experts_gate", "experts_up"), "experts_down"
_SOURCE, _COMBINED = "norm2 output", "combined output"
_CHOSEN, _PLACES, _TOKENS = "chosen experts", "places of tokens", "tokens of places"
_INPUTS, _RESULTS = "places of experts", "results of places"


def places_of(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Capacity slots of an expert for the ``tokens`` of a sequence that one rank routes.

    They are ``capacity_factor`` times its even share of the tokens, at least one.
    """
    return max(1, math.ceil(round(capacity_factor * tokens * top_k / num_experts, 6)))


def experts_key(model: ModelSpec) -> str:
    """Part of a layer's key that identifies a mixture of experts."""
    parts = [f"e{model.num_experts}", f"top{model.top_k}", f"ei{model.moe_intermediate_size}"]
    parts.append(f"cf{model.capacity_factor:g}")
    parts += [f"si{model.shared_expert_intermediate_size}"] * (model.shared_expert_intermediate_size > 0)
    parts += ["sgate"] * model.shared_expert_gate + ["rbias"] * model.router_bias + ["ebias"] * model.expert_bias
    return ",".join(parts)


def shared_expert_mlp(model: ModelSpec, share: RankShare) -> LayerPart:
    """A gated MLP for all tokens, perhaps times a gate of one number per token; empty without shared experts."""
    n, own, h = share.tokens, share.own_tokens, share.hidden
    i = model.shared_expert_intermediate_size // share.shard.tp
    if not i:
        return LayerPart()
    mlp = joined(
        column_linears({"shared_gate": i, "shared_up": i}, _SOURCE, share),
        gated("shared_", n * i),
        row_linear("shared_down", "shared_gated product", i, share),
    )
    if not model.shared_expert_gate:
        return with_role(mlp, Role.MLP, Role.SHARED_EXPERT)
    gate = linear("shared_expert_gate", _SOURCE, (own, 1, h), partial=(share.partial, False))
    sigmoid = Tensor("shared gate's sigmoid", own)
    output = "shared_down output"
    weigh = Operator(
        kernel=Pointwise("weigh shared", own * h + own, own * h),
        reads=("shared_expert_gate output", output),
        makes=(Tensor("weighed shared output", own * h), sigmoid),
        saves=(output, sigmoid.name),
    )
    whole = joined(mlp, with_role(gate, Role.GATING), weigh)
    return with_role(whole, Role.MLP, Role.SHARED_EXPERT)


def expert_mlp(model: ModelSpec, share: RankShare) -> LayerPart:
    """The router, the experts, and dispatch and combine of tokens: ``combined output``."""
    return with_role(joined(_router(model, share), _experts(model, share)), Role.MLP)


def sum_of_experts(model: ModelSpec, share: RankShare) -> LayerPart:
    """The sum of the outputs of the chosen experts and the shared one."""
    shared = "weighed shared output" if model.shared_expert_gate else "shared_down output"
    made = Tensor("sum of experts", share.own_tokens * share.hidden)
    return with_role(Operator(reads=(_COMBINED, shared), makes=(made,), passes=True), Role.MLP)


def _router(model: ModelSpec, share: RankShare) -> LayerPart:
    """Scores of all experts, the best of them and the capacity slots of their tokens."""
    n, h, e = share.own_tokens, share.hidden, model.num_experts
    chosen = n * model.top_k
    places = e * places_of(n, model.top_k, e, model.capacity_factor)
    both = share.partial, share.partial
    experts, weights = Tensor(_CHOSEN, chosen, INDEX_BYTES), Tensor("their weights", chosen, FP32_BYTES)
    tables = Tensor(_PLACES, chosen, INDEX_BYTES), Tensor(_TOKENS, places, INDEX_BYTES)
    routing = Operator(
        kernel=Pointwise("routing", n * e + 8 * chosen, 8 * chosen + places),  # sorting, and tables both ways
        reads=("router output",),
        makes=(weights, experts, *tables),
        saves=(weights.name, experts.name),
    )
    router = linear("router", _SOURCE, (n, e, h), bias=model.router_bias, partial=both)
    return joined(with_role(router, Role.GATING), routing)


def _experts(model: ModelSpec, share: RankShare) -> LayerPart:
    shard, experts, width = share.shard, model.num_experts, model.moe_intermediate_size
    n, h, i = share.own_tokens, share.hidden, width // shard.etp
    assert experts % shard.ep == width % shard.etp == 0, (experts, width, shard)
    own, chosen = experts // shard.ep, n * model.top_k
    sent = experts * places_of(n, model.top_k, experts, model.capacity_factor)
    rows = sent * shard.etp
    counted = min(rows, chosen * shard.etp)

    def grouped(name: str, source: str, columns: int, inner: int, joint: str = "") -> LayerPart:
        gemm = Gemm(name, rows, columns, inner, own, counted if counted < rows else 0, joint=joint)
        weight = ParameterSpec(f"{name}.weight", (own, columns, inner), expert=shard.experts_apart)
        bias = ParameterSpec(f"{name}.bias", (own, columns), expert=shard.experts_apart)
        return matmul(gemm, source, (weight, bias) if model.expert_bias else (weight,))

    there, back = _all_to_alls(sent * h, own, shard)
    dispatch = Operator(
        kernel=Pointwise("dispatch", sent * h, sent * h, moves=True),
        reads=(_SOURCE,),
        makes=(Tensor(_INPUTS if not there else "dispatched tokens", sent * h),),
        saves=(_TOKENS,),
    )
    matmuls = joined(
        *(grouped(name, _INPUTS, i, h, "+".join(GATE_AND_UP)) for name in GATE_AND_UP),
        gated("experts_", rows * i),
        grouped(DOWN, "experts_gated product", h, i),
    )
    return joined(
        *_chain([dispatch, *there], "", _INPUTS),
        with_role(matmuls, Role.EXPERTS),
        *_chain(back, "experts_down output", _RESULTS),
        *_combine(_RESULTS if back else "experts_down output", chosen, n, h),
    )


def _combine(source: str, chosen: int, n: int, h: int) -> Iterator[Operator]:
    """Unpermute the results of the chosen experts, weight them and sum them."""
    picked, weighed = Tensor("outputs of chosen experts", chosen * h), Tensor("weighed outputs", chosen * h)
    weights, dropped = Tensor("weights without dropped tokens", chosen), Tensor("dropped tokens", chosen, MASK_BYTES)
    kernel = Pointwise("combine", 3 * chosen * h, 2 * chosen * h + n * h)
    yield Operator(kernel=kernel, reads=(source,), makes=(picked,), saves=(_PLACES,))
    yield Operator(reads=("their weights",), makes=(weights, dropped), saves=(dropped.name,))
    yield Operator(
        reads=(picked.name, weights.name),
        makes=(Tensor(_COMBINED, n * h),),
        saves=(picked.name, weights.name),
        forward_scratch=(weighed,),
        backward_scratch=(weighed,),
    )


def _chain(steps: list[Operator], source: str, result: str) -> Iterator[Operator]:
    """Operators of which each reads the tensor that the one before it makes; the last one makes ``result``.

    The first one reads ``source``; if that is empty, it keeps its own input.
    """
    for number, step in enumerate(steps, 1):
        (made,) = step.makes
        made = replace(made, name=result) if number == len(steps) else made
        yield replace(step, reads=(source,) if source else step.reads, makes=(made,))
        source = made.name


def _all_to_alls(elements: int, own: int, shard: Shard) -> tuple[list[Operator], list[Operator]]:
    """Operators of dispatch and combine: collectives, and copies from and to the order of ranks.

    Capacity slots are copied from tokens. They are copied once more, in expert order, if several experts have slots for
    several ranks.

    Args:
        elements: Elements of the slots that one rank fills.
        own: Experts per rank.
    """
    split = shard.etp * elements
    copy = (Tensor("in the order of ranks", split),) if own > 1 else ()
    there, back = list[Operator](), list[Operator]()

    def step(kernel: LayerCollective | Pointwise, size: int) -> Operator:
        scratch = copy if isinstance(kernel, LayerCollective) else ()
        made = (Tensor(f"after {kernel.name}", size),)
        return Operator(kernel=kernel, makes=made, forward_scratch=scratch, backward_scratch=scratch)

    if shard.ep > 1:
        everywhere = CollectiveKind.ALL_TO_ALL
        there.append(step(LayerCollective("expert inputs", "ep", everywhere, everywhere, elements), elements))
        back.append(step(LayerCollective("expert outputs", "ep", everywhere, everywhere, elements), elements))
    if shard.etp > 1:
        gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
        there.append(step(LayerCollective("gathered expert inputs", "etp", gather, scatter, split), split))
        back.insert(0, step(LayerCollective("parts of expert outputs", "etp", scatter, gather, split), elements))
    if there and own > 1:
        there.append(step(Pointwise("sort by expert", split, split, moves=True), split))
        back.insert(0, step(Pointwise("sort by rank", split, split, moves=True), split))
    return there, back
