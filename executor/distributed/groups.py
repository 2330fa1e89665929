"""Process groups with the timeout of the run."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def run_timeout() -> timedelta | None:
    """Timeout of the default process group, for ``new_group``; None for torch's own, where it has none (a fake group).

    torch gives other groups 10 minutes on NCCL and 30 on gloo, whatever the default group has: they would end before
    the launcher names the rank that hangs, or while a rank compiles.
    """
    world = dist.group.WORLD
    assert world is not None
    for device in ("cuda", "cpu"):
        try:
            backend = world._get_backend(torch.device(device))
        except RuntimeError:  # the group has no backend of this device
            continue
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None
