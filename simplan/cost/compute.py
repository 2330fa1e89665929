"""Time of compute from a device's datasheet: a roofline over the kernels of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from simplan.cost.base import Price, Provenance
from simplan.cost.low_precision import LinearCost, LinearRates
from simplan.errors import Problem, SpecError
from simplan.program.program import LayerWork, Phase
from simplan.program.split_footprint import weighted_kernels
from simplan.spec.hardware import DeviceSpec
from simplan.spec.layer import Attention, Exchange, Gemm, Kernel, Lookup, Pointwise, has_backward
from simplan.spec.low_precision import linears
from simplan.spec.software import StateBytes
from simplan.spec.training import Precision
from simplan.units import format_bytes, format_count, format_flop_per_s, format_rate, format_time

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
        provenance: Of the matmul rates.
        linear_flop_per_s: What large products of the linear layers reach where ``state.linear`` says that they are in a
            lower precision; 0 where they are not.
    """

    matmul_flop_per_s: float
    bytes_per_s: float
    state: StateBytes
    optimizer: str
    provenance: Provenance
    linear_flop_per_s: float = 0.0

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
        low = linears(work.layer) if self.state.linear is not None else []
        linear = LinearCost()
        for kernel in kernels:
            if kernel in low:
                linear = linear.plus(self._linear_rates.cost(kernel, work.microbatch_size, work.phase))
        wide = [kernel for kernel in kernels if kernel not in low]
        flops = sum(_flops(kernel, work.phase) for kernel in wide if isinstance(kernel, Gemm | Attention))
        flops *= work.microbatch_size
        wide_s = sum(self._kernel_s(kernel, work.microbatch_size, work.phase) for kernel in wide)
        return Price(
            wide_s + linear.products_s + linear.casts_s,
            self.provenance,
            _RELATIVE_STD[self.provenance],
            self._formula(len(kernels), flops + linear.wide_flops, linear),
        )

    @property
    def _linear_rates(self) -> LinearRates:
        assert self.state.linear is not None
        return LinearRates(
            self.state.linear,
            self.state,
            self.linear_flop_per_s,
            self.matmul_flop_per_s,
            self.bytes_per_s,
            _LAUNCH_S,
        )

    def _formula(self, num_kernels: int, flops: int, linear: LinearCost) -> str:
        counted = f"{num_kernels} kernel{'s' if num_kernels != 1 else ''}"
        if not flops and not linear.flops:
            return f"{counted} at {format_rate(self.bytes_per_s)}"
        found = [counted]
        if linear.flops:
            assert self.state.linear is not None
            precision, rate = self.state.linear.precision, format_flop_per_s(self.linear_flop_per_s)
            found.append(f"{format_count(linear.flops)} FLOPs in {precision} at up to {rate}")
            moved = f"{format_bytes(linear.cast_bytes)} of {linear.num_casts} casts to {precision}"
            found.append(f"{moved} in {format_time(linear.casts_s)}")
        if flops:
            found.append(f"{format_count(flops)} FLOPs at up to {format_flop_per_s(self.matmul_flop_per_s)}")
        found.append(f"the rest at {format_rate(self.bytes_per_s)}")
        return ", ".join(found)

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
                times = b / rate * (_BACKWARD_ATTENTION if propagates else 1)
                return sum(max(flops * times, _LAUNCH_S) for flops in kernel.calls)
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
    wanted: list[Precision] = [precision] if state.linear is None else ["bf16", precision]
    problems = []
    for dtype in wanted:
        if dtype not in device.peak_flop_per_s and dtype not in device.matmul_flop_per_s:
            known = ", ".join(sorted(device.peak_flop_per_s)) or "none"
            problems.append(
                Problem(
                    field="training.precision",
                    value=precision,
                    rule=f"{device.id} has no published dense peak for {'it' if dtype == precision else dtype}",
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
    rates = [_matmul_rate(device, dtype) for dtype in wanted]
    return Roofline(
        matmul_flop_per_s=rates[0][0],
        bytes_per_s=device.memory_bandwidth_bytes_per_s * _BANDWIDTH_SHARE,
        state=state,
        optimizer=optimizer,
        provenance=rates[-1][1],
        linear_flop_per_s=rates[1][0] if len(rates) > 1 else 0.0,
    )


def _matmul_rate(device: DeviceSpec, dtype: Precision) -> tuple[float, Provenance]:
    """What large products reach: the best that was published, else a share of the peak."""
    ceiling = device.matmul_flop_per_s.get(dtype)
    if ceiling is not None:
        return ceiling, Provenance.PUBLISHED
    return device.peak_flop_per_s[dtype] * _MATMUL_SHARE_OF_PEAK, Provenance.DATASHEET
