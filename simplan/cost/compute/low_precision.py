"""Time of linear layers in 8 or 4 bits: products at a rate of their own, and casts, which only move bytes.

A cast reads its operand as it is and writes it quantized, with its scales (``simplan.model.low_precision.casts`` has
how often); in eager mode it is several kernels. That a compiler may join one with the norm or the activation before it
is not counted. Which scales a product takes does not change its rate, though kernels for one scale a row are slower
than those for one a tensor (torchao/float8/README.md at 36027d82).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simplan.cost.compute.matmul import Product, ProductRates
from simplan.model.layer import Gemm
from simplan.model.low_precision import Cast, LinearFormat, casts
from simplan.program.program import Phase
from simplan.software.software import StateBytes

__all__ = ["LinearCost", "LinearRates"]

_WITH_ONE_SCALE = 3
_POST_SCALE_BYTES = 12  # per element: the product of its two scales is written in FP32, and read with it to scale it
_POST_SCALE_KERNELS = 4  # these two, and two that write scales of 1 for the matmul
_PASSES = {Phase.FORWARD: False, Phase.RECOMPUTE: False, Phase.BACKWARD: True}


class LinearCost(NamedTuple):
    """What some linear layers take in a pass.

    Attributes:
        products_s: Of their matrix products.
        casts_s: Of their casts.
        num_casts: How many.
        cast_bytes: Read and written by them.
        flops: Of the products in low precision.
        wide_flops: Of those in 16 bits.
    """

    products_s: float = 0.0
    casts_s: float = 0.0
    num_casts: int = 0
    cast_bytes: int = 0
    flops: int = 0
    wide_flops: int = 0

    def plus(self, other: LinearCost) -> LinearCost:
        """Of both."""
        return LinearCost(
            self.products_s + other.products_s,
            self.casts_s + other.casts_s,
            self.num_casts + other.num_casts,
            self.cast_bytes + other.cast_bytes,
            self.flops + other.flops,
            self.wide_flops + other.wide_flops,
        )


@dataclass(frozen=True, slots=True)
class LinearRates:
    """What bounds them.

    Attributes:
        form: How they are quantized.
        state: Element widths of all else; weights are cast from ``gathered``.
        low: Products in low precision.
        wide: The same in 16 bits.
        traffic: Of casts, as of ``StackRates``.
        weight_casts: Part of the microbatches in which weights are cast; their time is spread over all.
        any_order: As of ``KernelRates.any_order``: an operand with one scale needs no copy along its columns.
    """

    form: LinearFormat
    state: StateBytes
    low: ProductRates
    wide: ProductRates
    traffic: float
    weight_casts: float = 1.0
    any_order: bool = False

    def cost(self, gemm: Gemm, microbatch_size: int, phase: Phase) -> LinearCost:
        """Of one linear layer.

        Args:
            gemm: Its product in forward.
            microbatch_size: Sequences b.
            phase: Forward, recomputation or a whole backward.
        """
        backward, rows = _PASSES[phase], microbatch_size * gemm.m
        found = LinearCost()
        for cast in casts(self.form, trained=gemm.trained, propagates=gemm.propagates):
            if cast.backward is backward and cast.operand not in gemm.cast_before:
                num_bytes = self.cast_bytes(cast, gemm, microbatch_size)
                cast_s = num_bytes * self.traffic / self.low.bytes_per_s + cast.kernels * self._launches_s(gemm)
                often = self.weight_casts if cast.operand == "weight" else 1.0
                found = found.plus(LinearCost(casts_s=often * cast_s, num_casts=1, cast_bytes=num_bytes))
        m, n, k, groups = rows / gemm.num_groups, gemm.n, gemm.k, gemm.num_groups
        if not backward:
            return found.plus(self._product(m, n, k, groups, gemm.streams))
        if gemm.propagates:
            found = found.plus(self._product(m, k, n, groups, gemm.streams)).plus(self._post_scale(rows * k))
        if gemm.trained:
            found = found.plus(self._product(n, k, m, groups, gemm.streams, wide=self.form.wide_weight_gradient))
            if not self.form.wide_weight_gradient:
                found = found.plus(self._post_scale(gemm.weight_elements))
        return found

    def _post_scale(self, elements: int) -> LinearCost:
        """Scaling a result of backward per row and column, which in eager mode is done after its matmul."""
        if not self.form.eager or self.form.has_one_scale:
            return LinearCost()
        num_bytes = _POST_SCALE_BYTES * elements
        seconds = num_bytes * self.traffic / self.low.bytes_per_s + _POST_SCALE_KERNELS * self.low.kernel_s
        return LinearCost(casts_s=seconds, cast_bytes=num_bytes)

    def cast_bytes(self, cast: Cast, gemm: Gemm, microbatch_size: int) -> int:
        """Read and written by one cast."""
        rows = microbatch_size * gemm.m
        shapes = {"input": (rows, gemm.k), "weight": (gemm.num_groups * gemm.n, gemm.k), "gradient": (rows, gemm.n)}
        height, width = shapes[cast.operand]
        weight = cast.operand == "weight"
        read = self.state.gathered if weight else self.state.activation
        wide = height * width * (cast.reads * read + cast.wide_writes * self.state.activation + cast.between_bytes)
        writes = min(cast.writes, 1) if self.any_order and self.form.has_one_scale else cast.writes
        return wide + (writes + 2 * cast.copies) * self.form.quantized_bytes(height, width, weight=weight)

    def _launches_s(self, gemm: Gemm) -> float:
        """What kernels of a cast take beyond their bytes: where groups are products of their own, each has its casts.

        These come one after the other, also those before products on several streams; with scales from earlier steps
        one kernel does all of them (TE, csrc/extensions/cast.cpp, multi_tensor_quantize_impl, v2.9 to v2.16). A scale
        of the whole operand takes three kernels: they find the largest element, work out the scale, and cast.
        """
        if not gemm.streams or self.form.recipe == "delayed":
            return self.low.kernel_s
        return gemm.num_groups * (_WITH_ONE_SCALE if self.form.finds_largest else 1) * self.low.kernel_s

    def _product(
        self, rows: float, columns: int, depth: float, groups: int, streams: int, *, wide: bool = False
    ) -> LinearCost:
        """Products of two operands; results are in 16 bits."""
        bits = 8 * self.state.activation if wide else self.form.element_bits
        operands, result = groups * (rows + columns) * depth, groups * rows * columns
        product = Product(rows, columns, depth, groups, operands * bits / 8 + result * self.state.activation)
        launches_s = self.low.launches_s(groups, streams)
        seconds = (self.wide if wide else self.low).seconds(product) + launches_s - self.low.kernel_s
        if self.form.orders_scales and not wide:
            seconds += 2 * launches_s
        flops = round(product.flops)
        return LinearCost(products_s=seconds, flops=0 if wide else flops, wide_flops=flops if wide else 0)
