"""Times what FSDP2 does around its collectives: hooks, and copies into and out of the buffers it sends.

A layer's weights are sharded over all ranks as the executor shards them, but its module computes nothing and its
collectives move nothing. What is left of forward is the work around an all-gather; what is left of a backward that
finds the weights gathered is the work around a reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from executor.timing import Stopwatch

__all__ = ["FsdpBench"]


class FsdpBench:
    """One layer's weights, sharded.

    Args:
        layer: The layer, whose parameters are fp32; it is sharded in place.
        compute_dtype: What they are cast to before they are gathered; None for nothing.
        device: Where they are.
    """

    def __init__(self, layer: nn.Module, compute_dtype: torch.dtype | None, device: torch.device) -> None:
        mesh = DeviceMesh.from_group(_world(), device.type, mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy()
        if compute_dtype is not None:
            policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        unit = _Untouched(layer)
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        sharded.set_custom_all_gather(_NothingGathered())
        sharded.set_custom_reduce_scatter(_NothingReduced())
        # the outermost unit has duties of its own; in a model it is not a layer
        self._root: nn.Module = nn.Sequential(unit)
        fully_shard(self._root, mesh=mesh, mp_policy=policy)
        self._watch = Stopwatch(device)
        self._input = torch.zeros(1, device=device, requires_grad=True)

    def round(self) -> tuple[float, float]:
        """Seconds around one all-gather and one reduce-scatter."""
        outputs: list[Tensor] = []
        gather_s = self._watch(lambda: outputs.append(self._root(self._input)))
        reduce_s = self._watch(outputs.pop().backward)
        return gather_s, reduce_s


class _Untouched(nn.Module):
    """Has a layer's parameters, and makes gradients for them without computing them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        out: Tensor = _Passed.apply(x, *self.layer.parameters())  # type: ignore[no-untyped-call]
        return out


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return (gradients[0], *(torch.empty_like(parameter) for parameter in ctx.saved_tensors))


class _NothingGathered(DefaultAllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        return None


class _NothingReduced(DefaultReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return None


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
