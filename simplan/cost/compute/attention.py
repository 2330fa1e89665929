"""Time of the attention core: fused, by the generation of its kernel, or unfused, product by product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from simplan.cost.compute.matmul import Product, ProductRates
from simplan.model.layer import Attention
from simplan.model.low_precision import LinearFormat
from simplan.software.rates import AttentionShare, LowAttention

__all__ = ["AttentionRates"]

_BACKWARD_PRODUCTS = 2.5  # five products against two, since the scores are computed again (Dao et al. 2022)
_WIDE_HEAD = 128
_EAGER_PASSES = 4  # scores read and written with a scale or bias, read by the softmax, weights written
_EAGER_BYTES = 8  # the softmax in fp32, written and read
_SOFTMAX_PASSES = (2, 3)  # one fused kernel reads scores and writes weights; backward reads two and writes one
_DROPOUT_PASSES = 2
_SOFT_CAP_PASSES = (6, 7)  # scaled, tanh, scaled again; the tanh of backward reads its output as well
_MASK_BYTES = 1
_ROW = 32


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """What attention reaches.

    Attributes:
        products: Matrix products of 16 or 32 bits, of which unfused attention has four.
        flop_per_s: The best published rate of such products.
        share: Of that, by a fused kernel whose heads are wide and whose queries meet many keys.
        half_keys: Keys that a query meets at which a fused kernel reaches half of its rate.
        narrow_heads: Part of the rate that heads of 64 reach.
        width: Bytes of an element.
        score_traffic: As of ``KernelRates``.
        form: How it is quantized where it is in 8 bits.
        low: Rates of that by width of a head.
        traffic: Of casts, as of ``StackRates``.
    """

    products: ProductRates
    flop_per_s: float
    share: AttentionShare
    half_keys: float
    narrow_heads: float
    width: int
    score_traffic: float = 1.0
    form: LinearFormat | None = None
    low: Mapping[int, LowAttention] | None = None
    traffic: float = 1.0

    def seconds(self, kernel: Attention, b: int, *, backward: bool) -> float:
        """Of b sequences."""
        if kernel.eight_bits:
            return self._low_s(kernel, b, backward)
        return self._eager_s(kernel, b, backward) if kernel.eager else self._fused_s(kernel, b, backward)

    def _low_s(self, kernel: Attention, b: int, backward: bool) -> float:
        """The same kernel at another rate, and casts of what it reads.

        Backward computes the scores of all keys up to a query's own even where there is a window: on GB300 it took
        6.7 ms of 8,192 tokens and 1.9 of 4,096 with one of 128, where that in 16 bits took 0.86 and 0.44
        (NVIDIA/cudnn-frontend at c3552dea, benchmark/sdpa_benchmark_training/results/gpt_oss/gb300, cuDNN 9.24).
        """
        assert self.low is not None
        assert self.form is not None
        whole = replace(kernel, eight_bits=False, window=0 if backward else kernel.window)
        width = max((known for known in self.low if known <= kernel.head_dim), default=min(self.low))
        times = self.low[width].backward if backward else self.low[width].forward
        fixed_s = len(whole.calls) * self.products.kernel_s
        casts, elements = self._casts(kernel, backward)
        passes = 2 if self.form.finds_largest else 1
        copies = 1 if self.form.has_one_scale else 2
        num_bytes = b * (elements * passes * self.width + copies * self.form.quantized_bytes(elements // _ROW, _ROW))
        casting_s = num_bytes * self.traffic / self.products.bytes_per_s + casts * passes * self.products.kernel_s
        return fixed_s + (self._fused_s(whole, b, backward) - fixed_s) / times + casting_s

    @staticmethod
    def _casts(kernel: Attention, backward: bool) -> tuple[int, int]:
        """Tensors that are quantized, and their elements in one sequence: queries, keys and values, or gradients."""
        values = kernel.value_head_dim or kernel.head_dim
        if backward:
            return 1, kernel.seq_len * kernel.num_heads * values
        keys = (kernel.num_keys or kernel.seq_len) * kernel.num_key_value_heads * (kernel.head_dim + values)
        return 3, kernel.seq_len * kernel.num_heads * kernel.head_dim + keys

    def _fused_s(self, kernel: Attention, b: int, backward: bool) -> float:
        """Calls of the kernel one after the other; tiles that the mask cuts through cost as much as whole ones."""
        width = kernel.head_dim + (kernel.value_head_dim or kernel.head_dim)
        keys = kernel.computed_flops / (2 * kernel.num_heads * kernel.seq_len * width)
        share = self.share.backward if backward else self.share.forward
        share *= self.share.sustained * keys / (keys + self.half_keys)
        if kernel.head_dim < _WIDE_HEAD:
            share *= self.narrow_heads ** (_WIDE_HEAD / kernel.head_dim - 1)
        rate = self.flop_per_s * share
        times = b / rate * (_BACKWARD_PRODUCTS if backward else 1)
        return sum(flops * times + self.products.kernel_s for flops in kernel.calls)

    def _eager_s(self, kernel: Attention, b: int, backward: bool) -> float:
        """Two batched products, four in backward, and kernels that pass over the scores between them."""
        heads, queries = b * kernel.num_heads, kernel.seq_len
        keys, scores = kernel.num_keys or queries, b * kernel.num_scores
        dims = (kernel.head_dim, kernel.value_head_dim or kernel.head_dim)
        products = [product for dim in dims for product in self._products(heads, queries, keys, dim, scores)]
        made, summed = products[0::2], products[1::2]
        runs = [made[1], summed[1], summed[0], summed[0]] if backward else [made[0], summed[1]]
        if kernel.fused_softmax:
            passed = scores * self.width * _SOFTMAX_PASSES[backward]
        else:
            passed = scores * (_EAGER_PASSES * self.width + _EAGER_BYTES) * (2 if backward else 1)
        if kernel.soft_cap:
            passed += scores * _SOFT_CAP_PASSES[backward] * self.width
        if kernel.dropout:
            passed += scores * (_DROPOUT_PASSES * self.width + _MASK_BYTES)
        passing_s = passed * self.score_traffic / self.products.bytes_per_s + self.products.kernel_s
        return sum(self.products.seconds(product) for product in runs) + passing_s

    def _products(self, heads: int, queries: int, keys: int, dim: int, scores: int) -> tuple[Product, Product]:
        """One that makes scores, and one that sums over them."""
        num_bytes = self.width * (scores + heads * (queries + keys) * dim)
        scores_of, sum_over = (queries, keys, dim, heads, num_bytes), (queries, dim, keys, heads, num_bytes)
        return Product(*scores_of, operands="slices"), Product(*sum_over, operands="slices")
