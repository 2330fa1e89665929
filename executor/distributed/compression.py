"""Gradient compression: communication hooks of DDP that communicate less than whole gradients.

``fp16``, ``bf16`` and ``powersgd`` are torch's own hooks. ``top_k`` and ``random_k`` follow Stich et al. 2018
(arXiv:1809.07599). ``int8``, ``int4``, ``one_bit`` and ``one_bit_adam`` have the compressed all-reduce of 1-bit Adam
(Tang et al. 2021, arXiv:2102.02888). Every collective is recorded.

Hooks with several phases end before the next bucket begins. gloo matches collectives by the order of their issue, and
callbacks of two buckets would mix that up. Besides, torch 2.13's PowerSGD waits for collectives inside of callbacks:
with two buckets in flight both threads of gloo wait, and none is left for the collectives.

Annotations are not postponed in this module: torch checks the annotations of communication hooks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from executor.distributed.ddp import average_whole
from executor.distributed.mesh import Peers, RecordedGroup
from executor.distributed.quantization import all_gather, average_quantized
from simplan.plan.compression import Compression, quantized_part

_FP32_BYTES = 4
_MAX_BUCKETS = 2**20  # for seeds


class CompressionHook(ABC):
    """A communication hook of DDP that compresses, and what a rank keeps for it between steps.

    DDP makes its buckets anew after its first backward. What is kept belongs to a bucket, so that backward must have
    been run by the first step: see ``passing_on``.

    Args:
        peers: Ranks that average gradients.
        num_whole_steps: Number of first steps with whole gradients.

    Attributes:
        step: Number of steps whose gradients were reduced.
    """

    def __init__(self, compression: Compression, peers: Peers, num_whole_steps: int) -> None:
        self._compression, self._peers, self._num_whole_steps = compression, peers, num_whole_steps
        self._kept: dict[str, Tensor] = {}
        self._passes_on = False
        self.step = 0

    def reduce(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """The hook."""
        if self._passes_on:
            return _done(bucket)
        averaged = average_whole(self._peers, bucket) if self.step < self._num_whole_steps else self._reduce(bucket)
        self.step += bucket.is_last()
        return averaged

    @abstractmethod
    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Compresses, communicates and decompresses a bucket."""

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """Leaves the gradients of the block as they are: its backward counts for DDP's buckets only."""
        self._passes_on = True
        yield
        self._passes_on = False

    def tensors(self) -> dict[str, Tensor]:
        """Errors of compression and the like between two steps, by name; they differ between ranks."""
        return dict(self._kept)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets what ``tensors`` gave on the same rank of a run with the same buckets."""
        self._kept = dict(tensors)

    def _errors(self, name: str, like: Tensor, *shape: int) -> Tensor | None:
        """Errors, to be changed in place; zeros at first, None without error feedback."""
        if not self._compression.keeps_errors:
            return None
        if name not in self._kept:
            self._kept[name] = like.new_zeros(shape)
        return self._kept[name]


def compression_hook(compression: Compression, peers: Peers, num_whole_steps: int) -> CompressionHook:
    """The hook of a kind of compression; arguments as of ``CompressionHook``."""
    match compression.kind:
        case "fp16" | "bf16":
            return _SixteenBits(compression, peers, num_whole_steps)
        case "powersgd":
            hook = _BatchedPowerSgd if compression.batched else _PowerSgd
            return hook(compression, peers, num_whole_steps)
        case "top_k":
            return _TopK(compression, peers, num_whole_steps)
        case "random_k":
            return _RandomK(compression, peers, num_whole_steps)
        case "one_bit_adam":
            return MomentumCompression(compression, peers, num_whole_steps)
        case _:
            assert compression.bits is not None, compression
            return _Quantized(compression, peers, num_whole_steps)


def _done(bucket: GradBucket) -> Future[Tensor]:
    """A future with the bucket's buffer."""
    buffer = bucket.buffer()
    done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done


def _recorded(peers: Peers) -> RecordedGroup:
    """Process group for torch's hooks."""
    name = f"ranks {peers.ranks} of compressed gradients"
    return RecordedGroup(name, peers.rank, peers.size, peers.group, peers.ranks, peers.recorder)


class _SixteenBits(CompressionHook):
    """torch's hooks ``fp16`` and ``bf16``."""

    def __init__(self, compression: Compression, peers: Peers, num_whole_steps: int) -> None:
        super().__init__(compression, peers, num_whole_steps)
        self._group: Any = _recorded(peers)
        # DDP refuses torch's BF16 hook on CPUs by its name, though gloo adds BF16 numbers
        self._hook = fp16_compress_hook if compression.kind == "fp16" else bf16_compress_hook

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        return self._hook(self._group, bucket)


class _PowerSgd(CompressionHook):
    """torch's hook, one bucket after the other.

    Random numbers make the first factors only, for all buckets in the same step; so there is no generator to keep.
    """

    def __init__(self, compression: Compression, peers: Peers, num_whole_steps: int) -> None:
        super().__init__(compression, peers, num_whole_steps)
        self._state = PowerSGDState(
            _recorded(peers),
            matrix_approximation_rank=compression.rank,
            start_powerSGD_iter=2,  # the least; ``reduce`` waits for the first compressed step
            min_compression_rate=compression.min_compression,
            use_error_feedback=compression.error_feedback,
        )
        self._by_bucket = {
            "errors": self._state.error_dict,
            "p": self._state.p_memory_dict,
            "q": self._state.q_memory_dict,
        }

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        self._state.iter = self.step
        future = powerSGD_hook(self._state, bucket)
        future.wait()
        return future

    def tensors(self) -> dict[str, Tensor]:
        """See the base class."""
        return {f"{name}{index}": x for name, kept in self._by_bucket.items() for index, x in kept.items() if len(x)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See the base class."""
        for name, kept in self._by_bucket.items():
            kept |= {int(key.removeprefix(name)): tensor for key, tensor in tensors.items() if key.startswith(name)}


class _BatchedPowerSgd(CompressionHook):
    """PowerSGD of all gradients of a bucket as one square matrix.

    torch 2.13's ``batched_powerSGD_hook`` fails an assertion about its own factors: ``_orthogonalize`` takes three
    dimensions, and it has two.
    """

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        buffer, index, peers = bucket.buffer(), bucket.index(), self._peers
        side = square_side(buffer.numel())
        matrix = buffer.new_zeros(side, side)
        matrix.view(-1)[: buffer.numel()] = buffer
        errors = self._errors(f"errors{index}", buffer, side, side)
        if errors is not None:
            matrix += errors
        q = self._kept.get(f"q{index}")
        if q is None:  # equal on all ranks, on any device
            rank, generator = min(self._compression.rank, side), torch.Generator().manual_seed(index)
            q = torch.randn(side, rank, generator=generator, dtype=buffer.dtype).to(buffer.device)
        p = torch.linalg.qr(peers.all_reduce(matrix @ torch.linalg.qr(q).Q)).Q
        q = self._kept[f"q{index}"] = peers.all_reduce(matrix.T @ p).div_(peers.size)
        product = p @ q.T
        if errors is not None:
            torch.sub(matrix, product, out=errors)
        buffer.copy_(product.view(-1)[: buffer.numel()])
        return _done(bucket)


class _TopK(CompressionHook):
    """The largest values of a bucket, and zeros for the others."""

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """All-gathers values of largest magnitude with their indices, in one tensor. Errors become what is not sent."""
        buffer, peers = bucket.buffer(), self._peers
        errors = self._errors(f"errors{bucket.index()}", buffer, buffer.numel())
        gradients = buffer if errors is None else errors.add_(buffer)
        num_kept = self._compression.num_kept(gradients.numel())
        indices = gradients.abs().topk(num_kept, sorted=False).indices
        integer = torch.int32 if gradients.itemsize == _FP32_BYTES else torch.int64  # as wide as the values
        sent = torch.cat((gradients[indices].view(integer), indices.to(integer)))
        gradients[indices] = 0
        gathered = sent.new_empty(peers.size * len(sent))
        handle = peers.issue("all_gather", gathered)
        work = all_gather(gathered, sent, group=peers.group, async_op=True)
        assert work is not None

        def decompress(future: Future[Any]) -> Tensor:
            del future
            peers.complete(handle)
            buffer.zero_()
            for values, places in gathered.view(peers.size, 2, num_kept):
                buffer.index_add_(0, places, values.view(buffer.dtype))
            return buffer.div_(peers.size)

        averaged: Future[Tensor] = work.get_future().then(decompress)
        return averaged


class _RandomK(CompressionHook):
    """Values of a bucket at random indices, which all ranks draw alike, and zeros for the others."""

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """All-reduces the values. Errors become what is not sent."""
        buffer, peers = bucket.buffer(), self._peers
        errors = self._errors(f"errors{bucket.index()}", buffer, buffer.numel())
        gradients = buffer if errors is None else errors.add_(buffer)
        num_kept, seed = self._compression.num_kept(gradients.numel()), self.step * _MAX_BUCKETS + bucket.index()
        generator = torch.Generator(gradients.device).manual_seed(seed)
        indices = torch.randperm(gradients.numel(), generator=generator, device=gradients.device)[:num_kept].clone()
        values = gradients[indices]
        gradients[indices] = 0
        # with errors left out the sum must be right in the mean
        divisor = peers.size * (num_kept / buffer.numel() if errors is None else 1)
        handle = peers.issue("all_reduce", values)
        work = dist.all_reduce(values, group=peers.group, async_op=True)
        assert work is not None

        def decompress(future: Future[Any]) -> Tensor:
            del future
            peers.complete(handle)
            buffer.zero_()
            buffer[indices] = values.div_(divisor)
            return buffer

        averaged: Future[Tensor] = work.get_future().then(decompress)
        return averaged


class _Quantized(CompressionHook):
    """``int8``, ``int4`` and ``one_bit``: every rank averages a part of the gradients, from and to few bits."""

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        self._average(bucket.buffer(), self._compression.kind, str(bucket.index()))
        return _done(bucket)

    def _average(self, buffer: Tensor, kind: str, name: str) -> None:
        """Replaces values by their mean over ranks, with the errors of a name."""
        num_ranks, part = self._peers.size, quantized_part(buffer.numel(), self._peers.size)
        errors = self._errors(f"errors{name}", buffer, num_ranks, part)
        mean_errors = self._errors(f"mean_errors{name}", buffer, 1, part)
        average_quantized(buffer, kind, self._peers, errors, mean_errors)


class MomentumCompression(_Quantized):
    """``one_bit_adam``: after the first steps, gradients stay local, and the optimizer averages its momentum."""

    @property
    def num_whole_steps(self) -> int:
        """Number of first steps with whole gradients, in which the variance is not frozen."""
        return self._num_whole_steps

    @property
    def is_frozen(self) -> bool:
        """True if the gradients of the last backward are not averaged."""
        return self.step > self._num_whole_steps

    def padded_elements(self, num_elements: int) -> int:
        """Elements of a momentum that can be averaged without a copy, at least ``num_elements``."""
        return self._peers.size * quantized_part(num_elements, self._peers.size)

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        return _done(bucket)

    def average(self, momentum: Tensor) -> None:
        """Replaces the momentum of a rank, (elements,), by the compressed mean over ranks."""
        self._average(momentum, "one_bit", "")


def square_side(num_elements: int) -> int:
    """Rows of the smallest square matrix with so many elements."""
    return math.isqrt(num_elements - 1) + 1
