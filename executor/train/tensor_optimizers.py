"""Optimizers that go from tensor to tensor: torch's Muon and Adafactor, whole, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim._adafactor import _single_tensor_adafactor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

from executor.distributed.mesh import Peers, local
from simplan.optimizers import OPTIMIZERS, OptimizerName

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13, and before
_WEIGHT_DECAY = 0.1  # torch.optim.Muon's
_MUON_MOMENTUM = 0.95


def whole(tensor: Tensor, like: nn.Parameter, peers: Peers) -> Tensor:
    """A whole tensor from the shards of FSDP2; the tensor itself for a parameter that is not sharded.

    Args:
        tensor: This rank's shard, of the shape of the parameter's.
        like: Parameter with the placement of the shards.
        peers: Ranks over which parameters are sharded.
    """
    dim = _sharded_dim(like)
    if dim is None or peers.size == 1:
        return tensor
    rows = -(-like.shape[dim] // peers.size)  # the last shards may be smaller or empty
    part = tensor.movedim(dim, 0)
    padded = part.new_zeros((rows, *part.shape[1:]))
    padded[: len(part)] = part
    gathered = padded.new_empty((peers.size * rows, *part.shape[1:]))
    handle = peers.issue("all_gather", gathered)
    if peers.group is not None:
        _all_gather(gathered, padded, group=peers.group)
    peers.complete(handle)
    return gathered[: like.shape[dim]].movedim(0, dim)


def own_part(tensor: Tensor, like: nn.Parameter, peers: Peers) -> Tensor:
    """This rank's shard of a whole tensor; the reverse of ``whole``."""
    dim = _sharded_dim(like)
    if dim is None or peers.size == 1:
        return tensor
    rows = -(-like.shape[dim] // peers.size)
    start = min(peers.rank * rows, like.shape[dim])
    return tensor.narrow(dim, start, min(rows, like.shape[dim] - start))


def _sharded_dim(parameter: nn.Parameter) -> int | None:
    if not isinstance(parameter, DTensor):
        return None
    return next((placement.dim for placement in parameter.placements if isinstance(placement, Shard)), None)


class Muon(torch.optim.Optimizer):
    """torch's Muon for matrices of blocks, and AdamW for all other parameters.

    torch 2.13, ``optim/_muon.py``; of parameters that FSDP2 shards, updates are gathered in BF16 before Newton-Schulz
    (Liu et al. 2025, arXiv:2502.16982, algorithm 1), which every rank computes.

    Args:
        adamw: Makes AdamW of some parameters.
        matrices: Ids of the matrices of blocks; None for all matrices.
        shards: Ranks over which FSDP2 shards parameters.
    """

    def __init__(
        self,
        parameters: Any,
        adamw: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        matrices: Collection[int] | None,
        shards: Peers,
    ) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self._ids, self._shards = matrices, shards
        (group,) = self.param_groups
        others = [parameter for parameter in group["params"] if not self._is_matrix(parameter)]
        self._others = adamw(others) if others else None

    def _is_matrix(self, parameter: nn.Parameter) -> bool:
        return parameter.ndim == 2 if self._ids is None else id(parameter) in self._ids

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters."""
        (group,) = self.param_groups
        for parameter in group["params"]:
            if parameter.grad is not None and self._is_matrix(parameter):
                self._update(parameter, group["lr"])
        if self._others is not None:
            self._others.state = self.state  # loading a checkpoint replaces it
            self._others.step()

    def _update(self, parameter: nn.Parameter, rate: float) -> None:
        assert parameter.grad is not None
        state, gradient, weight = self.state[parameter], local(parameter.grad), local(parameter)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        momentum = local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - _MUON_MOMENTUM)
        update = gradient.lerp(momentum, _MUON_MOMENTUM)
        matrix = update
        if _sharded_dim(parameter) is not None:
            matrix = whole(update.bfloat16(), parameter, self._shards)
        del update
        direction = _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)
        rows, columns = parameter.shape
        weight.mul_(1 - rate * _WEIGHT_DECAY)
        adjusted = rate * max(1.0, rows / columns) ** 0.5
        weight.add_(own_part(direction, parameter, self._shards).to(weight.dtype), alpha=-adjusted)


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor; of parameters that FSDP2 shards, gradients and weights are gathered, and states are whole.

    Args:
        shards: Ranks over which FSDP2 shards parameters.
    """

    def __init__(self, parameters: Any, shards: Peers) -> None:
        super().__init__(parameters, foreach=False)
        self._shards = shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters."""
        (group,) = self.param_groups
        eps1, eps2 = group["eps"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = whole(local(parameter.grad), parameter, self._shards)
            weight = whole(local(parameter), parameter, self._shards)
            state = self.state[parameter]
            if not state:
                state.update(_factors(gradient))
            _single_tensor_adafactor(
                [weight],
                [gradient],
                [state.get("row_var")],
                [state.get("col_var")],
                [state.get("variance")],
                [state["step"]],
                None,
                None,
                d=group["d"],
                lr=group["lr"],
                beta2_decay=group["beta2_decay"],
                weight_decay=group["weight_decay"],
                eps1=eps1,
                eps2=eps2,
                maximize=False,
                has_complex=False,
            )
            if _sharded_dim(parameter) is not None:
                local(parameter).copy_(own_part(weight, parameter, self._shards))


def _factors(gradient: Tensor) -> dict[str, Tensor]:
    """States of a tensor before its first step, as in torch's ``_init_group``."""
    step = torch.tensor(0.0)
    if gradient.dim() < 2:
        return {"step": step, "variance": torch.zeros_like(gradient)}
    rows, columns = gradient.shape[:-1], (*gradient.shape[:-2], 1, gradient.shape[-1])
    return {"step": step, "row_var": gradient.new_zeros((*rows, 1)), "col_var": gradient.new_zeros(columns)}


class _OverShards:
    """The step of torchao's AdamW over local shards.

    ``DTensor.from_local``, which torchao 0.18 calls, makes a view of a state, which forgets that the weight is not in
    FP32; torch 2.13 cannot compile that. Blocks of states are those of the shard, either way.
    """

    param_groups: list[dict[str, Any]]
    state: dict[nn.Parameter, dict[str, Tensor]]
    _new_buffer: Callable[[Tensor, bool], Tensor]
    is_adamw: bool

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates all parameters, with one compilation for every shape."""
        from torch._dynamo.utils import disable_cache_limit
        from torchao.optim.adam import single_param_adam

        compiled: Callable[..., None] = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
        with disable_cache_limit():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None or not local(parameter).numel():
                        continue
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
                            state[name] = _as_sharded(self._new_buffer(local(parameter), is_signed), parameter)
                    state["step"] += 1
                    weight, gradient = local(parameter).detach(), local(parameter.grad)
                    moments = local(state["exp_avg"]), local(state["exp_avg_sq"])
                    numbers = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
                    compiled(weight, gradient, state["step"], *moments, None, *numbers, self.is_adamw, False)


def _as_sharded(state: Tensor, like: nn.Parameter) -> Tensor:
    """A state of a shard as a DTensor with the placement of the parameter, for checkpoints."""
    if not isinstance(like, DTensor):
        return state
    return DTensor(state, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def of_package(name: OptimizerName, parameters: Any, rate: float) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes, torchao or transformers, with the settings of the executor's AdamW.

    Args:
        name: Name in ``simplan.optimizers``.
        parameters: Parameters to update, or torch's parameter groups.
        rate: Learning rate.
    """
    facts = OPTIMIZERS[name]
    if facts.package == "transformers":
        kind = getattr(import_module("transformers.optimization"), facts.kind)
        made = kind(parameters, lr=rate, scale_parameter=False, relative_step=False)
    else:
        kind = getattr(import_module(f"{facts.package}.optim"), facts.kind)
        made = (type(facts.kind, (_OverShards, kind), {}) if facts.package == "torchao" else kind)(parameters, lr=rate)
    assert isinstance(made, torch.optim.Optimizer)
    return made
