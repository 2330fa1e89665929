"""Gradient compression: communication hooks of DDP that communicate less than whole gradients.

``fp16``, ``bf16`` and ``powersgd`` are torch's own hooks. ``top_k`` and ``random_k`` follow Stich et al. 2018
(arXiv:1809.07599), ``int8``, ``int4`` and ``one_bit`` the compressed all-reduce of 1-bit Adam (Tang et al. 2021,
arXiv:2102.02888). Every collective is recorded.

Hooks with several phases end before the next bucket begins. gloo matches collectives by the order of their issue, and
callbacks of two buckets would mix that up. Besides, torch 2.13's PowerSGD waits for collectives inside of callbacks:
with two buckets in flight both threads of gloo wait, and none is left for the collectives.

Annotations are not postponed in this module: torch checks the annotations of communication hooks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn import functional

from executor.distributed.mesh import Peers, RecordedGroup
from simplan.plan.compression import BLOCK, Compression, quantized_part

Hook = Callable[[Any, GradBucket], Future[Tensor]]

# torch 2.13 has a new name for it, and warns about the old one
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_FP32_BYTES = 4
_MAX_INT8 = 127.0
_MAX_INT4 = 7.0
_NIBBLE, _LOW_NIBBLE = 4, 0x0F
_WEIGHTS = 2.0 ** torch.arange(8)  # of the signs in a byte
_SIGNS = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1) * 2.0 - 1.0  # (byte, sign)
_MAX_BUCKETS = 2**20  # for seeds


def compressed(compression: Compression, peers: Peers, average: Hook, num_whole_steps: int) -> tuple[Any, Hook]:
    """State and communication hook for ``DistributedDataParallel.register_comm_hook``.

    Args:
        compression: The compression.
        peers: Ranks that average gradients.
        average: Hook of steps with whole gradients.
        num_whole_steps: Number of first steps with whole gradients.
    """
    match compression.kind:
        case "fp16":
            return _recorded(peers), fp16_compress_hook
        case "bf16":
            return _recorded(peers), _bf16
        case "powersgd":
            state = PowerSGDState(
                _recorded(peers),
                matrix_approximation_rank=compression.rank,
                start_powerSGD_iter=compression.start_step,
                min_compression_rate=compression.min_compression,
                use_error_feedback=compression.error_feedback,
            )
            return state, _powersgd
        case "top_k" | "random_k":
            return None, _Sparse(compression, peers).reduce
        case "int8" | "int4" | "one_bit":
            return None, _Quantized(compression, peers, average, num_whole_steps).reduce


def _recorded(peers: Peers) -> RecordedGroup:
    """Process group for torch's hooks."""
    name = f"ranks {peers.ranks} of compressed gradients"
    return RecordedGroup(name, peers.rank, peers.size, peers.group, peers.ranks, peers.recorder)


def _bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Torch's hook under another name: DDP refuses that one by name on CPUs, though gloo adds BF16 numbers."""
    return bf16_compress_hook(state, bucket)


def _powersgd(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Torch's hook, one bucket after the other."""
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


class _Errors:
    """Errors of compression in earlier gradients, one tensor per bucket.

    DDP makes its buckets anew before the second step; then every parameter takes its errors along.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[tuple[int, ...], Tensor, tuple[Tensor, ...]]] = {}  # parameters, errors, parts
        self._moved: dict[int, Tensor] = {}  # by parameter

    def of(self, bucket: GradBucket, num_elements: int) -> Tensor:
        """``(num_elements,)`` Errors of a bucket, to be changed in place; those beyond its gradients start at 0."""
        parameters, index = bucket.parameters(), bucket.index()
        ids = tuple(map(id, parameters))
        if index in self._buckets and self._buckets[index][0] == ids:
            return self._buckets[index][1]
        for others, _, parts in self._buckets.values():
            self._moved |= dict(zip(others, parts, strict=True))
        self._buckets.clear()
        errors = bucket.buffer().new_zeros(num_elements)
        parts = torch.split(errors[: bucket.buffer().numel()], [parameter.numel() for parameter in parameters])
        for number, part in zip(ids, parts, strict=True):
            if number in self._moved:
                part.copy_(self._moved.pop(number))
        self._buckets[index] = ids, errors, parts
        return errors


class _Sparse:
    """``top_k`` and ``random_k``: some elements of a bucket, and zeros for the others."""

    def __init__(self, compression: Compression, peers: Peers) -> None:
        self._compression, self._peers = compression, peers
        self._errors = _Errors() if compression.error_feedback else None
        self._step = 0

    def reduce(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """The hook. Errors become what is not sent."""
        gradients = bucket.buffer()
        if self._errors is not None:
            gradients = self._errors.of(bucket, gradients.numel()).add_(gradients)
        if self._compression.kind == "top_k":
            return self._top_k(gradients, bucket.buffer())
        seed = self._step * _MAX_BUCKETS + bucket.index()
        self._step += bucket.is_last()
        return self._random_k(gradients, bucket.buffer(), seed)

    def _top_k(self, gradients: Tensor, buffer: Tensor) -> Future[Tensor]:
        """All-gathers values of largest magnitude with their indices, in one tensor."""
        peers, num_kept = self._peers, self._compression.num_kept(gradients.numel())
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

    def _random_k(self, gradients: Tensor, buffer: Tensor, seed: int) -> Future[Tensor]:
        """All-reduces values at indices that all ranks draw alike."""
        peers, num_kept = self._peers, self._compression.num_kept(gradients.numel())
        generator = torch.Generator(gradients.device).manual_seed(seed)
        indices = torch.randperm(gradients.numel(), generator=generator, device=gradients.device)[:num_kept].clone()
        values = gradients[indices]
        gradients[indices] = 0
        # with errors left out the sum must be right in the mean
        divisor = peers.size * (1 if self._errors is not None else num_kept / buffer.numel())
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


class _Quantized:
    """``int8``, ``int4`` and ``one_bit``: every rank averages a part of the gradients, from and to few bits."""

    def __init__(self, compression: Compression, peers: Peers, average: Hook, num_whole_steps: int) -> None:
        self._peers, self._average, self._num_whole_steps = peers, average, num_whole_steps
        self._kind = compression.kind
        self._errors = _Errors() if compression.error_feedback else None
        self._mean_errors: dict[int, Tensor] = {}  # by bucket, of the part that this rank averages
        self._step = 0

    def reduce(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """The hook; it returns when the bucket is done."""
        step, buffer, num_ranks = self._step, bucket.buffer(), self._peers.size
        self._step += bucket.is_last()
        if step < self._num_whole_steps:
            return self._average(state, bucket)
        if step == 1:  # DDP has made its buckets anew
            self._mean_errors.pop(bucket.index(), None)
        errors = mean_errors = None
        if self._errors is not None:
            part = quantized_part(buffer.numel(), num_ranks)
            errors = self._errors.of(bucket, num_ranks * part).view(num_ranks, part)
            if bucket.index() not in self._mean_errors:
                self._mean_errors[bucket.index()] = buffer.new_zeros(1, part)
            mean_errors = self._mean_errors[bucket.index()]
        average_quantized(buffer, self._kind, self._peers, errors, mean_errors)
        averaged: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        averaged.set_result(buffer)
        return averaged


def average_quantized(
    buffer: Tensor, kind: str, peers: Peers, errors: Tensor | None = None, mean_errors: Tensor | None = None
) -> None:
    """Replaces values by their mean over ranks, of which each averages a part, from and to few bits.

    Args:
        buffer: (elements,) values.
        kind: Key of ``QUANTIZERS``.
        peers: Ranks that average.
        errors, mean_errors: (num_ranks, part) and (1, part) what compression left out before, of all parts and of the
            mean of the own part; become what it leaves out now. None without error feedback.
    """
    part, (_, decode) = quantized_part(buffer.numel(), peers.size), QUANTIZERS[kind]
    gradients = buffer.new_zeros(peers.size, part)
    gradients.view(-1)[: buffer.numel()] = buffer
    sent = _quantized(kind, gradients, errors)
    del gradients
    received = torch.empty_like(sent)
    handle = peers.issue("all_to_all", sent)
    dist.all_to_all_single(received, sent, group=peers.group)
    peers.complete(handle)
    mean = decode(received, part).mean(0, keepdim=True)
    sent = _quantized(kind, mean, mean_errors)
    del mean
    handle = peers.issue("all_gather", received)
    all_gather(received.view(-1), sent.view(-1), group=peers.group)
    peers.complete(handle)
    buffer.copy_(decode(received, part).view(-1)[: buffer.numel()])


def quantized_bytes(buffer: Tensor, kind: str, num_ranks: int) -> int:
    """Bytes of either collective of ``average_quantized``, without computing it."""
    part, (encode, _) = quantized_part(buffer.numel(), num_ranks), QUANTIZERS[kind]
    return encode(torch.empty(num_ranks, part, dtype=buffer.dtype, device="meta")).nbytes


def _quantized(kind: str, values: Tensor, errors: Tensor | None) -> Tensor:
    """``(rows, bytes)`` Values plus errors, compressed; errors become what that leaves out. Changes both."""
    encode, decode = QUANTIZERS[kind]
    if errors is None:
        return encode(values)
    encoded = encode(values.add_(errors))
    torch.sub(values, decode(encoded, values.shape[1]), out=errors)
    return encoded


def _blocks(values: Tensor) -> Tensor:
    return values.view(len(values), -1, BLOCK)


def _to_int8(values: Tensor) -> Tensor:
    """``(rows, bytes)`` Every value in 8 bits, then the FP32 scales of all blocks."""
    blocks = _blocks(values)
    scales = blocks.abs().amax(2, keepdim=True).float().div_(_MAX_INT8)
    numbers = (blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)).round_().to(torch.int8)
    return torch.cat((numbers.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)), dim=1)


def _from_int8(encoded: Tensor, num_elements: int) -> Tensor:
    """``(rows, num_elements)`` Values of ``_to_int8``."""
    numbers, scales = torch.split(encoded, [num_elements, encoded.shape[1] - num_elements], dim=1)
    scales = scales.contiguous().view(torch.float32).unsqueeze(2)
    return _blocks(numbers.contiguous().view(torch.int8).float()).mul_(scales).flatten(1)


def _to_int4(values: Tensor) -> Tensor:
    """``(rows, bytes)`` Every value in 4 bits, two to a byte, then the FP32 scales of all blocks."""
    blocks = _blocks(values)
    scales = blocks.abs().amax(2, keepdim=True).float().div_(_MAX_INT4)
    numbers = (blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)).round_().add_(_MAX_INT4 + 1)
    pairs = numbers.to(torch.uint8).view(len(values), -1, 2)
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << _NIBBLE)
    return torch.cat((packed, scales.flatten(1).view(torch.uint8)), dim=1)


def _from_int4(encoded: Tensor, num_elements: int) -> Tensor:
    """``(rows, num_elements)`` Values of ``_to_int4``."""
    packed, scales = torch.split(encoded, [num_elements // 2, encoded.shape[1] - num_elements // 2], dim=1)
    scales = scales.contiguous().view(torch.float32).unsqueeze(2)
    numbers = torch.stack((packed & _LOW_NIBBLE, packed >> _NIBBLE), dim=2).float().sub_(_MAX_INT4 + 1)
    return _blocks(numbers.flatten(1)).mul_(scales).flatten(1)


def _to_signs(values: Tensor) -> Tensor:
    """``(rows, bytes)`` Signs of all values, 8 to a byte, then the mean magnitudes of all blocks in FP32."""
    scales = _blocks(values).abs().mean(2).float()
    positive = values.sign().clamp_(min=0).view(len(values), -1, 8)
    packed = (positive @ _WEIGHTS.to(values)).to(torch.uint8)
    return torch.cat((packed, scales.view(torch.uint8)), dim=1)


def _from_signs(encoded: Tensor, num_elements: int) -> Tensor:
    """``(rows, num_elements)`` Values of ``_to_signs``."""
    packed, scales = torch.split(encoded, [num_elements // 8, encoded.shape[1] - num_elements // 8], dim=1)
    scales = scales.contiguous().view(torch.float32).unsqueeze(2)
    signs = functional.embedding(packed.int(), _SIGNS.to(encoded.device))
    return _blocks(signs.flatten(1)).mul_(scales).flatten(1)


QUANTIZERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "int8": (_to_int8, _from_int8),
    "int4": (_to_int4, _from_int4),
    "one_bit": (_to_signs, _from_signs),
}
"""By kind of compression, rows of values to bytes, and bytes with the number of values of a row back to values."""
