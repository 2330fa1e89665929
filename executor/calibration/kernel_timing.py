"""Times the kernels of the grid, all ranks at once, each until its interval is narrow or the time is up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.calibration.layer_timing import FsdpBench
from executor.calibration.timing import TIMED_DTYPES, Stopwatch, of_rank_0, sample_of, together, wide
from executor.models.norms import RMSNorm
from simplan.cost.calibration import KernelName, KernelTiming, Sample, TimedDtype

__all__ = ["GridSizes", "Probe", "fsdp_benches", "grid_sizes", "probes", "time_kernels"]

_WIDTH = 1024  # of rows that norms and the loss run over
_TABLE_ROWS = 256
_NUM_TENSORS = 4


@dataclass(frozen=True, slots=True)
class GridSizes:
    """Sizes to time.

    Attributes:
        dims: Of matrix products, each of rows, columns and depth.
        most_volume: Largest rows x columns x depth.
        most_elements: Largest matrix.
        attention: Heads of all sequences, lengths, widths of heads.
        most_scores: Largest heads x length x length x width.
        elements: Of all other kernels.
    """

    dims: tuple[int, ...]
    most_volume: int
    most_elements: int
    attention: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    most_scores: int
    elements: tuple[int, ...]


def grid_sizes(device: torch.device, *, small: bool) -> GridSizes:
    """What a device of its kind can time within minutes."""
    if small:
        return GridSizes((64, 256), 2**22, 2**16, ((8,), (64, 128), (32,)), 2**22, (2**12, 2**16))
    if device.type == "cuda":
        dims = tuple(2**exponent for exponent in range(7, 16, 2))
        heads, lengths, widths = (16, 128), (256, 1024, 4096), (64, 128)
        return GridSizes(dims, 2**38, 2**28, (heads, lengths, widths), 2**38, tuple(2**e for e in range(12, 29, 4)))
    dims = tuple(2**exponent for exponent in range(6, 15, 2))
    attention = (4, 16, 64), (64, 256, 1024), (32, 64, 128)
    return GridSizes(dims, 2**30, 2**24, attention, 2**29, tuple(2**e for e in range(12, 24, 3)))


@dataclass(slots=True)
class Probe:
    """One kernel at one size.

    Attributes:
        kernel, sizes: As of ``KernelTiming``.
        forward: Runs it, the n-th time.
        inputs: What it has gradients of; none where its backward is not timed.
        forward_s, backward_s: What it took, by round.
        repeats: How often it runs in one timing, so that a timing is long enough.
    """

    kernel: KernelName
    sizes: tuple[int, ...]
    forward: Callable[[int], object]
    inputs: Sequence[Tensor] = ()
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    repeats: int = 1


class _Pool:
    """Random numbers to take operands from."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.randn(num_elements, device=device, dtype=dtype).mul_(0.1)

    def take(self, rows: int, columns: int, place: int) -> Tensor:
        """A matrix; other places do not overlap, as far as there is room."""
        size = rows * columns
        first = place * size % max(1, self._numbers.numel() - size + 1) // 64 * 64
        return self._numbers[first : first + size].view(rows, columns)


def probes(dtype: torch.dtype, device: torch.device, sizes: GridSizes) -> Iterator[Probe]:
    """Every kernel at every size, but FSDP's copies."""
    pool = _Pool(4 * sizes.most_elements, dtype, device)
    one = torch.zeros(1, device=device)
    yield Probe("launch", (1,), lambda _: one.add_(1))
    for rows, columns, depth in product(sizes.dims, repeat=3):
        largest = max(rows * depth, columns * depth, rows * columns)
        if rows * columns * depth <= sizes.most_volume and largest <= sizes.most_elements:
            yield from _products(pool, rows, columns, depth)
    for heads, length, width in product(*sizes.attention):
        if heads * length * length * width <= sizes.most_scores:
            yield _attention(heads, length, width, dtype, device)
    for elements in sizes.elements:
        yield from _elementwise(elements, dtype, device)
        yield from _of_parameters(elements, device)


def _products(pool: _Pool, rows: int, columns: int, depth: int) -> Iterator[Probe]:
    """A linear layer's three products, their operands laid out as autograd has them."""
    sizes = rows, columns, depth

    def linear(n: int, x: Tensor) -> Tensor:
        return functional.linear(x, pool.take(columns, depth, n + 1))

    def input_gradient(n: int, dy: Tensor) -> Tensor:
        return dy @ pool.take(depth, columns, n + 1)

    def weight_gradient(n: int, dy: Tensor) -> Tensor:
        return dy.t() @ pool.take(depth, columns, n + 1)

    yield Probe("linear", sizes, partial(linear, x=pool.take(rows, depth, 0)))
    yield Probe("linear_input_gradient", sizes, partial(input_gradient, dy=pool.take(rows, depth, 0)))
    yield Probe("linear_weight_gradient", sizes, partial(weight_gradient, dy=pool.take(depth, rows, 0)))


def _attention(heads: int, length: int, width: int, dtype: torch.dtype, device: torch.device) -> Probe:
    shape = 1, heads, length, width
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def run(_: int) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Probe("attention", (heads, length, width), run, (q, k, v))


def _elementwise(elements: int, dtype: torch.dtype, device: torch.device) -> Iterator[Probe]:
    width = min(_WIDTH, elements)
    rows = elements // width

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    x, y = tensor(rows, width), tensor(rows, width)
    sizes = (elements,)
    layer_norm = nn.LayerNorm(width, device=device, dtype=dtype)
    rms_norm = RMSNorm(width).to(device=device, dtype=dtype)
    yield Probe("layer_norm", sizes, lambda _: layer_norm(x), (x, *layer_norm.parameters()))
    yield Probe("rms_norm", sizes, lambda _: rms_norm(x), (x, *rms_norm.parameters()))
    yield Probe("gelu", sizes, lambda _: functional.gelu(x), (x,))
    yield Probe("silu_multiply", sizes, lambda _: functional.silu(x) * y, (x, y))
    yield Probe("add", sizes, lambda _: x + y, (x, y))
    table = tensor(_TABLE_ROWS, width)
    picked = torch.randint(_TABLE_ROWS, (rows,), device=device)
    yield Probe("lookup", sizes, lambda _: functional.embedding(picked, table), (table,))
    targets = torch.randint(width, (rows,), device=device)
    yield Probe("cross_entropy", sizes, lambda _: functional.cross_entropy(x.float(), targets), (x,))
    cosine, sine = torch.randn(2, rows, width // 2, device=device, dtype=dtype)

    def rotate(_: int) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    yield Probe("rotary", sizes, rotate, (x,))


def _of_parameters(elements: int, device: torch.device) -> Iterator[Probe]:
    """What is done to parameters and gradients, which are fp32."""
    parts = [nn.Parameter(torch.randn(elements // _NUM_TENSORS, device=device)) for _ in range(_NUM_TENSORS)]
    others = [torch.randn_like(part) for part in parts]
    for part in parts:
        part.grad = torch.zeros_like(part)
    sizes = (elements,)

    @torch.no_grad()
    def accumulate(_: int) -> None:
        for part, other in zip(parts, others, strict=True):
            part.add_(other)

    @torch.no_grad()
    def scale(_: int) -> None:
        for other in others:
            other.div_(1.0001)

    def copy(_: int) -> None:
        for part, other in zip(parts, others, strict=True):
            other.copy_(part.detach())

    def step(_: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    yield Probe("accumulate", sizes, accumulate)
    yield Probe("scale", sizes, scale)
    yield Probe("copy", sizes, copy)
    yield Probe("adamw", sizes, partial(step, optimizer=torch.optim.AdamW(parts, lr=1e-6, fused=True)))
    yield Probe("sgd", sizes, partial(step, optimizer=torch.optim.SGD(parts, lr=1e-6, fused=True)))


def fsdp_benches(
    dtype: torch.dtype, device: torch.device, sizes: GridSizes
) -> Iterator[tuple[tuple[int, ...], FsdpBench]]:
    """Parameters by number, as a few matrices of one layer that FSDP shards."""
    narrow = None if dtype in (torch.float32, torch.float64) else dtype
    for elements in sizes.elements:
        side = max(2, int((elements // _NUM_TENSORS) ** 0.5))
        layer = nn.ModuleList(nn.Linear(side, side, bias=False, device=device) for _ in range(_NUM_TENSORS))
        yield (_NUM_TENSORS * side * side,), FsdpBench(layer, narrow, device)


_SHORTEST_S = 3e-4
_MOST_REPEATS = 16


def time_kernels(
    dtype: TimedDtype, num_ranks: int, device: torch.device, keep_going: Callable[[int], bool], *, small: bool = False
) -> list[KernelTiming]:
    """Times every kernel at every size.

    Args:
        dtype: Precision; of the linear layers that are in 8 bits nothing is timed here.
        num_ranks: Ranks that do this at the same time.
        device: Where.
        keep_going: Asked before each round with the number of rounds done; the same answer on all ranks.
        small: Fewer and smaller sizes.
    """
    watch, sizes = Stopwatch(device), grid_sizes(device, small=small)
    found = list(probes(TIMED_DTYPES[dtype], device, sizes))
    for probe in found:
        _round(probe, watch, 0)
        once_s = of_rank_0(_round(probe, watch, 1))
        probe.repeats = min(_MOST_REPEATS, max(1, math.ceil(_SHORTEST_S / once_s)))
        probe.forward_s.clear()
        probe.backward_s.clear()
    benches: list[tuple[tuple[int, ...], FsdpBench, tuple[list[float], list[float]]]] = []
    benches += ((numbers, bench, ([], [])) for numbers, bench in fsdp_benches(TIMED_DTYPES[dtype], device, sizes))
    for _, bench, _ in benches:
        bench.round()
    done, still_open = 0, found
    while still_open and keep_going(done):
        for probe in still_open:
            together()
            _round(probe, watch, done)
        for _, bench, seconds in benches:
            together()
            for part, took_s in zip(seconds, bench.round(), strict=True):
                part.append(took_s)
        done += 1
        are_wide = of_rank_0([wide(probe.forward_s) or wide(probe.backward_s) for probe in still_open])
        still_open = [probe for probe, is_wide in zip(still_open, are_wide, strict=True) if is_wide]

    def timing(kernel: KernelName, shape: tuple[int, ...], seconds: Sample, backward: Sample | None) -> KernelTiming:
        return KernelTiming(
            kernel=kernel, sizes=shape, dtype=dtype, num_ranks=num_ranks, seconds=seconds, backward_s=backward
        )

    timings = [
        timing(p.kernel, p.sizes, sample_of(p.forward_s), sample_of(p.backward_s) if p.inputs else None) for p in found
    ]
    for shape, _, (gather_s, reduce_s) in benches:
        timings.append(timing("gather_copy", shape, sample_of(gather_s), None))
        timings.append(timing("reduce_copy", shape, sample_of(reduce_s), None))
    return timings


def _round(probe: Probe, watch: Stopwatch, number: int) -> float:
    """Times a probe once; gives the time of its forward."""
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        for n in range(probe.repeats):
            output = probe.forward(number * probe.repeats + n)
            if probe.inputs:
                assert isinstance(output, torch.Tensor)
                outputs.append(output)

    probe.forward_s.append(watch(forward) / probe.repeats)
    if probe.inputs:
        gradient = torch.ones_like(outputs[0])

        def backward() -> None:
            while outputs:
                torch.autograd.grad(outputs.pop(), probe.inputs, gradient)

        probe.backward_s.append(watch(backward) / probe.repeats)
    return probe.forward_s[-1]
