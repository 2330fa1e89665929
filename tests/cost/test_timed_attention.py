"""Fused attention beside what NVIDIA timed alone: cuDNN in 16 bits, causal, not deterministic.

NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results: llama3.1 and gpt_oss of gb200 (c3552dea), llama3.1 of
gb300 (60e572b7), gpt_oss of gb300_919_only_cudnn (df73764a), both of h200_919_only_cudnn (df73764a, afa9f7c0; an H200
has the multiprocessors of an H100). Milliseconds forward and backward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplan import catalog
from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.kernel_cost import kernel_cost
from simplan.model.layer import Attention
from simplan.plan.plan import ParallelPlan
from simplan.training.training import TrainingSpec
from tests.cost.rates import changed

_LAUNCH_S = 3e-6  # of a kernel that is timed over and over


def timed_alone(device: str) -> AttentionRates:
    """Rates as in the textbook, with nothing of what a training step makes of them."""
    found, software = catalog.device(device), catalog.software("megatron-bridge", textbook=True)
    kernels = catalog.kernel_rates(found.architecture, textbook=True)
    alone = {name: share.model_copy(update={"sustained": 1.0}) for name, share in kernels.attention.items()}
    found = found.model_copy(update={"kernels": kernels.model_copy(update={"attention": alone})})
    training = TrainingSpec(global_batch_size=1, precision="bf16")
    state = software.state(training, ParallelPlan())
    cost = kernel_cost(found, "bf16", state, "adamw", software, num_devices=1, shards_parameters=False)
    return replace(cost.attention, matmuls=changed(cost.attention.matmuls, kernel_overhead_s=_LAUNCH_S))


def llama(tokens: int) -> Attention:
    return Attention(64, 8, 128, tokens)


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
    assert 1e3 * rates.seconds(kernel, sequences, backward=False) == pytest.approx(forward_ms, rel=0.08)
    assert 1e3 * rates.seconds(kernel, sequences, backward=True) == pytest.approx(backward_ms, rel=0.11)


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
    seconds = sum(rates.seconds(kernel, 2, backward=backward) for backward in (False, True))
    assert 1e3 * seconds == pytest.approx(forward_ms + backward_ms, rel=0.05)
