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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simplan.model.layer import (
    CollectiveKind,
    Gemm,
    Kernel,
    LayerCollective,
    Operator,
    ParameterSpec,
    Pointwise,
    Role,
    Tensor,
)
from simplan.model.parts.mlp import column_linears, gated, row_linear
from simplan.model.parts.part import FP32_BYTES, INDEX_BYTES, MASK_BYTES, LayerPart, joined, linear, with_role
from simplan.model.share import RankShare

if TYPE_CHECKING:
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

__all__ = ["ExpertsForm", "expert_mlp", "experts_form", "places_of", "shared_expert_mlp", "sum_of_experts"]

GATE_AND_UP, DOWN = ("experts_gate", "experts_up"), "experts_down"
_SOURCE, _COMBINED = "norm2 output", "combined output"
_CHOSEN, _PLACES, _TOKENS = "chosen experts", "places of tokens", "tokens of places"
_INPUTS, _RESULTS = "places of experts", "results of places"


def places_of(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Capacity slots of an expert per sequence: ``capacity_factor`` times its even share of tokens, at least one.

    Args:
        tokens: Tokens of the sequence that one rank routes.
        top_k: Experts of a token.
        num_experts: Experts in all.
        capacity_factor: Slots relative to the even share, for experts that more tokens choose.
    """
    return max(1, math.ceil(round(capacity_factor * tokens * top_k / num_experts, 6)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """Variant of the mixture of experts.

    Attributes:
        num_experts: Number of experts.
        top_k: Experts of a token.
        width: Columns of an expert's matrices.
        capacity_factor: Capacity slots relative to the even share (``places_of``).
        shared_width: Columns of the experts that all tokens use, together; 0 for none.
        shared_gate: A separate gate weights the output of the shared experts.
        router_bias: The router has a bias.
        bias: The experts' matrices have biases.
    """

    num_experts: int
    top_k: int
    width: int
    capacity_factor: float
    shared_width: int
    shared_gate: bool
    router_bias: bool
    bias: bool

    @property
    def key(self) -> str:
        """Part of a layer's key that identifies the form."""
        parts = [f"e{self.num_experts}", f"top{self.top_k}", f"ei{self.width}", f"cf{self.capacity_factor:g}"]
        parts += [f"si{self.shared_width}"] * (self.shared_width > 0) + ["sgate"] * self.shared_gate
        return ",".join([*parts, *["rbias"] * self.router_bias, *["ebias"] * self.bias])


def experts_form(model: ModelSpec) -> ExpertsForm:
    """The mixture of experts of a model that has one."""
    return ExpertsForm(
        num_experts=model.num_experts,
        top_k=model.top_k,
        width=model.moe_intermediate_size,
        capacity_factor=model.capacity_factor,
        shared_width=model.shared_expert_intermediate_size,
        shared_gate=model.shared_expert_gate,
        router_bias=model.router_bias,
        bias=model.expert_bias,
    )


def shared_expert_mlp(form: ExpertsForm, share: RankShare) -> LayerPart:
    """A gated MLP for all tokens, perhaps times a gate of one number per token; empty without shared experts.

    Args:
        form: Variant of the experts.
        share: Sizes.
    """
    n, own, h, i = share.tokens, share.own_tokens, share.hidden, form.shared_width // share.shard.tp
    if not i:
        return LayerPart()
    mlp = joined(
        column_linears({"shared_gate": i, "shared_up": i}, _SOURCE, share),
        gated("shared_", n * i),
        row_linear("shared_down", "shared_gated product", i, share),
    )
    if not form.shared_gate:
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
    whole = joined(mlp, with_role(gate, Role.GATING), LayerPart(operators=(weigh,)))
    return with_role(whole, Role.MLP, Role.SHARED_EXPERT)


def expert_mlp(form: ExpertsForm, share: RankShare) -> LayerPart:
    """The router, the experts, and dispatch and combine of tokens: ``combined output``.

    Args:
        form: Variant of the experts.
        share: Sizes.
    """
    return with_role(joined(_router(form, share), _experts(form, share)), Role.MLP)


def sum_of_experts(form: ExpertsForm, share: RankShare) -> LayerPart:
    """The sum of the outputs of the chosen experts and the shared one."""
    shared = "weighed shared output" if form.shared_gate else "shared_down output"
    made = Tensor("sum of experts", share.own_tokens * share.hidden)
    return with_role(LayerPart(operators=(Operator(reads=(_COMBINED, shared), makes=(made,), passes=True),)), Role.MLP)


def _router(form: ExpertsForm, share: RankShare) -> LayerPart:
    """Scores of all experts, the best of them and the capacity slots of their tokens."""
    n, h, e = share.own_tokens, share.hidden, form.num_experts
    chosen = n * form.top_k
    places = e * places_of(n, form.top_k, e, form.capacity_factor)
    both = share.partial, share.partial
    experts, weights = Tensor(_CHOSEN, chosen, INDEX_BYTES), Tensor("their weights", chosen, FP32_BYTES)
    tables = Tensor(_PLACES, chosen, INDEX_BYTES), Tensor(_TOKENS, places, INDEX_BYTES)
    routing = Operator(
        kernel=Pointwise("routing", n * e + 8 * chosen, 8 * chosen + places),  # sorting, and tables both ways
        reads=("router output",),
        makes=(weights, experts, *tables),
        saves=(weights.name, experts.name),
    )
    router = linear("router", _SOURCE, (n, e, h), bias=form.router_bias, partial=both)
    return joined(with_role(router, Role.GATING), LayerPart(operators=(routing,)))


def _experts(form: ExpertsForm, share: RankShare) -> LayerPart:
    shard = share.shard
    n, h, i, ep = share.own_tokens, share.hidden, form.width // shard.etp, shard.ep
    assert form.num_experts % ep == form.width % shard.etp == 0, (form, shard)
    own, chosen = form.num_experts // ep, n * form.top_k
    sent = form.num_experts * places_of(n, form.top_k, form.num_experts, form.capacity_factor)
    rows = sent * shard.etp
    counted = min(rows, chosen * shard.etp)

    def grouped(name: str, source: str, columns: int, inner: int, joint: str = "") -> LayerPart:
        gemm = Gemm(name, rows, columns, inner, own, counted if counted < rows else 0, joint=joint)
        weight = ParameterSpec(f"{name}.weight", (own, columns, inner), expert=shard.experts_apart)
        bias = ParameterSpec(f"{name}.bias", (own, columns), expert=shard.experts_apart)
        operator = Operator(
            kernel=gemm,
            reads=(source,),
            makes=(Tensor(f"{name} output", rows * columns),),
            saves=(source,),
            parameters=(bias.name, weight.name) if form.bias else (weight.name,),
        )
        return LayerPart(parameters=(weight, bias) if form.bias else (weight,), operators=(operator,))

    there, back = _exchanges(sent * h, own, shard)
    dispatch = Operator(
        kernel=Pointwise("dispatch", sent * h, sent * h, moves=True),
        reads=(_SOURCE,),
        makes=(Tensor(_INPUTS if not there else "dispatched tokens", sent * h),),
        saves=(_TOKENS,),
    )
    return joined(
        LayerPart(operators=tuple(_chain([dispatch, *there], "", _INPUTS))),
        with_role(
            joined(
                *(grouped(name, _INPUTS, i, h, "+".join(GATE_AND_UP)) for name in GATE_AND_UP),
                gated("experts_", rows * i),
                grouped(DOWN, "experts_gated product", h, i),
            ),
            Role.EXPERTS,
        ),
        LayerPart(operators=tuple(_chain(back, "experts_down output", _RESULTS) if back else ())),
        LayerPart(operators=tuple(_combine(_RESULTS if back else "experts_down output", chosen, n, h))),
    )


def _combine(source: str, chosen: int, n: int, h: int) -> Iterator[Operator]:
    """Unpermute the results of the chosen experts, weight them and sum them."""
    picked, matmul = Tensor("outputs of chosen experts", chosen * h), Tensor("weighed outputs", chosen * h)
    weights, dropped = Tensor("weights without dropped tokens", chosen), Tensor("dropped tokens", chosen, MASK_BYTES)
    kernel = Pointwise("combine", 3 * chosen * h, 2 * chosen * h + n * h)
    yield Operator(kernel=kernel, reads=(source,), makes=(picked,), saves=(_PLACES,))
    yield Operator(reads=("their weights",), makes=(weights, dropped), saves=(dropped.name,))
    yield Operator(
        reads=(picked.name, weights.name),
        makes=(Tensor(_COMBINED, n * h),),
        saves=(picked.name, weights.name),
        forward_scratch=(matmul,),
        backward_scratch=(matmul,),
    )


def _chain(steps: list[Operator], source: str, result: str) -> Iterator[Operator]:
    """Operators of which each reads the tensor that the one before it makes.

    Args:
        steps: The operators.
        source: Name of the first operator's input; empty to keep its own.
        result: Name of the last operator's result.
    """
    for number, step in enumerate(steps, 1):
        (made,) = step.makes
        made = replace(made, name=result) if number == len(steps) else made
        yield replace(step, reads=(source,) if source else step.reads, makes=(made,))
        source = made.name


def _exchanges(elements: int, own: int, shard: Shard) -> tuple[list[Operator], list[Operator]]:
    """Operators of dispatch and combine: collectives, and copies from and to the order of ranks.

    Capacity slots are copied from tokens. They are copied once more, in expert order, if several experts have slots for
    several ranks.

    Args:
        elements: Elements of the slots that one rank fills.
        own: Experts per rank.
        shard: Split of the layers.
    """
    there: list[tuple[Kernel, int]] = []
    back: list[tuple[Kernel, int]] = []
    split = shard.etp * elements
    if shard.ep > 1:
        everywhere = CollectiveKind.ALL_TO_ALL
        there.append((LayerCollective("expert inputs", "ep", everywhere, everywhere, elements), elements))
        back.append((LayerCollective("expert outputs", "ep", everywhere, everywhere, elements), elements))
    if shard.etp > 1:
        gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
        there.append((LayerCollective("gathered expert inputs", "etp", gather, scatter, split), split))
        back.insert(0, (LayerCollective("parts of expert outputs", "etp", scatter, gather, split), elements))
    if there and own > 1:
        there.append((Pointwise("sort by expert", split, split, moves=True), split))
        back.insert(0, (Pointwise("sort by rank", split, split, moves=True), split))
    copy = (Tensor("in the order of ranks", split),) if own > 1 else ()
    first, second = (
        [
            Operator(
                kernel=kernel,
                makes=(Tensor(f"after {kernel.name}", size),),
                forward_scratch=copy if isinstance(kernel, LayerCollective) else (),
                backward_scratch=copy if isinstance(kernel, LayerCollective) else (),
            )
            for kernel, size in way
        ]
        for way in (there, back)
    )
    return first, second
