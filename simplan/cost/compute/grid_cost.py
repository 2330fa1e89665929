"""Cost estimates of layers without a timing: the sum of their kernels, each from the grid of a calibration.

A kernel's time is interpolated between the sizes of the grid, linearly in logarithms, so a power law is met exactly.
Below the smallest size a kernel takes the time of that size (launch-bound). Beyond the largest size, time grows in
proportion to the work. The same applies to a corner of the grid without a timing, because that would have taken too
long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from simplan.cost.calibration.format import KernelName, KernelTiming
from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.kernels import KernelCost, running_kernels
from simplan.cost.compute.matmul import (
    ACTIVATION_GRADIENTS,
    GEMM_WORDS,
    WEIGHT_GRADIENTS,
    Matmul,
    MatmulRates,
    gemm_sizes,
)
from simplan.cost.model import CostEstimate, CostPart, Limit, Provenance
from simplan.model.kernel import PointwiseFunction, in_forward, num_chunks
from simplan.model.layer import Attention, Gemm, Kernel, LayerCollective, LayerSpec, Lookup, Pointwise
from simplan.optimizers import UPDATES, UpdateName, Widths
from simplan.program.program import LayerWork, Phase, TensorUpdates
from simplan.units import format_time

_SYSTEMATIC_STD = 0.12
_FP32_WIDTHS = Widths(4, 4, 4)
"""Relative standard deviation between a layer and the sum of its kernels: Python overhead, views, caches."""
_EXTRAPOLATED_STD = 0.3
_NEGLIGIBLE = 0.1  # fraction of a layer's time that may lie outside of the timed range

_OF_PARAMETERS: dict[Phase, KernelName] = {
    Phase.GATHER_COPY: "gather_copy",
    Phase.REDUCE_COPY: "reduce_copy",
    Phase.SCALE: "scale",
}

_REACH = 4.0  # factor beyond its sizes within which a grid is trusted: the distance of two sizes
_OF_ATTENTION = (1, 2, 1)  # time scales with heads, the square of their length, and head_dim


class GridTime(NamedTuple):
    """Time of a kernel from the grid.

    Attributes:
        inside: True if the size is within the timed range.
        std: Relative standard deviation of the underlying timings.
    """

    seconds: float
    inside: bool
    std: float = 0.0


class KernelGrid:
    """Kernel timings over sizes, all in one precision and with the same number of ranks."""

    def __init__(self, timings: Iterable[KernelTiming]) -> None:
        tables: dict[tuple[KernelName, bool], dict[tuple[int, ...], tuple[float, float]]] = defaultdict(dict)
        for timing in timings:
            tables[timing.kernel, False][timing.sizes] = timing.seconds.mean_s, timing.seconds.round_std
            if timing.backward_s is not None:
                tables[timing.kernel, True][timing.sizes] = timing.backward_s.mean_s, timing.backward_s.round_std
        self._tables = {
            key: _Table(times, _OF_ATTENTION if key[0] == "attention" else (1,) * len(next(iter(times))))
            for key, times in tables.items()
        }

    def time(self, kernel: KernelName, sizes: Sequence[float], *, backward: bool = False) -> GridTime:
        """Returns the time of a timed kernel, or of its backward, at any size; for ``sizes`` see ``KernelTiming``."""
        return self._tables[kernel, backward].at(sizes)

    def attention(self, kernel: Attention, b: int, *, backward: bool) -> GridTime:
        """Returns the timed case (causal, equal numbers of queries and keys), scaled by the FLOPs of the kernel."""
        lengths = kernel.seq_len * (kernel.num_keys or kernel.seq_len)
        time = self.time("attention", (b * kernel.num_heads, lengths**0.5, kernel.head_dim), backward=backward)
        factor = kernel.computed_flops / (2 * kernel.num_heads * lengths * kernel.head_dim)
        usual = not (kernel.eager or kernel.masked) and 0.5 <= factor <= 2
        return time._replace(seconds=time.seconds * factor, inside=time.inside and usual)

    def timings(self, kernel: KernelName) -> Iterable[tuple[tuple[int, ...], float]]:
        """Returns sizes and seconds of a kernel as they were timed."""
        return self._tables[kernel, False].times.items()

    def largest(self, kernel: KernelName) -> int:
        """Returns the largest number of elements of a memory-bound kernel."""
        return max(sizes[0] for sizes, _ in self.timings(kernel))

    def has(self, kernel: KernelName) -> bool:
        """Returns True if a kernel was timed."""
        return (kernel, False) in self._tables


class _Table:
    """Times of one kernel over a lattice of sizes, of which some corners may be missing."""

    def __init__(self, times: Mapping[tuple[int, ...], tuple[float, float]], powers: Sequence[int]) -> None:
        self.times = {sizes: seconds for sizes, (seconds, _) in times.items()}
        self._std = math.fsum(std for _, std in times.values()) / len(times)
        self._powers = powers
        self._axes = [sorted({sizes[axis] for sizes in times}) for axis in range(len(powers))]
        self._most = max(self._work(sizes) for sizes in times)

    def _work(self, sizes: Sequence[float]) -> float:
        return math.prod(size**power for size, power in zip(sizes, self._powers, strict=True))

    def at(self, sizes: Sequence[float]) -> GridTime:
        """Returns the time interpolated along every axis."""
        inside = self._work(sizes) <= _REACH * self._most
        ends: list[tuple[tuple[int, float], ...]] = []  # by axis, the neighbors and their weights
        beyond = 1.0
        for size, axis, power in zip(sizes, self._axes, self._powers, strict=True):
            inside = inside and size <= _REACH * axis[-1]
            beyond *= max(1.0, size / axis[-1]) ** power
            ends.append(_neighbours(size, axis))
        log_s = 0.0
        for corner in product(*ends):
            weight = math.prod(weight for _, weight in corner)
            if weight:
                log_s += weight * math.log(self._corner(tuple(size for size, _ in corner)))
        return GridTime(math.exp(log_s) * beyond, inside, self._std)

    def _corner(self, sizes: tuple[int, ...]) -> float:
        """Returns the time of a lattice corner; a missing corner is scaled by work from the nearest smaller one."""
        if sizes in self.times:
            return self.times[sizes]
        smaller = [known for known in self.times if all(k <= s for k, s in zip(known, sizes, strict=True))]
        nearest = max(smaller or self.times, key=self._work)
        return self.times[nearest] * max(1.0, self._work(sizes) / self._work(nearest))


def _neighbours(size: float, axis: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Returns the sizes next to a size and their weights, linear in the logarithm."""
    if size <= axis[0] or len(axis) == 1:
        return ((axis[0], 1.0),)
    if size >= axis[-1]:
        return ((axis[-1], 1.0),)
    upper = bisect_left(axis, size)
    low, high = axis[upper - 1], axis[upper]
    share = math.log(size / low) / math.log(high / low)
    return ((low, 1 - share), (high, share))


class GridCost:
    """Cost estimates of any layer from kernel timings.

    Args:
        grid: Kernels over sizes, in the precision of the run.
        optimizer: An optimizer that was not timed is scaled by the bytes that it moves.
        accumulates: True if backward adds to existing gradients, False if it creates new ones (weights that FSDP
            casts).
        traffic: Bytes of memory-bound kernels, as a fraction of the bytes that eager torch reads and writes.
    """

    def __init__(
        self, grid: KernelGrid, *, optimizer: UpdateName, accumulates: bool = True, traffic: float = 1.0
    ) -> None:
        self._grid = grid
        self._optimizer: KernelName = "sgd" if optimizer.startswith("sgd") else "adamw"
        self._timed_bytes = UPDATES[self._optimizer].streamed_bytes
        self._of_timed = UPDATES[optimizer].update_bytes(1.0, _FP32_WIDTHS) / self._timed_bytes
        self._accumulates = accumulates
        self._traffic = traffic

    def cost_estimate(self, work: LayerWork) -> CostEstimate:
        """Returns the sum over the kernels that run."""
        found = list(self._times(work))
        parts = tuple(CostPart(name, time.seconds, Limit.TIMING, _grid_words, (time,)) for name, time in found)
        seconds, std = sum(time.seconds for _, time in found), max((time.std for _, time in found), default=0.0)
        outside_s = sum(time.seconds for _, time in found if not time.inside)
        if outside_s > _NEGLIGIBLE * seconds:
            return CostEstimate(parts, Provenance.EXTRAPOLATED, max(std, _EXTRAPOLATED_STD))
        return CostEstimate(parts, Provenance.CALIBRATED, (std**2 + _SYSTEMATIC_STD**2) ** 0.5)

    def _times(self, work: LayerWork) -> Iterator[tuple[str, GridTime]]:
        phase = work.phase
        if work.updates is not None:
            yield from self._tensor_updates(work.updates)
            return
        if phase in _OF_PARAMETERS or phase is Phase.OPTIMIZER:
            name = _OF_PARAMETERS.get(phase, self._optimizer)
            if work.num_parameters:
                time = self._grid.time(name, (work.num_parameters,))
                yield name, time._replace(seconds=time.seconds * (self._of_timed if name == self._optimizer else 1.0))
            return
        gradients = 0
        for kernel in running_kernels(work):
            if phase in WEIGHT_GRADIENTS or (in_forward(kernel) and phase is Phase.FORWARD):
                gradients += num_chunks(kernel, work.microbatch_size) * _gradient_elements(kernel, work.layer)
            for suffix, time in self._kernel(kernel, work):
                yield kernel.name + suffix, time
        if gradients and self._accumulates:
            yield "gradients added up", self._grid.time("accumulate", (gradients,))

    def _tensor_updates(self, updates: TensorUpdates) -> Iterator[tuple[str, GridTime]]:
        """Yields the streams of an update from tensor to tensor, by its bytes, and its matmuls."""
        if updates.num_bytes:
            yield self._optimizer, self._grid.time(self._optimizer, (updates.num_bytes / self._timed_bytes,))
        for sizes, number in updates.products:
            time = self._grid.time("linear", sizes)
            yield f"orthogonalization {' x '.join(map(str, sizes))}", time._replace(seconds=number * time.seconds)

    def _kernel(self, kernel: Kernel, work: LayerWork) -> Iterator[tuple[str, GridTime]]:
        """Yields times of a kernel, each with what it computes after the name of the kernel."""
        b, phase = work.microbatch_size, work.phase
        backward = phase in ACTIVATION_GRADIENTS
        match kernel:
            case Gemm():
                yield from self._matmuls(kernel, b, phase)
            case Attention():
                if phase is not Phase.BACKWARD_WEIGHT:
                    yield "", self._grid.attention(kernel, b, backward=backward)
            case Pointwise():
                if phase is not Phase.BACKWARD_WEIGHT:
                    name, elements = _pointwise(kernel)
                    num = num_chunks(kernel, b)
                    for of_backward in (False, True) if in_forward(kernel) else (backward,):
                        time = self._grid.time(name, (b * elements / num,), backward=of_backward)
                        yield "", time._replace(seconds=num * time.seconds * self._traffic)
            case Lookup(rows=rows, width=columns):
                yield "", self._grid.time("lookup", (b * rows * columns,), backward=phase in WEIGHT_GRADIENTS)
            case LayerCollective():
                raise AssertionError("a collective is no compute")

    def _matmuls(self, kernel: Gemm, b: int, phase: Phase) -> Iterator[tuple[str, GridTime]]:
        """Yields times of the forward matmul, or of the two backward matmuls; matmuls of experts run sequentially."""
        for name, sizes in gemm_sizes(kernel, b, phase).items():
            time = self._grid.time(name, sizes)
            # a convolution costs more than its equivalent matmul
            inside = time.inside and not kernel.image_elements
            times = kernel.num_groups * num_chunks(kernel, b)
            yield GEMM_WORDS[name], time._replace(seconds=times * time.seconds, inside=inside)


def _grid_words(time: GridTime) -> str:
    """Returns the time and its source; between the sizes of the grid it is no arithmetic to be followed by hand."""
    where = "between sizes" if time.inside else "beyond the sizes"
    return f"{format_time(time.seconds, digits=4)} ({where} of the grid)"


_FP32_COPY_BYTES = 8  # read and written per element
_HOST_CALL_LAUNCHES = 2.5
"""Time in which the host issues an operation of a module under autograd, over the time of a bare launch. Chosen on runs
of one H200 (scenarios/measured), whose host took 39 to 45 us over 14 to 21 us."""
_HOST_CALL_STD = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _GridMatmuls(MatmulRates):
    """Rates of matmuls of a GPU: timed alone, at the clocks that a training step sustains."""

    grid: KernelGrid

    def part(self, name: str, matmul: Matmul, launches_s: float | None = None) -> CostPart:
        if matmul.operands == "padded":  # convolutions are in no grid
            return MatmulRates.part(self, name, matmul, launches_s)
        timed = self.grid.time("linear", (matmul.rows, matmul.columns, matmul.depth))
        efficiency = self.rates.matmul_efficiency * self.alignment_efficiency(matmul)
        more_s = 0.0 if launches_s is None else launches_s - self.kernel_overhead_s
        numbers = matmul.groups, timed.seconds, efficiency, more_s
        return CostPart(
            name, matmul.groups * timed.seconds / efficiency + more_s, Limit.TIMING, _sustained_words, numbers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _GridAttention(AttentionRates):
    """Rates of attention of a GPU: fused kernels as timed, at the clocks that a training step sustains."""

    grid: KernelGrid

    def _fused(self, kernel: Attention, b: int, backward: bool, times: float = 1.0) -> CostPart:
        timed, sustained = self.grid.attention(kernel, b, backward=backward).seconds, self.share.sustained
        # the rate of 8 bits applies to all but the fixed overhead
        fixed_s = 0.0 if times == 1.0 else len(kernel.calls) * self.matmuls.kernel_overhead_s
        seconds = fixed_s + (timed / sustained - fixed_s) / times
        numbers = 1, timed, sustained * times, fixed_s - fixed_s / times
        return CostPart(kernel.name, seconds, Limit.TIMING, _sustained_words, numbers)


def _sustained_words(groups: int, timed_s: float, efficiency: float, more_s: float) -> str:
    """Returns the formula of a timing at the clocks that a training step sustains."""
    times = f"{groups} x " if groups > 1 else ""
    more = f" {'-' if more_s < 0 else '+'} {format_time(abs(more_s), digits=4)}" if more_s else ""
    return f"{times}{format_time(timed_s, digits=4)} / {efficiency:.4g}{more}"


_PASSES: Mapping[PointwiseFunction, tuple[int, int]] = {
    "layer_norm": (2, 5), "rms_norm": (2, 5), "gelu": (2, 3), "silu_multiply": (5, 8), "rotary": (9, 9)
}  # fmt: skip
"""Elements that functions of the grid read and write in forward and backward, for each of their own."""
_OF_RESIDUAL: tuple[PointwiseFunction, ...] = ("layer_norm", "rms_norm")
"""Functions in the precision of the residual stream; others are in that of activations."""


def of_grid(kernels: KernelCost, grid: KernelGrid, wide: KernelGrid | None = None) -> KernelCost:
    """Returns kernel costs of a GPU of the catalog with the rates of a grid.

    Matmuls and fused attention take the time of the grid, memory-bound kernels their bytes at the bandwidth of the
    largest copy, or at that of their own function where it was timed. Timed alone, a kernel is faster than in a step,
    where clocks fall with power: the catalog's factors for that apply. The host issues operations as fast as launches
    were timed.

    Args:
        wide: The grid in FP32; None for none.
    """
    elements = grid.largest("copy")
    copied_bytes_per_s = _FP32_COPY_BYTES * elements / grid.time("copy", (elements,)).seconds
    rates = kernels.matmuls.rates.model_copy(update={"kernel_overhead_s": grid.time("add", (1,)).seconds})
    best = max(2 * math.prod(sizes) / seconds for sizes, seconds in grid.timings("linear"))
    rate, num_sms = best * rates.matmul_efficiency, kernels.matmuls.num_sms
    matmuls = _GridMatmuls(rate, copied_bytes_per_s, num_sms, rates, grid=grid)
    own, state = kernels.attention, kernels.state
    paces = []
    for function, passes in _PASSES.items():
        is_wide = function in _OF_RESIDUAL and state.residual > state.activation
        timed, width = (wide, state.residual) if is_wide else (grid, state.activation)
        if timed is not None and timed.has(function):
            paces.append((function, _pace(timed, function, passes, width, copied_bytes_per_s)))
    attention = _GridAttention(matmuls, own.flop_per_s, own.share, own.state, own.low, own.traffic, grid=grid)
    return replace(
        kernels,
        matmuls=matmuls,
        attention=attention,
        paces=tuple(paces),
        provenance=Provenance.CALIBRATED,
        relative_std=_SYSTEMATIC_STD,
        host_call_s=_HOST_CALL_LAUNCHES * grid.time("launch", (1,)).seconds if kernels.host_call_s else 0.0,
        host_call_std=_HOST_CALL_STD,
    )


def _pace(
    grid: KernelGrid, function: PointwiseFunction, passes: tuple[int, int], width: int, bytes_per_s: float
) -> tuple[float, float]:
    """Returns the largest time of a function in forward and backward relative to its bytes at a bandwidth."""
    elements = grid.largest(function)
    times = [grid.time(function, (elements,), backward=backward).seconds for backward in (False, True)]
    forward, backward = (
        seconds * bytes_per_s / (number * width * elements) for seconds, number in zip(times, passes, strict=True)
    )
    return forward, backward


def _gradient_elements(kernel: Kernel, layer: LayerSpec) -> int:
    if isinstance(kernel, Gemm):
        return kernel.weight_elements if kernel.trained else 0
    return layer.num_trained if isinstance(kernel, Lookup) and kernel.trained else 0


def _pointwise(kernel: Pointwise) -> tuple[KernelName, float]:
    """Returns the nearest kernel of the grid, and its number of output elements."""
    match kernel.like:
        case "silu_multiply" | "rotary":
            return kernel.like, kernel.writes / 2
        case "add":
            return "add", (kernel.reads + kernel.writes) / 3
        case _:
            return kernel.like, kernel.writes
