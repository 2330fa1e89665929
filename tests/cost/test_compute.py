"""The roofline against arithmetic by hand."""

from __future__ import annotations

import pytest

from simplan.cost.base import Provenance
from simplan.cost.compute import Roofline
from simplan.program.program import LayerWork, Phase
from simplan.spec.layer import (
    Attention,
    CollectiveKind,
    Exchange,
    Gemm,
    LayerKind,
    LayerSpec,
    Lookup,
    ParameterSpec,
    Pointwise,
)
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


def test_copies_read_and_write_gathered_weights() -> None:
    state = StateBytes(parameter=4, gradient=4, activation=2, boundary=2, gathered=2)
    rates = Roofline(1e14, 1e12, state, "adamw", Provenance.PUBLISHED)
    for phase in (Phase.GATHER_COPY, Phase.REDUCE_COPY):
        assert rates.price(LayerWork(LAYER, phase, 1, 10**9)).seconds == pytest.approx(2 * 2 * 1e-3)


PARTS = LayerSpec(
    key="parts",
    kind=LayerKind.BLOCK,
    parameters=(
        ParameterSpec("a.weight", (4096, 8192)),
        ParameterSpec("norm.weight", (1,)),
        ParameterSpec("e.weight", (1,)),
    ),
    kernels=(
        Exchange("x", "tp", CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, 10**9),
        Gemm("a", 2048, 4096, 8192),
        Pointwise("b", 10**8, 10**8),
        Attention(32, 8, 128, 2048, causal=False, num_keys=8192),
        Pointwise("norm", 10**8, 10**8),
        Lookup("e", 10**4, 10**4),
    ),
    saved=(),
    output_elements=0,
)
GEMM_S = 2 * 2048 * 4096 * 8192 / 1e14
POINTWISE_S = 2 * 10**8 * 2 / 1e12
LOOKUP_S = 10**8 * (2 + 4) / 1e12  # activations in 2 bytes, weights in 4
ATTENTION_S = 4 * 2048 * 8192 * 128 * 32 / 0.6e14


@pytest.mark.parametrize(
    ("phase", "kernels", "seconds"),
    [
        (Phase.FORWARD, None, GEMM_S + 2 * POINTWISE_S + ATTENTION_S + LOOKUP_S),
        (Phase.FORWARD, (0,), 0.0),
        (Phase.FORWARD, (0, 1), GEMM_S),
        (Phase.RECOMPUTE, (2, 3), POINTWISE_S + ATTENTION_S),
        (Phase.BACKWARD, (1,), 2 * GEMM_S),
        (Phase.BACKWARD, (3,), 2.5 * ATTENTION_S),
        (Phase.BACKWARD_INPUT, None, GEMM_S + 2 * 2 * POINTWISE_S + 2.5 * ATTENTION_S),
        (Phase.BACKWARD_WEIGHT, None, GEMM_S + POINTWISE_S + LOOKUP_S),
        (Phase.BACKWARD_WEIGHT, (2, 3), 0.0),
        (Phase.BACKWARD_INPUT, (5,), 0.0),
    ],
)
def test_parts_of_a_layer_cost_their_kernels(phase: Phase, kernels: tuple[int, ...] | None, seconds: float) -> None:
    """Exchanges are messages, priced elsewhere. The second part of a backward reads once more what norms took in."""
    assert RATES.price(LayerWork(PARTS, phase, 1, 0, kernels)).seconds == pytest.approx(seconds)
