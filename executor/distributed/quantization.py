"""Averages of tensors over ranks, from and to few bits: the compressed all-reduce of 1-bit Adam.

Tang et al. 2021 (arXiv:2102.02888): an all-to-all brings each rank its part of all tensors, and an all-gather brings
back the compressed mean. Every collective is recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from executor.distributed.mesh import Peers
from simplan.plan.compression import BLOCK, quantized_part

# torch 2.13 has a new name for it, and warns about the old one
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_MAX_INT8 = 127.0
_MAX_INT4 = 7.0
_NIBBLE, _LOW_NIBBLE = 4, 0x0F
_WEIGHTS = 2.0 ** torch.arange(8)  # of the signs in a byte
_SIGNS = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1) * 2.0 - 1.0  # (byte, sign)


def average_quantized(
    buffer: Tensor, kind: str, peers: Peers, errors: Tensor | None = None, mean_errors: Tensor | None = None
) -> None:
    """Replaces values by their mean over ranks, of which each averages a part, from and to few bits.

    Args:
        buffer: (elements,) values. Whole blocks for every rank need no copy.
        kind: Key of ``QUANTIZERS``.
        peers: Ranks that average.
        errors, mean_errors: (num_ranks, part) and (1, part) what compression left out before, of all parts and of the
            mean of the own part; become what it leaves out now. None without error feedback.
    """
    part, (_, decode) = quantized_part(buffer.numel(), peers.size), QUANTIZERS[kind]
    if buffer.numel() == peers.size * part:
        values = buffer.view(peers.size, part)
    else:
        values = buffer.new_zeros(peers.size, part)
        values.view(-1)[: buffer.numel()] = buffer
    sent = _quantized(kind, values, errors)
    del values
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
