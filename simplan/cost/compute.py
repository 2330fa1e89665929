"""Time of compute from a device's datasheet: a roofline over the kernels of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from simplan.cost.base import Price, Provenance
from simplan.errors import Problem, SpecError
from simplan.program.program import LayerWork, Phase
from simplan.program.split_footprint import weighted_kernels
from simplan.spec.hardware import DeviceSpec
from simplan.spec.layer import Attention, Exchange, Gemm, Kernel, Lookup, Pointwise, has_backward
from simplan.spec.software import StateBytes
from simplan.spec.training import Precision
from simplan.units import format_count, format_flop_per_s, format_rate

__all__ = ["Roofline", "roofline"]

_MATMUL_SHARE_OF_PEAK = 0.77  # where no matmul ceiling was published: the median of the 20 that were
_ATTENTION_SHARE_OF_MATMUL = 0.6  # FlashAttention-2 forward against cuBLAS on A100 (Dao 2023, figure 5)
_BANDWIDTH_SHARE = 0.85  # of the datasheet, for streaming kernels (STREAM-like tests on A100 and H100)
_LAUNCH_S = 5e-6  # a kernel launched alone takes no less on any recent GPU
_BACKWARD_ATTENTION = 2.5  # five products against two, since the scores are computed again (Dao et al. 2022)
_BACKWARD_POINTWISE = 2
_BACKWARD_EAGER = 2  # four products against two, and as many more passes over the scores
_SCORE_PASSES = 6  # scores are written, read and written with a bias, read by the softmax; weights written and read
_SOFTMAX_BYTES = 8  # the softmax in fp32, written and read
_ACTIVATION_GRADIENTS = (Phase.BACKWARD, Phase.BACKWARD_INPUT)
_BACKWARD = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
_OPTIMIZER_BYTES = 32  # Adam: read weight, gradient, two moments; write weight, two moments, zeroed gradient (fp32)
_SGD_BYTES = 16
_SCALE_BYTES = 8
_RELATIVE_STD = {Provenance.PUBLISHED: 0.2, Provenance.DATASHEET: 0.3}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of one device for one precision.

    Attributes:
        matmul_flop_per_s: What large matrix products reach.
        bytes_per_s: What streaming kernels reach.
        state: Element widths.
        optimizer: Which optimizer.
        provenance: Of the matmul rate.
    """

    matmul_flop_per_s: float
    bytes_per_s: float
    state: StateBytes
    optimizer: str
    provenance: Provenance

    def price(self, work: LayerWork) -> Price:
        """Sum over the kernels that run of max(FLOPs / rate, bytes / bandwidth, launch).

        Of a backward in two parts the first has one product of each matrix and all else but lookups, the second the
        other product, the lookups, and what reads activations and gradients once more for the weights of norms.
        Copies, the division of gradients and the optimizer stream so many bytes a parameter.
        """
        width = self._streamed_bytes(work.phase)
        if width:
            return Price(
                width * work.num_parameters / self.bytes_per_s,
                Provenance.DATASHEET,
                _RELATIVE_STD[Provenance.DATASHEET],
                f"{width} B x {format_count(work.num_parameters)} parameters / {format_rate(self.bytes_per_s)}",
            )
        all_kernels = work.layer.kernels
        indices = range(len(all_kernels)) if work.kernels is None else work.kernels
        kernels = [all_kernels[index] for index in indices if not isinstance(all_kernels[index], Exchange)]
        if work.phase is Phase.BACKWARD_WEIGHT:
            weighted = weighted_kernels(work.layer)
            kernels = [kernel for kernel in kernels if kernel in weighted]
        elif work.phase is Phase.BACKWARD_INPUT:
            kernels = [kernel for kernel in kernels if not isinstance(kernel, Lookup)]
        if work.phase in _BACKWARD:
            kernels = [kernel for kernel in kernels if has_backward(kernel)]
        flops = sum(_flops(kernel, work.phase) for kernel in kernels if isinstance(kernel, Gemm | Attention))
        return Price(
            sum(self._kernel_s(kernel, work.microbatch_size, work.phase) for kernel in kernels),
            self.provenance,
            _RELATIVE_STD[self.provenance],
            self._formula(len(kernels), flops * work.microbatch_size),
        )

    def _formula(self, num_kernels: int, flops: int) -> str:
        counted = f"{num_kernels} kernel{'s' if num_kernels != 1 else ''}"
        if not flops:
            return f"{counted} at {format_rate(self.bytes_per_s)}"
        return (
            f"{counted}, {format_count(flops)} FLOPs at up to {format_flop_per_s(self.matmul_flop_per_s)}, "
            f"the rest at {format_rate(self.bytes_per_s)}"
        )

    def _streamed_bytes(self, phase: Phase) -> int:
        """Bytes read and written for each parameter; 0 for phases that run kernels."""
        match phase:
            case Phase.GATHER_COPY | Phase.REDUCE_COPY:
                return 2 * self.state.gathered
            case Phase.SCALE:
                return _SCALE_BYTES
            case Phase.OPTIMIZER:
                return _SGD_BYTES if self.optimizer == "sgd" else _OPTIMIZER_BYTES
            case Phase.FORWARD | Phase.RECOMPUTE | Phase.BACKWARD | Phase.BACKWARD_INPUT | Phase.BACKWARD_WEIGHT:
                return 0

    def _kernel_s(self, kernel: Kernel, b: int, phase: Phase) -> float:
        width, propagates = self.state.activation, phase in _ACTIVATION_GRADIENTS
        match kernel:
            case Gemm(m=m, n=n):
                flop_s = b * kernel.computed_flops / self.matmul_flop_per_s
                elements = b * (m * n + kernel.input_elements) + kernel.weight_elements
                byte_s = elements * width / self.bytes_per_s
                return max(flop_s, byte_s, _LAUNCH_S) * (kernel.backward_products if phase is Phase.BACKWARD else 1)
            case Attention(eager=True):  # two products, four in backward, and the scores between them
                flop_s = b * kernel.computed_flops / self.matmul_flop_per_s
                byte_s = b * kernel.num_scores * (_SCORE_PASSES * width + _SOFTMAX_BYTES) / self.bytes_per_s
                return max((flop_s + byte_s) * (_BACKWARD_EAGER if propagates else 1), _LAUNCH_S)
            case Attention():
                rate = self.matmul_flop_per_s * _ATTENTION_SHARE_OF_MATMUL
                return max(b * kernel.computed_flops / rate * (_BACKWARD_ATTENTION if propagates else 1), _LAUNCH_S)
            case Pointwise(reads=reads, writes=writes):
                num_bytes = b * (reads + writes) * width * (_BACKWARD_POINTWISE if propagates else 1)
                return max(num_bytes / self.bytes_per_s, _LAUNCH_S)
            case Lookup(rows=rows, width=columns):
                num_bytes = b * rows * columns * (width + self.state.gathered)
                return max(num_bytes / self.bytes_per_s, _LAUNCH_S)
            case Exchange():
                raise AssertionError("an exchange is a message")


def _flops(kernel: Gemm | Attention, phase: Phase) -> int:
    """What a formula says of a kernel; of attention as many products as model FLOPs count."""
    if phase is not Phase.BACKWARD:
        return kernel.computed_flops
    return kernel.computed_flops * (kernel.backward_products if isinstance(kernel, Gemm) else 2)


def roofline(device: DeviceSpec, precision: Precision, state: StateBytes, optimizer: str) -> Roofline:
    """The roofline of a catalogue device.

    Raises:
        SpecError: The catalogue has no peak for the precision, or no memory bandwidth.
    """
    problems = []
    peak = device.peak_flop_per_s.get(precision)
    if peak is None and precision not in device.matmul_flop_per_s:
        known = ", ".join(sorted(device.peak_flop_per_s)) or "none"
        problems.append(
            Problem(
                field="training.precision",
                value=precision,
                rule=f"{device.id} has no published dense peak for it",
                fix=f"known: {known}; or give cluster.device.peak_flop_per_s yourself",
            )
        )
    if device.memory_bandwidth_bytes_per_s is None:
        problems.append(
            Problem(
                field="cluster.device",
                value=device.id,
                rule="has no published memory bandwidth",
                fix="give cluster.device.memory_bandwidth_bytes_per_s yourself",
            )
        )
    if problems:
        raise SpecError(problems)
    assert device.memory_bandwidth_bytes_per_s is not None
    ceiling = device.matmul_flop_per_s.get(precision)
    if ceiling is None:
        assert peak is not None
        rate, provenance = peak * _MATMUL_SHARE_OF_PEAK, Provenance.DATASHEET
    else:
        rate, provenance = ceiling, Provenance.PUBLISHED
    return Roofline(rate, device.memory_bandwidth_bytes_per_s * _BANDWIDTH_SHARE, state, optimizer, provenance)
