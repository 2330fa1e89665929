"""How fast kernels run: what is known of an architecture of devices, and of the software that launches them.

Textbook values with their sources are in ``catalog/kernels.yaml``; ``kernels_fitted.yaml``, which ``make fit`` writes,
has the last word on those that published training runs say something about.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from simplan.base import NonNegative, Positive, Spec

__all__ = ["AttentionKernel", "AttentionShare", "KernelRates", "LowAttention", "StackRates"]

AttentionKernel = Literal["flash1", "flash2", "flash3"]
"""Generations of fused attention: FlashAttention 1, 2 and 3; cuDNN's are as the best of their architecture."""
_Part = Annotated[float, Field(gt=0, le=1)]


class AttentionShare(Spec):
    """What fused attention reaches of the best published rate of matrix products, heads of 128, long sequences.

    Attributes:
        forward, backward: In either direction, of the FLOPs that are not masked.
        half_keys, narrow_heads: As of ``KernelRates``, where the kernel itself was timed; None for as of all kernels.
        sustained: Part of these that a training step reaches.
    """

    forward: Positive
    backward: Positive
    half_keys: NonNegative | None = None
    narrow_heads: _Part | None = None
    sustained: Positive = 0.9


class LowAttention(Spec):
    """The rate of fused attention in 8 bits, as a multiple of that in 16 bits.

    Attributes:
        forward, backward: In either direction, casts apart.
    """

    forward: Positive
    backward: Positive


class KernelRates(Spec):
    """What kernels of an architecture reach.

    Attributes:
        ceiling_share: Part of the peak that products were ever measured at, for devices on which nobody measured.
        matmul_share: Part of the best published rate of matrix products that those of a training step sustain: its
            clocks fall with the power that it draws, and shapes are not the best ones.
        low_share: The same of products in 8 bits.
        fp4_share: The same in 4 bits.
        bandwidth_share: Part of the datasheet's memory bandwidth that streaming kernels reach.
        tile_s: What a tile of 256 x 128 of a product takes beyond its multiplications: it is begun and written out.
            Smaller tiles take as much less. The faster the multiplications are, the more it matters.
        half_depth: Length of the inner dimension at which a product reaches half of its rate, on devices of which no
            multiprocessors are known.
        last_wave: What a last wave of tiles that does not fill the device takes of a full one, beyond its part of it:
            nothing where tiles are cut to fit, or where clocks rise as much as multiprocessors idle.
        attention: Shares by kernel; a kernel that is missing does not run there.
        low_attention: By precision and width of a head, attention in 8 bits beside that in 16; empty where nobody
            published both.
        half_keys: Keys that a query meets, on average, at which fused attention reaches half of its rate.
        narrow_heads: Part of the rate of attention that heads of 64 reach.
        score_traffic: Bytes of kernels that pass over the scores of unfused attention, as a part of what they read and
            write: drawing dropout and masking keep them from streaming.
        any_order: Products in 8 bits take operands along rows or columns, as those in 16 bits do.
        row_scale_share: Part of the rate of products in 8 bits that those with a scale for each row reach.
        aligned: Elements that a dimension should be a multiple of, to be read in whole sectors.
        odd_share: Part of the rate of products with a dimension that is not.
        misaligned_share: The same where operands are slices of larger ones (heads), which then begin inside of sectors:
            they run without tensor cores (on an A100 in fp32 at 19.5 of 271 TFLOP/s).
        tile_share: Part of the rate that tiles of half and of a quarter of the largest reach.
        jitter: Standard deviation of how long a device computes, relative to the mean: N devices that wait for each
            other are as slow as the slowest, on average slower than the mean by about sqrt(2 ln N) deviations.
        kernel_s: What every kernel takes beyond its work: it is launched, fills the device, and runs out; also those
            that stand for several small ones.
        stream_overlap: Where small kernels are launched on several streams, how much of what each takes beyond its work
            is hidden by those beside it; all of it would be 1. So that 108 products of experts that were timed one by
            one on B200 (tests/cost/products_b200.csv) are within a tenth on average.
        taken_share: Part of a device that messages take from what is computed beside them. The kernels that move them
            share multiprocessors with no others: 16 of an A100's 108 on a DGX (S. Jeaugey in NVIDIA/nccl issue 689), so
            0.15; and they share memory and power. Nothing where a network's own engines move bytes (TPUs).
        split_s: What it takes to cut a product into parts that an exchange of tensor-parallel ranks runs beside, for
            each exchange: parts are launched and wait for each other one by one, and small ones fill the device less.
        step_s: What the host of a trainer does once a step while devices wait: it takes the next batch, reads the loss
            and norms back, logs.
        batch_s: What it does before a forward where software waits for it there (``SoftwareSpec.waits_for_batch``): the
            device runs dry, the host takes the microbatch, copies and broadcasts it, makes masks, and launches anew.
        unseen_std: How sure step times are under software that nothing was fitted to, or on an architecture that no
            run was seen of. Of one of which nothing is known it stays an assumption: H100, A100 and B200 as devices
            without an architecture are 9 % faster, 17 % slower and 24 % faster than as what they are.
        experts_std: How sure the time of layers with experts is, of which nothing was fitted: about nine in ten of 150
            published runs with experts are no further off than 1.645 of these.
        between_nodes_std: How sure messages between nodes are in training; None for as sure as where they were timed
            alone.
        fitted_on: Runs that constants were fitted on; None where all are textbook values.
    """

    ceiling_share: _Part = 0.77
    matmul_share: _Part = 0.93
    low_share: _Part = 0.9
    fp4_share: _Part = 0.6
    bandwidth_share: _Part = 0.85
    tile_s: NonNegative = 3e-6
    half_depth: NonNegative = 80.0
    last_wave: _Part = 0.5
    attention: dict[AttentionKernel, AttentionShare] = Field(default_factory=dict)
    low_attention: dict[Literal["fp8", "mxfp8"], dict[int, LowAttention]] = Field(default_factory=dict)
    half_keys: NonNegative = 250.0
    narrow_heads: _Part = 0.88
    score_traffic: Positive = 1.3
    any_order: bool = False
    row_scale_share: _Part = 0.75
    aligned: Annotated[int, Field(ge=1)] = 8
    odd_share: _Part = 0.55
    misaligned_share: _Part = 0.08
    tile_share: tuple[_Part, _Part] = (0.9, 0.75)
    jitter: NonNegative = 0.01
    kernel_s: NonNegative = 10e-6
    stream_overlap: Annotated[float, Field(ge=0, le=1)] = 0.85
    taken_share: Annotated[float, Field(ge=0, lt=1)] = 0.15
    split_s: NonNegative = 50e-6
    step_s: NonNegative = 0.01
    batch_s: NonNegative = 0.5e-3
    unseen_std: NonNegative = 0.3
    experts_std: NonNegative = 0.25
    between_nodes_std: NonNegative | None = None
    fitted_on: str | None = None

    def kernel_of(self, newest: AttentionKernel) -> AttentionKernel | None:
        """The newest kernel of attention that runs, or else the oldest one; None where none is known."""
        generations = get_args(AttentionKernel)
        known = [name for name in generations if name in self.attention]
        asked = [name for name in known if generations.index(name) <= generations.index(newest)]
        return asked[-1] if asked else known[0] if known else None


class StackRates(Spec):
    """What a framework makes of kernels.

    Attributes:
        attention_kernel: The newest generation that it calls; an architecture that has no such one runs an older one.
        traffic: Bytes of memory-bound kernels, as a part of what the same operations of eager torch read and write;
            fusion makes it less.
        compiled_traffic: The same where blocks are compiled.
        stack_share: What products reach of what the architecture sustains: of the version of its libraries, on the
            machines that it usually runs on.
        intra_slowdown: What messages inside nodes take in training, over what they take where collectives were timed
            alone: kernels run beside them, and devices come late.
        inter_slowdown: The same of messages between nodes, on the networks of the machines that it usually runs on.
        relative_std: How sure step times are; None where nothing was fitted to it, and it is as for an unseen one.
        fitted_on: Runs that constants were fitted on; None where all are textbook values.
    """

    attention_kernel: AttentionKernel = "flash2"
    traffic: Positive = 1.0
    compiled_traffic: Positive = 0.7
    stack_share: Positive = 1.0
    intra_slowdown: Positive = 1.0
    inter_slowdown: Positive = 1.0
    relative_std: NonNegative | None = None
    fitted_on: str | None = None
