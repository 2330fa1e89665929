"""Times of kernels against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simplan import catalog
from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.kernels import KernelCost
from simplan.cost.compute.matmul import Matmul, MatmulRates
from simplan.cost.model import Provenance
from simplan.model.layer import Attention, CollectiveKind, Gemm, LayerCollective, Lookup, ParameterSpec, Pointwise
from simplan.program.program import LayerWork, Phase
from simplan.software.rates import AttentionEfficiency
from simplan.software.software import StateBytes
from tests.cost.rates import PLAIN, attention_s, changed, cost_of
from tests.layers import layer_of_kernels

STATE = StateBytes(parameter=4, gradient=4, activation=2, boundary=4)
PRODUCTS = changed(MatmulRates(1e14, 1e12, None, PLAIN), unaligned_efficiency=0.5, misaligned_slice_efficiency=0.1)
ATTENTION = AttentionRates(PRODUCTS, 1e14, AttentionEfficiency(forward=0.6, backward=0.5, sustained=1.0), STATE)


def costs(state: StateBytes = STATE, **fields: Any) -> KernelCost:
    return KernelCost(PRODUCTS, ATTENTION, state, "adamw", Provenance.PUBLISHED, 0.1, **fields)


RATES = costs()
LAYER = layer_of_kernels((Gemm("w", 2048, 4096, 8192),), (ParameterSpec("w", (4096, 8192)),), key="one matmul")


def test_a_large_matmul_is_bound_by_flops_and_its_backward_is_two() -> None:
    forward_s = 3 * 2 * 2048 * 4096 * 8192 / 1e14
    for phase, expected in ((Phase.FORWARD, forward_s), (Phase.BACKWARD, 2 * forward_s)):
        assert RATES.cost_estimate(LayerWork(LAYER, phase, 3, 0)).seconds == pytest.approx(expected)


def test_the_optimizer_is_bound_by_32_bytes_a_parameter() -> None:
    """Adam in fp32: read weight, gradient, two moments; write weight, two moments, zeroed gradient."""
    assert RATES.cost_estimate(LayerWork(LAYER, Phase.OPTIMIZER, 1, 10**9)).seconds == pytest.approx(0.032)


def test_the_optimizer_in_pure_bf16_is_bound_by_16_bytes_a_parameter() -> None:
    """Adam over weights, gradients and states of 2 bytes moves half the bytes of FP32 states."""
    rates = costs(StateBytes(parameter=2, gradient=2, moment=2, activation=2, boundary=2))
    for phase, seconds in ((Phase.OPTIMIZER, 0.016), (Phase.NORM, 0.002), (Phase.SCALE, 0.004)):
        assert rates.cost_estimate(LayerWork(LAYER, phase, 1, 10**9)).seconds == pytest.approx(seconds)


def test_copies_read_and_write_gathered_weights() -> None:
    state = StateBytes(parameter=4, gradient=4, activation=2, boundary=2, gathered=2)
    rates = costs(state)
    for phase in (Phase.GATHER_COPY, Phase.REDUCE_COPY):
        assert rates.cost_estimate(LayerWork(LAYER, phase, 1, 10**9)).seconds == pytest.approx(2 * 2 * 1e-3)


PARTS = layer_of_kernels(
    (
        LayerCollective("x", "tp", CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, 10**9),
        Gemm("a", 2048, 4096, 8192),
        Pointwise("b", 10**8, 10**8),
        Attention(32, 8, 128, 2048, causal=False, num_keys=8192),
        Pointwise("norm", 10**8, 10**8),
        Lookup("e", 10**4, 10**4),
    ),
    (ParameterSpec("a.weight", (4096, 8192)), ParameterSpec("norm.weight", (1,)), ParameterSpec("e.weight", (1,))),
    key="parts",
)
GEMM_S = 2 * 2048 * 4096 * 8192 / 1e14
POINTWISE_S = 2 * 10**8 * 2 / 1e12
LOOKUP_S = 10**8 * (2 + 4) / 1e12  # activations in 2 bytes, weights in 4
ATTENTION_S = 4 * 2048 * 8192 * 128 * 32 / 0.6e14  # backward reaches 1 / 1.2 of the rate


@pytest.mark.parametrize(
    ("phase", "kernels", "seconds"),
    [
        (Phase.FORWARD, None, GEMM_S + 2 * POINTWISE_S + ATTENTION_S + LOOKUP_S),
        (Phase.FORWARD, (0,), 0.0),
        (Phase.FORWARD, (0, 1), GEMM_S),
        (Phase.RECOMPUTE, (2, 3), POINTWISE_S + ATTENTION_S),
        (Phase.BACKWARD, (1,), 2 * GEMM_S),
        (Phase.BACKWARD, (3,), 2.5 * 1.2 * ATTENTION_S),
        (Phase.BACKWARD_INPUT, None, GEMM_S + 2 * 2 * POINTWISE_S + 2.5 * 1.2 * ATTENTION_S),
        (Phase.BACKWARD_WEIGHT, None, GEMM_S + POINTWISE_S + LOOKUP_S),
        (Phase.BACKWARD_WEIGHT, (2, 3), 0.0),
        (Phase.BACKWARD_INPUT, (5,), 0.0),
    ],
)
def test_parts_of_a_layer_cost_their_kernels(phase: Phase, kernels: tuple[int, ...] | None, seconds: float) -> None:
    """Exchanges are communications, priced elsewhere. The second part of a backward reads once more what norms took
    in."""
    assert RATES.cost_estimate(LayerWork(PARTS, phase, 1, 0, kernels)).seconds == pytest.approx(seconds)


def tiled(**fields: Any) -> MatmulRates:
    """100 multiprocessors of 1e12 FLOP/s each."""
    return replace(changed(PRODUCTS, **fields), num_sms=100)


@pytest.mark.parametrize(
    ("rows", "columns", "waves"),
    [
        (2560, 1280, 1.0),  # 10 x 10 tiles of 256 x 128
        (2560, 2560, 2.0),
        (2560, 1408, 2.0),  # 110 tiles: a second wave of 10
    ],
)
def test_tiles_are_dealt_out_in_waves(rows: int, columns: int, waves: float) -> None:
    tile_overhead_s = 2 * 256 * 128 * 4096 / 1e12
    product = Matmul(rows, columns, 4096, 1, 0.0)
    slow_small = {"small_tile_efficiency": (0.5, 0.25)}
    assert tiled(**slow_small).part("", product).seconds == pytest.approx(waves * tile_overhead_s)
    partly = tiled(**slow_small, tail_wave_fraction=0.5)
    full = rows * columns / (256 * 128) / 100
    assert partly.part("", product).seconds == pytest.approx(tile_overhead_s * (full + waves) / 2)


def test_a_product_of_few_tiles_is_split_along_its_inner_dimension() -> None:
    """One tile of 128 x 64 in eight parts, not one multiprocessor for all of it."""
    whole_s = 2 * 128 * 64 * 8192 / 1e12
    assert tiled().part("", Matmul(128, 64, 8192, 1, 0.0)).seconds == pytest.approx(whole_s / 8)


def test_short_inner_dimensions_reach_half_the_rate_at_the_half_depth() -> None:
    product = Matmul(2560, 1280, 64, 1, 0.0)
    untiled = changed(PRODUCTS, half_rate_k=64.0)
    assert untiled.part("", product).seconds == pytest.approx(2 * PRODUCTS.part("", product).seconds)


def test_every_tile_is_begun_and_written_out() -> None:
    """Whatever the rate of its multiplications; a quarter of a tile takes a quarter."""
    whole, small = Matmul(2560, 1280, 64, 1, 0.0), Matmul(1280, 640, 64, 1, 0.0)
    for product, more_s in ((whole, 3e-6), (small, 0.75e-6)):
        assert tiled(tile_overhead_s=3e-6).part("", product).seconds - tiled().part(
            "", product
        ).seconds == pytest.approx(more_s)


DEEPGEMM = {
    (1, 4096, 2112, 7168): 1058,
    (1, 4096, 24576, 1536): 990,
    (1, 4096, 32768, 512): 590,
    (1, 4096, 7168, 16384): 1358,
    (1, 4096, 4096, 7168): 1304,
    (1, 4096, 7168, 2048): 1025,
    (4, 8192, 4096, 7168): 1297,
    (4, 8192, 7168, 2048): 1099,
    (8, 4096, 4096, 7168): 1288,
    (8, 4096, 7168, 2048): 1093,
}
"""TFLOP/s in FP8 on H800 by groups, rows of one, columns and depth (deepseek-ai/DeepGEMM at a6d97a1, README)."""


@pytest.mark.parametrize("shape", DEEPGEMM, ids=str)
def test_short_inner_dimensions_in_8_bits_cost_what_was_measured(shape: tuple[int, int, int, int]) -> None:
    """Relative to the deepest product; one of a depth of 512 is a quarter too fast, all others within an eighth."""
    device = catalog.device("h100-sxm-80gb")
    matmuls = MatmulRates(1.4e15, 1e16, device.num_sms, device.kernels.model_copy(update={"kernel_overhead_s": 0.0}))

    def rate(shape: tuple[int, int, int, int]) -> float:
        groups, rows, columns, depth = shape
        product = Matmul(rows, columns, depth, groups, 0.0)
        return product.flops / matmuls.part("", product).seconds

    deepest = (1, 4096, 7168, 16384)
    predicted, measured = rate(shape) / rate(deepest), DEEPGEMM[shape] / DEEPGEMM[deepest]
    assert predicted == pytest.approx(measured, rel=0.27 if shape[-1] == 512 else 0.125)


@pytest.mark.parametrize(("operands", "times"), [("whole", 2), ("slices", 10), ("padded", 1)])
def test_sizes_that_sectors_do_not_divide_are_slow_and_slower_in_slices(operands: Any, times: int) -> None:
    product = Matmul(512, 1004, 512, 1, 0.0, operands)
    assert PRODUCTS.part("", product).seconds == pytest.approx(times * 2 * 512 * 1004 * 512 / 1e14)


def test_a_product_is_bound_by_its_bytes_or_its_launch_where_these_take_longer() -> None:
    small = Matmul(8, 8, 8, 1, 1e6)
    assert PRODUCTS.part("", small).seconds == pytest.approx(1e-6)
    assert changed(PRODUCTS, kernel_overhead_s=5e-6).part("", small).seconds == pytest.approx(
        PRODUCTS.part("", small).seconds + 5e-6
    )


def test_unfused_attention_is_its_products_and_passes_over_the_scores() -> None:
    """Per head s x s scores: two products forward, four backward; softmax 2 and 3 passes, dropout 2 and its mask."""
    s, d, heads = 2048, 128, 4
    core = Attention(heads, heads, d, s, eager=True, fused_softmax=True, dropout=True)
    product_s = heads * 2 * s * s * d / 1e14
    moved_s = 2 * (heads * s * s + heads * 2 * s * d) / 1e12
    passes = (2 * 2 + 2 * 2 + 1, 3 * 2 + 2 * 2 + 1)
    for backward, matmuls in ((False, 2), (True, 4)):
        expected = matmuls * max(product_s, moved_s) + heads * s * s * passes[backward] / 1e12
        assert attention_s(ATTENTION, core, 1, backward=backward) == pytest.approx(expected)


def test_fused_attention_reaches_half_its_rate_where_a_query_meets_half_as_many_keys() -> None:
    """A causal query meets half of the keys on average."""
    core = Attention(4, 4, 128, 2048)
    halved = replace(ATTENTION, matmuls=changed(PRODUCTS, half_rate_keys=1024.0))
    ratio = attention_s(halved, core, 1, backward=False) / attention_s(ATTENTION, core, 1, backward=False)
    assert ratio == pytest.approx(2)
    narrow = replace(ATTENTION, matmuls=changed(PRODUCTS, head_dim_64_efficiency=0.8))
    core = replace(core, head_dim=64)
    ratio = attention_s(narrow, core, 1, backward=True) / attention_s(ATTENTION, core, 1, backward=True)
    assert ratio == pytest.approx(1 / 0.8)


def test_gradients_are_added_to_those_that_are_held_in_a_kernel_of_its_own() -> None:
    """bf16 products and fp32 gradients: 2 + 4 to widen, 4 + 4 + 4 to add; none where products do it themselves."""
    state = STATE.model_copy(update={"matmul_gradient": 2, "gradient": 4})
    assert state.accumulation_bytes == 18
    assert state.model_copy(update={"matmul_gradient": 4}).accumulation_bytes == 12
    assert state.model_copy(update={"matmul_gradient": 0}).accumulation_bytes == 0
    backward = LayerWork(LAYER, Phase.BACKWARD, 1, 0)
    added_s = costs(accumulation_bytes=18).seconds(backward) - RATES.seconds(backward)
    assert added_s == pytest.approx(18 * 4096 * 8192 / 1e12)


def test_gradients_that_were_freed_are_neither_added_to_nor_zeroed() -> None:
    """Under autocast: the first of four microbatches casts 2 + 4 bytes; AdamW moves 28 bytes in place of 32."""
    keeping = catalog.software("torch").with_changes(zero_grad_set_to_none=False)
    for software, added, moved in ((catalog.software("torch"), 6 + 12 * 3 / 4, 28), (keeping, 6 + 12, 32)):
        cost = cost_of("a100-sxm-80gb", software=software, num_devices=1, num_microbatches=4)
        assert cost.accumulation_bytes == added
        update = LayerWork(LAYER, Phase.OPTIMIZER, 1, 10**9)
        assert cost.seconds(update) == pytest.approx(moved * 1e9 / cost.matmuls.bytes_per_s)


def test_odd_vocabularies_run_without_wide_loads() -> None:
    """The head of GPT-2: 60 to 85 TFLOP/s on an H200 (scenarios/measured/h200). Slow devices are as for even sizes."""
    for device, precision, least, greatest in (
        ("h200-sxm", "bf16", 60e12, 85e12),
        ("h200-sxm", "tf32", 150e12, 400e12),
    ):
        matmuls = cost_of(device, precision, num_devices=1).matmuls
        odd = Matmul(8192, 50257, 768, 1, 0)
        assert least < odd.flops / matmuls.part("", odd).seconds < greatest
    small = cost_of("rtx-3090", "fp16", num_devices=1).matmuls
    assert small.alignment_efficiency(odd) == small.rates.unaligned_efficiency


def test_a_fused_optimizer_moves_what_its_sms_can() -> None:
    """268 million FP32 parameters took AdamW 2.89 ms on an H200 (scenarios/measured/h200), of 1.8 ms at 4.2 TB/s."""
    cost = cost_of("h200-sxm", num_devices=1)
    update = LayerWork(LAYER, Phase.OPTIMIZER, 1, 2**28)
    assert cost.seconds(update) == pytest.approx(2.89e-3, rel=0.02)
    assert replace(cost, optimizer="adamw_foreach").matmuls.bytes_per_s > 4e12


@pytest.mark.parametrize(("keys", "heads", "width", "forward_s", "backward_s"), [
    (2048, 128, 128, 3.228e-3, 10.154e-3), (512, 1024, 64, 1.223e-3, 3.124e-3),
])  # fmt: skip
def test_attention_in_fp32_is_as_fast_as_timed_on_an_h200(
    keys: int, heads: int, width: int, forward_s: float, backward_s: float
) -> None:
    """Causal, as timed alone (scenarios/measured/h200)."""
    rates = cost_of("h200-sxm", "fp32", num_devices=1).attention
    kernel = Attention(heads, heads, width, keys)
    for backward, timed_s in ((False, forward_s), (True, backward_s)):
        assert attention_s(rates, kernel, 1, backward=backward) == pytest.approx(timed_s, rel=0.3)


def test_every_kernel_takes_something_beyond_its_work() -> None:
    """A product and what is computed point by point; in backward the product's two and one more."""
    slow = replace(RATES, matmuls=changed(RATES.matmuls, kernel_overhead_s=1e-5))
    layer = layer_of_kernels((*LAYER.kernels, Pointwise("gelu", 8192, 8192)), LAYER.parameters, key="two kernels")
    assert [type(kernel) for kernel in layer.kernels] == [Gemm, Pointwise]
    for phase, number in ((Phase.FORWARD, 2), (Phase.BACKWARD, 3), (Phase.OPTIMIZER, 0)):
        work = LayerWork(layer, phase, 1, layer.num_parameters)
        assert slow.seconds(work) - RATES.seconds(work) == pytest.approx(number * 1e-5)


def test_weights_are_copied_for_products_in_another_precision() -> None:
    copying = costs(STATE.model_copy(update={"weight_copy": 2}))
    forward = LayerWork(LAYER, Phase.FORWARD, 1, 0)
    assert copying.seconds(forward) - RATES.seconds(forward) == pytest.approx((4 + 2) * 4096 * 8192 / 1e12)


def test_both_kinds_of_16_bits_and_devices_that_nobody_measured_have_the_rate_of_their_architecture() -> None:
    """271.2 TFLOP/s were measured in bf16 on the A100 with 80 GB, 87 % of the peak that all A100 share."""

    def rate(device: str, precision: str) -> float:
        return cost_of(device, precision).matmuls.flop_per_s

    assert rate("a100-sxm-80gb", "fp16") == rate("a100-sxm-80gb", "bf16")
    assert rate("a100-sxm-40gb", "bf16") == pytest.approx(rate("a100-sxm-80gb", "bf16"), rel=0.01)


def test_devices_that_wait_for_each_other_are_as_slow_as_the_slowest() -> None:
    """The largest of N draws of a normal distribution, by drawing: within a fifth of the approximation."""
    device = catalog.device("a100-sxm-80gb")
    jittery = device.model_copy(update={"kernels": device.kernels.model_copy(update={"jitter": 0.02})})
    for number in (256, 4096):
        largest = np.random.default_rng(0).normal(1, 0.02, (200, number)).max(axis=1).mean()
        assert cost_of(jittery, num_devices=number).slowest - 1 == pytest.approx(largest - 1, rel=0.2)
    assert cost_of(jittery, num_devices=1).slowest == 1


@pytest.mark.parametrize(
    ("num_groups", "streams", "overlap", "times"),
    [(16, 0, 0.5, 1), (16, 4, 1.0, 4), (16, 4, 0.0, 16), (16, 4, 0.5, 10), (3, 4, 1.0, 1), (3, 4, 0.5, 2)],
)
def test_launches_on_several_streams_hide_each_other_in_part(
    num_groups: int, streams: int, overlap: float, times: float
) -> None:
    """All of them for one stream, n / s for s that hide each other wholly."""
    rates = changed(PRODUCTS, kernel_overhead_s=1e-5, stream_overlap=overlap)
    assert rates.launches_s(num_groups, streams) == pytest.approx(times * 1e-5)
