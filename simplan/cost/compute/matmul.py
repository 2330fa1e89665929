"""Time of a matmul: tiles of its result, computed in waves over the SMs of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from simplan.cost.model import CostPart, Limit
from simplan.model.kernel import in_forward, num_chunks
from simplan.model.layer import Gemm
from simplan.program.program import Phase
from simplan.software.rates import KernelRates
from simplan.units import format_bytes, format_flop_per_s, format_flops, format_rate, format_time

ACTIVATION_GRADIENTS = (Phase.BACKWARD, Phase.BACKWARD_INPUT)
WEIGHT_GRADIENTS = (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
Operands = Literal["whole", "slices", "padded"]
GemmKernel = Literal["linear", "linear_input_gradient", "linear_weight_gradient"]
GEMM_WORDS: dict[GemmKernel, str] = {
    "linear": "",
    "linear_input_gradient": ": input gradient",
    "linear_weight_gradient": ": weight gradient",
}
"""What a matmul computes, after the name of its layer."""

_TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 128, 2))
"""Rows and columns of tiles for which libraries have kernels, and how many times each was halved: a smaller tile reads
more per multiplication (NVIDIA, Matrix Multiplication Background User's Guide, section 4)."""
_WHOLE_TILE = 256 * 128
_MAX_PARTS = 8
_MIN_PART = 2048  # inner dimension of a part beyond ``_MAX_PARTS``: gradients of convolutions sum over all pixels


class Matmul(NamedTuple):
    """A batch of matmuls ``rows x depth`` times ``depth x columns``.

    Attributes:
        rows, columns, depth: Sizes of one matmul.
        groups: Number of matmuls.
        num_bytes: Bytes read and written by all matmuls.
        operands: ``whole`` matrices, ``slices`` of larger ones (heads), or images, which are ``padded`` to aligned
            sizes.
    """

    rows: float
    columns: int
    depth: float
    groups: int
    num_bytes: float
    operands: Operands = "whole"

    @property
    def flops(self) -> float:
        """FLOPs of all matmuls: 2 rows columns depth each."""
        return 2 * self.groups * self.rows * self.columns * self.depth


def gemm_sizes(gemm: Gemm, b: int, phase: Phase) -> dict[GemmKernel, tuple[float, int, float]]:
    """Returns rows, columns and depth of each matmul of a layer in a phase, for b sequences and one of its groups.

    Of a matmul in chunks of tokens, these are the sizes of one chunk.
    """
    rows, n, k = b * gemm.m / gemm.num_groups / num_chunks(gemm, b), gemm.n, gemm.k
    sizes: dict[GemmKernel, tuple[float, int, float]] = {}
    forward = phase in (Phase.FORWARD, Phase.RECOMPUTE)
    gradients = in_forward(gemm) if forward else True
    if forward:
        sizes["linear"] = (rows, n, k)
    if gradients and (forward or phase in ACTIVATION_GRADIENTS) and gemm.propagates:
        sizes["linear_input_gradient"] = (rows, k, n)
    if gradients and (forward or phase in WEIGHT_GRADIENTS) and gemm.has_weight_gradient:
        sizes["linear_weight_gradient"] = (n, k, rows)
    return sizes


@dataclass(frozen=True, slots=True)
class MatmulRates:
    """Achieved rates of matmuls.

    Attributes:
        flop_per_s: FLOP/s of large matmuls.
        bytes_per_s: Bytes per second of streaming kernels.
        num_sms: Number of SMs; None for devices whose matmuls are not modeled as tiles over SMs.
        rates: Further efficiencies of the architecture.
    """

    flop_per_s: float
    bytes_per_s: float
    num_sms: int | None
    rates: KernelRates

    @property
    def kernel_overhead_s(self) -> float:
        """Fixed overhead per kernel in seconds."""
        return self.rates.kernel_overhead_s

    def launches_s(self, num_groups: int, streams: int) -> float:
        """Returns the fixed kernel overhead of one kernel per group, or of one kernel for all groups (0 streams).

        Of n kernels on s streams n / s run sequentially, and a fraction of the other overheads is exposed.
        """
        if not streams:
            return self.kernel_overhead_s
        in_line = math.ceil(num_groups / streams)
        return self.kernel_overhead_s * (in_line + (1 - self.rates.stream_overlap) * (num_groups - in_line))

    def part(self, name: str, matmul: Matmul, launches_s: float | None = None) -> CostPart:
        """Returns the longer of compute time and memory time, plus fixed overheads.

        Args:
            name: Name of the part.
            matmul: A batch of matmuls.
            launches_s: Seconds of fixed overheads; None for those of one kernel.
        """
        launches_s = self.kernel_overhead_s if launches_s is None else launches_s
        compute_s, least_s, numbers = self._compute_s(matmul)
        memory_s = matmul.num_bytes / self.bytes_per_s
        if memory_s > compute_s:
            return self.streaming(name, matmul.num_bytes, launches_s=launches_s)
        limit = Limit.LAUNCH if launches_s > compute_s else Limit.COMPUTE
        if limit is Limit.COMPUTE and compute_s > _LOST_IN_TILES * least_s:
            limit = Limit.TILES
        words = _compute_words if self.num_sms is None else _tiles_words
        return CostPart(name, compute_s + launches_s, limit, words, (*numbers, launches_s))

    def streaming(
        self, name: str, num_bytes: float, launches: float = 1, *, launches_s: float | None = None
    ) -> CostPart:
        """Returns the time to read and write bytes, plus fixed overheads.

        Args:
            name: Name of the part.
            num_bytes: Bytes read and written.
            launches: Number of kernels.
            launches_s: Seconds of fixed overheads, instead of ``launches``.
        """
        launches_s = launches * self.kernel_overhead_s if launches_s is None else launches_s
        memory_s = num_bytes / self.bytes_per_s
        limit = Limit.LAUNCH if launches_s > memory_s else Limit.MEMORY
        return CostPart(name, memory_s + launches_s, limit, streaming_words, (num_bytes, self.bytes_per_s, launches_s))

    def _compute_s(self, matmul: Matmul) -> tuple[float, float, tuple[float, ...]]:
        """Returns seconds of multiplications, the same at the rate of large matmuls, and numbers for the formula."""
        rate = self.flop_per_s * self.alignment_efficiency(matmul)
        least_s = matmul.flops / rate
        if self.num_sms is None:
            shortness = 1 + self.rates.half_rate_k / matmul.depth
            return least_s * shortness, least_s, (matmul.flops, rate, shortness)
        return self._tiled_s(matmul, rate / self.num_sms, self.num_sms, least_s)

    def alignment_efficiency(self, matmul: Matmul) -> float:
        """Returns the rate of a matmul with these sizes as a fraction of the rate with aligned ones."""
        rates, sizes = self.rates, (matmul.columns, matmul.depth)
        if matmul.operands == "padded" or not any(size % rates.aligned for size in sizes):
            return 1.0
        if matmul.operands == "slices":
            return rates.misaligned_slice_efficiency
        is_odd = any(size % max(1, rates.aligned // 4) for size in sizes)  # of 16 bits; wider ones begin at 4 bytes
        if is_odd and self.num_sms is not None:
            return min(rates.unaligned_efficiency, self.num_sms * rates.odd_flop_per_s / self.flop_per_s)
        return rates.unaligned_efficiency

    def _tiled_s(
        self, matmul: Matmul, flop_per_s: float, num_sms: int, least_s: float
    ) -> tuple[float, float, tuple[float, ...]]:
        """Returns the time with the fastest tile size, at a rate per SM; see ``_compute_s``.

        Few tiles that fill no wave are split along the inner dimension.
        """
        best_s, rates = math.inf, self.rates
        numbers: tuple[float, ...] = ()
        for rows, columns, halved in _TILES:
            tiles = matmul.groups * math.ceil(matmul.rows / rows) * math.ceil(matmul.columns / columns)
            parts = min(max(1, num_sms // tiles), max(_MAX_PARTS, int(matmul.depth) // _MIN_PART))
            full = tiles * parts / num_sms
            waves = max(1.0, full + rates.tail_wave_fraction * (math.ceil(full) - full))
            share = rates.small_tile_efficiency[halved - 1] if halved else 1.0
            flops, overhead_s = 2 * rows * columns * matmul.depth / parts, rates.tile_overhead_s * rows * columns
            tile_s = flops / (flop_per_s * share) + overhead_s / _WHOLE_TILE
            if waves * tile_s < best_s:
                best_s = waves * tile_s
                numbers = waves, rows, columns, flops, flop_per_s * share, overhead_s / _WHOLE_TILE
        return best_s, least_s, numbers


_LOST_IN_TILES = 1.25
"""Time over that at the rate of large matmuls from which a matmul counts as bound by its tiles, for people to read."""


def _tiles_words(
    waves: float, rows: int, columns: int, flops: float, flop_per_s: float, tile_s: float, launches_s: float
) -> str:
    fixed = f" + {format_time(tile_s, digits=4)}" if tile_s else ""
    multiplied = f"{format_flops(flops)} / {format_flop_per_s(flop_per_s)}"
    return f"{waves:.4g} waves (tiles of {rows} x {columns}) x ({multiplied}{fixed}){_launches_words(launches_s)}"


def _compute_words(flops: float, flop_per_s: float, shortness: float, launches_s: float) -> str:
    times = f" x {shortness:.4g}" if shortness > 1 else ""
    return f"{format_flops(flops)} / {format_flop_per_s(flop_per_s)}{times}{_launches_words(launches_s)}"


def streaming_words(num_bytes: float, bytes_per_s: float, launches_s: float) -> str:
    """Returns the formula of a kernel that reads and writes bytes, with its fixed overheads."""
    return f"{format_bytes(num_bytes, digits=4)} / {format_rate(bytes_per_s, digits=4)}{_launches_words(launches_s)}"


def _launches_words(launches_s: float) -> str:
    return f" + {format_time(launches_s, digits=4)}" if launches_s else ""
