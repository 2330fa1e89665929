"""Time of FP8 and FP4 linear layers: matmuls at a separate rate, and casts, which only move bytes.

A cast reads its operand unquantized and writes it quantized, with its scales (``simplan.model.low_precision.casts`` has
the counts); in eager mode a cast is several kernels. Fusion of a cast with the preceding norm or activation by a
compiler is not counted. The kind of scaling does not change the rate of a matmul, though kernels with rowwise scaling
are slower than those with per-tensor scaling (torchao/float8/README.md at 36027d82).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from simplan.cost.compute.matmul import Matmul, MatmulRates, gemm_sizes
from simplan.model.layer import Gemm
from simplan.model.low_precision import Cast, LinearFormat, casts
from simplan.program.program import Phase
from simplan.software.software import StateBytes

_WITH_ONE_SCALE = 3
_POST_SCALE_BYTES = 12  # per element: the product of both scales is written in FP32, then read to scale the element
_POST_SCALE_KERNELS = 4  # these two, and two that write scales of 1 for the matmul


class LinearCost(NamedTuple):
    """Cost of linear layers in a pass.

    Attributes:
        matmuls_s, casts_s: Seconds of matmuls and of casts.
        cast_bytes: Bytes read and written by casts.
        flops: FLOPs of low-precision matmuls.
        wide_flops: FLOPs of BF16 or FP16 matmuls.
    """

    matmuls_s: float = 0.0
    casts_s: float = 0.0
    num_casts: int = 0
    cast_bytes: int = 0
    flops: int = 0
    wide_flops: int = 0

    def plus(self, other: LinearCost) -> LinearCost:
        """Returns the sum of both costs."""
        return LinearCost(*map(add, self, other))


@dataclass(frozen=True, slots=True)
class LinearRates:
    """Rates that bound low-precision linear layers.

    Attributes:
        state: Bytes per element of all other tensors; weights are cast from ``gathered``.
        low: Rates of low-precision matmuls.
        wide: Rates of BF16 or FP16 matmuls.
        traffic: Traffic factor of casts; see ``FrameworkRates``.
        weight_casts: Fraction of the microbatches in which weights are cast; their time is spread over all.
    """

    form: LinearFormat
    state: StateBytes
    low: MatmulRates
    wide: MatmulRates
    traffic: float
    weight_casts: float = 1.0

    def cost(self, gemm: Gemm, microbatch_size: int, phase: Phase) -> LinearCost:
        """Returns the cost of one linear layer in forward, recomputation or a full backward."""
        backward, rows = phase is Phase.BACKWARD, microbatch_size * gemm.m
        linear_cost = LinearCost()
        for cast in casts(self.form, trained=gemm.trained, propagates=gemm.propagates):
            if cast.backward is backward and cast.operand not in gemm.cast_before:
                num_bytes = self.cast_bytes(cast, gemm, microbatch_size)
                cast_s = num_bytes * self.traffic / self.low.bytes_per_s + cast.kernels * self._launches_s(gemm)
                often = self.weight_casts if cast.operand == "weight" else 1.0
                linear_cost = linear_cost.plus(LinearCost(casts_s=often * cast_s, num_casts=1, cast_bytes=num_bytes))
        for name, sizes in gemm_sizes(gemm, microbatch_size, phase).items():
            wide = name == "linear_weight_gradient" and self.form.wide_weight_gradient
            linear_cost = linear_cost.plus(self._matmul(*sizes, gemm.num_groups, gemm.streams, wide=wide))
            if backward and not wide:
                elements = rows * gemm.k if name == "linear_input_gradient" else gemm.weight_elements
                linear_cost = linear_cost.plus(self._post_scale(elements))
        return linear_cost

    def _post_scale(self, elements: int) -> LinearCost:
        """Returns the cost of scaling a result of backward per row and column after its matmul, as in eager mode."""
        if not self.form.eager or self.form.has_one_scale:
            return LinearCost()
        num_bytes = _POST_SCALE_BYTES * elements
        seconds = num_bytes * self.traffic / self.low.bytes_per_s + _POST_SCALE_KERNELS * self.low.kernel_overhead_s
        return LinearCost(casts_s=seconds, cast_bytes=num_bytes)

    def cast_bytes(self, cast: Cast, gemm: Gemm, microbatch_size: int) -> int:
        """Returns the bytes read and written by one cast."""
        rows = microbatch_size * gemm.m
        shapes = {"input": (rows, gemm.k), "weight": (gemm.num_groups * gemm.n, gemm.k), "gradient": (rows, gemm.n)}
        height, width = shapes[cast.operand]
        weight = cast.operand == "weight"
        read = self.state.gathered if weight else self.state.activation
        wide = height * width * (cast.reads * read + cast.wide_writes * self.state.activation + cast.between_bytes)
        one_order = self.low.rates.fp8_any_layout and self.form.has_one_scale  # no copy along columns
        writes = min(cast.writes, 1) if one_order else cast.writes
        return wide + (writes + 2 * cast.copies) * self.form.quantized_bytes(height, width, weight=weight)

    def _launches_s(self, gemm: Gemm) -> float:
        """Returns the fixed overhead of a cast's kernels; groups with separate matmuls have separate casts.

        The casts are serialized, even before matmuls on several streams. With delayed scaling one kernel runs all of
        them (TE, csrc/extensions/cast.cpp, multi_tensor_quantize_impl, v2.9 to v2.16). Current per-tensor scaling takes
        three kernels: they find the largest element, compute the scale, and cast.
        """
        if not gemm.streams or self.form.recipe == "delayed":
            return self.low.kernel_overhead_s
        return gemm.num_groups * (_WITH_ONE_SCALE if self.form.finds_largest else 1) * self.low.kernel_overhead_s

    def _matmul(
        self, rows: float, columns: int, depth: float, groups: int, streams: int, *, wide: bool = False
    ) -> LinearCost:
        """Returns the cost of matmuls of two operands; results are in BF16 or FP16."""
        bits = 8 * self.state.activation if wide else self.form.element_bits
        operands, result = groups * (rows + columns) * depth, groups * rows * columns
        matmul = Matmul(rows, columns, depth, groups, operands * bits / 8 + result * self.state.activation)
        launches_s = self.low.launches_s(groups, streams)
        seconds = (self.wide if wide else self.low).seconds(matmul) + launches_s - self.low.kernel_overhead_s
        if self.form.orders_scales and not wide:
            seconds += 2 * launches_s
        flops = round(matmul.flops)
        return LinearCost(matmuls_s=seconds, flops=0 if wide else flops, wide_flops=flops if wide else 0)
