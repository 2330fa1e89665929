"""What is fitted of ``simplan.software.rates``: for each constant the expected spread of its logarithm, and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from simplan.software.rates import AttentionKernel

__all__ = ["ALL", "ARCHITECTURE", "KERNELS", "NEVER_APART", "SOFTWARE", "SUSTAINED", "TOGETHER", "ParameterBounds"]


class ParameterBounds(NamedTuple):
    """Of a constant.

    Attributes:
        log_std: How far from its textbook value the logarithm may be expected.
        low, high: What is possible.
    """

    log_std: float
    low: float
    high: float


ARCHITECTURE: Mapping[str, ParameterBounds] = MappingProxyType(
    {
        "matmul_share": ParameterBounds(0.1, 0.4, 1.0),
        "low_share": ParameterBounds(0.3, 0.3, 1.0),
        "fp4_share": ParameterBounds(0.4, 0.2, 1.0),
        "bandwidth_share": ParameterBounds(0.1, 0.5, 1.0),
    }
)
"""Of every architecture, with the kernels of attention that run on it (at most two were seen on any)."""

KERNELS: tuple[AttentionKernel, ...] = ("flash1", "flash2", "flash3")
SUSTAINED = ParameterBounds(0.2, 0.3, 2.0)
"""Of each kernel of attention on an architecture: ``AttentionShare.sustained``."""

SOFTWARE: Mapping[str, ParameterBounds] = MappingProxyType(
    {
        "traffic": ParameterBounds(0.5, 0.3, 4.0),
        "compiled_traffic": ParameterBounds(0.5, 0.2, 4.0),
        "stack_share": ParameterBounds(0.07, 0.7, 1.3),
        "intra_slowdown": ParameterBounds(0.3, 0.3, 3.0),
        "inter_slowdown": ParameterBounds(0.5, 0.3, 4.0),
    }
)
"""Of every software profile."""

NEVER_APART = ("maxtext", "tpu")
TOGETHER = 0.3
"""TPUs were seen with MaxText alone, and MaxText with nothing else, in fourteen runs: where each constant may be as far
off as others, fits follow what these few have of their own (errors of runs left out are then a third larger). Names of
owners begin so; their deviations are so much narrower."""

ALL: Mapping[str, ParameterBounds] = MappingProxyType(
    {
        "tile_s": ParameterBounds(0.5, 0.1e-6, 20e-6),
        "half_keys": ParameterBounds(0.5, 30.0, 2000.0),
        "narrow_heads": ParameterBounds(0.1, 0.4, 1.0),
        "misaligned_share": ParameterBounds(0.3, 0.02, 1.0),
        "last_wave": ParameterBounds(0.5, 0.05, 1.0),
        "score_traffic": ParameterBounds(0.3, 0.7, 3.0),
        "row_scale_share": ParameterBounds(0.15, 0.4, 1.0),
        "jitter": ParameterBounds(0.7, 0.001, 0.05),
        "kernel_s": ParameterBounds(0.7, 1e-6, 60e-6),
        "taken_share": ParameterBounds(0.5, 0.01, 0.5),
        "split_s": ParameterBounds(0.7, 1e-6, 300e-6),
        "step_s": ParameterBounds(0.7, 1e-3, 0.1),
        "batch_s": ParameterBounds(0.7, 0.05e-3, 5e-3),
    }
)
"""Common to all."""
