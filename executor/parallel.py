"""A rank's place among the ranks that split its layers, and the collectives by which they exchange activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from executor.groups import Group
from executor.recompute import keepable
from executor.recorder import Recorder
from simplan.spec.model import ModelSpec
from simplan.spec.shard import Shard

__all__ = ["Parallel", "Peers", "partial_parameters", "sum_partial_gradients"]

# torch 2.13 has new names for these two
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of one axis, and their collectives; every collective is recorded.

    Attributes:
        size: How many they are.
        rank: This one's index among them.
        group: Their process group. Without one nothing moves, and the shapes of results are right all the same, so that
            one rank's share of the work can be timed alone.
        recorder: Is told of every collective.
    """

    size: int = 1
    rank: int = 0
    group: Group | None = None
    recorder: Recorder | None = None

    @classmethod
    def of(cls, group: Group | None, rank: int, recorder: Recorder | None) -> Peers:
        """A rank's peers in a group, or, without one, itself alone."""
        return cls() if group is None else cls(len(group.ranks), group.ranks.index(rank), group, recorder)

    def all_reduce(self, x: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Tensor:
        """Reduces in place."""
        if self.group is not None:
            handle = self._issue("all_reduce", x)
            dist.all_reduce(x, op, group=self.group.handle)
            self._complete(handle)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks one after the other along a dimension."""
        gathered = x.new_empty(self.size, *x.shape)
        if self.group is not None:
            handle = self._issue("all_gather", gathered)
            _all_gather(gathered.flatten(0, 1), x.contiguous(), group=self.group.handle)
            self._complete(handle)
        return gathered.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: Tensor, dim: int, *, keeps: bool = False) -> Tensor:
        """The own part along a dimension of the sum over all ranks.

        Args:
            x: What this rank has of all parts.
            dim: The dimension.
            keeps: The result is ``keepable``.
        """
        parts = torch.unflatten(x, dim, (self.size, -1)).movedim(dim, 0).contiguous()
        return keepable(self._reduced, parts) if keeps else self._reduced(parts)

    def _reduced(self, parts: Tensor) -> Tensor:
        reduced = parts.new_empty(parts.shape[1:])
        if self.group is not None:
            handle = self._issue("reduce_scatter", parts)
            _reduce_scatter(reduced, parts.flatten(0, 1), group=self.group.handle)
            self._complete(handle)
        return reduced

    def all_to_all(self, x: Tensor, split_dim: int, gather_dim: int, *, keeps: bool = False) -> Tensor:
        """Every rank gives each its part along one dimension and lines up what it gets along another.

        Args:
            x: The tensor.
            split_dim, gather_dim: These dimensions.
            keeps: What it gets is ``keepable``.
        """
        parts = torch.unflatten(x, split_dim, (self.size, -1)).movedim(split_dim, 0).contiguous()
        received = keepable(self._swapped, parts) if keeps else self._swapped(parts)
        return received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)

    def _swapped(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        if self.group is not None:
            handle = self._issue("all_to_all", parts)
            dist.all_to_all_single(received.flatten(0, 1), parts.flatten(0, 1), group=self.group.handle)
            self._complete(handle)
        return received

    def _issue(self, kind: _Kind, buffer: Tensor) -> int:
        assert self.group is not None
        return -1 if self.recorder is None else self.recorder.issue(kind, self.group.ranks, buffer.nbytes)

    def _complete(self, handle: int) -> None:
        if self.recorder is not None:
            self.recorder.complete(handle)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How this rank's layers are split.

    Attributes:
        shard: The degrees.
        tp, cp, ep: The ranks that split the layers, those that split the sequences, and those that split the experts.
    """

    shard: Shard = field(default_factory=Shard)
    tp: Peers = field(default_factory=Peers)
    cp: Peers = field(default_factory=Peers)
    ep: Peers = field(default_factory=Peers)

    @classmethod
    def single(cls) -> Parallel:
        """Layers are whole."""
        return cls()

    @classmethod
    def silent(cls, shard: Shard) -> Parallel:
        """The first rank of a split, computing alone: nothing is exchanged."""
        return cls(shard, Peers(shard.tp), Peers(shard.cp), Peers(shard.ep))

    @classmethod
    def of(
        cls,
        shard: Shard,
        tp: Group | None,
        cp: Group | None,
        rank: int,
        recorder: Recorder | None,
        ep: Group | None = None,
    ) -> Parallel:
        """A rank of a job.

        Args:
            shard: The degrees.
            tp, cp, ep: Its groups; None where the degree is 1.
            rank: Its global rank.
            recorder: Is told of every collective.
        """
        return cls(shard, *(Peers.of(group, rank, recorder) for group in (tp, cp, ep)))

    def local_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of whole sequences (batch, seq_len): one of the early parts and its late counterpart.

        Causal attention costs a late token more than an early one; so all ranks have equal work.
        """
        if self.cp.size == 1:
            return x
        return x.index_select(1, self.positions(x.shape[1]).to(x.device))

    def positions(self, seq_len: int) -> Tensor:
        """Where in the sequence this rank's tokens are, (seq_len / cp) int64."""
        return self.all_positions(seq_len)[self.cp.rank]

    def all_positions(self, seq_len: int) -> Tensor:
        """The same of all context-parallel ranks, (cp, seq_len / cp)."""
        if self.cp.size == 1:
            return torch.arange(seq_len).unsqueeze(0)
        parts = torch.arange(seq_len).view(2 * self.cp.size, -1)
        early, late = parts[: self.cp.size], parts[self.cp.size :].flip(0)
        return torch.cat((early, late), dim=1)

    def own_part(self, x: Tensor, dim: int) -> Tensor:
        """The part of a tensor that this tensor-parallel rank has along a dimension."""
        return x.chunk(self.tp.size, dim)[self.tp.rank]

    @property
    def splits_tokens(self) -> bool:
        """Tensor-parallel ranks split the tokens between attention and MLP."""
        return self.shard.sequence_parallel and self.tp.size > 1


def partial_parameters(stage: nn.Module, spec: ModelSpec, shard: Shard) -> list[nn.Parameter]:
    """Parameters of a stage whose gradients each tensor-parallel rank has a part of, in the stage's order.

    Args:
        stage: An ``executor.model.Stage``, perhaps sharded by FSDP.
        spec: Its model.
        shard: How its layers are split.
    """
    layers = spec.layers_of(shard)
    names = {
        f"layers.{index}.{parameter.name}"
        for index, layer in enumerate(layers)
        for parameter in layer.parameters
        if parameter.partial_gradient
    }
    return [parameter for name, parameter in stage.named_parameters() if name in names]


def sum_partial_gradients(parameters: Iterable[nn.Parameter], tp: Peers) -> None:
    """Completes partial gradients by one all-reduce of all of them, as Megatron-LM does."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = parameter.grad
        gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    if not gradients or tp.size == 1:
        return
    summed = tp.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, total in zip(gradients, torch.split(summed, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
