"""Gradients between backward and the optimizer: sums of partial ones, averages of experts, norms and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from executor.distributed.mesh import ParallelDims, Peers, local
from executor.models.model import Stage, split_dimensions
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.model import ModelSpec
from simplan.runs.run_spec import RunSpec

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_TIED_NAMES = ("wte.weight", "lm_head.weight")


class StepOverError(Exception):
    """The step is over for a late replica: others have given it the gradients that it needs."""


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """Ranks that hold the other shards of this rank's parameters, for sums over all elements.

    Attributes:
        shard: Ranks over which FSDP shards all parameters.
        tp: Tensor-parallel ranks.
        replicated: Ids of parameters that each tensor-parallel rank holds in full; the first rank counts them.
        matrices: Ids of matrices of blocks; None if nothing is known of the parameters.
    """

    shard: Peers = field(default_factory=Peers)
    tp: Peers = field(default_factory=Peers)
    replicated: frozenset[int] = frozenset()
    matrices: frozenset[int] | None = None

    @classmethod
    def of(cls, job: RunSpec, stages: Iterable[Stage], dims: ParallelDims) -> ShardGroups:
        """The groups of one rank and its stages. Experts that FSDP shards over tensor-parallel ranks are split."""
        plan, replicated, matrices = job.plan, set(), set()
        layers = job.software.layers_of(job.model, plan)
        for stage in stages:
            split = split_dimensions(stage, job)
            blocks = [index for index in stage.layers if layers[int(index)].kind is LayerKind.BLOCK]
            of_blocks = {id(parameter) for index in blocks for parameter in stage.layers[index].parameters()}
            for name, parameter, said in stage.with_specs(layers):
                if id(parameter) in of_blocks and parameter.ndim == 2:
                    matrices.add(id(parameter))
                if name not in split and not (said.expert and plan.expert_shards > 1):
                    replicated.add(id(parameter))
        shards = dims.fsdp if plan.shards_parameters else Peers()
        return cls(shards, dims.tp, frozenset(replicated), frozenset(matrices))

    def counts(self, parameter: nn.Parameter) -> bool:
        """True when this rank counts its shard of a parameter: no other rank counts the same elements."""
        return self.tp.rank == 0 or id(parameter) not in self.replicated

    def total(self, x: Tensor) -> Tensor:
        """Sums over all ranks with other shards, in place."""
        for peers in (self.shard, self.tp):
            if peers.size > 1:
                peers.all_reduce(x)
        return x

    def norms(self, parameters: Sequence[nn.Parameter], *shards: list[Tensor]) -> Tensor:
        """Norms of unsharded tensors, (lists of shards, parameters): a list has one shard for each parameter."""
        squares = torch.stack([torch.stack(torch._foreach_norm(of_group)) for of_group in shards]).square()
        for index, parameter in enumerate(parameters):
            if not self.counts(parameter):
                squares[:, index] = 0.0
        return self.total(squares).sqrt()


def divide_gradients(parameters: Iterable[nn.Parameter], number: int) -> None:
    """Divides local shards of all gradients in one call; a call for each DTensor takes the host longer."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, number)


def zero_gradients(parameters: Iterable[nn.Parameter], *, drop: bool = False) -> None:
    """Sets all local gradients to zero in one call, in place; ``drop`` frees them instead."""
    if not drop:
        torch._foreach_zero_([local(parameter.grad) for parameter in parameters if parameter.grad is not None])
    for parameter in parameters if drop else ():
        parameter.grad = None


def partial_parameters(stage: Stage, layers: Sequence[LayerSpec]) -> list[nn.Parameter]:
    """Parameters of a stage whose gradients are partial sums on tensor-parallel ranks, in the stage's order.

    Args:
        stage: Stage, sharded by FSDP or not.
        layers: LayerSpecs of all layers of the model, as sharded on one rank.
    """
    return [parameter for _, parameter, said in stage.with_specs(layers) if said.partial_gradient]


def expert_parameters(stage: Stage, layers: Sequence[LayerSpec]) -> list[nn.Parameter]:
    """Parameters of a stage of which other expert-parallel ranks have others; arguments as above."""
    return [parameter for _, parameter, said in stage.with_specs(layers) if said.expert]


def experts_of(layer: nn.Module, spec: LayerSpec) -> list[nn.Parameter]:
    """Experts of one layer, before FSDP has it."""
    return [p for p, said in zip(layer.parameters(), spec.parameters, strict=True) if said.expert]


def sum_partial_gradients(parameters: Iterable[nn.Parameter], tp: Peers) -> None:
    """Completes partial gradients by one all-reduce of all of them, as Megatron-LM does."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(local(parameter.grad))
    if gradients and tp.size > 1:
        _sum_together(gradients, tp)


def _sum_together(gradients: Sequence[Tensor], peers: Peers) -> None:
    """Sums gradients over ranks in one all-reduce."""
    summed = peers.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, total in zip(gradients, torch.split(summed, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def average_expert_gradients(parameters: Sequence[nn.Parameter], num_ranks: int, peers: Peers) -> None:
    """Averages expert gradients over data-parallel ranks; gradients within an expert-parallel group are summed.

    Args:
        num_ranks: Number of data- and context-parallel ranks.
        peers: Ranks with the same experts.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    for gradient in gradients:
        gradient.div_(num_ranks)
    for gradient in gradients:
        peers.all_reduce(gradient)


class TiedWeights:
    """Weights that the first and the last stage share: each has a copy, and the gradients are summed.

    Args:
        ends: Ranks with the first and the last stage; this rank alone if it has both.
    """

    def __init__(self, job: RunSpec, stages: Mapping[int, Stage], ends: Peers) -> None:
        model, last = job.model, job.plan.num_stages - 1
        names: tuple[str, ...] = ()
        if last > 0 and model.shared_by_ends:
            names = _TIED_NAMES if model.captured is None else tuple(_captured_ties(model))
        self._copies = [
            [p for name, p in stages[index].named_parameters() if name.endswith(names) and p.requires_grad]
            for index in (0, last)
            if names and index in stages
        ]
        self._has_last, self._ends = last in stages, ends

    @property
    def second_copies(self) -> list[nn.Parameter]:
        """The copies of the last stage, which a norm over all weights must not count again."""
        return self._copies[-1] if self._copies and self._has_last else []

    def sum_gradients(self) -> None:
        """Each end has computed a part of the gradient."""
        ends = [[local(weight.grad) for weight in held if weight.grad is not None] for held in self._copies]
        assert [*map(len, ends)] == [*map(len, self._copies)]
        match ends:
            case [first, second]:  # both ends are on this rank
                for of_first, of_second in zip(first, second, strict=True):
                    of_first.add_(of_second)
                    of_second.copy_(of_first)
            case [[gradient]]:
                self._ends.all_reduce(gradient)
            case [gradients] if gradients:
                _sum_together(gradients, self._ends)


def _captured_ties(model: ModelSpec) -> Iterator[str]:
    """Names in a captured stage of the weights that the first and the last layer share."""
    assert model.captured is not None, "a captured model"
    head, path = model.layers[-1], model.captured.module_of(len(model.layers) - 1)
    for parameter in head.parameters:
        if parameter.name in head.tied:
            yield f"module.{path}.{parameter.name}" if path and not parameter.in_root else f"module.{parameter.name}"


class GradientClipper:
    """Clips gradients by their norm over all shards, tensor-parallel ranks and stages.

    The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``. The torch function cannot mix tensors with DTensors or
    DTensors of two meshes (``tests/executor/distributed/test_split_layers.py``), and its all-reduce of a DTensor's norm
    is not recorded.

    Args:
        max_norm: Gradients with a larger norm are scaled to it.
        copies: Parameters among them that another stage counts: the head's copy of a tied embedding.
        pipeline: Ranks of the other stages.
    """

    def __init__(
        self,
        max_norm: float,
        parameters: Sequence[nn.Parameter],
        copies: Sequence[nn.Parameter],
        groups: ShardGroups,
        pipeline: Peers,
    ) -> None:
        self._max_norm, self._groups, self._pipeline = max_norm, groups, pipeline
        self._parameters = list(parameters)
        uncounted = {id(copy) for copy in copies}
        self._counted = [p for p in parameters if groups.counts(p) and id(p) not in uncounted]

    @torch.no_grad()
    def clip(self) -> None:
        """Scales all gradients, also by 1, so that the host need not wait for the norm."""
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        norm = get_total_norm([local(p.grad) for p in self._counted if p.grad is not None])
        wide = torch.promote_types(norm.dtype, torch.float32)  # ranks sum squares of BF16 norms in FP32
        total = self._groups.total(norm.to(gradients[0].device, wide).square().reshape(1))
        if self._pipeline.size > 1:
            self._pipeline.all_reduce(total)
        scale = (self._max_norm / (total[0].sqrt() + _EPSILON)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
