"""Kernel costs of a device of the catalog for a framework."""

from __future__ import annotations

import math

from simplan.cluster.hardware import DeviceSpec, Dtype
from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.kernels import KernelCost, Transposed
from simplan.cost.compute.matmul import MatmulRates
from simplan.cost.compute.traffic import KernelSet
from simplan.cost.known import Known
from simplan.cost.model import Provenance
from simplan.errors import Problem, SpecError
from simplan.optimizers import UpdateName
from simplan.software.rates import AttentionEfficiency, FrameworkRates, KernelRates, low_attention
from simplan.software.software import SoftwareSpec, StateBytes
from simplan.training import Precision

_SIXTEEN_BITS: tuple[Dtype, ...] = ("bf16", "fp16")
_FP4_BITS = 4
_UNKNOWN_SHARE = AttentionEfficiency(forward=0.6, backward=0.5)  # FlashAttention-2 on A100 (Dao 2023, figures 5 and 6)


def kernel_cost(
    device: DeviceSpec,
    precision: Precision,
    state: StateBytes,
    optimizer: UpdateName,
    software: SoftwareSpec,
    *,
    num_devices: int,
    shards_parameters: bool,
    num_microbatches: int = 1,
    host_bytes_per_s: float | None = None,
    known: Known | None = None,
) -> KernelCost:
    """Returns the kernel costs of a device of the catalog.

    Args:
        device, precision, state, optimizer, software: See ``KernelCost``.
        num_devices: Number of devices that wait for each other.
        shards_parameters: True if FSDP reduces gradients; their accumulation is then part of FSDP's copies.
        num_microbatches: Microbatches per step, over which casts of weights that run once per step are spread.
        host_bytes_per_s: See ``KernelCost``.
        known: What fitted runs say of the job; None for deviations on known ground.

    Raises:
        SpecError: The catalog has no peak for the precision, or no memory bandwidth.
    """
    wanted: list[Precision] = [precision] if state.linear is None else ["bf16", precision]
    base = state.base
    in_full = base is not None and not base.autocast and precision in _SIXTEEN_BITS
    checked: list[Precision] = [*wanted, "fp32"] if in_full else wanted
    _check(device, precision, checked)
    rates, stack = device.kernels, software.rates
    (ceiling, provenance), *lower = [_ceiling(device, dtype) for dtype in wanted]
    matmuls = _matmul_rates(
        device, ceiling * rates.matmul_efficiency * stack.framework_efficiency, _aligned(rates, wanted[0])
    )
    full = None
    if in_full:
        full_ceiling = _ceiling(device, "fp32")[0]
        full = _matmul_rates(
            device, full_ceiling * rates.matmul_efficiency * stack.framework_efficiency, _aligned(rates, "fp32")
        )
    wide_attention = full is not None and base is not None and base.attention_bytes > base.compute_bytes
    attended: Precision = "fp32" if wide_attention else precision
    return KernelCost(
        matmuls=matmuls,
        attention=AttentionRates(
            full if full is not None and wide_attention else matmuls,
            (_ceiling(device, "fp32")[0] if attended in ("fp32", "tf32") else ceiling) * stack.framework_efficiency,
            _attention_share(rates, attended, stack),
            state,
            next((rate for name, rate in rates.low_attention.items() if name == low_attention(precision)), None),
            software.traffic,
        ),
        state=state,
        optimizer=optimizer,
        provenance=lower[0][1] if lower else provenance,
        relative_std=_relative_std(stack, known),
        slowest=1 + rates.jitter * math.sqrt(2 * math.log(num_devices)),
        num_devices=num_devices,
        traffic=software.traffic,
        kernel_set=_kernel_set(software),
        winograd=precision == "fp32",
        transposed=_transposed(precision, software),
        host_call_s=rates.host_call_s if is_launched(device, software) else 0.0,
        dtensor=software.dtensor and not software.compiled,
        accumulation_bytes=0 if shards_parameters else _accumulation_bytes(state, software, num_microbatches),
        zeroes_gradients=not software.drops_gradients,
        full=full,
        low=_low_rates(device, state, lower[0][0], stack) if lower else None,
        pads=software.layers.padded_matmuls,
        joined=software.layers.fused_gemms,
        weight_casts=1.0 if state.linear is None or state.linear.weights == "microbatch" else 1 / num_microbatches,
        host_bytes_per_s=host_bytes_per_s,
    )


def _relative_std(stack: FrameworkRates, known: Known | None) -> float:
    """Returns the deviation on known ground, widened by what is unknown."""
    if known is None:
        return stack.relative_std or 0.0
    own = known.common_std if stack.relative_std is None else stack.relative_std
    return math.hypot(own, known.std("compute"))


def _attention_share(rates: KernelRates, precision: Precision, stack: FrameworkRates) -> AttentionEfficiency:
    """Returns the efficiency of fused attention: FlashAttention and cuDNN's are for 16 bits."""
    if precision in ("fp32", "tf32"):
        return rates.fp32_attention
    kernel = rates.kernel_of(stack.attention_kernel)
    return _UNKNOWN_SHARE if kernel is None else rates.attention[kernel]


def _accumulation_bytes(state: StateBytes, software: SoftwareSpec, num_microbatches: int) -> float:
    """Returns the bytes to accumulate a gradient: where none is left from the step before, the first one stays."""
    first = state.added_bytes / num_microbatches if software.drops_gradients else 0
    return max(0.0, state.accumulation_bytes - first)


def is_launched(device: DeviceSpec, software: SoftwareSpec) -> bool:
    """Returns True if the host launches every kernel."""
    return device.kind == "gpu" and software.runtime != "xla" and not software.cuda_graphs


def _low_rates(device: DeviceSpec, state: StateBytes, ceiling: float, stack: FrameworkRates) -> MatmulRates:
    """Returns the rates of FP8 or FP4 matmuls."""
    assert state.linear is not None
    rates = device.kernels
    scaled = rates.rowwise_efficiency if state.linear.recipe.startswith("rowwise") else 1.0
    share = rates.fp4_efficiency if state.linear.element_bits == _FP4_BITS else rates.fp8_efficiency
    return _matmul_rates(device, ceiling * share * stack.framework_efficiency * scaled, rates.aligned)


def _matmul_rates(device: DeviceSpec, flop_per_s: float, aligned: int) -> MatmulRates:
    bandwidth, rates = device.memory_bandwidth_bytes_per_s, device.kernels
    assert bandwidth is not None
    rates = rates if rates.aligned == aligned else rates.model_copy(update={"aligned": aligned})
    return MatmulRates(flop_per_s, bandwidth * rates.bandwidth_efficiency, device.num_sms, rates)


def _kernel_set(software: SoftwareSpec) -> KernelSet:
    """Returns the kernels of memory-bound operators."""
    if software.compiled:
        return "compiled"
    if software.runtime != "torch":
        return "single"
    return "eager" if software.layers.fused_norms else "composed"


def _transposed(precision: Precision, software: SoftwareSpec) -> Transposed:
    """Returns the convolutions of a precision whose operands cuDNN transposes."""
    if software.channels_last or precision == "fp32":
        return "none"
    return "weight_gradients" if precision == "tf32" else "all"


def _aligned(rates: KernelRates, dtype: Precision) -> int:
    """Returns the elements that a dimension should be a multiple of."""
    return {"fp32": 1, "tf32": max(1, rates.aligned // 2)}.get(dtype, rates.aligned)


def _check(device: DeviceSpec, precision: Precision, wanted: list[Precision]) -> None:
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


def _ceiling(device: DeviceSpec, dtype: Precision) -> tuple[float, Provenance]:
    """Returns the best measured matmul rate, otherwise a fraction of the peak; BF16 and FP16 share a rate."""
    alike: list[Dtype] = [dtype]
    if dtype in _SIXTEEN_BITS:
        alike += [
            other for other in _SIXTEEN_BITS if device.peak_flop_per_s.get(other) == device.peak_flop_per_s.get(dtype)
        ]
    for name in alike:
        if name in device.matmul_flop_per_s:
            return device.matmul_flop_per_s[name], Provenance.PUBLISHED
    rates = device.kernels
    share = rates.fp32_max_efficiency if dtype == "fp32" else rates.max_efficiency
    return device.peak_flop_per_s[dtype] * share, Provenance.DATASHEET
