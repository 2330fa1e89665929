"""Optimizers of ``simplan.training``: torch's own, and LARS and LAMB, which take norms of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from executor.distributed.gradients import ShardGroups
from executor.distributed.mesh import local
from simplan.optimizers import UPDATES, OptimizerName, UpdateName
from simplan.plan.compression import in_whole_blocks

if TYPE_CHECKING:
    from executor.distributed.compression import MomentumCompression

_LEARNING_RATE = 1e-3
_MOMENTUM = 0.9


def update_in_backward(parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Makes backward update each parameter, by an optimizer of its own, and free its gradient.

    As torchtune's ``register_optim_in_bwd_hooks`` (``training/memory.py``); FSDP2 calls hooks of shards with reduced
    gradients.
    """
    for parameter, optimizer in zip(parameters, optimizers, strict=True):

        def update(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]


def make_optimizer(
    update: UpdateName,
    parameters: Any,
    groups: ShardGroups | None = None,
    momentum: MomentumCompression | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of a job.

    Args:
        update: Name of the optimizer, with the suffix ``_foreach`` if torch's fused kernels are not to be used.
        parameters: Parameters to update, or torch's parameter groups.
        groups: Ranks with other shards of the parameters, for norms; None for unsharded parameters.
        momentum: Averages the momentum of 1-bit Adam, which is Adam or AdamW; None for any other optimizer.
    """
    name = update.removesuffix("_foreach")
    settings: dict[str, Any] = {"lr": _LEARNING_RATE, "fused" if name == update else "foreach": True}
    if momentum is not None:
        return OneBitAdam(parameters, momentum, decays=name == "adamw", settings=settings)
    if UPDATES[update].by_tensor:
        return _from_tensor_to_tensor(cast("OptimizerName", name), parameters, groups or ShardGroups())
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": partial(_Adam, **settings),
        "adamw": partial(_AdamW, **settings),
        "sgd": partial(_Sgd, **settings),
        "sgd_momentum": partial(_Sgd, momentum=_MOMENTUM, **settings),
        "lars": partial(Lars, groups=groups or ShardGroups()),
        "lamb": partial(Lamb, groups=groups or ShardGroups()),
    }
    return kinds[name](parameters)


def _from_tensor_to_tensor(name: OptimizerName, parameters: Any, groups: ShardGroups) -> torch.optim.Optimizer:
    """Muon, Adafactor, or an optimizer of another package."""
    from executor.train import tensor_optimizers

    if name == "muon":
        adamw = partial(_AdamW, lr=_LEARNING_RATE, fused=True)
        return tensor_optimizers.Muon(parameters, adamw, groups.matrices, groups.shard)
    if name == "adafactor_torch":
        return tensor_optimizers.Adafactor(parameters, groups.shard)
    return tensor_optimizers.of_package(name, parameters, _LEARNING_RATE)


class _Adam(torch.optim.Adam):
    """torch's Adam, stepping over local shards: a DTensor takes the host longer and cannot be mixed with tensors."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Fills lists of parameters, gradients, states and step counts."""
        has_complex = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


class _AdamW(_Adam, torch.optim.AdamW):
    """Adam with decoupled weight decay."""


class OneBitAdam(_AdamW):
    """1-bit Adam of Tang et al. 2021 (arXiv:2102.02888): Adam, then Adam with a frozen variance.

    In the first steps gradients are averaged, and this is torch's optimizer. Afterwards every rank adds its own
    gradient to the common momentum, and ranks average the momentum in one bit per value. The variance stays as it is,
    with the bias correction of its last step; that of the momentum goes on.

    One bit has no zero. A value whose gradients are 0, or rounding errors like those of a key's bias, would get the
    momentum of its neighbors over no variance. So values with a variance below epsilon squared get no momentum
    (``exp_avg_mask`` of DeepSpeed's OnebitAdam), and tensors have no scale in common.

    Args:
        compression: Averages the momentum, and knows the first steps.
        decays: True for AdamW, False for Adam.
        settings: Of torch's optimizer.
    """

    def __init__(
        self, parameters: Any, compression: MomentumCompression, *, decays: bool, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(parameters, **settings)
        if not decays:
            self.param_groups[0]["weight_decay"] = 0.0
        self._compression = compression
        (group,) = self.param_groups
        trained: list[nn.Parameter] = group["params"]
        sizes = [parameter.numel() for parameter in trained]
        whole = in_whole_blocks(sizes)
        self._momentum = trained[0].new_zeros(compression.padded_elements(sum(whole)))
        *parts, rest = torch.split(self._momentum, [*whole, len(self._momentum) - sum(whole)])
        self._padding = [rest, *(part[size:] for part, size in zip(parts, sizes, strict=True))]
        for parameter, part in zip(trained, parts, strict=True):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"),
                "exp_avg": part[: parameter.numel()].view_as(parameter),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters; after the first steps, gradients have no use afterwards."""
        if not self._compression.is_frozen:
            super().step()
            return
        (group,) = self.param_groups
        parameters, weights, scratch = _trained(self)
        states = [self.state[parameter] for parameter in parameters]
        momenta, variances = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        num_whole = self._compression.num_whole_steps
        root = (1 - beta2**num_whole) ** 0.5
        if self._compression.step == num_whole + 1:
            for variance in variances:
                variance[variance < (root * group["eps"]) ** 2] = 0
        torch._foreach_add_([state["step"] for state in states], 1)
        torch._foreach_lerp_(momenta, scratch, 1 - beta1)
        torch._foreach_copy_(scratch, variances)
        torch._foreach_sign_(scratch)
        torch._foreach_mul_(momenta, scratch)
        torch._foreach_zero_(self._padding)
        self._compression.average(self._momentum)
        torch._foreach_mul_(momenta, scratch)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_copy_(scratch, variances)
        torch._foreach_sqrt_(scratch)
        torch._foreach_add_(scratch, root * group["eps"])
        rate = group["lr"] * root / (1 - beta1**self._compression.step)
        torch._foreach_addcdiv_(weights, momenta, scratch, -rate)


class _Sgd(torch.optim.SGD):
    """torch's SGD, stepping over local shards; torch has no fused SGD kernel for DTensors."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters."""
        parameters, weights, gradients = _trained(self)
        (group,) = self.param_groups
        momenta: list[Tensor | None] = [None] * len(parameters)
        if group["momentum"]:  # zeros become the first gradient
            momenta = [local(state["momentum_buffer"]) for state in _states(self, parameters, "momentum_buffer")]
        settings = {key: value for key, value in group.items() if key not in ("params", "differentiable")}
        sgd(weights, gradients, momenta, **settings)


class Lars(_Sgd):
    """Momentum SGD whose rate for a tensor w of gradient g is scaled by eta |w| / (|g| + decay |w|).

    You et al. 2017, arXiv:1708.03888, algorithm 1; by 1 where a norm is 0. The rate is a factor of the gradient.
    """

    def __init__(self, parameters: Any, groups: ShardGroups) -> None:
        super().__init__(parameters, lr=1.0, momentum=_MOMENTUM, foreach=True)
        self._groups, self._eta, self._decay = groups, 1e-3, 1e-4

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters; gradients have no use afterwards."""
        parameters, weights, gradients = _trained(self)
        if not parameters:
            return
        sizes, slopes = self._groups.norms(parameters, weights, gradients)
        ratios = self._eta * sizes / (slopes + self._decay * sizes)
        rates = _LEARNING_RATE * torch.where((sizes > 0) & (slopes > 0), ratios, 1.0)
        torch._foreach_add_(gradients, weights, alpha=self._decay)
        torch._foreach_mul_(gradients, rates.unbind())
        super().step()


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's update with decay, scaled per tensor w by |w| / |update|, or by 1 where a norm is 0.

    You et al. 2020, arXiv:1904.00962, algorithm 2, with bias-corrected moments.
    """

    def __init__(self, parameters: Any, groups: ShardGroups) -> None:
        super().__init__(parameters, {"lr": _LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-6, "decay": 0.01})
        self._groups = groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters; updates overwrite gradients and so need no memory."""
        parameters, weights, updates = _trained(self)
        if not parameters:
            return
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        states = _states(self, parameters, "exp_avg", "exp_avg_sq")
        for weight, update, state in zip(weights, updates, states, strict=True):
            mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
            step = state.setdefault("step", torch.zeros((), dtype=torch.float64)).add_(1)  # on the host, as torch's
            mean.lerp_(update, 1 - beta1)
            square.mul_(beta2).addcmul_(update, update, value=1 - beta2)
            torch.sqrt(square, out=update)
            update.div_((1 - beta2**step).sqrt()).add_(group["eps"])
            torch.div(mean, update, out=update)
            update.div_(1 - beta1**step).add_(weight, alpha=group["decay"])
        sizes, norms = self._groups.norms(parameters, weights, updates)
        torch._foreach_mul_(updates, torch.where((sizes > 0) & (norms > 0), sizes / norms, 1.0).unbind())
        torch._foreach_add_(weights, updates, alpha=-group["lr"])


def _trained(optimizer: torch.optim.Optimizer) -> tuple[list[nn.Parameter], list[Tensor], list[Tensor]]:
    """Parameters with a gradient, their local shards, and the local shards of the gradients."""
    (group,) = optimizer.param_groups
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    return parameters, [local(p) for p in parameters], [local(p.grad) for p in parameters]


def _states(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], *names: str) -> list[dict[str, Tensor]]:
    """State of each parameter, sharded as the parameter; zeros at first."""
    for parameter in parameters:
        if parameter not in optimizer.state:
            optimizer.state[parameter] = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
    return [optimizer.state[parameter] for parameter in parameters]
