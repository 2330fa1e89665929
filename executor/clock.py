"""When things happen, on the host for CPU ranks and on the stream for CUDA ranks, on one clock for all ranks."""

from __future__ import annotations

import time
from typing import Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "Stamp", "make_clock"]

Stamp = float | torch.cuda.Event


class Clock(Protocol):
    """Takes stamps now and turns them into seconds later."""

    def begin_step(self) -> None:
        """To be called before the first stamp of a step."""

    def stamp(self) -> Stamp:
        """Marks this point in the work of the calling thread (on CUDA: of its current stream)."""

    def settle(self) -> None:
        """Waits until everything stamped so far has happened."""

    def seconds(self, stamp: Stamp) -> float:
        """The time of a settled stamp of this step, on the monotonic clock that all processes of a host share."""


class HostClock:
    """For ranks that compute on the CPU: work is done when its call returns."""

    def begin_step(self) -> None:
        """Nothing to prepare."""

    def stamp(self) -> Stamp:
        """The monotonic clock now."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing is pending."""

    def seconds(self, stamp: Stamp) -> float:
        """Stamps are seconds already."""
        assert isinstance(stamp, float)
        return stamp


class CudaClock:
    """For ranks that compute on a CUDA device: stamps are events, tied to the host's clock at each step's start."""

    def __init__(self) -> None:
        self._anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._anchor_s = 0.0

    def begin_step(self) -> None:
        """Ties the stream to the host's clock: with the device idle, both are at the same instant."""
        torch.cuda.synchronize()
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_s = time.perf_counter()

    def stamp(self) -> Stamp:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def seconds(self, stamp: Stamp) -> float:
        """Anchor plus the device's own measure of the time since then."""
        assert isinstance(stamp, torch.cuda.Event)
        return self._anchor_s + float(self._anchor.elapsed_time(stamp)) * 1e-3


def make_clock(device: torch.device) -> Clock:
    """The clock for ranks on this kind of device."""
    return CudaClock() if device.type == "cuda" else HostClock()
