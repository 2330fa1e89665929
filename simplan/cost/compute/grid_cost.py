"""Cost estimates of layers without a timing: the sum of their kernels, each from the grid of a calibration."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.cost.calibration.format import KernelName
from simplan.cost.compute.grid import GridTime, KernelGrid
from simplan.cost.compute.kernels import running_kernels
from simplan.cost.model import CostEstimate, Provenance
from simplan.model.layer import Attention, Gemm, Kernel, LayerCollective, LayerSpec, Lookup, Pointwise
from simplan.program.program import LayerWork, Phase
from simplan.training.optimizer import UPDATES, UpdateName
from simplan.units import counted, format_time

__all__ = ["GridCost"]

_ACTIVATION_GRADIENTS = (Phase.BACKWARD, Phase.BACKWARD_INPUT)
_WEIGHT_GRADIENTS = (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
_SYSTEMATIC_STD = 0.12
"""Relative standard deviation between a layer and the sum of its kernels: Python overhead, views, caches."""
_EXTRAPOLATED_STD = 0.3
_NEGLIGIBLE = 0.1  # fraction of a layer's time that may lie outside of the timed range

_OF_PARAMETERS: dict[Phase, KernelName] = {
    Phase.GATHER_COPY: "gather_copy",
    Phase.REDUCE_COPY: "reduce_copy",
    Phase.SCALE: "scale",
}


class GridCost:
    """Cost estimates of any layer from kernel timings.

    Args:
        grid: Kernels over sizes, in the precision of the run.
        optimizer: Optimizer and implementation of its step. An optimizer that was not timed is scaled by the bytes that
            it moves.
        accumulates: True if backward adds to existing gradients, False if it creates new ones (weights that FSDP
            casts).
        traffic: Bytes of memory-bound kernels, as a fraction of the bytes that eager torch reads and writes.
    """

    def __init__(
        self, grid: KernelGrid, *, optimizer: UpdateName, accumulates: bool = True, traffic: float = 1.0
    ) -> None:
        self._grid = grid
        self._optimizer: KernelName = "sgd" if optimizer.startswith("sgd") else "adamw"
        self._of_timed = UPDATES[optimizer].streamed_bytes / UPDATES[self._optimizer].streamed_bytes
        self._accumulates = accumulates
        self._traffic = traffic

    def cost_estimate(self, work: LayerWork) -> CostEstimate:
        """Returns the sum over the kernels that run."""
        found = list(self._times(work))
        seconds = sum(time.seconds for _, time in found)
        outside = [(name, time.seconds) for name, time in found if not time.inside]
        std = max((time.std for _, time in found), default=0.0)
        formula = f"{counted(len(found), 'kernel')} of the grid"
        if sum(outside_s for _, outside_s in outside) > _NEGLIGIBLE * seconds:
            names = ", ".join(dict.fromkeys(name for name, _ in outside))
            price_std = max(std, _EXTRAPOLATED_STD)
            return CostEstimate(seconds, Provenance.EXTRAPOLATED, price_std, f"{formula}, larger than timed: {names}")
        largest = max(found, key=lambda each: each[1].seconds, default=None)
        if largest is not None and len(found) > 1:
            formula += f", {format_time(largest[1].seconds)} of it {largest[0]}"
        return CostEstimate(seconds, Provenance.CALIBRATED, (std**2 + _SYSTEMATIC_STD**2) ** 0.5, formula)

    def _times(self, work: LayerWork) -> Iterator[tuple[str, GridTime]]:
        phase = work.phase
        if phase in _OF_PARAMETERS or phase is Phase.OPTIMIZER:
            name = _OF_PARAMETERS.get(phase, self._optimizer)
            if work.num_parameters:
                time = self._grid.time(name, (work.num_parameters,))
                yield name, time._replace(seconds=time.seconds * (self._of_timed if name == self._optimizer else 1.0))
            return
        gradients = 0
        for kernel in running_kernels(work):
            gradients += _gradient_elements(kernel, work.layer) if phase in _WEIGHT_GRADIENTS else 0
            for time in self._kernel(kernel, work):
                yield _name(kernel), time
        if gradients and self._accumulates:
            yield "gradients added up", self._grid.time("accumulate", (gradients,))

    def _kernel(self, kernel: Kernel, work: LayerWork) -> Iterator[GridTime]:
        b, phase = work.microbatch_size, work.phase
        backward = phase in _ACTIVATION_GRADIENTS
        match kernel:
            case Gemm():
                yield from self._products(kernel, b, phase)
            case Attention():
                if phase is not Phase.BACKWARD_WEIGHT:
                    yield self._attention(kernel, b, backward)
            case Pointwise():
                if phase is not Phase.BACKWARD_WEIGHT:
                    name, elements = _pointwise(kernel)
                    time = self._grid.time(name, (b * elements,), backward=backward)
                    yield time._replace(seconds=time.seconds * self._traffic)
            case Lookup(rows=rows, width=columns):
                yield self._grid.time("lookup", (b * rows * columns,), backward=phase in _WEIGHT_GRADIENTS)
            case LayerCollective():
                raise AssertionError("an exchange is a message")

    def _products(self, kernel: Gemm, b: int, phase: Phase) -> Iterator[GridTime]:
        """Yields times of the forward matmul, or of the two backward matmuls; matmuls of experts run sequentially."""
        rows, n, k, groups = b * kernel.m / kernel.num_groups, kernel.n, kernel.k, kernel.num_groups
        found: list[tuple[KernelName, tuple[float, float, float]]] = []
        if phase in (Phase.FORWARD, Phase.RECOMPUTE):
            found.append(("linear", (rows, n, k)))
        if phase in _ACTIVATION_GRADIENTS and kernel.propagates:
            found.append(("linear_input_gradient", (rows, k, n)))
        if phase in _WEIGHT_GRADIENTS and kernel.trained:
            found.append(("linear_weight_gradient", (n, k, rows)))
        for name, sizes in found:
            time = self._grid.time(name, sizes)
            # a convolution costs more than its equivalent matmul
            yield time._replace(seconds=groups * time.seconds, inside=time.inside and not kernel.image_elements)

    def _attention(self, kernel: Attention, b: int, backward: bool) -> GridTime:
        """Returns the timed case (causal, equal numbers of queries and keys), scaled by the FLOPs of the kernel."""
        lengths = kernel.seq_len * (kernel.num_keys or kernel.seq_len)
        sizes = (b * kernel.num_heads, lengths**0.5, kernel.head_dim)
        time = self._grid.time("attention", sizes, backward=backward)
        causal = 2 * kernel.num_heads * lengths * kernel.head_dim
        factor = kernel.computed_flops / causal
        usual = not (kernel.eager or kernel.masked) and 0.5 <= factor <= 2
        return time._replace(seconds=time.seconds * factor, inside=time.inside and usual)


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


def _name(kernel: Kernel) -> str:
    return "exchange" if isinstance(kernel, LayerCollective) else kernel.name
