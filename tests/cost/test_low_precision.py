"""Products and casts of a linear layer in low precision against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.kernels import KernelCost
from simplan.cost.compute.matmul import MatmulRates
from simplan.cost.model import Provenance
from simplan.model.layer import Gemm, LayerKind, LayerSpec, ParameterSpec, Pointwise, Role
from simplan.model.low_precision import linear_format
from simplan.program.program import LayerWork, Phase
from simplan.software.rates import AttentionEfficiency
from simplan.software.software import StateBytes
from tests.cost.rates import PLAIN, changed, cost_of
from tests.layers import layer_of_kernels
from tests.support.problems import refuses

M, N, K = 4096, 8192, 2048
FLOPS = 2 * M * N * K


def layer(kind: LayerKind = LayerKind.BLOCK, *roles: Role) -> LayerSpec:
    kernels = Pointwise("gelu", 10**8, 10**8), Gemm("up", M, N, K)
    whole = layer_of_kernels(kernels, (ParameterSpec("up.weight", (N, K)),), kind=kind, key=f"{kind} {roles}")
    return replace(whole, operators=tuple(replace(o, roles=frozenset(roles)) for o in whole.operators))


def rates(precision: Any, recipe: Any = None, kept: Any = "wide") -> KernelCost:
    """16-bit products at 1e14, others at 2e14 FLOP/s; 1e12 bytes a second."""
    state = StateBytes(parameter=4, gradient=4, activation=2, boundary=2, gathered=2)
    state = state.model_copy(update={"linear": linear_format(precision, recipe, kept)})
    wide, low = (MatmulRates(rate, 1e12, None, PLAIN) for rate in (1e14, 2e14))
    attention = AttentionRates(wide, 1e14, AttentionEfficiency(forward=1.0, backward=1.0, sustained=1.0), state)
    return KernelCost(wide, attention, state, "adamw", Provenance.PUBLISHED, 0.1, low=low)


POINTWISE_S = 2 * 10**8 * 2 / 1e12
X, W, G = M * K, N * K, M * N
MX_SCALES, FP4 = 1 + 1 / 32, 0.5 + 1 / 16


@pytest.mark.parametrize(
    ("precision", "recipe", "kept", "forward_bytes", "backward_bytes", "wide_products"),
    [
        ("fp8", None, "wide", 5 * (X + W), 6 * G + 5 * (W + X), 0),
        ("fp8", "delayed", "quantized", 4 * (X + W), 4 * G, 0),
        ("fp8", "rowwise_with_gw_hp", "wide", 3 * (X + W), 3 * G + 5 * W, 1),
        ("mxfp8", None, "wide", (2 + MX_SCALES) * (X + W), (2 + MX_SCALES) * (2 * G + W + X), 0),
        ("nvfp4", None, "quantized", (4 + 2 * FP4) * (X + W), (4 + 2 * FP4) * G, 0),
    ],
)
def test_products_at_their_own_rate_and_casts_by_their_bytes(
    precision: str, recipe: str | None, kept: str, forward_bytes: float, backward_bytes: float, wide_products: int
) -> None:
    priced = rates(precision, recipe, kept)
    forward = priced.cost_estimate(LayerWork(layer(), Phase.FORWARD, 1, 0))
    backward = priced.cost_estimate(LayerWork(layer(), Phase.BACKWARD, 1, 0))
    assert forward.seconds == pytest.approx(POINTWISE_S + FLOPS / 2e14 + forward_bytes / 1e12, rel=2e-4)
    matmuls_s = (2 - wide_products) * FLOPS / 2e14 + wide_products * FLOPS / 1e14
    assert backward.seconds == pytest.approx(2 * POINTWISE_S + matmuls_s + backward_bytes / 1e12, rel=2e-4)
    assert any(f"{precision} cast of the input" in part.name for part in forward.parts)


def test_weights_that_are_quantized_once_a_step_are_so_in_a_part_of_the_microbatches() -> None:
    forward, backward = (LayerWork(layer(), phase, 1, 0) for phase in (Phase.FORWARD, Phase.BACKWARD))
    always = rates("fp8", "delayed", "quantized")
    once = replace(always, weight_casts=1 / 8)
    assert always.seconds(forward) - once.seconds(forward) == pytest.approx(7 / 8 * 4 * W / 1e12, rel=1e-3)
    assert always.seconds(backward) == once.seconds(backward)


@pytest.mark.parametrize(("weights", "part"), [("microbatch", 1.0), ("step", 1 / 8), ("stored", 1 / 8)])
def test_how_often_a_framework_quantizes_weights(weights: Any, part: float) -> None:
    """Of eight microbatches in all, or in the first one (Transformer Engine's is_first_microbatch)."""
    form = linear_format("fp8", "delayed", "quantized", weights)
    state = rates("fp8", "delayed", "quantized").state.model_copy(update={"linear": form})
    assert cost_of("h100-sxm-80gb", "fp8", "megatron-core", state=state, num_microbatches=8).weight_casts == part


@pytest.mark.parametrize(
    ("weights", "trained", "number"), [("stored", False, 0), ("stored", True, 1), ("step", False, 1)]
)
def test_frozen_weights_that_are_stored_in_8_bits_are_never_quantized(weights: Any, trained: bool, number: int) -> None:
    cost = rates("fp8", "delayed", "quantized")
    form = linear_format("fp8", "delayed", "quantized", weights)
    frozen = replace(cost, state=cost.state.model_copy(update={"linear": form}))
    plain_layer = layer()
    operators = tuple(
        replace(o, kernel=replace(o.kernel, trained=trained)) if isinstance(o.kernel, Gemm) else o
        for o in plain_layer.operators
    )
    parts = frozen.cost_estimate(LayerWork(replace(plain_layer, operators=operators), Phase.FORWARD, 1, 0)).parts
    assert sum("cast of the weight" in part.name for part in parts) == number


@pytest.mark.parametrize(("precision", "small"), [("fp8", 0), ("mxfp8", 2), ("nvfp4", 2)])
def test_small_kernels_bring_scales_of_blocks_into_order(precision: str, small: int) -> None:
    """One for each operand of a product; besides there are a GELU, two casts and the product in forward."""
    cost = rates(precision, None, "quantized")
    assert cost.low is not None
    slow = replace(
        cost, low=changed(cost.low, kernel_overhead_s=1e-5), matmuls=changed(cost.matmuls, kernel_overhead_s=1e-5)
    )
    forward, backward = (LayerWork(layer(), phase, 1, 0) for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert slow.seconds(forward) - cost.seconds(forward) == pytest.approx((4 + small) * 1e-5)
    assert slow.seconds(backward) - cost.seconds(backward) == pytest.approx((4 + 2 * small) * 1e-5)


@pytest.mark.parametrize(
    ("precision", "recipe", "casts"), [("fp8", "delayed", 1), ("fp8", "tensorwise", 3 * 8), ("mxfp8", None, 8)]
)
def test_each_expert_has_casts_of_its_own_one_after_the_other(precision: Any, recipe: Any, casts: int) -> None:
    """Of eight, on as many streams, for which products take as long as one: so the rest is of casts."""
    cost = rates(precision, recipe, "quantized")
    assert cost.low is not None
    state = cost.state.model_copy(update={"linear": linear_format(precision, recipe, "quantized", experts=True)})
    alone = replace(cost, state=state, matmuls=changed(cost.matmuls, kernel_overhead_s=1e-5))
    slow = replace(alone, low=changed(cost.low, kernel_overhead_s=1e-5))
    gemm = Gemm("experts_up", M, N, K, 8, streams=8)
    experts = layer_of_kernels((gemm,), layer().parameters, key="experts")
    forward = LayerWork(experts, Phase.FORWARD, 1, 0)
    scales = 2 * (recipe is None)
    assert slow.seconds(forward) - alone.seconds(forward) == pytest.approx((2 * casts + 1 + scales) * 1e-5)


@pytest.mark.parametrize(
    ("precision", "recipe", "saved"), [("fp8", "delayed", 1), ("fp8", "blockwise", 0), ("mxfp8", None, 0)]
)
def test_operands_with_one_scale_need_no_second_copy_where_products_take_any_order(
    precision: str, recipe: str | None, saved: int
) -> None:
    cost, forward = rates(precision, recipe, "quantized"), LayerWork(layer(), Phase.FORWARD, 1, 0)
    form = replace(linear_format(precision, recipe, "quantized"), any_layout=True)  # type: ignore[arg-type]
    fp8_any_layout = replace(cost, state=cost.state.model_copy(update={"linear": form}))
    assert cost.seconds(forward) - fp8_any_layout.seconds(forward) == pytest.approx(saved * (X + W) / 1e12)
    for device, known in (("h100-sxm-80gb", False), ("b200-sxm", True)):
        assert cost_of(device, "fp8", "megatron-core").matmuls.rates.fp8_any_layout == known


def test_products_are_cut_into_parts_for_exchanges_beside_them() -> None:
    whole = LayerWork(layer(), Phase.FORWARD, 1, 0)
    cost = rates("fp8")
    cost = replace(cost, matmuls=changed(cost.matmuls, gemm_split_overhead_s=1e-4))
    assert cost.seconds(whole._replace(cuts=2)) == pytest.approx(cost.seconds(whole) + 2e-4)


@pytest.mark.parametrize("other", [layer(LayerKind.HEAD), layer(LayerKind.BLOCK, Role.GATING)])
def test_heads_and_routers_are_priced_as_in_bf16(other: LayerSpec) -> None:
    forward = rates("fp8").cost_estimate(LayerWork(other, Phase.FORWARD, 1, 0))
    assert forward.seconds == pytest.approx(POINTWISE_S + FLOPS / 1e14)


def test_a_device_without_a_peak_for_it_is_refused_by_name() -> None:
    with refuses("training.precision", rule="h100-sxm-80gb has no published dense peak", fix="known: bf16"):
        cost_of("h100-sxm-80gb", "nvfp4", state=rates("nvfp4").state)
