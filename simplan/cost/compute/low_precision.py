"""Time of FP8 and FP4 linear layers: matmuls at a separate rate, and casts, which only move bytes.

A cast reads its operand unquantized and writes it quantized, with its scales (``simplan.model.low_precision.casts`` has
the counts); in eager mode a cast is several kernels. Fusion of a cast with the preceding norm or activation by a
compiler is not counted. The kind of scaling does not change the rate of a matmul, though kernels with rowwise scaling
are slower than those with per-tensor scaling (torchao/float8/README.md at 36027d82).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simplan.cost.compute.matmul import GEMM_WORDS, Matmul, MatmulRates, gemm_sizes
from simplan.cost.model import CostPart
from simplan.model.layer import Gemm
from simplan.model.low_precision import Cast, LinearFormat, casts
from simplan.program.program import Phase
from simplan.software.software import StateBytes

_WITH_ONE_SCALE = 3
_POST_SCALE_BYTES = 12  # per element: the product of both scales is written in FP32, then read to scale the element
_POST_SCALE_KERNELS = 4  # these two, and two that write scales of 1 for the matmul


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

    def parts(self, gemm: Gemm, microbatch_size: int, phase: Phase) -> Iterator[CostPart]:
        """Yields casts and matmuls of one linear layer in forward, recomputation or a full backward."""
        backward, rows = phase is Phase.BACKWARD, microbatch_size * gemm.m
        known = {"weight"} if self.form.weights == "stored" and not gemm.trained else set[str]()
        for cast in casts(self.form, trained=gemm.trained, propagates=gemm.propagates):
            if cast.backward is backward and cast.operand not in known.union(gemm.cast_before):
                num_bytes = self.cast_bytes(cast, gemm, microbatch_size) * self.traffic
                launches_s = cast.kernels * self._launches_s(gemm)
                name = f"{gemm.name}: {self.form.precision} cast of the {cast.operand}"
                part = self.low.streaming(name, num_bytes, launches_s=launches_s)
                often = self.weight_casts if cast.operand == "weight" else 1.0
                yield part.times(often, "of the microbatches")
        for name, sizes in gemm_sizes(gemm, microbatch_size, phase).items():
            wide = name == "linear_weight_gradient" and self.form.wide_weight_gradient
            yield self._matmul(gemm.name + GEMM_WORDS[name], *sizes, gemm, wide=wide)
            if backward and not wide and self.form.eager and not self.form.has_one_scale:
                # results of backward are scaled per row and column after their matmul
                elements = rows * gemm.k if name == "linear_input_gradient" else gemm.weight_elements
                scaled_bytes = _POST_SCALE_BYTES * elements * self.traffic
                yield self.low.streaming(f"{gemm.name}: scales", scaled_bytes, _POST_SCALE_KERNELS)

    def cast_bytes(self, cast: Cast, gemm: Gemm, microbatch_size: int) -> int:
        """Returns the bytes read and written by one cast."""
        rows = microbatch_size * gemm.m
        shapes = {"input": (rows, gemm.k), "weight": (gemm.num_groups * gemm.n, gemm.k), "gradient": (rows, gemm.n)}
        height, width = shapes[cast.operand]
        weight = cast.operand == "weight"
        read = self.state.gathered if weight else self.state.activation
        wide = height * width * (cast.reads * read + cast.wide_writes * self.state.activation + cast.between_bytes)
        writes = min(cast.writes, 1) if self.form.has_one_copy else cast.writes
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
        self, name: str, rows: float, columns: int, depth: float, gemm: Gemm, *, wide: bool = False
    ) -> CostPart:
        """Returns matmuls of two operands; results are in BF16 or FP16."""
        groups, bits = gemm.num_groups, 8 * self.state.activation if wide else self.form.element_bits
        operands, result = groups * (rows + columns) * depth, groups * rows * columns
        matmul = Matmul(rows, columns, depth, groups, operands * bits / 8 + result * self.state.activation)
        launches_s = self.low.launches_s(groups, gemm.streams)
        if self.form.orders_scales and not wide:
            launches_s *= 3
        if wide:
            launches_s += self.wide.kernel_overhead_s - self.low.kernel_overhead_s
        return (self.wide if wide else self.low).part(name, matmul, launches_s)
