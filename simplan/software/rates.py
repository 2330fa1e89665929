"""Kernel efficiencies of a device architecture, and of the framework that launches the kernels.

``catalog/kernels.yaml`` has priors with their sources. ``kernels_fitted.yaml``, which ``make fit`` writes, overrides
the values that published training runs determine.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import Field

from simplan.base import Count, NonNegative, Positive, Spec

AttentionKernel = Literal["flash1", "flash2", "flash3"]
"""Generations of fused attention: FlashAttention 1, 2 and 3. cuDNN's kernels count as the best of their
architecture."""
_Part = Annotated[float, Field(gt=0, le=1)]


class AttentionEfficiency(Spec):
    """Efficiency of fused attention relative to the best published matmul rate, for head_dim 128 and long sequences.

    Attributes:
        forward, backward: Efficiency in each direction, counting unmasked FLOPs.
        half_rate_keys, head_dim_64_efficiency: ``KernelRates.half_rate_keys`` and ``head_dim_64_efficiency`` measured
            on this kernel; None for the values of all kernels.
        sustained: Fraction of these efficiencies achieved in a training step.
    """

    forward: Positive
    backward: Positive
    half_rate_keys: NonNegative | None = None
    head_dim_64_efficiency: _Part | None = None
    sustained: Positive = 0.9


class LowAttention(Spec):
    """Rate of fused attention in FP8 as a multiple of its BF16 rate.

    Attributes:
        forward, backward: Multiple in each direction, without casts.
    """

    forward: Positive
    backward: Positive


def low_attention(precision: str) -> str:
    """Precision of FP8 attention next to linear layers in a low precision: FP8 next to NVFP4 (NVTE_DPA_FP8_RECIPE)."""
    return "fp8" if precision == "nvfp4" else precision


class KernelRates(Spec):
    """Kernel efficiencies of an architecture.

    Attributes:
        max_efficiency: Best measured matmul rate as a fraction of peak, for devices without a measurement.
        fp32_max_efficiency: ``max_efficiency`` of FP32 matmuls, which run without tensor cores. Measured were 0.98 on
            A100, 0.91 on V100, 0.78 on H100, 0.66 on RTX 3090 and 4090, and 0.54 on T4 (catalog/devices.yaml).
        matmul_efficiency: Matmul rate in a training step as a fraction of the best published rate. Clocks fall with
            power draw, and shapes are not the best ones.
        fp8_efficiency: ``matmul_efficiency`` of FP8 matmuls.
        fp4_efficiency: ``matmul_efficiency`` of FP4 matmuls.
        bandwidth_efficiency: Memory bandwidth of streaming kernels as a fraction of the datasheet bandwidth.
        tile_overhead_s: Seconds per GEMM tile of 256 x 128 beyond its multiplications (start and write-out). Smaller
            tiles take proportionally less. The faster the multiplications, the more it matters.
        half_rate_k: Inner dimension at which a matmul achieves half of its rate, on devices with an unknown number of
            SMs.
        tail_wave_fraction: Cost of the idle part of a last wave of tiles, as a fraction of busy time. Small where tiles
            are cut to fit, or where clocks rise as SMs idle.
        attention: Efficiencies by attention kernel; a kernel that is missing does not run on the architecture.
        fp32_attention: Efficiency of torch's memory-efficient attention in FP32 and TF32, relative to FP32 matmuls.
        low_attention: Attention rates in FP8 relative to BF16, by precision and head_dim; empty without public data on
            both.
        half_rate_keys: Average attended keys per query at which fused attention achieves half of its rate.
        head_dim_64_efficiency: Attention rate at head_dim 64 as a fraction of the rate.
        softmax_traffic_factor: Bytes of kernels over the scores of unfused attention, relative to what they read and
            write: dropout sampling and masking keep them from streaming.
        fp8_any_layout: FP8 matmuls take operands along rows or columns, as BF16 matmuls do.
        rowwise_efficiency: Rate of FP8 matmuls with rowwise scaling as a fraction of the FP8 rate.
        aligned: Elements of 16 bits that a dimension should be a multiple of, to be read in full sectors; half as many
            of 32 bits. FP32 matmuls without tensor cores need no alignment.
        unaligned_efficiency: Rate of matmuls with a dimension that is no multiple of ``aligned``, as a fraction of the
            rate.
        odd_flop_per_s: FLOP/s of one SM at most in matmuls of 16 bits with an odd dimension, whose rows begin at odd
            elements, so that they are loaded one by one: the head of GPT-2 with 50,257 tokens runs at 60 to 85 TFLOP/s
            on 132 SMs of an H200 (scenarios/measured/h200).
        misaligned_slice_efficiency: ``unaligned_efficiency`` for operands that are slices of larger tensors (heads) and
            so begin inside of sectors. These matmuls run without tensor cores (on an A100 in FP32 at 19.5 of 271
            TFLOP/s).
        transpose_bytes_per_s: Bytes that one SM reads and writes per second while it transposes images: less than its
            part of the bandwidth of the fastest memories.
        update_bytes_per_s: Bytes that one SM reads and writes per second in the fused step of an optimizer.
        small_tile_efficiency: Rates of matmuls with tiles of half and of a quarter of the largest, as fractions of the
            rate.
        jitter: Standard deviation of a device's compute time, relative to the mean. N devices that synchronize are as
            slow as the slowest, on average about sqrt(2 ln N) deviations above the mean.
        kernel_overhead_s: Fixed overhead of the device per kernel in seconds: the gap to the kernel before, ramp-up and
            tail. Kernels that represent several small ones have it, too. The host's time for a launch is
            ``host_call_s``.
        stream_overlap: Fraction of the fixed overhead of small kernels on several streams that concurrent kernels hide;
            1 for all of it. With this value 108 expert GEMMs timed individually on B200 (tests/cost/products_b200.csv)
            are within 16% on average.
        overlap_slowdown: Overlap slowdown: fraction of compute throughput lost while communication overlaps.
            Communication kernels occupy SMs: 16 of an A100's 108 on a DGX (S. Jeaugey in NVIDIA/nccl issue 689), so
            0.15. They also share memory and power. 0 where a network's own engines transfer bytes (TPUs). No
            rule is derived: with 16 to 32 channels SMs are 15 to 30% of an A100's 108, 12 to 24% of an H100's 132 and
            11 to 22% of a B200's 148; runs do not say their channels, and 0.151 fits all three together.
        gemm_split_overhead_s: Seconds per tensor-parallel collective to cut a matmul into chunks that overlap it.
            Chunks are launched and wait for each other sequentially, and small chunks fill the device less.
        host_call_s: Seconds in which the host issues one operation; none in a CUDA graph. Kernels that are shorter than
            that leave the device waiting. Hosts differ by several times (``KernelCost.host_call_std``).
        host_step_overhead_s: Seconds of CPU work of a trainer once per step while devices wait: next batch, reading
            loss and norms back, logging.
        host_batch_overhead_s: Seconds of CPU work before a forward where the framework waits for it
            (``SoftwareSpec.waits_for_batch``). The GPU starves while the CPU takes the microbatch, copies and
            broadcasts it, makes masks, and launches again.
        moe_std: Relative standard deviation of the time of layers with experts, not fitted: about 90% of 150 published
            runs with experts have an error of at most 1.645 of it.
        inter_node_std: Relative standard deviation of communication between nodes in training; None for that of
            collectives timed alone.
        fitted_on: Runs that constants were fitted on; None if all are priors.
    """

    max_efficiency: _Part = 0.77
    fp32_max_efficiency: _Part = 0.75
    matmul_efficiency: _Part = 0.93
    fp8_efficiency: _Part = 0.9
    fp4_efficiency: _Part = 0.6
    bandwidth_efficiency: _Part = 0.85
    tile_overhead_s: NonNegative = 3e-6
    half_rate_k: NonNegative = 80.0
    tail_wave_fraction: _Part = 0.5
    attention: dict[AttentionKernel, AttentionEfficiency] = Field(default_factory=dict)
    fp32_attention: AttentionEfficiency = AttentionEfficiency(
        forward=0.83, backward=0.66, half_rate_keys=100, head_dim_64_efficiency=0.9, sustained=1
    )
    low_attention: dict[Literal["fp8", "mxfp8"], dict[int, LowAttention]] = Field(default_factory=dict)
    half_rate_keys: NonNegative = 250.0
    head_dim_64_efficiency: _Part = 0.88
    softmax_traffic_factor: Positive = 1.3
    fp8_any_layout: bool = False
    rowwise_efficiency: _Part = 0.75
    aligned: Count = 8
    unaligned_efficiency: _Part = 0.55
    odd_flop_per_s: Positive = 0.6e12
    misaligned_slice_efficiency: _Part = 0.08
    transpose_bytes_per_s: Positive = 10e9
    update_bytes_per_s: Positive = 20e9
    small_tile_efficiency: tuple[_Part, _Part] = (0.9, 0.75)
    jitter: NonNegative = 0.01
    kernel_overhead_s: NonNegative = 5e-6
    stream_overlap: Annotated[float, Field(ge=0, le=1)] = 0.85
    overlap_slowdown: Annotated[float, Field(ge=0, lt=1)] = 0.15
    gemm_split_overhead_s: NonNegative = 50e-6
    host_call_s: NonNegative = 20e-6
    host_step_overhead_s: NonNegative = 0.01
    host_batch_overhead_s: NonNegative = 0.5e-3
    moe_std: NonNegative = 0.25
    inter_node_std: NonNegative | None = None
    fitted_on: str | None = None

    def kernel_of(self, newest: AttentionKernel) -> AttentionKernel | None:
        """Newest attention kernel of the architecture up to ``newest``, else the oldest; None if none is known."""
        generations = get_args(AttentionKernel)
        known = [name for name in generations if name in self.attention]
        asked = [name for name in known if generations.index(name) <= generations.index(newest)]
        return asked[-1] if asked else known[0] if known else None


class FrameworkRates(Spec):
    """Efficiency of kernels under a framework, relative to the architecture.

    Attributes:
        attention_kernel: Newest generation of fused attention that the framework calls; an architecture without it runs
            an older one.
        traffic: Bytes of memory-bound kernels, as a fraction of what eager torch reads and writes for the same
            operations; fusion lowers it.
        compiled_traffic: Bytes of memory-bound kernels with compiled blocks, as a fraction of those of fused groups
            (``simplan.cost.compute.traffic``).
        framework_efficiency: Matmul rate as a fraction of the architecture's rate. It depends on library versions, and
            on the machines that the framework usually runs on.
        intra_slowdown: Time of communication inside nodes in training, relative to collectives timed alone: other
            kernels overlap, and ranks arrive late.
        inter_slowdown: ``intra_slowdown`` of communication between nodes, on the networks of the machines that the
            framework usually runs on.
        relative_std: Relative standard deviation of compute on ground where runs were fitted (``simplan.cost.known``);
            None without a fit.
        fitted_on: Runs that constants were fitted on; None if all are priors.
    """

    attention_kernel: AttentionKernel = "flash2"
    traffic: Positive = 1.0
    compiled_traffic: Positive = 1.0
    framework_efficiency: Positive = 1.0
    intra_slowdown: Positive = 1.0
    inter_slowdown: Positive = 1.0
    relative_std: NonNegative | None = None
    fitted_on: str | None = None


class MemorySpread(Spec):
    """Uncertainty of peak memory, as independent relative standard deviations.

    They are those of a normal distribution with the same 90% interval. Persistent tensors (weights, gradients and
    optimizer states) are sums of known sizes, and have none but in fine-tuning.

    Attributes:
        transient_std: Of tensors that exist only during a step: activations, unsharded parameters, temporaries.
        allocator_std: Of device memory: blocks of the caching allocator, driver context and communication buffers.
        finetuning_std: Of all tensors of a run that fine-tunes, whose loops store and free weights in more ways.
        fitted_on: Peaks that the deviations were fitted on; None for the wider ones of profiles without peaks.
    """

    transient_std: NonNegative = 0.0
    allocator_std: NonNegative = 0.0
    finetuning_std: NonNegative = 0.0
    fitted_on: str | None = None

    def relative_std(self, transient_fraction: float, *, allocated: bool, finetunes: bool) -> float:
        """Relative standard deviation of a peak.

        Args:
            transient_fraction: Fraction of transient tensors in the peak.
            allocated: True for a peak of tensors alone, False for one of the allocator or the device.
            finetunes: Task of the run is not ``pretrain``.
        """
        of_allocator = 0.0 if allocated else self.allocator_std
        return math.hypot(self.transient_std * transient_fraction, of_allocator, finetunes * self.finetuning_std)
