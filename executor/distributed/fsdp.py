"""Sharded data parallelism with torch's FSDP2; every all-gather and reduce-scatter is recorded.

torch allows a module's all-gather and reduce-scatter to be replaced; the replacements are torch's own, with a record.
Their base classes are private names with the same meaning in torch 2.11 and 2.13
(``tests/executor/distributed/test_pipeline.py`` pins them).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import Shard

from executor.distributed.mesh import ParallelDims, Peers, fill_from_own, local
from executor.distributed.recompute import hide_hooks
from executor.models.model import Stage
from simplan.program.action import Action
from simplan.program.lowering.fsdp_units import shard_dimension


class StageSharding:
    """Shards a stage layer by layer: every layer is an FSDP unit, and the remaining parameters are the root unit.

    With expert parallelism, the experts of a layer are a separate unit inside of the layer's unit, and are prefetched
    with the layer (torchtitan, torchtitan/models/llama4/infra/parallelize.py).

    Args:
        dims: ``fsdp`` has the ranks over which parameters, gradients and optimizer states are sharded. ``replicate``
            has the ranks with the same shard (hybrid sharding). Every collective is recorded.
        compute_dtype: Dtype of parameters in all-gathers and compute; gradients are cast back before reduce-scatter.
            None for the dtype of the parameters.
        unshard: Action that unshards the stage in a pipeline; None where the layers' hooks unshard.
        experts: Shard experts over ``dims.experts`` instead.
        on_host: Shards of parameters, and their gradients, are in host memory.
    """

    def __init__(
        self,
        dims: ParallelDims,
        device_type: str,
        *,
        compute_dtype: torch.dtype | None,
        unshard: Action | None,
        experts: bool = False,
        on_host: bool = False,
    ) -> None:
        precision = MixedPrecisionPolicy()
        if compute_dtype is not None:
            precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        # memory is pinned for copies to and from CUDA devices; there are none where the host is the device
        policies = precision, CPUOffloadPolicy(pin_memory=device_type != "cpu") if on_host else OffloadPolicy()
        if dims.tp.size > 1:  # parts of DTensors are views; nothing here changes hidden states in place
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        self._units = _Units(dims, policies, device_type, unshard)
        self._of_experts = _Units(dims, policies, device_type, unshard, experts=True) if experts else None

    def shard(self, layer: nn.Module, *, reshards: bool, ignored: Collection[nn.Parameter] = ()) -> None:
        """Shards a layer in place.

        Args:
            reshards: Free the unsharded parameters between forward and backward.
            ignored: Parameters that FSDP leaves unsharded and unchanged.
        """
        self._units.ignored.update(ignored)
        inner, matrices = None, []
        if self._of_experts is not None:
            from executor.models.moe import expert_matrices

            matrices = expert_matrices(layer)
            inner = self._of_experts.make(matrices, reshards=reshards) if matrices else None
        outer = self._units.make([layer], reshards=reshards)
        if inner is not None:
            hide_hooks(matrices)
            outer.set_modules_to_forward_prefetch([inner])

    def finish(self, stage: Stage, *, casts_inputs: bool = True, reshards: bool = False) -> None:
        """Shards the remaining parameters: layers that share a weight.

        Args:
            casts_inputs: Cast what the stage receives to the dtype of compute.
            reshards: Free these parameters after forward.
        """
        # what a stage gives is sent, and nothing changes it in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .FSDPCapturedPart. returned a view tensor")
        self._units.make([stage], reshards=reshards, casts_inputs=casts_inputs)


class _Units:
    """Makes FSDP units over the ranks of one axis.

    Args:
        dims, unshard: See ``StageSharding``.
        experts: True for units of experts. Their gradients already include tokens of other expert-parallel ranks, so
            sums are divided by the number of ranks that average all other gradients.

    Attributes:
        ignored: Parameters that stay unsharded.
    """

    def __init__(
        self,
        dims: ParallelDims,
        policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
        device_type: str,
        unshard: Action | None,
        *,
        experts: bool = False,
    ) -> None:
        self._peers, self._replicate = dims.experts if experts else dims.fsdp, dims.replicate
        self._policies, self._unshard = policies, unshard
        self.ignored: set[nn.Parameter] = set()
        self._divides_by = dims.fsdp.size * dims.replicate.size if experts else None
        self._mesh = dims.fsdp_mesh(device_type, experts=experts)

    def make(self, modules: list[nn.Module], *, reshards: bool, casts_inputs: bool = True) -> FSDPModule:
        """Makes one unit of modules, without parameters that are in other units."""
        fully_shard(
            modules,
            mesh=self._mesh,
            reshard_after_forward=reshards,
            mp_policy=replace(self._policies[0], cast_forward_inputs=casts_inputs),
            offload_policy=self._policies[1],
            ignored_params=self.ignored,
            shard_placement_fn=lambda parameter: Shard(shard_dimension(local(parameter).shape, self._peers.size)),
        )
        unit = modules[0]  # all have the same state
        assert isinstance(unit, FSDPModule)
        reduction = _Reduction(self._peers, self._replicate)
        unit.set_custom_all_gather(_AllGather(self._peers, self._unshard))
        unit.set_custom_reduce_scatter(reduction)
        if self._replicate.size > 1:
            unit.set_all_reduce_hook(reduction.all_reduced)
        if self._divides_by is not None:
            unit.set_gradient_divide_factor(self._divides_by)
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it sums
        return unit


class _AllGather(DefaultAllGather):
    def __init__(self, peers: Peers, unshard: Action | None) -> None:
        super().__init__()
        self._peers, self._unshard = peers, unshard

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        handle = self._peers.issue("all_gather", output_tensor, self._unshard)
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        if work is None:
            self._peers.complete(handle)
        else:
            work.get_future().then(lambda _: self._peers.complete(handle))
        return work


class _Reduction(DefaultReduceScatter):
    """Recorded reduce-scatter; with replicas (hybrid sharding), torch all-reduces its result."""

    def __init__(self, peers: Peers, replicate: Peers) -> None:
        super().__init__()
        self._peers, self._replicate = peers, replicate
        self._all_reduce = -1

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        handle = self._peers.issue("reduce_scatter", input_tensor)
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        if self._peers.alone:
            fill_from_own("reduce_scatter", output_tensor, input_tensor, self._peers.rank)
        self._peers.complete(handle)
        if self._replicate.size > 1:
            self._all_reduce = self._replicate.issue("all_reduce", output_tensor)
        return work

    def all_reduced(self, gradients: Tensor) -> None:
        """Records the all-reduce that torch issues after the reduce-scatter (hybrid sharding)."""
        del gradients
        self._replicate.complete(self._all_reduce)
