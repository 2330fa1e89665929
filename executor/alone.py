"""One rank of a job of any size, alone in this process: its kernels and its memory, and no other rank.

torch's fake process group (``torch.testing._internal.distributed.fake_pg``) takes every collective and message and
moves nothing between ranks: a gather fills its result with the rank's own part, a reduction leaves it as it is. What a
rank computes, allocates and issues does not depend on what the others send, so all of that is as in a real run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.groups import Groups, make_groups
from simplan.program.run_spec import RunSpec

__all__ = ["alone_as"]


@contextmanager
def alone_as(rank: int, job: RunSpec) -> Iterator[Groups]:
    """This process is a rank of the job while the block runs; gives its groups.

    Args:
        rank: Which.
        job: The job.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.plan.num_devices)
    try:
        model = job.model
        tied, experts = model.tied_embeddings, model.num_experts > 0
        yield make_groups(job.plan, job.parsed_table(), rank, tied=tied, experts=experts, alone=True)
    finally:
        dist.destroy_process_group()
