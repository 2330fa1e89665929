"""Time of a matrix product: tiles of its result, dealt out to the multiprocessors of a device in waves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Product", "ProductRates"]

_TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 128, 2))
"""Rows and columns of tiles that libraries have kernels for, and how many times they were halved: a smaller one reads
more for each product (NVIDIA, Matrix Multiplication Background User's Guide, section 4)."""
_WHOLE_TILE = 256 * 128
_MOST_PARTS = 8


class Product(NamedTuple):
    """``rows x depth`` times ``depth x columns``, so many of them at once.

    Attributes:
        rows, columns, depth: Sizes of one.
        groups: How many.
        num_bytes: Read and written by all.
        operands: ``whole`` matrices, ``slices`` of larger ones (heads), or images, which are ``padded`` to what kernels
            like.
    """

    rows: float
    columns: int
    depth: float
    groups: int
    num_bytes: float
    operands: Literal["whole", "slices", "padded"] = "whole"

    @property
    def flops(self) -> float:
        """2 rows columns depth, of all."""
        return 2 * self.groups * self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True)
class ProductRates:
    """What products reach.

    Attributes:
        flop_per_s: Large ones.
        bytes_per_s: Streaming kernels.
        kernel_s, stream_overlap: As of ``KernelRates``.
        num_sms: Multiprocessors; None where products are not dealt out to any.
        tile_s, half_depth, last_wave, aligned, odd_share, misaligned_share, tile_share: As of ``KernelRates``.
    """

    flop_per_s: float
    bytes_per_s: float
    kernel_s: float
    num_sms: int | None
    tile_s: float
    half_depth: float
    last_wave: float
    aligned: int
    odd_share: float
    misaligned_share: float
    tile_share: tuple[float, float]
    stream_overlap: float = 1.0

    def launches_s(self, num_groups: int, streams: int) -> float:
        """What kernels take beyond their work that are launched for one group each, or one for all (0 streams).

        Of n kernels on s streams n / s come one after the other, and of the others a part is not hidden.
        """
        if not streams:
            return self.kernel_s
        in_line = math.ceil(num_groups / streams)
        return self.kernel_s * (in_line + (1 - self.stream_overlap) * (num_groups - in_line))

    def seconds(self, product: Product) -> float:
        """The longer of computing and moving bytes, and what any kernel takes beyond."""
        rate = self.flop_per_s
        if product.operands != "padded" and any(size % self.aligned for size in (product.columns, product.depth)):
            rate *= self.misaligned_share if product.operands == "slices" else self.odd_share
        if self.num_sms is None:
            compute_s = product.flops / rate * (1 + self.half_depth / product.depth)
        else:
            compute_s = self._tiled_s(product, rate / self.num_sms, self.num_sms)
        return max(compute_s, product.num_bytes / self.bytes_per_s) + self.kernel_s

    def _tiled_s(self, product: Product, flop_per_s: float, num_sms: int) -> float:
        """Of the tiles that take least; where few fill no wave, the inner dimension is split into parts.

        Args:
            product: The product.
            flop_per_s: Of one multiprocessor.
            num_sms: How many there are.
        """
        best_s = math.inf
        for rows, columns, halved in _TILES:
            tiles = product.groups * math.ceil(product.rows / rows) * math.ceil(product.columns / columns)
            parts = min(max(1, num_sms // tiles), _MOST_PARTS)
            full = tiles * parts / num_sms
            waves = max(1.0, full + self.last_wave * (math.ceil(full) - full))
            share = self.tile_share[halved - 1] if halved else 1.0
            multiplying_s = 2 * rows * columns * product.depth / parts / (flop_per_s * share)
            best_s = min(best_s, waves * (multiplying_s + self.tile_s * rows * columns / _WHOLE_TILE))
        return best_s
