"""Sharded data parallelism with torch's FSDP2, every gather and reduction recorded.

torch lets a module's all-gather and reduce-scatter be replaced; ours are torch's own and tell the recorder. Their base
classes are private names with the same meaning in torch 2.11 and 2.13 (``tests/executor/test_pipeline.py`` pins them).
"""

from __future__ import annotations

from collections.abc import Collection
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
from executor.moe import expert_matrices
from executor.recompute import hide_hooks
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
    experts: Group | None = None,
) -> None:
    """Shards a stage in place: every layer is a unit, layers that share a weight are one together with the root.

    The last layer is never resharded after forward: backward begins with it. Experts of which other ranks have others
    are a unit inside of their layer's, asked for with it (torchtitan, torchtitan/models/llama4/infra/parallelize.py).

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
        experts: Ranks over which experts are sharded instead; None for ``shard``.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = list(stage.layers.values())
    head = layers[-1]
    units = _Units(shard, replicate, recorder, policy, next(stage.parameters()).device.type, unshard, ignored)
    of_experts = None if experts is None else units.of_experts(experts)
    for layer in layers[1:-1] if _share_weight(layers[0], head) else layers:
        reshards = reshard_after_forward and layer is not head
        matrices = expert_matrices(layer)
        inner = of_experts.make(matrices, reshards=reshards) if of_experts is not None and matrices else None
        outer = units.make([layer], reshards=reshards)
        if inner is not None:
            hide_hooks(matrices)
            outer.set_modules_to_forward_prefetch([inner])
    units.make([stage], reshards=False)


class _Units:
    """Makes units over one group of ranks.

    Args:
        group, replicate, recorder, unshard, ignored: As for ``shard_stage``.
        policy: Which precisions they have.
        device_type: Of their parameters.
        divides_by: What sums of gradients are divided by; None for the ranks that have added to them.
    """

    def __init__(
        self,
        group: Group,
        replicate: Group | None,
        recorder: Recorder,
        policy: MixedPrecisionPolicy,
        device_type: str,
        unshard: Action | None,
        ignored: Collection[nn.Parameter],
        divides_by: int | None = None,
    ) -> None:
        self._group, self._replicate, self._recorder, self._policy = group, replicate, recorder, policy
        self._device_type, self._unshard, self._ignored, self._divides_by = device_type, unshard, ignored, divides_by
        self._mesh = _mesh(group, replicate, device_type)

    def of_experts(self, group: Group) -> _Units:
        """The same over the ranks that have the same experts: tokens of others are in their gradients already."""
        averaged = len(self._group.ranks) * (1 if self._replicate is None else len(self._replicate.ranks))
        return _Units(
            group,
            self._replicate,
            self._recorder,
            self._policy,
            self._device_type,
            self._unshard,
            self._ignored,
            averaged,
        )

    def make(self, modules: list[nn.Module], *, reshards: bool) -> FSDPModule:
        """Makes one unit of modules, without what is in units already."""
        fully_shard(
            modules,
            mesh=self._mesh,
            reshard_after_forward=reshards,
            mp_policy=self._policy,
            ignored_params=set(self._ignored),
            shard_placement_fn=lambda parameter: Shard(shard_dimension(parameter.shape, len(self._group.ranks))),
        )
        unit = modules[0]  # all have the same state
        assert isinstance(unit, FSDPModule)
        reduction = _Reduction(self._recorder, self._group, self._replicate)
        unit.set_custom_all_gather(_AllGather(self._recorder, self._group, self._unshard))
        unit.set_custom_reduce_scatter(reduction)
        if self._replicate is not None:
            unit.set_all_reduce_hook(reduction.all_reduced)
        if self._divides_by is not None:
            unit.set_gradient_divide_factor(self._divides_by)
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it sums
        return unit


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
