"""Mixture of experts: a router, experts of which every token uses a few, and experts that all tokens share.

Tokens are routed in groups, of which each is one sequence (Lepikhin et al. 2021, GShard, section 3.1): of every group
an expert takes so many tokens as it has places, and computes all places whether tokens fill them or not. So all sizes
are fixed beforehand, and what is dropped does not depend on how a batch is split. Expert-parallel ranks have some of
the experts each; an all-to-all brings the tokens of all of these ranks to them, another one brings the results back. A
token that uses several experts of one rank is sent there as many times.

Beside tensor parallelism (with sequence parallelism) and context parallelism every rank routes its own tokens, which
are a part of each sequence and so a group of their own. Tensor-parallel ranks hold equal routers, whose gradients are
parts, and split the shared expert as any MLP. Experts are split by ``etp``, not by ``tp``: ranks that split an expert
gather the tokens of all of them before it, and sum and scatter its results (Liu et al. 2025, arXiv:2504.14960,
section 3.2).

The weights of the chosen experts are the softmax of their scores (Jiang et al. 2024, Mixtral). Routers that normalize
in another way cost the same but for the scores of all experts, which some of them keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simplan.spec.layer import CollectiveKind, Exchange, Gemm, Kernel, ParameterSpec, Pointwise, Saved
from simplan.spec.models.part import FP32_BYTES, Part
from simplan.spec.share import Share, column_exchanges, row_kernels

if TYPE_CHECKING:
    from simplan.spec.model import ModelSpec
    from simplan.spec.shard import Shard

__all__ = ["ExpertsForm", "expert_mlp", "experts_form", "places_of", "shared_expert_mlp"]

_INDEX_BYTES = 8
_MASK_BYTES = 1


def places_of(tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Tokens of one sequence that an expert takes: ``capacity_factor`` times its even share, at least one.

    Args:
        tokens: Of the sequence, that one rank routes.
        top_k: Experts of a token.
        num_experts: Experts in all.
        capacity_factor: Room for experts that are asked for more than others.
    """
    return max(1, math.ceil(round(capacity_factor * tokens * top_k / num_experts, 6)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """Which mixture of experts.

    Attributes:
        num_experts: Of which every token uses ``top_k``.
        top_k: Experts of a token.
        width: Columns of an expert's matrices.
        capacity_factor: As of ``places_of``.
        shared_width: The same of the experts that all tokens use, taken together; 0 for none.
        shared_gate: Their output is weighed by a gate of its own.
        router_bias: The router has one.
        bias: The experts' matrices have them.
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
        """What tells layers of this form from others."""
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


def shared_expert_mlp(form: ExpertsForm, share: Share) -> Part:
    """A gated MLP for all tokens, perhaps times a gate of one number a token; nothing where there is none.

    Args:
        form: Which experts.
        share: Sizes.
    """
    n, h, i = share.tokens, share.hidden, form.shared_width // share.shard.tp
    if not i:
        return Part()
    before, after = column_exchanges("norm2 output", share)
    kernels: list[Kernel] = [
        *before,
        Gemm("shared_gate", n, i, h),
        Gemm("shared_up", n, i, h),
        *after,
        Pointwise("shared_silu_multiply", 3 * n * i, 2 * n * i),
        Gemm("shared_down", n, h, i),
        *row_kernels("shared_down output", share),
    ]
    parameters = [
        ParameterSpec("shared_gate.weight", (i, h)),
        ParameterSpec("shared_up.weight", (i, h)),
        ParameterSpec("shared_down.weight", (h, i)),
    ]
    saved = [
        Saved("shared_gate output", n * i, made_by="shared_gate"),
        Saved("shared silu output", n * i, made_by="shared_silu_multiply"),
        Saved("shared_up output", n * i, made_by="shared_up"),
        Saved("shared gated product", n * i, made_by="shared_silu_multiply"),
    ]
    # tokens are gathered once for both matrices that use them, which then get their gradients in one operation
    both = ("shared_gate.weight", "shared_up.weight")
    gradients = ["shared_down.weight", *(both if share.partial else both[::-1])]
    if form.shared_gate:
        own = share.own_tokens
        kernels += [Gemm("shared_expert_gate", own, 1, h), Pointwise("weigh shared", own * h + own, own * h)]
        parameters.append(ParameterSpec("shared_expert_gate.weight", (1, h), share.partial))
        saved += [
            Saved("shared_down output", own * h, made_by="shared_down output" if share.shard.tp > 1 else "shared_down"),
            Saved("shared gate's sigmoid", own, made_by="weigh shared"),
        ]
        gradients.insert(0, "shared_expert_gate.weight")
    return Part(parameters=tuple(parameters), kernels=tuple(kernels), saved=tuple(saved), gradients=tuple(gradients))


def expert_mlp(form: ExpertsForm, share: Share) -> Part:
    """The router, the experts and what brings tokens there and back.

    Args:
        form: Which experts.
        share: Sizes.
    """
    router = _router(form, share)
    experts = _experts(form, share)
    return Part(
        parameters=(*router.parameters, *experts.parameters),
        kernels=(*router.kernels, *experts.kernels),
        saved=(*router.saved, *experts.saved),
        gradients=(*experts.gradients, *router.gradients),
    )


def _router(form: ExpertsForm, share: Share) -> Part:
    """Scores of all experts, the best of them and where their places are."""
    n, h, e = share.own_tokens, share.hidden, form.num_experts
    chosen = n * form.top_k
    places = e * places_of(n, form.top_k, e, form.capacity_factor)
    parameters = [ParameterSpec("router.weight", (e, h), share.partial)]
    if form.router_bias:
        parameters.append(ParameterSpec("router.bias", (e,), share.partial))
    return Part(
        parameters=tuple(parameters),
        kernels=(
            Gemm("router", n, e, h),
            Pointwise("routing", n * e + 8 * chosen, 8 * chosen + places),  # sorting, and tables both ways
        ),
        saved=(
            Saved("chosen experts", chosen, _INDEX_BYTES, made_by="routing"),
            Saved("their weights", chosen, FP32_BYTES, made_by="routing"),
            Saved("places of tokens", chosen, _INDEX_BYTES, made_by="routing"),
            Saved("tokens of places", places, _INDEX_BYTES, made_by="routing"),
        ),
        gradients=tuple(parameter.name for parameter in reversed(parameters)),
    )


def _experts(form: ExpertsForm, share: Share) -> Part:
    shard = share.shard
    n, h, i, ep = share.own_tokens, share.hidden, form.width // shard.etp, shard.ep
    assert form.num_experts % ep == form.width % shard.etp == 0, (form, shard)
    own, chosen, apart = form.num_experts // ep, n * form.top_k, shard.experts_apart
    sent = form.num_experts * places_of(n, form.top_k, form.num_experts, form.capacity_factor)
    rows = sent * shard.etp
    counted = min(rows, chosen * shard.etp)
    shapes = {"experts_gate": (i, h), "experts_up": (i, h), "experts_down": (h, i)}
    parameters = []
    for name, (columns, inner) in shapes.items():
        parameters.append(ParameterSpec(f"{name}.weight", (own, columns, inner), expert=apart))
        if form.bias:
            parameters.append(ParameterSpec(f"{name}.bias", (own, columns), expert=apart))
    matrices = {
        name: Gemm(name, rows, columns, inner, own, counted if counted < rows else 0)
        for name, (columns, inner) in shapes.items()
    }
    there, back = _exchanges(sent * h, own, shard)
    biases = ("bias", "weight") if form.bias else ("weight",)
    return Part(
        parameters=tuple(parameters),
        kernels=(
            Pointwise("dispatch", sent * h, sent * h, moves=True),
            *there,
            matrices["experts_gate"],
            matrices["experts_up"],
            Pointwise("experts_silu_multiply", 3 * rows * i, 2 * rows * i),
            matrices["experts_down"],
            *back,
            Pointwise("combine", 3 * chosen * h, 2 * chosen * h + n * h),
        ),
        saved=(
            Saved("places of experts", rows * h, made_by=there[-1].name if there else "dispatch"),
            Saved("experts_gate output", rows * i, made_by="experts_gate"),
            Saved("experts silu output", rows * i, made_by="experts_silu_multiply"),
            Saved("experts_up output", rows * i, made_by="experts_up"),
            Saved("experts gated product", rows * i, made_by="experts_silu_multiply"),
            Saved("outputs of chosen experts", chosen * h, made_by="combine"),
            Saved("weights without dropped tokens", chosen, made_by="combine"),
            Saved("which tokens are dropped", chosen, _MASK_BYTES, made_by="combine"),
        ),
        gradients=tuple(f"{name}.{kind}" for name in ("experts_down", "experts_up", "experts_gate") for kind in biases),
    )


def _exchanges(elements: int, own: int, shard: Shard) -> tuple[list[Kernel], list[Kernel]]:
    """What brings places to their experts and back: exchanges, and copies from and to the order of ranks.

    Places are copied from tokens, and, where several experts have places for several ranks, once more in their order.

    Args:
        elements: Of the places that one rank fills.
        own: Experts of a rank.
        shard: How layers are split.
    """
    there: list[Kernel] = []
    back: list[Kernel] = []
    if shard.ep > 1:
        everywhere = CollectiveKind.ALL_TO_ALL
        there.append(Exchange("expert inputs", "ep", everywhere, everywhere, elements))
        back.append(Exchange("expert outputs", "ep", everywhere, everywhere, elements))
    if shard.etp > 1:
        gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
        there.append(Exchange("gathered expert inputs", "etp", gather, scatter, shard.etp * elements))
        back.insert(0, Exchange("parts of expert outputs", "etp", scatter, gather, shard.etp * elements))
    if there and own > 1:
        there.append(Pointwise("sort by expert", shard.etp * elements, shard.etp * elements, moves=True))
        back.insert(0, Pointwise("sort by rank", shard.etp * elements, shard.etp * elements, moves=True))
    return there, back
