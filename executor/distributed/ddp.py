"""Data parallelism with torch's DistributedDataParallel, every bucket recorded.

Annotations are not postponed in this module: torch checks the annotations of the communication hook.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, _compute_bucket_assignment_by_size  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from executor.distributed.mesh import Peers
from simplan.units import MIB

Hook = Callable[[Any, GradBucket], Future[Tensor]]

# torch 2.13 has a new name for it
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_BROADCAST_BUFFERS = "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers"


def wrap_ddp(
    module: nn.Module,
    peers: Peers,
    bucket_bytes: int | None,
    ignored: Collection[Tensor] = (),
    *,
    gradient_as_bucket_view: bool = False,
    broadcast_buffers: bool = False,
    hook: Hook | None = None,
) -> DistributedDataParallel:
    """Wraps a stage in DDP, which averages gradients over a group in buckets, overlapped with backward.

    Args:
        peers: Ranks that hold the same stage; every bucket is recorded.
        bucket_bytes: Bucket size limit; None for torch's limits (1 MiB for the first bucket, 25 MiB for the others).
        ignored: Parameters and buffers that DDP leaves alone.
        gradient_as_bucket_view: Make gradients views of the buckets; else both exist.
        broadcast_buffers: Broadcast the buffers of the first rank before a forward that follows a reduction.
        hook: Averages a bucket; None for an all-reduce.
    """
    tensors = (*module.named_parameters(), *module.named_buffers(remove_duplicate=False))
    names = [name for name, tensor in tensors if any(tensor is other for other in ignored)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {_BROADCAST_BUFFERS: broadcast_buffers}
    wrapped = _RecordedDdp(
        module,
        peers,
        process_group=peers.group,
        bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / MIB,
        gradient_as_bucket_view=gradient_as_bucket_view,
        init_sync=False,  # weights are equal by their seed, and positions of context-parallel ranks must not become so
        **options,
    )

    def average(state: None, bucket: GradBucket) -> Future[Tensor]:
        return average_whole(peers, bucket)

    wrapped.register_comm_hook(None, hook or average)
    return wrapped


class _RecordedDdp(DistributedDataParallel):
    """DDP of which broadcasts of buffers are recorded."""

    def __init__(self, module: nn.Module, peers: Peers, **options: Any) -> None:
        super().__init__(module, **options)
        self._peers = peers

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        peers = self._peers
        buckets, _ = _compute_bucket_assignment_by_size(tensors, [buffer_size])  # as torch does it inside
        sizes = [sum(tensors[index].nbytes for index in bucket) for bucket in buckets]
        handles = [peers.issue_bytes("broadcast", num_bytes) for num_bytes in sizes]
        super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]
        for handle in handles:
            peers.complete(handle)


def average_whole(peers: Peers, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket with the arithmetic of torch's default: divide, then sum."""
    gradients = bucket.buffer().div_(peers.size)
    handle = peers.issue("all_reduce", gradients)
    work = dist.all_reduce(gradients, group=peers.group, async_op=True)
    assert work is not None

    def done(future: Future[list[Tensor]]) -> Tensor:
        del future  # the same tensor: it was reduced in place
        peers.complete(handle)
        return gradients

    averaged: Future[Tensor] = work.get_future().then(done)
    return averaged
