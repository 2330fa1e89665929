"""Time of compute on a device without a calibration: a sum over the kernels of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.low_precision import LinearCost, LinearRates
from simplan.cost.compute.matmul import (
    ACTIVATION_GRADIENTS,
    WEIGHT_GRADIENTS,
    GemmKernel,
    Matmul,
    MatmulRates,
    gemm_sizes,
)
from simplan.cost.compute.traffic import KernelSet, layer_traffic
from simplan.cost.model import CostEstimate, Provenance
from simplan.model.fused_gemms import fused_gemms
from simplan.model.kernel import Chunks, in_forward, num_chunks
from simplan.model.layer import (
    Attention,
    Gemm,
    Kernel,
    LayerCollective,
    Lookup,
    Pointwise,
    Role,
    has_backward,
)
from simplan.model.low_precision import quantized_linears
from simplan.program.memory.split_footprint import weighted_kernels
from simplan.program.program import LayerWork, Phase
from simplan.software.software import StateBytes
from simplan.training import UPDATES, UpdateName
from simplan.units import counted, format_bytes, format_count, format_flop_per_s, format_rate, format_time

_EAGER_ATTENTION_CALLS = 6
_FUSED_CASTS = 0.6
"""Bytes of casts to 8 bits that are compiled, relative to single kernels: of 7 bytes per element of 16 bits (read for
the largest, read for the cast, written, and written transposed with its read) a fused kernel before saves about 3."""
Transposed = Literal["none", "weight_gradients", "all"]
"""Convolutions before and after which images are transposed."""
_WINOGRAD = 1.5
"""Speed of a 3 x 3 convolution with stride 1 in FP32 as Winograd's algorithm, relative to a matmul: 2.25 times fewer
multiplications, minus transforms (Lavin and Gray 2016, arXiv:1509.09308, section 4.1 and table 5)."""
_BACKWARD = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
_SCALE_BYTES = 8
_NORM_BYTES = 4
_ACCUMULATE_BYTES = 12
_FP32_BYTES = 4
_HOST_STD = 1.5
"""Relative standard deviation of updates on the host: with bound threads and native kernels they reach the bandwidth of
the host's memory within 5 %, without them they take 5 times as long (deepspeedai/DeepSpeed issue 6834)."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Kernel costs of one device, in one precision, as run by one framework.

    Attributes:
        matmuls: Rates of matmuls in the precision of activations.
        attention: Rates of the attention core.
        state: Bytes per element of tensors.
        provenance: Source of the matmul rate.
        relative_std: Relative standard deviation of estimates.
        slowest: Time of the slowest device over the mean of all devices.
        num_devices: Number of these devices, for formulas.
        traffic: See ``FrameworkRates``.
        kernel_set: Kernels of memory-bound operators (``simplan.cost.compute.traffic``).
        winograd: Convolutions of 3 x 3 with stride 1 run as Winograd's algorithm (FP32).
        transposed: Convolutions whose operands and results are transposed, since they are stored channels first.
        host_call_s: See ``KernelRates``; 0 where the host launches no single kernels.
        accumulation_bytes: Bytes read and written per gradient element of a matrix to accumulate it.
        low: Rates of linear layers in the low precision of ``state.linear``; None for none.
        joined: True if matrices with the same input are fused; see ``LayerImplementation.fused_gemms``.
        weight_casts: Fraction of the microbatches in which weights of low-precision linear layers are cast.
        host_bytes_per_s: See ``host_memory_rate``; None for none.
    """

    matmuls: MatmulRates
    attention: AttentionRates
    state: StateBytes
    optimizer: UpdateName
    provenance: Provenance
    relative_std: float
    slowest: float = 1.0
    num_devices: int = 1
    traffic: float = 1.0
    kernel_set: KernelSet = "single"
    winograd: bool = False
    transposed: Transposed = "none"
    host_call_s: float = 0.0
    accumulation_bytes: int = 0
    low: MatmulRates | None = None
    joined: bool = False
    weight_casts: float = 1.0
    host_bytes_per_s: float | None = None

    def cost_estimate(self, work: LayerWork) -> CostEstimate:
        """Returns the sum over the kernels that run.

        The input half of a split backward has one matmul per matrix and all other kernels except lookups. The weight
        half has the other matmul, the lookups, and passes that read activations and gradients again for the weights of
        norms. Copies, gradient division and the optimizer stream a fixed number of bytes per parameter.
        """
        if width := self._streamed_bytes(work.phase):
            of_host = self._host_rate(work) is not None
            where = " (memory of the host)" if of_host else self._slowest_words()
            rate = format_rate(self._host_rate(work) or self.matmuls.bytes_per_s)
            return CostEstimate(
                self.seconds(work),
                Provenance.DATASHEET,
                _HOST_STD if of_host else self.relative_std,
                f"{width} B x {format_count(work.num_parameters)} parameters / {rate}{where}",
            )
        relative_std = self.relative_std
        if work.layer.kernels_with(Role.EXPERTS):
            relative_std = max(relative_std, self.matmuls.rates.moe_std)
        return CostEstimate(self.seconds(work), self.provenance, relative_std, self._formula(work))

    def _slowest_words(self) -> str:
        """Returns the factor of the slowest device for formulas; empty for 1."""
        return f" x {self.slowest:.3f} (slowest of {self.num_devices})" if self.slowest > 1 else ""

    def seconds(self, work: LayerWork) -> float:
        """Returns the seconds of ``cost_estimate`` without a formula."""
        width = self._streamed_bytes(work.phase)
        if width:
            num_bytes = width * work.num_parameters
            host_rate = self._host_rate(work)
            return num_bytes / host_rate if host_rate else self.slowest * num_bytes / self.matmuls.bytes_per_s
        low, wide = self._split(running_kernels(work), work)
        linear = self._linear_cost(low, work)
        wide_s = sum(self._kernel_s(kernel, work.microbatch_size, work.phase) for kernel in wide)
        device_s = self.slowest * (wide_s + self._memory_bound_s(work) + linear.matmuls_s + linear.casts_s)
        host_s = self.host_calls(work) * self.host_call_s
        return max(device_s, host_s) + work.cuts * self.matmuls.rates.gemm_split_overhead_s

    def host_calls(self, work: LayerWork) -> int:
        """Returns the operations that the host issues, the larger part of which are launches of kernels."""
        low, wide = self._split(running_kernels(work), work)
        b, phase = work.microbatch_size, work.phase
        return self._memory_bound(work)[1] + sum(self._calls_of(kernel, b, phase) for kernel in (*low, *wide))

    def _memory_bound_s(self, work: LayerWork) -> float:
        """Returns seconds of memory-bound kernels, casts and sums of bias gradients."""
        num_bytes, launches = self._memory_bound(work)
        num_bytes *= work.microbatch_size * self.traffic
        return num_bytes / self.matmuls.bytes_per_s + launches * self.matmuls.kernel_overhead_s

    def _memory_bound(self, work: LayerWork) -> tuple[float, int]:
        widths = self.state.activation, self.state.residual
        return _memory_bound(work, widths, self.kernel_set)

    def _calls_of(self, kernel: Kernel, b: int, phase: Phase) -> int:
        """Returns the operations that the host issues for a matmul, attention or lookup."""
        match kernel:
            case Gemm():
                matmuls = num_chunks(kernel, b) * max(1, len(gemm_sizes(kernel, b, phase)))
                casts = bool(self.state.weight_copy) and phase is Phase.FORWARD
                return max(1, kernel.streams and kernel.num_groups) * matmuls + casts
            case Attention():
                return len(kernel.calls) * (_EAGER_ATTENTION_CALLS if kernel.eager else 1)
            case Pointwise():
                return 0  # see ``_memory_bound``
            case _:
                return 1

    def _host_rate(self, work: LayerWork) -> float | None:
        """Returns bytes per second for work of a CPU that is not the device; None for work of the device."""
        return self.host_bytes_per_s if work.on_host else None

    def _split(self, kernels: list[Kernel], work: LayerWork) -> tuple[list[Gemm], list[Kernel]]:
        """Splits kernels into low-precision linear layers and all others."""
        form = self.state.linear
        quantized = set(quantized_linears(work.layer, form)) if self.low and form else set()
        gemms = [kernel for kernel in kernels if isinstance(kernel, Gemm)]
        low, wide = [k for k in gemms if k in quantized], [k for k in gemms if k not in quantized]
        if self.joined:
            low, wide = fused_gemms(low), fused_gemms(wide)
        return low, [*wide, *(kernel for kernel in kernels if not isinstance(kernel, Gemm))]

    def _linear_cost(self, kernels: list[Gemm], work: LayerWork) -> LinearCost:
        """Returns the cost of linear layers in low precision."""
        total = LinearCost()
        if self.low is None or not kernels:
            return total
        assert self.state.linear is not None
        traffic = self.traffic * (_FUSED_CASTS if self.kernel_set == "compiled" else 1.0)
        rates = LinearRates(self.state.linear, self.state, self.low, self.matmuls, traffic, self.weight_casts)
        for kernel in kernels:
            total = total.plus(rates.cost(kernel, work.microbatch_size, work.phase))
            total = total.plus(LinearCost(matmuls_s=self._weights_s(kernel, work.microbatch_size, work.phase)))
        return total

    def _formula(self, work: LayerWork) -> str:
        low, wide = self._split(running_kernels(work), work)
        linear = self._linear_cost(low, work)
        flops = sum(_flops(kernel, work.phase) for kernel in wide if isinstance(kernel, Gemm | Attention))
        flops = flops * work.microbatch_size + linear.wide_flops
        found, bytes_per_s = [counted(len(low) + len(wide), "kernel")], format_rate(self.matmuls.bytes_per_s)
        if not flops and not linear.flops:
            return f"{found[0]} at {bytes_per_s}{self._slowest_words()}"
        if linear.flops:
            assert self.state.linear is not None
            assert self.low is not None
            precision, rate = self.state.linear.precision, format_flop_per_s(self.low.flop_per_s)
            found.append(f"{format_count(linear.flops)} FLOPs in {precision} at up to {rate}")
            moved = f"{format_bytes(linear.cast_bytes)} of {linear.num_casts} casts to {precision}"
            found.append(f"{moved} in {format_time(linear.casts_s)}")
        if flops:
            found.append(f"{format_count(flops)} FLOPs at up to {format_flop_per_s(self.matmuls.flop_per_s)}")
        found.append(f"the rest at {bytes_per_s}")
        if self.slowest > 1:
            found.append(f"all{self._slowest_words()}")
        if work.cuts:
            found.append(
                f"{work.cuts} x {format_time(self.matmuls.rates.gemm_split_overhead_s)} to split GEMMs into chunks"
            )
        return ", ".join(found)

    def _streamed_bytes(self, phase: Phase) -> int:
        """Returns the bytes read and written per parameter; 0 for phases that run kernels."""
        match phase:
            case Phase.GATHER_COPY | Phase.REDUCE_COPY:
                return 2 * self.state.gathered
            case Phase.ACCUMULATE:
                return int(_ACCUMULATE_BYTES * self.state.update_fraction)
            case Phase.SCALE:
                return int(_SCALE_BYTES * self.state.update_fraction)
            case Phase.OPTIMIZER:
                return int(UPDATES[self.optimizer].streamed_bytes * self.state.update_fraction)
            case Phase.NORM:
                return int(_NORM_BYTES * self.state.update_fraction)
            case Phase.FORWARD | Phase.RECOMPUTE | Phase.BACKWARD | Phase.BACKWARD_INPUT | Phase.BACKWARD_WEIGHT:
                return 0

    def _kernel_s(self, kernel: Kernel, b: int, phase: Phase) -> float:
        match kernel:
            case Gemm():
                matmuls = self._matmuls(kernel, b, phase)
                launches_s = self.matmuls.launches_s(kernel.num_groups, kernel.streams)
                more_s = len(matmuls) * (launches_s - self.matmuls.kernel_overhead_s)
                extra_s = self._weights_s(kernel, b, phase) + self._transposes_s(kernel, b, phase)
                return num_chunks(kernel, b) * sum(map(self.matmuls.seconds, matmuls)) + more_s + extra_s
            case Attention():
                return self.attention.seconds(kernel, b, backward=phase in ACTIVATION_GRADIENTS)
            case Pointwise():
                return 0.0  # see ``_memory_bound``
            case Lookup(rows=rows, width=columns):
                return self._streaming_s(b * rows * columns * (self.state.activation + self.state.gathered))
            case LayerCollective():
                raise AssertionError("a collective is no compute")

    def _weights_s(self, kernel: Gemm, b: int, phase: Phase) -> float:
        """Returns the seconds of weight copies before matmuls, and of gradient accumulation after them."""
        width, num = 0, num_chunks(kernel, b)
        # autocast keeps the copy of a parameter, but not those that the function of a recomputed chunk makes
        apart = kernel.chunks is not None and not kernel.chunks.in_forward
        if self.state.weight_copy and (phase is Phase.FORWARD or (apart and phase is Phase.RECOMPUTE)):
            width += (num if apart else 1) * (int(self.state.parameter) + self.state.weight_copy)
        if kernel.trained and (phase in WEIGHT_GRADIENTS or (in_forward(kernel) and phase is Phase.FORWARD)):
            width += self.accumulation_bytes if kernel.chunks is None else num * self._added_bytes(kernel.chunks)
        return kernel.weight_elements * width / self.matmuls.bytes_per_s

    def _added_bytes(self, chunks: Chunks) -> int:
        """Returns the bytes per element to add a chunk's gradient of the weight to those of earlier chunks."""
        own, total = self.state.matmul_gradient or self.state.activation, self.state.residual
        if chunks.fused:  # added in FP32, by the matmul itself if the sum is FP32
            return 2 * _FP32_BYTES if total == _FP32_BYTES else own + 2 * _FP32_BYTES + 2 * total
        if chunks.in_place and own == total:
            return own + 2 * self.state.accumulated
        return (own + total) * (own != total) + 3 * total

    def _streaming_s(self, num_bytes: float, launches: int = 1) -> float:
        return num_bytes / self.matmuls.bytes_per_s + launches * self.matmuls.kernel_overhead_s

    def _matmuls(self, kernel: Gemm, b: int, phase: Phase) -> list[Matmul]:
        """Returns the forward matmul, or the input-gradient and weight-gradient matmuls of backward."""
        rows = b / num_chunks(kernel, b)
        elements = rows * (kernel.m * kernel.n + kernel.input_elements) + kernel.weight_elements
        num_bytes = elements * self.state.activation
        operands: Literal["whole", "padded"] = "padded" if kernel.image_elements else "whole"
        sizes = gemm_sizes(kernel, b, phase)
        speeds = {name: _WINOGRAD if self.winograd and _fits_winograd(kernel, name) else 1.0 for name in sizes}
        return [
            Matmul(rows, columns, depth / speeds[name], kernel.num_groups, num_bytes, operands)
            for name, (rows, columns, depth) in sizes.items()
        ]

    def _transposes_s(self, kernel: Gemm, b: int, phase: Phase) -> float:
        """Returns the seconds to transpose input and output of each matmul of a convolution."""
        if not kernel.image_elements or self.transposed == "none":
            return 0.0
        num_bytes = 2 * b * (kernel.m * kernel.n + kernel.image_elements) * self.state.activation
        matmuls = len(gemm_sizes(kernel, b, phase))
        if self.transposed == "weight_gradients":
            matmuls = int(phase in WEIGHT_GRADIENTS)
        rates = self.matmuls
        bytes_per_s = rates.bytes_per_s
        if rates.num_sms is not None:
            bytes_per_s = min(bytes_per_s, rates.num_sms * rates.rates.transpose_bytes_per_s)
        return matmuls * (num_bytes / bytes_per_s + 2 * rates.kernel_overhead_s)


def _fits_winograd(kernel: Gemm, name: GemmKernel) -> bool:
    """True for outputs and gradients of inputs of a 3 x 3 convolution with stride 1."""
    is_weight_gradient = name == "linear_weight_gradient"
    return not is_weight_gradient and kernel.image_elements > 0 and kernel.k * kernel.m == 9 * kernel.image_elements


def _memory_bound(work: LayerWork, widths: tuple[int, int], kernel_set: KernelSet) -> tuple[float, int]:
    """Returns bytes for one sequence, and launches, of the memory-bound kernels that run in a phase."""
    layer, phase, kernels = work.layer, work.phase, work.kernels
    b = 1 if layer.loss_chunks is None else work.microbatch_size  # on which the number of chunks depends
    key = ("memory bound", phase, kernels, widths, kernel_set, b)
    if key in layer.derived:
        known: tuple[float, int] = layer.derived[key]
        return known
    backward, weights = phase in ACTIVATION_GRADIENTS, phase in WEIGHT_GRADIENTS
    num_bytes, launches = 0.0, 0
    traffic = layer_traffic(layer, *widths, kernel_set)
    for index in running_indices(LayerWork(layer, phase, 1, 0, kernels)):
        own, times = traffic[index], num_chunks(layer.kernels[index], b)
        num_bytes += own.backward_bytes if backward else own.forward_bytes
        launches += times * (own.backward_launches if backward else own.forward_launches)
        if weights and own.bias_bytes:
            num_bytes += own.bias_bytes
            launches += times
    layer.derived[key] = num_bytes, launches
    return num_bytes, launches


def running_kernels(work: LayerWork) -> list[Kernel]:
    """Returns the kernels of a layer that run in a phase, without collectives."""
    return [work.layer.kernels[index] for index in running_indices(work)]


def running_indices(work: LayerWork) -> list[int]:
    """Returns the indices of the kernels of a layer that run in a phase, without collectives."""
    kernels = work.layer.kernels
    indices = range(len(kernels)) if work.kernels is None else work.kernels
    running = [index for index in indices if not isinstance(kernels[index], LayerCollective)]
    if work.phase is Phase.BACKWARD_WEIGHT:
        weighted = weighted_kernels(work.layer)
        running = [index for index in running if kernels[index] in weighted]
    elif work.phase is Phase.BACKWARD_INPUT:
        running = [index for index in running if not isinstance(kernels[index], Lookup)]
    if work.phase in _BACKWARD:
        running = [index for index in running if has_backward(kernels[index])]
    return running


def _flops(kernel: Gemm | Attention, phase: Phase) -> int:
    """Returns the FLOPs of a kernel for formulas; attention's backward counts as many matmuls as model FLOPs do."""
    if in_forward(kernel) and isinstance(kernel, Gemm):
        return kernel.computed_flops * (1 + kernel.backward_matmuls)
    if phase is not Phase.BACKWARD:
        return kernel.computed_flops
    return kernel.computed_flops * (kernel.backward_matmuls if isinstance(kernel, Gemm) else 2)
