"""Time of compute on a device without a calibration: a sum over the kernels of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.low_precision import LinearRates
from simplan.cost.compute.matmul import (
    ACTIVATION_GRADIENTS,
    GEMM_WORDS,
    WEIGHT_GRADIENTS,
    GemmKernel,
    Matmul,
    MatmulRates,
    gemm_sizes,
)
from simplan.cost.compute.traffic import KernelSet, layer_traffic
from simplan.cost.model import CostEstimate, CostPart, Limit, Provenance
from simplan.model.kernel import Chunks, PointwiseFunction, in_forward, num_chunks
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
from simplan.model.low_precision import fused_gemms, quantized_linears
from simplan.optimizers import UPDATES, UpdateName
from simplan.program.memory.split_footprint import weighted_kernels
from simplan.program.program import LayerWork, Phase, TensorUpdates
from simplan.software.software import StateBytes
from simplan.units import counted, format_rate, format_time

_EAGER_ATTENTION_CALLS = 6
_DTENSOR_CALLS = (32, 57, 82)
"""Operations of plain torch that take the host as long as DTensor's part of a matmul with its hooks, forward and
backward, and of a collective in one direction. A Llama block of torch 2.13 takes 5.5 times its plain forward and
backward more in forward and 7.7 times in backward with sequence parallelism, 3.8 and 5.4 times without; these are 101
operations (measured on a CPU with a fake process group, benchmarks/dtensor_host.py, 2026-11-30)."""
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
_ZEROED_BYTES = 4
_FP32_BYTES = 4
_NORM_PASSES, _NORM_LAUNCHES = 8, 9
"""Elements of a weight in FP32 that the norms of DoRA read and write, and kernels besides their two matmuls: the
identity (2), both upcasts, scaling, sum, norm, quotient and difference."""
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
        paces: Times of eager memory-bound functions in forward and backward, relative to their bytes at the bandwidth.
        winograd: Convolutions of 3 x 3 with stride 1 run as Winograd's algorithm (FP32).
        transposed: Convolutions whose operands and results are transposed, since they are stored channels first.
        host_call_s: See ``KernelRates``; 0 where the host launches no single kernels.
        host_call_std: Relative standard deviation of ``host_call_s``.
        dtensor: Tensor-parallel ranks hold DTensors; see ``SoftwareSpec``.
        accumulation_bytes: Bytes read and written per gradient element of a matrix to accumulate it, mean over
            microbatches.
        zeroes_gradients: The optimizer step ends with zeroed gradients; else they are freed.
        low: Rates of linear layers in the low precision of ``state.linear``; None for none.
        full: Rates of FP32 matmuls of a run in fewer bits; None for none.
        pads: True if operands of matmuls are padded to aligned sizes.
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
    paces: tuple[tuple[PointwiseFunction, tuple[float, float]], ...] = ()
    winograd: bool = False
    transposed: Transposed = "none"
    host_call_s: float = 0.0
    host_call_std: float = 0.5
    dtensor: bool = False
    accumulation_bytes: float = 0
    zeroes_gradients: bool = True
    low: MatmulRates | None = None
    full: MatmulRates | None = None
    pads: bool = False
    joined: bool = False
    weight_casts: float = 1.0
    host_bytes_per_s: float | None = None

    def cost_estimate(self, work: LayerWork) -> CostEstimate:
        """Returns the kernels that run.

        The input half of a split backward has one matmul per matrix and all other kernels except lookups. The weight
        half has the other matmul, the lookups, and passes that read activations and gradients again for the weights of
        norms. Copies, gradient division and the optimizer stream a fixed number of bytes per parameter.
        """
        if work.updates is not None:
            return self._tensor_updates(work.updates)
        if width := self._streamed_bytes(work.phase):
            host_rate = self.host_bytes_per_s if work.on_host else None
            rate, parameters = host_rate or self._streaming_rate(work.phase), work.num_parameters
            limit = Limit.MEMORY if host_rate is None else Limit.HOST
            streamed = CostPart(
                str(work.phase), width * parameters / rate, limit, _parameters_words, (width, parameters, rate)
            )
            if host_rate is not None:
                return CostEstimate.of(streamed, Provenance.DATASHEET, _HOST_STD)
            slowest = streamed.times(self.slowest, self._slowest_title)
            return CostEstimate.of(slowest, Provenance.DATASHEET, self.relative_std)
        relative_std = self.relative_std
        if work.layer.kernels_with(Role.EXPERTS):
            relative_std = max(relative_std, self.matmuls.rates.moe_std)
        parts = self._parts(work)
        if unfitted := work.layer.unfitted:
            total_s = sum([part.seconds for part in parts])
            own_s = [part.seconds * max(relative_std, _std_of(part.name, unfitted)) for part in parts]
            relative_std = sum(own_s) / total_s if total_s else relative_std
        return CostEstimate(tuple(parts), self.provenance, self._with_host(relative_std, parts, work))

    def _with_host(self, relative_std: float, parts: Iterable[CostPart], work: LayerWork) -> float:
        """Returns the relative standard deviation of parts, to which a faster or slower host contributes."""
        if not self.host_call_s:
            return relative_std
        device_s = sum([part.seconds for part in parts if part.limit is not Limit.HOST])
        host_s = self.host_calls(work) * self.host_call_s
        low_s, high_s = (max(device_s, host_s * (1 + sign * self.host_call_std)) for sign in (-1, 1))
        return math.hypot(relative_std * device_s, (high_s - low_s) / 2) / max(device_s, host_s) if high_s else 0.0

    def _tensor_updates(self, updates: TensorUpdates) -> CostEstimate:
        """Returns an update from tensor to tensor: streamed bytes, matmuls, and the host's part.

        The device waits for a host that issues kernels tensor by tensor, and always where the host waits for it.
        """
        facts = UPDATES[self.optimizer]
        parts = [self.matmuls.streaming("states and weights", updates.num_bytes, updates.num_tensors)]
        for (rows, columns, depth), number in updates.products:
            gemm = Gemm(f"orthogonalization {rows} x {columns} x {depth}", rows, columns, depth, trained=False)
            parts += [part.times(number, "matmuls") for part in self._gemm(gemm, 1, Phase.RECOMPUTE)]
        parts = self._on_slowest(parts)
        device_s, calls = sum([part.seconds for part in parts]), updates.num_tensors * facts.host_calls
        hidden_s = 0.0 if facts.synchronizes else device_s
        if (more_s := calls * self.host_call_s - hidden_s) > 0:
            numbers = calls, self.host_call_s, hidden_s
            parts.append(CostPart("waiting for the host", more_s, Limit.HOST, _host_words, numbers))
        return CostEstimate(tuple(parts), Provenance.DATASHEET, self.relative_std)

    def seconds(self, work: LayerWork) -> float:
        """Returns the seconds of ``cost_estimate``."""
        return self.cost_estimate(work).seconds

    def _parts(self, work: LayerWork) -> list[CostPart]:
        """Returns the kernels of a layer that run, with what the slowest device and the host add."""
        b, phase = work.microbatch_size, work.phase
        low, wide = self._split(running_kernels(work), work)
        parts = [part for kernel in wide for part in self._kernel(kernel, b, phase)]
        for name, (num_bytes, launches) in self._memory_bound(work).items():
            parts.append(self.matmuls.streaming(name, num_bytes * b * self.traffic, launches))
        parts += self._linears(low, work)
        parts = self._on_slowest(parts)
        if self.host_call_s:
            device_s, calls = sum([part.seconds for part in parts]), self.host_calls(work)
            if (more_s := calls * self.host_call_s - device_s) > 0:
                numbers = calls, self.host_call_s, device_s
                parts.append(CostPart("waiting for the host", more_s, Limit.HOST, _host_words, numbers))
        if work.cuts:
            overhead_s = self.matmuls.rates.gemm_split_overhead_s
            cuts = work.cuts, overhead_s
            parts.append(CostPart("GEMMs in chunks", work.cuts * overhead_s, Limit.LAUNCH, _cuts_words, cuts))
        return parts

    def _on_slowest(self, parts: list[CostPart]) -> list[CostPart]:
        """Returns parts with the wait for the slowest device."""
        if self.slowest <= 1 or not parts:
            return parts
        device_s = sum([part.seconds for part in parts])
        numbers = self.slowest, device_s
        wait = CostPart(self._slowest_title, (self.slowest - 1) * device_s, Limit.SLOWEST, _slowest_words, numbers)
        return [*parts, wait]

    @property
    def _slowest_title(self) -> str:
        return f"slowest of {self.num_devices} devices"

    def host_calls(self, work: LayerWork) -> int:
        """Returns the operations that the host issues, the larger part of which are launches of kernels."""
        low, wide = self._split(running_kernels(work), work)
        b, phase = work.microbatch_size, work.phase
        launches = sum(launches for _, launches in self._memory_bound(work).values())
        calls = launches + sum(self._calls_of(kernel, b, phase) for kernel in (*low, *wide))
        return calls + self._dtensor_calls(work)

    def _dtensor_calls(self, work: LayerWork) -> int:
        """Returns what DTensor costs the host besides, in operations of plain torch; collectives' goes to matmuls."""
        running = sum(isinstance(kernel, Gemm) for kernel in running_kernels(work))
        split = [k for k in work.layer.kernels if isinstance(k, LayerCollective) and k.axis == "tp"]
        if not (self.dtensor and split and running):
            return 0
        of_forward, of_backward, of_collective = _DTENSOR_CALLS
        backward = work.phase in _BACKWARD
        collectives = sum((k.backward if backward else k.forward) is not None for k in split)
        of_collectives = of_collective * collectives / sum(isinstance(kernel, Gemm) for kernel in work.layer.kernels)
        halves = 2 if work.phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) else 1
        return round(running * ((of_backward if backward else of_forward) + of_collectives) / halves)

    def _memory_bound(self, work: LayerWork) -> dict[str, tuple[float, int]]:
        """Returns memory-bound kernels, casts and sums of bias gradients; see ``_memory_bound``."""
        widths = self.state.activation, self.state.residual
        return _memory_bound(work, widths, self.kernel_set, self.paces)

    def _calls_of(self, kernel: Kernel, b: int, phase: Phase) -> int:
        """Returns the operations that the host issues for a matmul, attention or lookup."""
        match kernel:
            case Gemm():
                matmuls = num_chunks(kernel, b) * max(1, len(gemm_sizes(kernel, b, phase)))
                narrows = self._stored_bytes(kernel) > self.state.weight_copy > 0 and phase is Phase.FORWARD
                casts = int(narrows) if kernel.stored is None else kernel.stored.unpacking_kernels
                norms = _NORM_LAUNCHES + 2 if kernel.norm_rank and phase in (Phase.FORWARD, Phase.RECOMPUTE) else 0
                made = kernel.operands  # in forward; backward is issued by another thread
                steps = 0 if made is None else made.weight_kernels[0] + made.activation_kernels[0]
                return max(1, kernel.streams and kernel.num_groups) * matmuls + casts + norms + steps
            case Attention():
                return len(kernel.calls) * (_EAGER_ATTENTION_CALLS if kernel.eager else 1)
            case Pointwise():
                return 0  # see ``_memory_bound``
            case _:
                return 1

    def _split(self, kernels: list[Kernel], work: LayerWork) -> tuple[list[Gemm], list[Kernel]]:
        """Splits kernels into low-precision linear layers and all others."""
        form = self.state.linear
        quantized = set(quantized_linears(work.layer, form)) if self.low and form else set()
        gemms = [kernel for kernel in kernels if isinstance(kernel, Gemm)]
        low, wide = [k for k in gemms if k in quantized], [k for k in gemms if k not in quantized]
        if self.joined:
            low, wide = fused_gemms(low), fused_gemms(wide)
        return low, [*wide, *(kernel for kernel in kernels if not isinstance(kernel, Gemm))]

    def _linears(self, kernels: list[Gemm], work: LayerWork) -> Iterator[CostPart]:
        """Yields casts and matmuls of linear layers in low precision."""
        if self.low is None or not kernels:
            return
        assert self.state.linear is not None
        traffic = self.traffic * (_FUSED_CASTS if self.kernel_set == "compiled" else 1.0)
        rates = LinearRates(self.state.linear, self.state, self.low, self.matmuls, traffic, self.weight_casts)
        for kernel in kernels:
            yield from rates.parts(kernel, work.microbatch_size, work.phase)
            yield from self._weights(kernel, work.microbatch_size, work.phase)

    def _streaming_rate(self, phase: Phase) -> float:
        """Returns the bytes per second of a phase over parameters."""
        rates, is_fused = self.matmuls, not self.optimizer.endswith("_foreach")
        if phase is not Phase.OPTIMIZER or rates.num_sms is None or not is_fused:
            return rates.bytes_per_s
        return min(rates.bytes_per_s, rates.num_sms * rates.rates.update_bytes_per_s)

    def _streamed_bytes(self, phase: Phase) -> float:
        """Returns the bytes read and written per parameter; 0 for phases that run kernels."""
        match phase:
            case Phase.GATHER_COPY | Phase.REDUCE_COPY:
                return 2 * self.state.gathered
            case Phase.ACCUMULATE:
                return int(_ACCUMULATE_BYTES * self.state.update_fraction)
            case Phase.SCALE:
                return int(_SCALE_BYTES * self.state.update_fraction)
            case Phase.OPTIMIZER:
                facts, fraction = UPDATES[self.optimizer], self.state.update_fraction
                if facts.by_tensor:
                    return facts.update_bytes(fraction, self.state.widths())
                freed = 0 if self.zeroes_gradients else _ZEROED_BYTES
                return int((facts.streamed_bytes - freed) * fraction) - self.state.saved_update_bytes
            case Phase.NORM:
                return int(_NORM_BYTES * self.state.update_fraction)
            case Phase.FORWARD | Phase.RECOMPUTE | Phase.BACKWARD | Phase.BACKWARD_INPUT | Phase.BACKWARD_WEIGHT:
                return 0

    def _kernel(self, kernel: Kernel, b: int, phase: Phase) -> Iterable[CostPart]:
        """Returns the parts of a kernel for b sequences."""
        match kernel:
            case Gemm():
                return self._gemm(kernel, b, phase)
            case Attention():
                return self.attention.parts(kernel, b, backward=phase in ACTIVATION_GRADIENTS)
            case Pointwise():
                return ()  # see ``_memory_bound``
            case Lookup(rows=rows, width=columns):
                num_bytes = b * rows * columns * (self.state.activation + self.state.gathered)
                return (self.matmuls.streaming(kernel.name, num_bytes),)
            case LayerCollective():
                raise AssertionError("a collective is no compute")

    def _gemm(self, kernel: Gemm, b: int, phase: Phase) -> Iterator[CostPart]:
        rates = self.matmuls if self.full is None or not kernel.full_precision else self.full
        launches_s = rates.launches_s(kernel.num_groups, kernel.streams)
        yield from self._unpacking(kernel, b, phase)
        yield from self._norms(kernel, phase)
        yield from self._operands(kernel, b, phase)
        yield from self._merging(kernel, phase)
        for name, matmul in self._matmuls(kernel, b, phase).items():
            part = rates.part(kernel.name + GEMM_WORDS[name], matmul, launches_s)
            yield part.times(num_chunks(kernel, b), "chunks")
        yield from self._weights(kernel, b, phase)
        yield from self._transposes(kernel, b, phase)

    def _unpacking(self, kernel: Gemm, b: int, phase: Phase) -> Iterator[CostPart]:
        """Yields the kernels that unpack a frozen weight before each of its matmuls."""
        form = kernel.stored
        forward = phase in (Phase.FORWARD, Phase.RECOMPUTE)
        once = form is not None and (form.keeps_weight or kernel.merged_rank > 0)
        if form is None or not gemm_sizes(kernel, b, phase) or (once and not forward):
            return
        num_bytes = form.unpacked_traffic(kernel.num_groups * kernel.n, kernel.k, self._operand_bytes(kernel))
        if form.quantizes_input and forward:  # INT8 input, INT32 result
            rows = b * kernel.m
            num_bytes = rows * (kernel.k * (1 + self.state.activation) + kernel.n * (4 + self.state.activation))
        yield self.matmuls.streaming(f"{kernel.name}: weight unpacked", num_bytes, form.unpacking_kernels)

    def _norms(self, kernel: Gemm, phase: Phase) -> Iterator[CostPart]:
        """Yields the norms of a weight's rows with its adapter, once per microbatch in forward and recomputation."""
        n, k, rank = kernel.n, kernel.k, kernel.norm_rank
        if not rank or phase not in (Phase.FORWARD, Phase.RECOMPUTE):
            return
        for columns, depth in ((rank, k), (n, rank)):
            elements = k * (depth + columns) + columns * depth
            matmul = Matmul(k, columns, depth, 1, elements * self.state.activation)
            yield self.matmuls.part(f"{kernel.name}: norms", matmul, self.matmuls.launches_s(1, 0))
        form, width = kernel.stored, self._operand_bytes(kernel)
        unpacked = 0 if form is None else form.unpacked_traffic(n, k, width)
        launches = _NORM_LAUNCHES + (0 if form is None else form.unpacking_kernels)
        # the identity is written, and cast; change and weight are upcast; the change is scaled, added, summed by row
        own = self.state.parameter
        num_bytes = (
            k * k * (own + (own + width) * (own != width)) + n * k * (2 * width + _FP32_BYTES * _NORM_PASSES) + unpacked
        )
        yield self.matmuls.streaming(f"{kernel.name}: norms, by element", num_bytes, launches)

    def _operands(self, kernel: Gemm, b: int, phase: Phase) -> Iterator[CostPart]:
        """Yields the kernels that make a matmul's input and, once per microbatch, its weight."""
        made, is_backward = kernel.operands, phase not in (Phase.FORWARD, Phase.RECOMPUTE)
        if made is None:
            return
        if made.activations is not None and (not is_backward or phase in ACTIVATION_GRADIENTS):
            num_bytes, kernels = made.activations[is_backward] * b * kernel.m * kernel.k, made.activation_kernels
            yield self.matmuls.streaming(f"{kernel.name}: input made", num_bytes, kernels[is_backward])
        if not is_backward or phase in WEIGHT_GRADIENTS:
            num_bytes, kernels = made.weights[is_backward] * kernel.weight_elements, made.weight_kernels
            yield self.matmuls.streaming(f"{kernel.name}: weight made", num_bytes, kernels[is_backward])

    def _merging(self, kernel: Gemm, phase: Phase) -> Iterator[CostPart]:
        """Yields sums of weights and their adapters, a batched matmul each, and in backward the adapters' gradients."""
        n, k, rank, groups = kernel.n, kernel.k, kernel.merged_rank, kernel.num_groups
        forward = phase in (Phase.FORWARD, Phase.RECOMPUTE)
        if not rank or not (forward or phase in WEIGHT_GRADIENTS):
            return
        width = self._operand_bytes(kernel)
        sizes = [(n, k, rank)] if forward else [(n, rank, k), (rank, k, n)]
        for rows, columns, depth in sizes:
            elements = rows * depth + depth * columns + rows * columns * (1 + forward)
            matmul = Matmul(rows, columns, depth, groups, groups * elements * width)
            yield self.matmuls.part(f"{kernel.name}: adapters merged", matmul, self.matmuls.launches_s(groups, 0))

    def _operand_bytes(self, kernel: Gemm) -> int:
        """Returns the bytes per element of a matmul's operands."""
        base = self.state.base
        return self.state.activation if base is None or kernel.stored is None else base.compute_bytes

    def _weights(self, kernel: Gemm, b: int, phase: Phase) -> Iterator[CostPart]:
        """Yields weight copies before matmuls, and gradient accumulation after them."""
        copied, num = 0, num_chunks(kernel, b)
        added: float = 0
        # autocast keeps the copy of a parameter, but not those that the function of a recomputed chunk makes
        apart = kernel.chunks is not None and not kernel.chunks.in_forward
        stored = self._stored_bytes(kernel)
        copies = stored > self.state.weight_copy > 0 and (kernel.trained or not apart) and kernel.stored is None
        if copies and (phase is Phase.FORWARD or (apart and phase is Phase.RECOMPUTE)):
            copied = (num if apart else 1) * (stored + self.state.weight_copy)
        if (kernel.trained or kernel.operands) and (
            phase in WEIGHT_GRADIENTS or (in_forward(kernel) and phase is Phase.FORWARD)
        ):
            added = self.accumulation_bytes if kernel.chunks is None else num * self._added_bytes(kernel.chunks)
        for what, width in (("copy of the weight", copied), ("weight gradient, accumulated", added)):
            if width:
                yield self.matmuls.streaming(f"{kernel.name}: {what}", kernel.weight_elements * width, 0)

    def _stored_bytes(self, kernel: Gemm) -> int:
        """Returns the bytes of an element of a matrix between steps."""
        return int(self.state.parameter if kernel.trained or kernel.operands else self.state.frozen)

    def _added_bytes(self, chunks: Chunks) -> int:
        """Returns the bytes per element to add a chunk's gradient of the weight to those of earlier chunks."""
        own, total = self.state.matmul_gradient or self.state.activation, self.state.residual
        if chunks.fused:  # added in FP32, by the matmul itself if the sum is FP32
            return 2 * _FP32_BYTES if total == _FP32_BYTES else own + 2 * _FP32_BYTES + 2 * total
        if chunks.in_place and own == total:
            return own + 2 * self.state.accumulated
        return (own + total) * (own != total) + 3 * total

    def _matmuls(self, kernel: Gemm, b: int, phase: Phase) -> dict[GemmKernel, Matmul]:
        """Returns the forward matmul, or the input-gradient and weight-gradient matmuls of backward."""
        rows = b / num_chunks(kernel, b)
        elements = rows * (kernel.m * kernel.n + kernel.input_elements) + kernel.weight_elements
        num_bytes = elements * self._operand_bytes(kernel)
        operands: Literal["whole", "padded"] = "padded" if kernel.image_elements or self.pads else "whole"
        sizes = gemm_sizes(kernel, b, phase)
        speeds = {name: _WINOGRAD if self.winograd and _fits_winograd(kernel, name) else 1.0 for name in sizes}
        return {
            name: Matmul(rows, columns, depth / speeds[name], kernel.num_groups, num_bytes, operands)
            for name, (rows, columns, depth) in sizes.items()
        }

    def _transposes(self, kernel: Gemm, b: int, phase: Phase) -> Iterator[CostPart]:
        """Yields transposes of input and output of each matmul of a convolution."""
        if not kernel.image_elements or self.transposed == "none":
            return
        num_bytes = 2 * b * (kernel.m * kernel.n + kernel.image_elements) * self.state.activation
        matmuls = len(gemm_sizes(kernel, b, phase))
        if self.transposed == "weight_gradients":
            matmuls = int(phase in WEIGHT_GRADIENTS)
        if not matmuls:
            return
        rates = self.matmuls
        if rates.num_sms is not None:
            slower = min(rates.bytes_per_s, rates.num_sms * rates.rates.transpose_bytes_per_s)
            rates = replace(rates, bytes_per_s=slower)
        yield rates.streaming(f"{kernel.name}: transposes", matmuls * num_bytes, 2 * matmuls)


def _fits_winograd(kernel: Gemm, name: GemmKernel) -> bool:
    """True for outputs and gradients of inputs of a 3 x 3 convolution with stride 1."""
    is_weight_gradient = name == "linear_weight_gradient"
    return not is_weight_gradient and kernel.image_elements > 0 and kernel.k * kernel.m == 9 * kernel.image_elements


def _memory_bound(
    work: LayerWork,
    widths: tuple[int, int],
    kernel_set: KernelSet,
    paces: tuple[tuple[PointwiseFunction, tuple[float, float]], ...],
) -> dict[str, tuple[float, int]]:
    """Returns bytes for one sequence, and launches, of the memory-bound kernels that run in a phase, by name."""
    layer, phase, kernels = work.layer, work.phase, work.kernels
    b = 1 if layer.loss_chunks is None else work.microbatch_size  # on which the number of chunks depends
    key = ("memory bound", phase, kernels, widths, kernel_set, paces, b)
    if key in layer.derived:
        known: dict[str, tuple[float, int]] = layer.derived[key]
        return known
    backward, weights = phase in ACTIVATION_GRADIENTS, phase in WEIGHT_GRADIENTS
    found: dict[str, tuple[float, int]] = {}
    traffic, slower = layer_traffic(layer, *widths, kernel_set), {} if kernel_set == "compiled" else dict(paces)
    for index in running_indices(LayerWork(layer, phase, 1, 0, kernels)):
        own, times = traffic[index], num_chunks(layer.kernels[index], b)
        num_bytes = own.backward_bytes if backward else own.forward_bytes
        launches = times * (own.backward_launches if backward else own.forward_launches)
        if weights and own.bias_bytes:
            num_bytes += own.bias_bytes
            launches += times
        if num_bytes or launches:
            kernel = layer.kernels[index]
            name = kernel.name if isinstance(kernel, Pointwise) else f"{kernel.name}: casts, copies and biases"
            if isinstance(kernel, Pointwise):
                num_bytes *= kernel.passes * slower.get(kernel.like, (1.0, 1.0))[backward]
            before = found.get(name, (0.0, 0))
            found[name] = before[0] + num_bytes, before[1] + launches
    layer.derived[key] = found
    return found


def _std_of(part: str, unfitted: Mapping[str, float]) -> float:
    """Relative standard deviation of a part, whose name begins with that of its kernel; 0 for that of the device."""
    known = unfitted.get(part)
    if known is None and part.endswith(_GEMM_ENDS):
        known = next((unfitted[part.removesuffix(end)] for end in _GEMM_ENDS if part.removesuffix(end) in unfitted), 0)
    return known or 0.0


_GEMM_ENDS = tuple(word for word in GEMM_WORDS.values() if word)


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


def _parameters_words(width: float, num_parameters: int, bytes_per_s: float) -> str:
    return f"{width} B x {num_parameters:,} parameters / {format_rate(bytes_per_s, digits=4)}"


def _slowest_words(slowest: float, device_s: float) -> str:
    return f"{slowest - 1:.4g} x {format_time(device_s, digits=4)}"


def _host_words(calls: int, call_s: float, device_s: float) -> str:
    return f"{counted(calls, 'operation')} x {format_time(call_s, digits=4)} - {format_time(device_s, digits=4)}"


def _cuts_words(cuts: int, overhead_s: float) -> str:
    return f"{counted(cuts, 'cut')} x {format_time(overhead_s, digits=4)}"
