"""Copies between a device and memory of its host: beside what a CUDA device computes, on the spot on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HostLink", "Moved"]


class Moved(NamedTuple):
    """A copy that was issued.

    Attributes:
        tensor: Where it goes.
        event: Happens when it is there; None for a copy that is done.
    """

    tensor: Tensor
    event: torch.cuda.Event | None


class HostLink:
    """The link of one device. Both directions have a stream of their own.

    Buffers on the host are pinned, from torch's caching host allocator, which gives one out again only when copies on
    all streams that used it have ended (``torch/csrc``, CachingHostAllocator). On a CPU, host and device are one
    memory: a copy is a memcpy into a buffer apart.

    Args:
        device: Whose.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self.outgoing = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self.incoming = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def host_buffer(self, like: Tensor) -> Tensor:
        """A buffer on the host."""
        return torch.empty_like(like, device="cpu", pin_memory=self.outgoing is not None)

    def send(self, source: Tensor, to: Tensor) -> Moved:
        """Copies to the host what the current stream has computed so far.

        The caller holds ``source`` until the current stream has waited for the copy.
        """
        return self._copy(source, to, self.outgoing)

    def fetch(self, source: Tensor, to: Tensor) -> Moved:
        """Copies from the host, after what the current stream has been given so far: ``to`` may be memory it used."""
        return self._copy(source, to, self.incoming)

    def receiving(self) -> AbstractContextManager[object]:
        """Memory that is allocated inside belongs to the incoming stream."""
        return nullcontext() if self.incoming is None else torch.cuda.stream(self.incoming)

    def receive_after(self, moved: Moved) -> None:
        """What comes from now on waits for a copy."""
        if self.incoming is not None and moved.event is not None:
            self.incoming.wait_event(moved.event)

    def wait(self, moved: Moved) -> None:
        """The current stream waits for a copy."""
        if moved.event is not None:
            torch.cuda.current_stream(self.device).wait_event(moved.event)

    def _copy(self, source: Tensor, to: Tensor, stream: torch.cuda.Stream | None) -> Moved:
        if stream is None:
            to.copy_(source)
            return Moved(to, None)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return Moved(to, event)
