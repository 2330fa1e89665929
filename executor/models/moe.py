"""Mixture of experts: routing with a fixed expert capacity.

Every sequence is a separate group (Lepikhin et al. 2021, GShard, section 3.1): an expert has ``places_of`` capacity
slots per sequence. Tokens fill the slots in order. Empty slots contain the first token of the batch, and the experts'
output for them is unused. Ranks that split attention route their local tokens, which are one group per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention import LatentAttention
from executor.models.attention_cores import LayerRequest
from executor.models.blocks import Block, GatedMlp, llama_attention, llama_block
from simplan.errors import Problem, SpecError
from simplan.model.model import ModelSpec
from simplan.model.parts.experts import places_of


class Routing(NamedTuple):
    """Assignment of tokens to capacity slots of experts.

    Attributes:
        loads: Tokens routed to each expert per sequence, (batch, experts) int64.
        slots: Capacity slot of each token's choice, (batch * tokens * top_k) int64; 0 for dropped choices.
        dropped: True for choices without a slot, (batch * tokens * top_k) bool.
        sources: Token in each capacity slot, (experts * batch * places) int64.
    """

    loads: Tensor
    slots: Tensor
    dropped: Tensor
    sources: Tensor


def route(chosen: Tensor, num_experts: int, places: int) -> Routing:
    """Assigns every choice to the next capacity slot of its expert.

    Args:
        chosen: Experts of every token, (batch, tokens, top_k) int64.
        places: Capacity slots of an expert per sequence.
    """
    batch, tokens, top_k = chosen.shape
    choices = chosen.flatten(1)
    loads = choices.new_zeros(batch, num_experts).scatter_add_(1, choices, torch.ones_like(choices))
    order = choices.argsort(dim=1, stable=True)
    expert = choices.gather(1, order)
    before = loads.cumsum(1) - loads
    place = torch.arange(tokens * top_k, device=chosen.device) - before.gather(1, expert)
    sequence = torch.arange(batch, device=chosen.device).unsqueeze(1)
    none = num_experts * batch * places  # an additional row, for dropped choices
    row = ((expert * batch + sequence) * places + place).masked_fill_(place >= places, none)
    sources = chosen.new_zeros(none + 1).scatter_(0, row.flatten(), (sequence * tokens + order // top_k).flatten())
    slots = torch.empty_like(row).scatter_(1, order, row).flatten()
    dropped = slots == none
    return Routing(loads, slots.masked_fill_(dropped, 0), dropped, sources[:-1].clone())


class GroupedLinear(nn.Module):
    """Linear layer with one matrix per expert."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """(experts, rows, in_features) to (experts, rows, out_features)."""
        return torch.bmm(x, self.weight.to(x.dtype).transpose(1, 2))  # weights outside of FSDP are not cast by it


class ExpertMlp(nn.Module):
    """MoE layer: a router, experts, and optionally a shared expert.

    Attributes:
        to_experts, from_experts: Expert dispatch and combine of capacity slots (experts, rows, hidden_size); identity
            without ``executor.distributed.expert_parallel``.
        most_tokens: Largest number of tokens of one sequence routed to each expert in this step, (experts); None before
            the first forward.
    """

    to_experts: Callable[[Tensor], Tensor]
    from_experts: Callable[[Tensor], Tensor]

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        h, i, shared = spec.hidden_size, spec.moe_intermediate_size, spec.shared_expert_intermediate_size
        self.shared = GatedMlp(h, shared) if shared else None
        self.shared_expert_gate = nn.Linear(h, 1, bias=False) if spec.shared_expert_gate else None
        self.router = nn.Linear(h, spec.num_experts, bias=spec.router_bias)
        self.experts_gate = GroupedLinear(spec.num_experts, h, i)
        self.experts_up = GroupedLinear(spec.num_experts, h, i)
        self.experts_down = GroupedLinear(spec.num_experts, i, h)
        self.to_experts = self.from_experts = _unchanged
        self.most_tokens: Tensor | None = None
        self._num_experts, self._top_k, self._capacity_factor = spec.num_experts, spec.top_k, spec.capacity_factor

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (batch, tokens, hidden_size) to hidden states of the same shape."""
        if self.shared is None:
            return self._routed(x)
        shared: Tensor = self.shared(x)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return self._routed(x) + shared

    def _routed(self, x: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs, (batch, tokens, hidden_size)."""
        batch, tokens, width = x.shape
        scores, chosen = self.router(x).topk(self._top_k, dim=-1)
        # softmax in at least fp32, as everywhere
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        places = places_of(tokens, self._top_k, self._num_experts, self._capacity_factor)
        with torch.no_grad():
            routing = route(chosen, self._num_experts, places)
            self._count(routing.loads)
        # sent and received tensors have no name, so that they are freed as early as possible
        dispatched = self.to_experts(
            x.flatten(0, 1).index_select(0, routing.sources).view(self._num_experts, batch * places, width)
        )
        picked = self.from_experts(self._experts(dispatched)).flatten(0, 1).index_select(0, routing.slots)
        picked = picked.view(batch * tokens, self._top_k, width)
        weights = weights.flatten(0, 1).to(picked.dtype)
        weights = weights.masked_fill(routing.dropped.view_as(weights), 0.0)
        combined: Tensor = (picked * weights.unsqueeze(-1)).sum(1).view(batch, tokens, width)
        return combined

    def _experts(self, x: Tensor) -> Tensor:
        """(experts, rows, hidden_size) each."""
        out: Tensor = self.experts_down(functional.silu(self.experts_gate(x)) * self.experts_up(x))
        return out

    def _count(self, loads: Tensor) -> None:
        if self.most_tokens is None:
            self.most_tokens = torch.zeros_like(loads[0])
        torch.maximum(self.most_tokens, loads.amax(0), out=self.most_tokens)


def _unchanged(x: Tensor) -> Tensor:
    return x


def moe_block(request: LayerRequest) -> nn.Module:
    """A block of family ``moe``: the first ones are dense."""
    if request.index - 1 < request.spec.num_dense_layers:
        return llama_block(request)
    return Block(request.spec, llama_attention(request), ExpertMlp(request.spec))


def deepseek_block(request: LayerRequest) -> nn.Module:
    """A block of family ``deepseek``: the first ones are dense."""
    spec, attention = request.spec, LatentAttention(request)
    dense = request.index - 1 < spec.num_dense_layers
    mlp = GatedMlp(spec.hidden_size, spec.intermediate_size) if dense else ExpertMlp(spec)
    return Block(spec, attention, mlp)


def check_places(stages: Iterable[nn.Module], spec: ModelSpec, tokens: int) -> None:
    """Checks that no token of the step was dropped; then resets the counts.

    Args:
        stages: Stages of this rank, which have run the step.
        tokens: Tokens per sequence that this rank routes.

    Raises:
        SpecError: Tokens were dropped, and ``drop_tokens`` is off.
    """
    if not spec.num_experts:
        return
    places = places_of(tokens, spec.top_k, spec.num_experts, spec.capacity_factor)
    for name, module in ((name, module) for stage in stages for name, module in stage.named_modules()):
        if not isinstance(module, ExpertMlp) or module.most_tokens is None:
            continue
        received, module.most_tokens = module.most_tokens, None
        if spec.drop_tokens or int(received.max()) <= places:
            continue
        share = tokens * spec.top_k / spec.num_experts
        raise SpecError(
            Problem(
                field="model.capacity_factor",
                value=f"{spec.capacity_factor:g}",
                rule=f"is capacity {places} per sequence; expert {int(received.argmax())} of "
                f"{name.removeprefix('module.')} received {int(received.max())}",
                fix=f"use {int(received.max()) / share:.3g} or more, or model.drop_tokens = true",
            )
        )


def expert_matrices(layer: nn.Module) -> list[nn.Module]:
    """Modules of a layer with its experts."""
    return [module for module in layer.modules() if isinstance(module, GroupedLinear)]
