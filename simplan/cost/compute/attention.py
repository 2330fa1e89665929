"""Time of the attention core: fused, by kernel generation, or unfused, matmul by matmul."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from simplan.cost.compute.matmul import Matmul, MatmulRates, Operands
from simplan.cost.model import CostPart, Limit
from simplan.model.layer import Attention
from simplan.software.rates import AttentionEfficiency, LowAttention
from simplan.software.software import StateBytes
from simplan.units import format_flop_per_s, format_flops, format_time

_BACKWARD_FLOPS_RATIO = 2.5  # five matmuls against two, since the scores are recomputed (Dao et al. 2022)
_WIDE_HEAD = 128
_SCALE_PASSES = 2  # scores read and written with a scale, and again with a mask
_SOFTMAX_PASSES = (2, 3)  # reads scores and writes weights; backward reads two and writes one
_DROPOUT_PASSES = 2
_SOFT_CAP_PASSES = (6, 7)  # scaled, tanh, scaled again; the tanh of backward reads its output as well
_MASK_BYTES = 1
_ROW = 32


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Achieved rates of attention kernels.

    Attributes:
        matmuls: Rates of the BF16, FP16 or FP32 matmuls of unfused attention.
        flop_per_s: Best published rate of these matmuls, in FLOP/s.
        share: Efficiency, as a fraction of ``flop_per_s``, of a fused kernel with large head_dim and many keys per
            query.
        state: Bytes per element of tensors; ``linear`` is the format of FP8 attention.
        low: FP8 rates by head_dim; None for none.
        traffic: Traffic factor of casts; see ``FrameworkRates``.
    """

    matmuls: MatmulRates
    flop_per_s: float
    share: AttentionEfficiency
    state: StateBytes
    low: Mapping[int, LowAttention] | None = None
    traffic: float = 1.0

    def parts(self, kernel: Attention, b: int, *, backward: bool) -> list[CostPart]:
        """Returns the kernels for b sequences."""
        if kernel.eight_bits:
            return self._low(kernel, b, backward)
        return self._eager(kernel, b, backward) if kernel.eager else [self._fused(kernel, b, backward)]

    def _low(self, kernel: Attention, b: int, backward: bool) -> list[CostPart]:
        """Returns FP8 attention: the fused kernel at another rate, plus casts of its inputs.

        Backward computes the scores of all keys up to a query's own even with a sliding window. On GB300 with a window
        of 128 it took 6.7 ms for 8,192 tokens and 1.9 ms for 4,096. BF16 took 0.86 ms and 0.44 ms
        (NVIDIA/cudnn-frontend at c3552dea, benchmark/sdpa_benchmark_training/results/gpt_oss/gb300, cuDNN 9.24).
        """
        form = self.state.linear
        assert self.low is not None
        assert form is not None
        whole = replace(kernel, eight_bits=False, window=0 if backward else kernel.window)
        width = max((known for known in self.low if known <= kernel.head_dim), default=min(self.low))
        times = self.low[width].backward if backward else self.low[width].forward
        casts, elements = self._casts(kernel, backward)
        passes = 2 if form.finds_largest else 1
        copies = 1 if form.has_one_scale else 2
        quantized_bytes = copies * form.quantized_bytes(elements // _ROW, _ROW)
        num_bytes = b * (elements * passes * self.state.activation + quantized_bytes)
        return [
            self._fused(whole, b, backward, times),
            self.matmuls.streaming(f"{kernel.name}: casts", num_bytes * self.traffic, casts * passes),
        ]

    @staticmethod
    def _casts(kernel: Attention, backward: bool) -> tuple[int, int]:
        """Returns the number of quantized tensors and their elements per sequence: Q, K and V, or the gradient."""
        values = kernel.value_head_dim or kernel.head_dim
        if backward:
            return 1, kernel.seq_len * kernel.num_heads * values
        keys = (kernel.num_keys or kernel.seq_len) * kernel.num_key_value_heads * (kernel.head_dim + values)
        return 3, kernel.seq_len * kernel.num_heads * kernel.head_dim + keys

    def _fused(self, kernel: Attention, b: int, backward: bool, times: float = 1.0) -> CostPart:
        """Returns sequential fused kernels; tiles that the mask crosses cost as much as full tiles.

        Args:
            times: Rate over that of 16-bit attention.
        """
        width = kernel.head_dim + (kernel.value_head_dim or kernel.head_dim)
        keys = kernel.computed_flops / (2 * kernel.num_heads * kernel.seq_len * width)
        own, rates = self.share, self.matmuls.rates
        half_rate_keys = rates.half_rate_keys if own.half_rate_keys is None else own.half_rate_keys
        share = own.backward if backward else own.forward
        share *= own.sustained * keys / (keys + half_rate_keys)
        if kernel.head_dim < _WIDE_HEAD:
            head_dim_64_efficiency = (
                rates.head_dim_64_efficiency if own.head_dim_64_efficiency is None else own.head_dim_64_efficiency
            )
            share *= head_dim_64_efficiency ** (_WIDE_HEAD / kernel.head_dim - 1)
        rate = self.flop_per_s * share * times
        flops = b * sum(kernel.calls) * (_BACKWARD_FLOPS_RATIO if backward else 1)
        fixed_s, compute_s = len(kernel.calls) * self.matmuls.kernel_overhead_s, flops / rate
        limit = Limit.LAUNCH if fixed_s > compute_s else Limit.COMPUTE
        return CostPart(kernel.name, compute_s + fixed_s, limit, _fused_words, (flops, rate, fixed_s))

    def _eager(self, kernel: Attention, b: int, backward: bool) -> list[CostPart]:
        """Returns two batched matmuls, four in backward, and kernels over the scores between them."""
        heads, queries = b * kernel.num_heads, kernel.seq_len
        keys, scores = kernel.num_keys or queries, b * kernel.num_scores
        dims = (kernel.head_dim, kernel.value_head_dim or kernel.head_dim)
        matmuls = [matmul for dim in dims for matmul in self._matmuls(heads, queries, keys, dim, scores)]
        made, summed = matmuls[0::2], matmuls[1::2]
        name = kernel.name
        runs = (
            {
                f"{name}: weights' gradient": made[1],
                f"{name}: values' gradient": summed[1],
                f"{name}: queries' gradient": summed[0],
                f"{name}: keys' gradient": summed[0],
            }
            if backward
            else {f"{name}: scores": made[0], f"{name}: sum of values": summed[1]}
        )
        passes, launches = self._score_passes(kernel, backward)
        masks = kernel.fused_softmax or kernel.causal or kernel.dropout  # models of images have none
        factor = self.matmuls.rates.softmax_traffic_factor if masks else self.traffic
        softmax = self.matmuls.streaming(f"{name}: softmax", scores * passes * factor, launches)
        return [*(self.matmuls.part(name, matmul) for name, matmul in runs.items()), softmax]

    def _score_passes(self, kernel: Attention, backward: bool) -> tuple[int, int]:
        """Returns bytes read and written per score by kernels between the matmuls, and the number of these kernels.

        Without a fused softmax, torch scales scores, fills masked ones and computes the softmax in the precision of the
        residual stream, which under autocast takes a cast before and after it.
        """
        width, wide = self.state.activation, self.state.residual
        passes, launches = (_DROPOUT_PASSES * width + _MASK_BYTES, 1) if kernel.dropout else (0, 0)
        if kernel.soft_cap:
            passes += _SOFT_CAP_PASSES[backward] * width
        if kernel.fused_softmax:
            return passes + width * _SOFTMAX_PASSES[backward], launches + 1
        casts = 2 if wide != width else 0
        scales = 2 if kernel.causal or kernel.dropout else 1
        passes += scales * _SCALE_PASSES * width + casts * (width + wide) + _SOFTMAX_PASSES[backward] * wide
        return passes, launches + scales + casts + 1

    def _matmuls(self, heads: int, queries: int, keys: int, dim: int, scores: int) -> tuple[Matmul, Matmul]:
        """Returns the matmul that computes scores and the matmul that sums over them."""
        num_bytes = self.state.activation * (scores + heads * (queries + keys) * dim)
        scores_of, sum_over = (queries, keys, dim, heads, num_bytes), (queries, dim, keys, heads, num_bytes)
        # heads are slices of wider tensors, which begin inside of a sector if their width is not aligned
        operands: Operands = "slices" if dim % self.matmuls.rates.aligned else "whole"
        return Matmul(*scores_of, operands=operands), Matmul(*sum_over, operands=operands)


def _fused_words(flops: float, flop_per_s: float, fixed_s: float) -> str:
    fixed = f" + {format_time(fixed_s, digits=4)}" if fixed_s else ""
    return f"{format_flops(flops)} / {format_flop_per_s(flop_per_s)}{fixed}"
