"""What a measurement was taken on: machine, versions, threads, backend."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["environment"]


def environment(num_ranks: int, *, cuda: bool) -> dict[str, str | int | float | None]:
    """Facts that move a measurement.

    Args:
        num_ranks: Ranks on this machine.
        cuda: Whether they compute on CUDA devices.
    """
    cores = len(os.sched_getaffinity(0))
    nccl = torch.cuda.nccl.version() if cuda else None  # type: ignore[no-untyped-call]
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": _driver() if cuda else None,
        "backend": "nccl" if cuda else "gloo",
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "num_cores": cores,
        "num_ranks": num_ranks,
        "threads_per_rank": None if cuda else max(1, cores // num_ranks),
    }


def _driver() -> str | None:
    """Version of NVIDIA's kernel module, e.g. ``550.54.15``; None where Linux does not tell."""
    info = Path("/proc/driver/nvidia/version")
    words = info.read_text(errors="replace").partition("\n")[0].split() if info.exists() else []
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _processor() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
