"""Ranks that run out of memory: how torch's errors about it are known, and what is said instead."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from executor.profiling.memory import peak_memory, process_bytes
from simplan.errors import RunError
from simplan.units import format_bytes

__all__ = ["RankOutOfMemoryError", "asked_for", "predicted_peak", "told_when_out_of_memory"]

_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.ASCII)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class RankOutOfMemoryError(RunError):
    """There was not enough memory for this rank; the message compares what it held with what was predicted."""


@contextmanager
def told_when_out_of_memory(device: torch.device, predicted_bytes: int | None) -> Iterator[None]:
    """Errors of the block that mean a lack of memory leave it as a RankOutOfMemoryError.

    Args:
        device: Where this rank computes.
        predicted_bytes: What the prediction says it needs there; None without a prediction.

    Raises:
        RankOutOfMemoryError: The block ran out of memory; its cause is torch's own error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        cause = _shortage(error)
        if cause is None:
            raise
        raise RankOutOfMemoryError(_sentence(cause, device, predicted_bytes)) from error


def predicted_peak(predicted_bytes: int | None) -> str:
    """What the prediction said about a rank."""
    if predicted_bytes is None:
        return "no peak was predicted for it"
    return f"a peak of {format_bytes(predicted_bytes)} was predicted for it"


def asked_for(message: str) -> int | None:
    """Bytes that could not be had, as torch's message says; None when it does not."""
    match = _ASKED.search(message)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def _shortage(error: BaseException) -> BaseException | None:
    """The error, or one that it was raised from, that says so: torch's pipelines wrap what stages raise."""
    found: BaseException | None = error
    while found is not None:
        # torch.OutOfMemoryError is a RuntimeError of its own type on CUDA
        if isinstance(found, MemoryError | torch.OutOfMemoryError) or any(sign in str(found) for sign in _SIGNS):
            return found
        found = found.__cause__ or found.__context__
    return None


def _sentence(error: BaseException, device: torch.device, predicted_bytes: int | None) -> str:
    held, capacity, what = _room(device)
    asked = asked_for(str(error))
    more = "" if asked is None else f" and asked for {format_bytes(asked)} more"
    said = f"it held {format_bytes(held)}{more}, where {what} {format_bytes(capacity)}"
    return f"{said}; {predicted_peak(predicted_bytes)}"


def _room(device: torch.device) -> tuple[int, int, str]:
    """Bytes that are held, bytes that there are, and what words the latter come after."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_reserved(device), total, "the device has"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and (held := process_bytes("VmSize")) is not None:
        return held, limit, "a process may map (ulimit -v)"
    held = process_bytes("VmRSS") or peak_memory(device).device_bytes or 0
    return held, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the host has"
