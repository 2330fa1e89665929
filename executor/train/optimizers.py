"""The optimizers of ``simplan.spec.optimizer``: torch's own, and LARS and LAMB, which take norms of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.sgd import sgd

from executor.distributed.mesh import Peers
from executor.models.model import Stage
from simplan.spec.model import ModelSpec
from simplan.spec.optimizer import UpdateName
from simplan.spec.plan import ParallelPlan

__all__ = [
    "Lamb",
    "Lars",
    "Parts",
    "divide_gradients",
    "held_alike",
    "local",
    "make_optimizer",
    "squares",
    "zero_gradients",
]

_LEARNING_RATE = 1e-3
_MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Parts:
    """Of which tensors this rank has parts, and which ranks have the others.

    Attributes:
        shard: Ranks with the other shards of all of them (FSDP).
        tp: Tensor-parallel ranks.
        alike: Ids of the parameters of which tensor-parallel ranks hold the same; their first rank counts them.
    """

    shard: Peers = field(default_factory=Peers)
    tp: Peers = field(default_factory=Peers)
    alike: frozenset[int] = frozenset()

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's part of a tensor is not another's, too."""
        return self.tp.rank == 0 or id(parameter) not in self.alike

    def total(self, x: Tensor) -> Tensor:
        """Summed over all ranks with other parts, in place."""
        for peers in (self.shard, self.tp):
            if peers.size > 1:
                peers.all_reduce(x)
        return x


def held_alike(stage: Stage, model: ModelSpec, plan: ParallelPlan) -> frozenset[int]:
    """Ids of those parameters of a stage of which all tensor-parallel ranks hold the same.

    They do not split these, nor are they among the ranks over which FSDP shards experts.
    """
    names = {
        f"layers.{index}.{part.name}"
        for index, (layer, split) in enumerate(zip(model.layers, model.layers_of(plan.shard), strict=True))
        for whole, part in zip(layer.parameters, split.parameters, strict=True)
        if whole.shape == part.shape and not (part.expert and plan.expert_shards > 1)
    }
    return frozenset(id(parameter) for name, parameter in stage.named_parameters() if name in names)


def local(tensor: Tensor) -> Tensor:
    """What is here of a sharded tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of each tensor's elements, (tensors,); 0 of a tensor without elements."""
    return torch.stack(torch._foreach_norm(list(tensors))).square()


def divide_gradients(parameters: Iterable[nn.Parameter], number: int) -> None:
    """Divides what is here of all gradients, in place and in one call: one for each DTensor takes the host longer."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, number)


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sets what is here of all gradients to zero, in place and in one call; they stay allocated."""
    torch._foreach_zero_([local(parameter.grad) for parameter in parameters if parameter.grad is not None])


def make_optimizer(
    update: UpdateName, parameters: Sequence[nn.Parameter], parts: Parts | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a job.

    Args:
        update: Which, and how its step is computed: fused kernels, or ``foreach``.
        parameters: What it updates.
        parts: For norms, what other ranks have of them; None where all are whole.
    """
    groups: list[dict[str, Any]] = [{"params": list(parameters)}]
    name = update.removesuffix("_foreach")
    how: dict[str, Any] = {"fused": True} if name == update else {"foreach": True}
    kinds: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adam": lambda: _Adam(groups, lr=_LEARNING_RATE, **how),
        "adamw": lambda: _AdamW(groups, lr=_LEARNING_RATE, **how),
        "sgd": lambda: _Sgd(groups, lr=_LEARNING_RATE, **how),
        "sgd_momentum": lambda: _Sgd(groups, lr=_LEARNING_RATE, momentum=_MOMENTUM, **how),
        "lars": lambda: Lars(parameters, parts or Parts()),
        "lamb": lambda: Lamb(parameters, parts or Parts()),
    }
    return kinds[name]()


class _Adam(torch.optim.Adam):
    """torch's, with a step over what is here of sharded tensors: for DTensors each call takes the host longer."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Fills lists of parameters, gradients, states and counts of steps."""
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return found


class _AdamW(_Adam, torch.optim.AdamW):
    """The same with decoupled decay."""


class _Sgd(torch.optim.SGD):
    """torch's, with a step over what is here of sharded tensors; it has no fused kernel for DTensors."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            momenta: list[Tensor | None] = [None] * len(trained)
            if group["momentum"]:
                for parameter in trained:  # zeros become the first gradient
                    if "momentum_buffer" not in self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
                momenta = [local(self.state[parameter]["momentum_buffer"]) for parameter in trained]
            names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
            settings = {name: group[name] for name in names}
            sgd([local(p) for p in trained], [local(p.grad) for p in trained], momenta, **settings)


class _Layerwise(torch.optim.Optimizer):
    """An optimizer whose step on a parameter depends on norms of the whole tensor; gradients are overwritten."""

    def __init__(self, parameters: Sequence[nn.Parameter], parts: Parts, **settings: float) -> None:
        super().__init__([{"params": list(parameters)}], {"lr": _LEARNING_RATE, **settings})
        self._parts = parts

    def _trained(self) -> list[nn.Parameter]:
        found: list[nn.Parameter] = self.param_groups[0]["params"]
        return found

    def _norms(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Of every weight and of every gradient (or what has taken its place), (parameters,) each."""
        parameters = self._trained()
        found = torch.stack((squares([local(p) for p in parameters]), squares(gradients)))
        counted = [self._parts.counts(parameter) for parameter in parameters]
        found *= torch.tensor(counted, dtype=found.dtype, device=found.device)
        weights, others = self._parts.total(found).sqrt()
        return weights, others

    def _states(self, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """By parameter, sharded as it is; zeros at first."""
        for parameter in self._trained():
            if parameter not in self.state:
                self.state[parameter] = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        return [tuple(local(self.state[parameter][name]) for name in names) for parameter in self._trained()]

    def _count_step(self) -> Tensor:
        """Counts this step, beside the states of each parameter as torch does; float64 on the CPU."""
        none = torch.zeros((), dtype=torch.float64)
        counts: list[Tensor] = [self.state[parameter].setdefault("step", none.clone()) for parameter in self._trained()]
        torch._foreach_add_(counts, 1)
        return counts[0]


class Lars(_Layerwise):
    """Momentum SGD whose rate for a tensor w of gradient g is scaled by eta |w| / (|g| + decay |w|).

    You et al. 2017, arXiv:1708.03888, algorithm 1; by 1 where a norm is 0.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: Parts) -> None:
        super().__init__(parameters, parts, momentum=_MOMENTUM, eta=1e-3, decay=1e-4)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters; gradients have no use afterwards."""
        settings = self.param_groups[0]
        gradients = [local(p.grad) for p in self._trained() if p.grad is not None]
        weights, norms = self._norms(gradients)
        trust = settings["eta"] * weights / (norms + settings["decay"] * weights)
        trust = torch.where((weights > 0) & (norms > 0), trust, 1.0)
        for parameter, gradient, (momentum,), ratio in zip(
            self._trained(), gradients, self._states(["momentum"]), trust, strict=True
        ):
            weight = local(parameter)
            gradient.add_(weight, alpha=settings["decay"]).mul_(settings["lr"] * ratio)
            momentum.mul_(settings["momentum"]).add_(gradient)
            weight.sub_(momentum)


class Lamb(_Layerwise):
    """Adam's update with decay, scaled for each tensor w by |w| / |update|.

    You et al. 2020, arXiv:1904.00962, algorithm 2, with corrected moments; by 1 where a norm is 0.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: Parts) -> None:
        super().__init__(parameters, parts, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.01)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters; the update takes the place of the gradient, so that it needs no memory."""
        settings = self.param_groups[0]
        updates = [local(p.grad) for p in self._trained() if p.grad is not None]
        states = self._states(["exp_avg", "exp_avg_sq"])
        num_steps = self._count_step()
        first, second = (1 - settings[beta] ** num_steps for beta in ("beta1", "beta2"))
        for parameter, update, (mean, square) in zip(self._trained(), updates, states, strict=True):
            mean.lerp_(update, 1 - settings["beta1"])
            square.mul_(settings["beta2"]).addcmul_(update, update, value=1 - settings["beta2"])
            torch.sqrt(square, out=update)
            update.div_(second.sqrt()).add_(settings["eps"])
            torch.div(mean, update, out=update)
            update.div_(first).add_(local(parameter), alpha=settings["decay"])
        weights, norms = self._norms(updates)
        trust = torch.where((weights > 0) & (norms > 0), weights / norms, 1.0)
        for parameter, update, ratio in zip(self._trained(), updates, trust, strict=True):
            local(parameter).addcmul_(update, ratio, value=-settings["lr"])
