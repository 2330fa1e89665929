"""Data parallelism with torch's DistributedDataParallel, every bucket recorded.

Annotations are not postponed in this module: torch checks the annotations of the communication hook.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from executor.distributed.mesh import Peers
from simplan.units import MIB

Hook = Callable[[Any, GradBucket], Future[Tensor]]

# Rotary tables are equal on all ranks; torch 2.13 has a new name for not sending them before every forward.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


def wrap_ddp(
    module: nn.Module,
    peers: Peers,
    bucket_bytes: int | None,
    ignored: Collection[nn.Parameter] = (),
    *,
    gradient_as_bucket_view: bool = False,
    hook: Hook | None = None,
) -> DistributedDataParallel:
    """Wraps a stage in DDP, which averages gradients over a group in buckets, overlapped with backward.

    Args:
        peers: Ranks that hold the same stage; every bucket is recorded.
        bucket_bytes: Bucket size limit; None for torch's limits (1 MiB for the first bucket, 25 MiB for the others).
        ignored: Parameters that DDP leaves alone.
        gradient_as_bucket_view: Make gradients views of the buckets; else both exist.
        hook: Averages a bucket; None for an all-reduce.
    """
    names = [name for name, parameter in module.named_parameters() if any(parameter is other for other in ignored)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(
        module,
        process_group=peers.group,
        bucket_cap_mb=None if bucket_bytes is None else bucket_bytes / MIB,
        gradient_as_bucket_view=gradient_as_bucket_view,
        init_sync=False,  # weights are equal by their seed, and positions of context-parallel ranks must not become so
        **_KEEP_BUFFERS,
    )

    def average(state: None, bucket: GradBucket) -> Future[Tensor]:
        return average_whole(peers, bucket)

    wrapped.register_comm_hook(None, hook or average)
    return wrapped


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
