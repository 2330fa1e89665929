"""The roofline against arithmetic by hand."""

from __future__ import annotations

import pytest

from simplan.cost.base import Provenance
from simplan.cost.compute import Roofline
from simplan.program.program import LayerWork, Phase
from simplan.spec.layer import Gemm, LayerKind, LayerSpec, ParameterSpec
from simplan.spec.software import StateBytes

STATE = StateBytes(parameter=4, gradient=4, activation=2, boundary=4)
RATES = Roofline(1e14, 1e12, STATE, "adamw", Provenance.PUBLISHED)
LAYER = LayerSpec(
    key="one matmul",
    kind=LayerKind.BLOCK,
    parameters=(ParameterSpec("w", (4096, 8192)),),
    kernels=(Gemm("w", 2048, 4096, 8192),),
    saved=(),
    output_elements=0,
)


def test_a_large_matmul_is_bound_by_flops_and_its_backward_is_two() -> None:
    forward_s = 3 * 2 * 2048 * 4096 * 8192 / 1e14
    for phase, expected in ((Phase.FORWARD, forward_s), (Phase.BACKWARD, 2 * forward_s)):
        assert RATES.price(LayerWork(LAYER, phase, 3, 0)).seconds == pytest.approx(expected)


def test_the_optimizer_is_bound_by_32_bytes_a_parameter() -> None:
    """Adam in fp32: read weight, gradient, two moments; write weight, two moments, zeroed gradient."""
    assert RATES.price(LayerWork(LAYER, Phase.OPTIMIZER, 1, 10**9)).seconds == pytest.approx(0.032)
