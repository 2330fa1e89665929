"""Fused attention beside what NVIDIA timed: cudnn-frontend's own tables, in 8 bits and alone in 16.

NVIDIA/cudnn-frontend at c3552dea (llama on GB300: 60e572b7), benchmark/sdpa_benchmark_training/results/{dsv3,llama3.1,
gpt_oss}/{gb200,gb300}: milliseconds of two sequences, causal (top_left), cudnn, not deterministic. In 16 bits also
gpt_oss of gb300_919_only_cudnn (df73764a) and both of h200_919_only_cudnn (df73764a, afa9f7c0; an H200 has the
multiprocessors of an H100).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import pytest

from simplan import catalog
from simplan.cost.compute.attention import AttentionRates
from simplan.model.layer import Attention
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from tests.cost.rates import attention_s, changed, cost_of
from tests.jobs import problems

Precision = Literal["bf16", "fp8", "mxfp8"]
BRIDGE = catalog.software("megatron-bridge")
PACKED = catalog.model("llama3-8b").model_copy(update={"document_lengths": (4096, 4096)})
LLAMA, DEEPSEEK = catalog.model("llama3-8b"), catalog.model("deepseek-v2-lite")


def rates(device: str, precision: Precision, *, free_casts: bool = True) -> AttentionRates:
    attention_rates = cost_of(device, precision, BRIDGE, num_devices=1).attention
    free = replace(changed(attention_rates.matmuls, kernel_overhead_s=0.0), bytes_per_s=1e30)
    return replace(attention_rates, matmuls=free) if free_casts else attention_rates


def deepseek(tokens: int) -> Attention:
    return Attention(128, 128, 192, tokens, value_head_dim=128)


def llama(tokens: int) -> Attention:
    return Attention(64, 8, 128, tokens)


@pytest.mark.parametrize(
    ("device", "kernel", "bf16_ms", "precision", "low_ms"),
    [
        ("gb300", deepseek(8192), (2.842, 10.976), "mxfp8", (1.916, 7.757)),
        ("gb300", deepseek(8192), (2.842, 10.976), "fp8", (1.725, 6.049)),
        ("gb300", llama(8192), (1.185, 3.832), "mxfp8", (0.856, 3.917)),
        ("gb300", llama(8192), (1.185, 3.832), "fp8", (0.759, 3.087)),
        ("gb200", deepseek(8192), (4.639, 16.531), "mxfp8", (3.824, 13.219)),
        ("gb200", deepseek(8192), (4.639, 16.531), "fp8", (3.561, 11.647)),
        ("gb200", llama(8192), (1.918, 5.712), "mxfp8", (1.864, 6.759)),
        ("gb200", llama(8192), (1.918, 5.712), "fp8", (1.763, 6.056)),
    ],
)
def test_8_bits_save_what_they_save_at_a_length_that_the_rates_are_not_from(
    device: str, kernel: Attention, bf16_ms: tuple[float, ...], precision: Precision, low_ms: tuple[float, ...]
) -> None:
    """Casts are no part of the tables; on GB200 backward of heads of 128 is slower in 8 bits."""
    wide, low = rates(device, "bf16"), rates(device, precision)
    for backward in (False, True):
        ratio = attention_s(low, replace(kernel, eight_bits=True), 2, backward=backward)
        ratio /= attention_s(wide, kernel, 2, backward=backward)
        assert ratio == pytest.approx(low_ms[backward] / bf16_ms[backward], rel=0.12)


def test_backward_in_8_bits_skips_no_keys_of_a_window() -> None:
    """gpt-oss: 6.6 ms for 8,192 tokens and 1.9 for 4,096, with a window of 128; 0.86 and 0.44 in 16 bits."""
    low = rates("gb300", "mxfp8")
    for tokens, ms in ((4096, 1.872), (8192, 6.643)):
        kernel = Attention(128, 128, 64, tokens, window=128, eight_bits=True)
        assert 1e3 * attention_s(low, kernel, 2, backward=True) == pytest.approx(ms, rel=0.3)
        whole = attention_s(low, replace(kernel, window=0), 2, backward=True)
        assert attention_s(low, kernel, 2, backward=True) == pytest.approx(whole)
        assert attention_s(low, kernel, 2, backward=False) < 0.3 * attention_s(
            low, replace(kernel, window=0), 2, backward=False
        )


@pytest.mark.parametrize(
    ("precision", "passes", "copies"),
    [("mxfp8", 1, 2 * 33 / 32), ("fp8", 2, 1)],  # a byte for 32; one scale, for which the largest is found first
)
def test_casts_read_and_write_what_the_kernel_reads(precision: Precision, passes: int, copies: float) -> None:
    free, whole = rates("gb300", precision), rates("gb300", precision, free_casts=False)
    kernel = replace(deepseek(4096), eight_bits=True)
    for backward, casts, elements in ((False, 3, 4096 * 128 * (192 + 192 + 128)), (True, 1, 4096 * 128 * 128)):
        kernels_s = (1 + casts * passes) * whole.matmuls.kernel_overhead_s
        moved_s = elements * (2 * passes + copies) * whole.traffic / whole.matmuls.bytes_per_s
        casts_s = attention_s(whole, kernel, 1, backward=backward) - attention_s(free, kernel, 1, backward=backward)
        assert casts_s == pytest.approx(kernels_s + moved_s, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "cluster", "precision", "plan", "said"),
    [
        (LLAMA, "gb200-nvl72", "bf16", {}, "is for training.precision = fp8, mxfp8 or nvfp4, and it is bf16"),
        (LLAMA, "dgx-h100", "fp8", {}, "on h100-sxm-80gb is not modeled yet: there is no public data"),
        (
            catalog.model("gpt3-175b"),
            "gb200-nvl72",
            "mxfp8",
            {},
            "of the family gpt is not modeled yet; models: llama",
        ),
        (PACKED, "gb200-nvl72", "mxfp8", {}, "of packed documents .* is not modeled yet"),
        (LLAMA, "gb200-nvl72", "mxfp8", {"cp": 2, "dp_shard": 4}, "with plan.cp = 2 is not modeled yet"),
    ],
)
def test_unmodelled_options_are_refused_by_name(
    model: ModelSpec, cluster: str, precision: str, plan: dict[str, Any], said: str
) -> None:
    software = BRIDGE.model_copy(update={"fp8_dot_product_attention": True})
    plan = {"dp_shard": 8, "zero_stage": 1, **plan}
    refusals = problems(model, plan, cluster=cluster, software=software, precision=precision)
    wanted = re.compile(f"software.fp8_dot_product_attention = true: .*{said}")
    assert any(wanted.match(sentence) for sentence in refusals)


def test_only_layers_with_attention_are_others() -> None:
    plan, other = ParallelPlan(), BRIDGE.model_copy(update={"fp8_dot_product_attention": True})
    pairs = zip(BRIDGE.layers_of(DEEPSEEK, plan), other.layers_of(DEEPSEEK, plan), strict=True)
    assert [first == two for first, two in pairs] == [True, *[False] * 27, True]
    assert other.title == "megatron-bridge, all_to_all, FP8 attention"


_LAUNCH_S = 3e-6  # of a kernel that is timed over and over


def timed_alone(device: str) -> AttentionRates:
    """Rates as in the textbook, with nothing of what a training step makes of them."""
    spec, software = catalog.device(device), catalog.software("megatron-bridge", textbook=True)
    kernels = catalog.kernel_rates(spec.architecture, textbook=True)
    alone = {name: share.model_copy(update={"sustained": 1.0}) for name, share in kernels.attention.items()}
    spec = spec.model_copy(update={"kernels": kernels.model_copy(update={"attention": alone})})
    cost = cost_of(spec, software=software, num_devices=1)
    return replace(cost.attention, matmuls=changed(cost.attention.matmuls, kernel_overhead_s=_LAUNCH_S))


def gpt_oss(tokens: int, *, key_value_heads: int, heads: int, window: int) -> Attention:
    return Attention(heads, key_value_heads, 64, tokens, window=window)


@pytest.mark.parametrize(
    ("device", "sequences", "tokens", "forward_ms", "backward_ms"),
    [
        ("h100-sxm-80gb", 1, 2048, 0.142, 0.464),
        ("h100-sxm-80gb", 1, 4096, 0.465, 1.450),
        ("h100-sxm-80gb", 1, 8192, 1.708, 5.083),
        ("h100-sxm-80gb", 1, 16384, 6.531, 19.002),
        ("gb200", 2, 2048, 0.166, 0.506),
        ("gb200", 2, 4096, 0.530, 1.607),
        ("gb200", 2, 8192, 1.918, 5.712),
        ("gb200", 2, 16384, 7.303, 21.500),
        ("gb300", 2, 2048, 0.100, 0.356),
        ("gb300", 2, 4096, 0.323, 1.101),
        ("gb300", 2, 8192, 1.185, 3.832),
        ("gb300", 2, 16384, 4.593, 14.593),
    ],
)
def test_heads_of_128(device: str, sequences: int, tokens: int, forward_ms: float, backward_ms: float) -> None:
    rates, kernel = timed_alone(device), llama(tokens)
    assert 1e3 * attention_s(rates, kernel, sequences, backward=False) == pytest.approx(forward_ms, rel=0.08)
    assert 1e3 * attention_s(rates, kernel, sequences, backward=True) == pytest.approx(backward_ms, rel=0.11)


@pytest.mark.parametrize(
    ("device", "kernel", "forward_ms", "backward_ms"),
    [
        ("h100-sxm-80gb", gpt_oss(8192, heads=64, key_value_heads=8, window=1024), 0.738, 2.149),
        ("gb200", gpt_oss(8192, heads=128, key_value_heads=128, window=128), 0.668, 1.146),
        ("gb300", gpt_oss(8192, heads=64, key_value_heads=8, window=1024), 0.359, 0.965),
    ],
)
def test_heads_of_64_with_a_window(device: str, kernel: Attention, forward_ms: float, backward_ms: float) -> None:
    """One share stands for both directions: on GB200 forward is a third too fast and backward a fifth too slow."""
    rates = timed_alone(device)
    seconds = sum(attention_s(rates, kernel, 2, backward=backward) for backward in (False, True))
    assert 1e3 * seconds == pytest.approx(forward_ms + backward_ms, rel=0.05)
