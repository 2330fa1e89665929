"""Sharded data parallelism with torch's FSDP2, every gather and reduction recorded.

torch lets a module's all-gather and reduce-scatter be replaced; ours are torch's own and tell the recorder. Their base
classes are private names with the same meaning in torch 2.11 and 2.13 (``tests/executor/test_pipeline.py`` pins them).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import Shard

from executor.groups import Group
from executor.model import Stage
from executor.recorder import Recorder
from simplan.program.action import Action
from simplan.program.units import shard_dimension

__all__ = ["shard_stage"]


def shard_stage(
    stage: Stage,
    shard: Group,
    replicate: Group | None,
    recorder: Recorder,
    *,
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool,
    unshard: Action | None,
    ignored: Collection[nn.Parameter] = (),
) -> None:
    """Shards a stage in place: every layer is a unit, layers that share a weight are one together with the root.

    The last layer is never resharded after forward: backward begins with it.

    Args:
        stage: The stage, with whole parameters.
        shard: Ranks over which parameters, gradients and optimizer states are sharded.
        replicate: Ranks that hold the same shard (hybrid sharding); None for one replica.
        recorder: Gets every collective's bytes, group, issue and completion.
        compute_dtype: Parameters are cast to it before they are gathered, and gradients back before they are reduced.
            None for computing with parameters as they are.
        reshard_after_forward: Free the gathered parameters of a unit between its forward and its backward.
        unshard: The action that gathers the stage in a pipeline; None where its layers' hooks do.
        ignored: Parameters that stay whole and as they are.
    """
    mesh = _mesh(shard, replicate, next(stage.parameters()).device.type)
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = list(stage.layers.values())
    head = layers[-1]

    def placed(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dimension(parameter.shape, len(shard.ranks)))

    shared = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=set(ignored), shard_placement_fn=placed)
    for unit in layers[1:-1] if _share_weight(layers[0], head) else layers:
        shared(unit, reshard_after_forward=reshard_after_forward and unit is not head)
    shared(stage, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            reduction = _Reduction(recorder, shard, replicate)
            module.set_custom_all_gather(_AllGather(recorder, shard, unshard))
            module.set_custom_reduce_scatter(reduction)
            if replicate is not None:
                module.set_all_reduce_hook(reduction.all_reduced)


def _mesh(shard: Group, replicate: Group | None, device_type: str) -> DeviceMesh:
    """The ranks that hold parts or copies of this stage: [shard], or [replicate, shard]."""
    with unset_fake_temporarily():  # a mesh holds numbers, also where all other tensors are without data
        if replicate is None:
            return DeviceMesh.from_group(shard.handle, device_type, mesh_dim_names=("shard",))
        offsets = torch.tensor(replicate.ranks) - dist.get_rank()
        ranks = offsets.unsqueeze(1) + torch.tensor(shard.ranks)
        return DeviceMesh.from_group(
            [replicate.handle, shard.handle], device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
        )


def _share_weight(first: nn.Module, last: nn.Module) -> bool:
    return first is not last and not set(first.parameters()).isdisjoint(last.parameters())


class _AllGather(DefaultAllGather):
    def __init__(self, recorder: Recorder, group: Group, unshard: Action | None) -> None:
        super().__init__()
        self._recorder, self._group, self._unshard = recorder, group, unshard

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        handle = self._recorder.issue("all_gather", self._group.ranks, output_tensor.nbytes, self._unshard)
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        if work is None:
            self._recorder.complete(handle)
        else:
            work.get_future().then(lambda _: self._recorder.complete(handle))
        return work


class _Reduction(DefaultReduceScatter):
    """A reduce-scatter, followed by torch's all-reduce of its result where there are replicas."""

    def __init__(self, recorder: Recorder, group: Group, replicate: Group | None) -> None:
        super().__init__()
        self._recorder, self._group, self._replicate = recorder, group, replicate
        self._all_reduce = -1

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        handle = self._recorder.issue("reduce_scatter", self._group.ranks, input_tensor.nbytes)
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._recorder.complete(handle)
        if self._replicate is not None:
            self._all_reduce = self._recorder.issue("all_reduce", self._replicate.ranks, output_tensor.nbytes)
        return work

    def all_reduced(self, gradients: Tensor) -> None:
        """The all-reduce that torch asks for after the reduce-scatter is done."""
        del gradients
        self._recorder.complete(self._all_reduce)
