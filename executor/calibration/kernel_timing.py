"""Times the kernels of the grid on all ranks simultaneously, each until its interval is narrow or time is up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.calibration.layer_timing import FsdpCopies
from executor.calibration.timing import TIMED_DTYPES, Bench, Stopwatch, of_rank_0, sample_of, together, wide
from executor.models.norms import RMSNorm
from simplan.cost.calibration.format import KernelName, KernelTiming, TimedDtype

_WIDTH = 1024  # of the rows of norms and the loss
_TABLE_ROWS = 256
_NUM_TENSORS = 4
_MIN_TIMING_S = 3e-4
_MAX_REPEATS = 16
_AHEAD_S = 0.003  # for the host to issue the repeats of a kernel, or one optimizer step


@dataclass(frozen=True, slots=True)
class GridSizes:
    """Sizes to time.

    Attributes:
        dims: Rows, columns and depth of matmuls.
        max_volume: Largest rows x columns x depth.
        max_elements: Largest matrix.
        attention: Heads of all sequences, sequence lengths, head_dims.
        max_scores: Largest heads x length x length x head_dim.
        elements: Elements of all other kernels.
    """

    dims: tuple[int, ...]
    max_volume: int
    max_elements: int
    attention: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    max_scores: int
    elements: tuple[int, ...]


def grid_sizes(device: torch.device, *, small: bool) -> GridSizes:
    """Sizes that such a device can time within minutes."""
    if small:
        return GridSizes((64, 256), 2**22, 2**16, ((8,), (64, 128), (32,)), 2**22, (2**12, 2**16))
    if device.type == "cuda":
        dims = tuple(2**exponent for exponent in range(7, 16, 2))
        heads, lengths, widths = (16, 128, 1024), (128, 512, 2048, 8192), (64, 128)
        return GridSizes(dims, 2**39, 2**28, (heads, lengths, widths), 2**38, tuple(2**e for e in range(12, 29, 4)))
    dims = tuple(2**exponent for exponent in range(6, 15, 2))
    attention = (4, 16, 64), (64, 256, 1024), (32, 64, 128)
    return GridSizes(dims, 2**30, 2**24, attention, 2**29, tuple(2**e for e in range(12, 24, 3)))


@dataclass(slots=True)
class Probe:
    """One kernel at one size.

    Attributes:
        kernel, sizes: As in ``KernelTiming``.
        forward: Runs the kernel, for the n-th time.
        inputs: Tensors that get gradients; empty where backward is not timed.
        backward_kernel: Name of the backward, where that is a kernel of the grid.
        seconds: Timings of forward and backward, by round.
        repeats: Runs of the kernel in one timing, so that a timing is long enough.
    """

    kernel: KernelName
    sizes: tuple[int, ...]
    forward: Callable[[int], Any]
    inputs: Sequence[Tensor] = ()
    backward_kernel: KernelName | None = None
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    repeats: int = 1

    def warm_up(self, watch: Stopwatch) -> None:
        """Runs the kernel without counting, and sets the repeats; every rank must call this."""
        for number in range(2):
            self.round(watch, number)
        once_s = of_rank_0(watch(self.forward, 2))  # with the time of the host
        if self.backward_kernel is None:
            self.repeats = min(_MAX_REPEATS, max(1, math.ceil(_MIN_TIMING_S / once_s)))
        self.seconds = [], []

    def round(self, watch: Stopwatch, number: int) -> None:
        """Times forward, and backward if there is one."""
        outputs: list[Tensor] = []

        def forward() -> None:
            for n in range(self.repeats):
                output = self.forward(number * self.repeats + n)
                if self.inputs:
                    outputs.append(output)

        self.seconds[0].append(self._timed(watch, forward) / self.repeats)
        if self.inputs:
            gradient = torch.ones_like(outputs[0])

            def backward() -> None:
                while outputs:
                    if self.backward_kernel is None:
                        torch.autograd.grad(outputs.pop(), self.inputs, gradient)
                    else:  # FSDP's hooks accumulate
                        torch.autograd.backward(outputs.pop(), gradient)

            self.seconds[1].append(self._timed(watch, backward) / self.repeats)

    def _timed(self, watch: Stopwatch, run: Callable[[], object]) -> float:
        """Seconds of a call; on CUDA of its kernels alone, except where the host's launches are what is timed."""
        return watch(run) if self.kernel == "launch" else watch.each([run], _AHEAD_S)[0]

    def timings(self, dtype: TimedDtype, num_ranks: int) -> Iterator[KernelTiming]:
        """The timings of all ranks; every rank must call this."""
        timing = partial(KernelTiming, sizes=self.sizes, dtype=dtype, num_ranks=num_ranks)
        forward_s = sample_of(self.seconds[0])
        backward_s = sample_of(self.seconds[1]) if self.inputs else None
        if self.backward_kernel is None or backward_s is None:
            yield timing(kernel=self.kernel, seconds=forward_s, backward_s=backward_s)
        else:
            yield timing(kernel=self.kernel, seconds=forward_s)
            yield timing(kernel=self.backward_kernel, seconds=backward_s)


def time_kernels(dtype: TimedDtype, bench: Bench, *, small: bool = False) -> list[KernelTiming]:
    """Times every kernel at every size.

    Args:
        dtype: Precision; linear layers in FP8 are not timed.
        small: Fewer and smaller sizes.
    """
    watch = Stopwatch(bench.device)
    probes = list(kernel_probes(TIMED_DTYPES[dtype], bench.device, grid_sizes(bench.device, small=small)))
    for probe in probes:
        probe.warm_up(watch)
    still_open, done = probes, 0
    while still_open and bench.keep_going(done):
        for probe in still_open:
            together()
            probe.round(watch, done)
        still_open = list(compress(still_open, of_rank_0([any(map(wide, probe.seconds)) for probe in still_open])))
        done += 1
    return [timing for probe in probes for timing in probe.timings(dtype, bench.num_ranks)]


class _Pool:
    """Random numbers for operands."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.randn(num_elements, device=device, dtype=dtype).mul_(0.1)

    def take(self, rows: int, columns: int, place: int) -> Tensor:
        """Matrix from the pool; matrices with different ``place`` do not overlap if the pool is large enough."""
        size = rows * columns
        first = place * size % max(1, self._numbers.numel() - size + 1) // 64 * 64
        return self._numbers[first : first + size].view(rows, columns)


def kernel_probes(dtype: torch.dtype, device: torch.device, sizes: GridSizes) -> Iterator[Probe]:
    """Every kernel at every size."""
    pool = _Pool(4 * sizes.max_elements, dtype, device)
    number = torch.zeros(1, device=device)
    yield Probe("launch", (1,), lambda _: number.add_(1))
    for rows, columns, depth in product(sizes.dims, repeat=3):
        largest = max(rows * depth, columns * depth, rows * columns)
        if rows * columns * depth <= sizes.max_volume and largest <= sizes.max_elements:
            yield from _matmuls(pool, rows, columns, depth)
    for heads, length, width in product(*sizes.attention):
        if heads * length * length * width <= sizes.max_scores:
            yield _attention(heads, length, width, dtype, device)
    for elements in sizes.elements:
        yield from _elementwise(elements, dtype, device)
        yield from _of_parameters(elements, device)
    for elements in sizes.elements:
        yield _fsdp_copies(elements, dtype, device)


def _matmuls(pool: _Pool, rows: int, columns: int, depth: int) -> Iterator[Probe]:
    """The three matmuls of a linear layer, with operands laid out as autograd has them."""
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
    """Kernels on parameters and gradients, which are FP32."""
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


def _fsdp_copies(elements: int, dtype: torch.dtype, device: torch.device) -> Probe:
    """FSDP's copies around the collectives of a few matrices."""
    side = max(2, int((elements // _NUM_TENSORS) ** 0.5))
    layer = nn.ModuleList(nn.Linear(side, side, bias=False, device=device) for _ in range(_NUM_TENSORS))
    copies = FsdpCopies(layer, None if dtype in (torch.float32, torch.float64) else dtype, device)
    sizes = (_NUM_TENSORS * side * side,)
    return Probe("gather_copy", sizes, lambda _: copies.gather(), (copies.input,), "reduce_copy")
