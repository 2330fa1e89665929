"""Activation offload: tensors saved by blocks are in host memory between a block's forward and its backward.

``simplan.program.lowering.offload.OffloadedActivations`` models the same copies and documents the time of each: to the
host, free on the device, and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from executor.distributed.mesh import local
from executor.profiling.recorder import Recorder
from simplan.program.action import Action

Copied = torch.cuda.Event | None
"""End of a copy that was issued; None for a copy that is done."""


class HostLink:
    """Host link of one device, with one stream per direction.

    Buffers on the host are pinned, from torch's caching host allocator. The allocator reuses a buffer only after the
    copies on all streams that used it have ended (``torch/csrc``, CachingHostAllocator). On a CPU, host and device
    share one memory: a copy is a memcpy into a separate buffer.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.device = device
        self.outgoing = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self.incoming = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def host_buffer(self, like: Tensor) -> Tensor:
        """A buffer on the host."""
        return torch.empty_like(like, device="cpu", pin_memory=self.outgoing is not None)

    def send(self, source: Tensor, to: Tensor) -> Copied:
        """Copies a tensor to the host, after the current stream has computed it.

        The caller keeps ``source`` alive until the current stream has waited for the copy.
        """
        return self._copy(source, to, self.outgoing)

    def fetch(self, source: Tensor, to: Tensor) -> Copied:
        """Copies from the host, after the current stream's queued work, which may have used the memory of ``to``."""
        return self._copy(source, to, self.incoming)

    def wait(self, copied: Copied) -> None:
        """The current stream waits for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def _copy(self, source: Tensor, to: Tensor, stream: torch.cuda.Stream | None) -> Copied:
        if stream is None:
            to.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event


class ActivationOffload:
    """Activation offload of one rank.

    Args:
        recorder: Recorder with the current action; records the copies.
        blocks: Indices of the model's layers that are blocks.
        at_once: Forwards that the backward of the same microbatch follows immediately.
    """

    def __init__(
        self, link: HostLink, recorder: Recorder, rank: int, blocks: Collection[int], at_once: Collection[Action]
    ) -> None:
        self._link, self._recorder, self._rank = link, recorder, rank
        self._blocks, self._at_once = blocks, at_once
        self._leaving: deque[_Kept | None] = deque()  # one for each layer, the newest last

    def forward(
        self, layers: Sequence[tuple[int, nn.Module]], x: Tensor, tables: Callable[[], Iterable[Tensor]] = tuple
    ) -> Tensor:
        """Forward of a stage.

        Args:
            layers: Its layers, with their index in the model.
            x: Its input: tokens, or a receive buffer, which stays.
            tables: Gives tensors that layers share, which stay as well.
        """
        blocks = [place for place, (index, _) in enumerate(layers) if index in self._blocks]
        below: _Kept | None = None
        for place, (_, layer) in enumerate(layers):
            is_block = place in blocks
            while len(self._leaving) > 1:
                if (left := self._leaving.popleft()) is not None:
                    left.let_go()
            kept = None
            if not is_block or (place == blocks[-1] and self._recorder.current in self._at_once):
                x = layer(x)
            else:
                kept = _Kept(layer, self._link, [x] if place == 0 else [], tables)
                with saved_tensors_hooks(kept.pack, _unpack):
                    x = layer(x)
                self._record("to_host", kept.send())
            self._leaving.append(kept)
            if is_block:
                x.register_hook(partial(self._begin_backward, kept, below))  # type: ignore[no-untyped-call]
            below = kept
        return x

    def _begin_backward(self, kept: _Kept | None, below: _Kept | None, gradient: Tensor) -> None:
        """The gradient of a block's output is there."""
        del gradient
        while self._leaving:
            other = self._leaving.popleft()
            if other is not None and other is kept:
                other.keep()
            elif other is not None:
                other.let_go()
        if kept is not None:
            self._fetch(kept)
            kept.wait()
        if below is not None:
            self._fetch(below)

    def _fetch(self, kept: _Kept) -> None:
        num_bytes = kept.fetch()
        if num_bytes:
            self._record("from_host", num_bytes)

    def _record(self, kind: Any, num_bytes: int) -> None:
        self._recorder.complete(self._recorder.issue(kind, (self._rank,), num_bytes))


class _Buffer:
    """One storage that a block saved for backward: flat tensors on the device, on the host, or temporarily on both."""

    __slots__ = ("host", "on_device")

    def __init__(self, on_device: Tensor) -> None:
        self.on_device: Tensor | None = on_device
        self.host: Tensor | None = None


class _Saved(NamedTuple):
    """A tensor that autograd has saved: a view of a buffer."""

    buffer: _Buffer
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _SavedDTensor(NamedTuple):
    """A DTensor that autograd has saved, with its local part as above."""

    here: Tensor | _Saved
    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]


class _Kept:
    """Tensors that one block saves for the backward of one microbatch.

    Autograd saves a tensor once per operation that needs it, and saves views of one storage separately. Each storage is
    copied once. After the copy back only autograd references the storage, so that it is freed after its last use.

    Args:
        layer: The block, whose weights and tables stay on the device.
        stays: Other tensors that stay on the device.
        tables: Gives tensors that layers share, some of which may be made while one runs.
    """

    def __init__(
        self,
        layer: nn.Module,
        link: HostLink,
        stays: Iterable[Tensor],
        tables: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._layer, self._link, self._others = layer, link, [_storage(tensor) for tensor in stays]
        self._tables = tables
        self._stays: frozenset[tuple[int, torch.dtype]] | None = None
        self._buffers: dict[tuple[int, torch.dtype], _Buffer] = {}
        self._copied: list[Copied] = []

    def pack(self, tensor: Tensor) -> Tensor | _Saved | _SavedDTensor:
        """Records the tensors that autograd saves."""
        if isinstance(tensor, DTensor):
            layout = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
            return _SavedDTensor(self._packed(tensor.to_local()), *layout)
        return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> Tensor | _Saved:
        if self._stays is None:  # FSDP has replaced shards by unsharded weights only now
            tables = [local(tensor) for tensor in (*self._layer.parameters(), *self._layer.buffers())]
            self._stays = frozenset([*self._others, *map(_storage, tables)])
        key = _storage(tensor)
        elsewhere = tensor.device != self._link.device  # numbers on the host, which come back as they are
        if elsewhere or key in self._stays or not tensor.untyped_storage().nbytes():
            return tensor
        if any(key == _storage(table) for table in self._tables()):
            return tensor
        if key not in self._buffers:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._buffers[key] = _Buffer(tensor.detach().as_strided((elements,), (1,), 0))
        return _Saved(self._buffers[key], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def send(self) -> int:
        """Starts the copies to the host, after the current stream's work; returns the number of bytes."""
        num_bytes = 0
        for buffer in self._buffers.values():
            assert buffer.on_device is not None
            buffer.host = self._link.host_buffer(buffer.on_device)
            self._copied.append(self._link.send(buffer.on_device, buffer.host))
            num_bytes += buffer.host.nbytes
        return num_bytes

    def let_go(self) -> None:
        """Waits for the copies, and frees the device."""
        self.wait()
        for buffer in self._buffers.values():
            buffer.on_device = None

    def keep(self) -> None:
        """Backward comes before that: the copies were in vain."""
        self.wait()
        for buffer in self._buffers.values():
            buffer.host = None
        self._buffers.clear()

    def fetch(self) -> int:
        """Starts the copy back, once; returns the number of bytes."""
        num_bytes = 0
        for buffer in self._buffers.values():
            assert buffer.host is not None
            buffer.on_device = torch.empty_like(buffer.host, device=self._link.device)
            self._copied.append(self._link.fetch(buffer.host, buffer.on_device))
            num_bytes += buffer.host.nbytes
            buffer.host = None
        self._buffers.clear()
        return num_bytes

    def wait(self) -> None:
        """The current stream waits for all copies that were issued."""
        for copied in self._copied:
            self._link.wait(copied)
        self._copied.clear()


def _unpack(saved: Tensor | _Saved | _SavedDTensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, _SavedDTensor):
        here, mesh, placements = _unpack(saved.here), saved.mesh, saved.placements
        return DTensor.from_local(here, mesh, placements, run_check=False, shape=saved.shape, stride=saved.stride)
    assert saved.buffer.on_device is not None
    return saved.buffer.on_device.as_strided(saved.size, saved.stride, saved.offset)


def _storage(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage()._cdata, tensor.dtype
