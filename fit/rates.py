"""What is fitted of ``simplan.software.rates``: for each constant the expected spread of its logarithm, and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from simplan.software.rates import AttentionKernel

__all__ = ["ALL", "ARCHITECTURE", "KERNELS", "NEVER_APART", "SOFTWARE", "SUSTAINED", "TOGETHER", "Bounds"]


class Bounds(NamedTuple):
    """Of a constant.

    Attributes:
        log_std: How far from its textbook value the logarithm may be expected.
        low, high: What is possible.
    """

    log_std: float
    low: float
    high: float


ARCHITECTURE: Mapping[str, Bounds] = MappingProxyType(
    {
        "matmul_share": Bounds(0.1, 0.4, 1.0),
        "low_share": Bounds(0.3, 0.3, 1.0),
        "fp4_share": Bounds(0.4, 0.2, 1.0),
        "bandwidth_share": Bounds(0.1, 0.5, 1.0),
    }
)
"""Of every architecture, with the kernels of attention that run on it (at most two were seen on any)."""

KERNELS: tuple[AttentionKernel, ...] = ("flash1", "flash2", "flash3")
SUSTAINED = Bounds(0.2, 0.3, 2.0)
"""Of each kernel of attention on an architecture: ``AttentionShare.sustained``."""

SOFTWARE: Mapping[str, Bounds] = MappingProxyType(
    {
        "traffic": Bounds(0.5, 0.3, 4.0),
        "compiled_traffic": Bounds(0.5, 0.2, 4.0),
        "stack_share": Bounds(0.07, 0.7, 1.3),
        "intra_slowdown": Bounds(0.3, 0.3, 3.0),
        "inter_slowdown": Bounds(0.5, 0.3, 4.0),
    }
)
"""Of every software profile."""

NEVER_APART = ("maxtext", "tpu")
TOGETHER = 0.3
"""TPUs were seen with MaxText alone, and MaxText with nothing else, in fourteen runs: where each constant may be as far
off as others, fits follow what these few have of their own (errors of runs left out are then a third larger). Names of
owners begin so; their deviations are so much narrower."""

ALL: Mapping[str, Bounds] = MappingProxyType(
    {
        "tile_s": Bounds(0.5, 0.1e-6, 20e-6),
        "half_keys": Bounds(0.5, 30.0, 2000.0),
        "narrow_heads": Bounds(0.1, 0.4, 1.0),
        "misaligned_share": Bounds(0.3, 0.02, 1.0),
        "last_wave": Bounds(0.5, 0.05, 1.0),
        "score_traffic": Bounds(0.3, 0.7, 3.0),
        "row_scale_share": Bounds(0.15, 0.4, 1.0),
        "jitter": Bounds(0.7, 0.001, 0.05),
        "kernel_s": Bounds(0.7, 1e-6, 60e-6),
        "taken_share": Bounds(0.5, 0.01, 0.5),
        "split_s": Bounds(0.7, 1e-6, 300e-6),
        "step_s": Bounds(0.7, 1e-3, 0.1),
        "batch_s": Bounds(0.7, 0.05e-3, 5e-3),
    }
)
"""Common to all."""
