"""Memory-bound kernels, launches of the host and layouts of images, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplan import catalog
from simplan.cost.compute.attention import AttentionRates
from simplan.cost.compute.kernels import KernelCost
from simplan.cost.compute.matmul import Matmul, MatmulRates
from simplan.cost.compute.traffic import layer_traffic
from simplan.cost.model import Provenance
from simplan.model.layer import Gemm, ParameterSpec, Pointwise
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.program.program import LayerWork, Phase
from simplan.software.rates import AttentionEfficiency
from simplan.software.software import StateBytes
from tests.cost.rates import PLAIN, changed, cost_of
from tests.layers import layer_of_kernels

H, T = 256, 128
GPT = ModelSpec(family="gpt", num_hidden_layers=1, hidden_size=H, num_attention_heads=4, seq_len=T, vocab_size=1024)
FP32 = StateBytes(parameter=4, gradient=4, activation=4, boundary=4)
MATMULS = changed(MatmulRates(1e14, 1e12, None, PLAIN), transpose_bytes_per_s=1e9)
COST = KernelCost(
    MATMULS, AttentionRates(MATMULS, 1e14, AttentionEfficiency(forward=1, backward=1), FP32), FP32, "sgd",
    Provenance.PUBLISHED, 0.1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "forward", "backward"),
    [
        # norms 2 and 2, sums 3 and 3, GELU 2 x 4; backward: norms 5 and 5, gradients at two forks 3 each, parts of QKV
        # joined 2 x 3, GELU 3 x 4
        ("single", 18, 34),
        # norm 2; sum and norm 4; GELU 8; sum 3. Backward: norm 3 (gradient, input, gradient of the input); sum and norm
        # 5 (two gradients and the sum read, two gradients written); GELU 12; sum 3
        ("compiled", 17, 23),
    ],
)
def test_kernels_of_a_gpt_block_pass_the_tensors_counted_by_hand(kernels: str, forward: int, backward: int) -> None:
    """In tensors of the hidden size; statistics of norms add less than 1%."""
    traffic = layer_traffic(GPT.layers[1], 4, 4, kernels)  # type: ignore[arg-type]
    tensor = T * H * 4
    assert sum(t.forward_bytes for t in traffic) / tensor == pytest.approx(forward, rel=0.01)
    assert sum(t.backward_bytes for t in traffic) / tensor == pytest.approx(backward, rel=0.01)
    assert sum(t.bias_bytes for t in traffic) / tensor == 3 + 1 + 4 + 1


def test_autocast_adds_casts_and_keeps_the_residual_stream_in_fp32() -> None:
    """Forward of eager bf16: norms 8 + 6 each, sums 4 + 2 + 4 each, GELU 16 bytes per element of the hidden states."""
    traffic = layer_traffic(GPT.layers[1], 2, 4, "single")
    assert sum(t.forward_bytes for t in traffic) / (T * H) == pytest.approx(2 * (8 + 6) + 2 * 10 + 16, rel=0.01)


def test_a_compiled_loss_passes_twice_over_logits_in_16_bits() -> None:
    for kernels, num_bytes in (("compiled", 2 * 2), ("single", 2 + 4 + 3 * 4)):
        head = layer_traffic(GPT.layers[-1], 2, 4, kernels)[-1].forward_bytes  # type: ignore[arg-type]
        cast = layer_traffic(GPT.layers[-1], 2, 4, kernels)[-2].forward_bytes  # type: ignore[arg-type]
        assert (head + cast) / (T * 1024) == pytest.approx(num_bytes, rel=0.01)


SHORT = layer_of_kernels(
    (Gemm("w", 8, 8, 8), Pointwise("p", 8, 8)), (ParameterSpec("w.weight", (8, 8)),), key="short kernels"
)


@pytest.mark.parametrize(("sequence_parallel", "forward", "backward"), [(True, 5.5, 7.7), (False, 3.85, 5.4)])
def test_dtensors_cost_the_host_as_much_as_measured(sequence_parallel: bool, forward: float, backward: float) -> None:
    """Multiples of a plain block's forward and backward, measured by benchmarks/dtensor_host.py with torch 2.13."""
    without, model, software = (
        replace(COST, kernel_set="composed"),
        catalog.model("llama3-8b"),
        catalog.software("torch"),
    )
    having = replace(without, dtensor=True)
    plain, split = (
        software.layers_of(model, plan)[1]
        for plan in (ParallelPlan(), ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    )
    both = sum(without.host_calls(LayerWork(plain, phase, 1, 0)) for phase in (Phase.FORWARD, Phase.BACKWARD))
    for phase, measured in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        work = LayerWork(split, phase, 1, 0)
        more = having.host_calls(work) - without.host_calls(work)
        assert more / both == pytest.approx(measured, rel=0.12)
        alone = LayerWork(plain, phase, 1, 0)
        assert having.host_calls(alone) == without.host_calls(alone)


def test_a_layer_of_short_kernels_takes_as_long_as_the_host_issues_them() -> None:
    """Forward: two operations; backward: two matmuls and one other kernel. Long kernels hide the host."""
    bound = replace(COST, host_call_s=1e-3)
    for phase, calls in ((Phase.FORWARD, 2), (Phase.BACKWARD, 3)):
        short, long = LayerWork(SHORT, phase, 1, 0), LayerWork(SHORT, phase, 10**12, 0)
        assert bound.seconds(short) == pytest.approx(calls * 1e-3)
        assert bound.seconds(long) == COST.seconds(long) > calls * 1e-3
        # the unknown speed of the host is all that is unsure of the one, and no part of the other
        assert bound.cost_estimate(short).relative_std == pytest.approx(bound.host_call_std, rel=0.01)
        assert bound.cost_estimate(long).relative_std == COST.cost_estimate(long).relative_std


RESNET = ModelSpec(family="resnet", depths=(2,), layer_type="bottleneck", image_size=32, num_classes=10)
BLOCK = RESNET.layers[2]
CONVOLUTIONS = tuple(index for index, kernel in enumerate(BLOCK.kernels) if isinstance(kernel, Gemm))


@pytest.mark.parametrize(
    ("transposed", "forward", "backward"), [("none", 0, 0), ("weight_gradients", 0, 1), ("all", 1, 2)]
)
def test_images_channels_first_are_transposed_around_convolutions(transposed: str, forward: int, backward: int) -> None:
    """Inputs and results of each matmul are read and written: 2 x (256 + 64 + 64 + 64 + 64 + 256) channels."""
    cost = replace(COST, transposed=transposed)  # type: ignore[arg-type]
    num_bytes = 2 * 4 * 8 * 8 * (256 + 64 + 64 + 64 + 64 + 256)
    for phase, times in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        work = LayerWork(BLOCK, phase, 4, 0, CONVOLUTIONS)
        assert cost.seconds(work) - COST.seconds(work) == pytest.approx(times * 4 * num_bytes / 1e12, abs=1e-12)


def test_winograd_saves_multiplications_of_3_x_3_convolutions_alone() -> None:
    slow = replace(COST, matmuls=replace(MATMULS, flop_per_s=1e9))
    for kernel, times in ((0, 1.0), (CONVOLUTIONS[1], 1.5)):
        work = LayerWork(BLOCK, Phase.FORWARD, 4, 0, (kernel,))
        assert slow.seconds(work) / replace(slow, winograd=True).seconds(work) == pytest.approx(times)


def test_fp32_needs_no_alignment_and_tf32_half_as_much() -> None:
    """50,257 columns and 50,260, which are a multiple of four."""
    device = catalog.device("a100-sxm-80gb")
    for precision, columns, slow in (("fp32", 50257, False), ("tf32", 50260, False), ("tf32", 50257, True)):
        rates = cost_of(device, precision).matmuls
        odd, even = (rates.part("", Matmul(8192, n, 1024, 1, 0.0)).seconds for n in (columns, 50304))
        assert (odd > 1.5 * even) is slow, precision


def test_gradients_that_sum_over_all_pixels_fill_the_device() -> None:
    """One tile of 64 x 64 and 400,000 pixels: parts of 2,048 pixels, one per SM."""
    rates = replace(changed(MATMULS, tail_wave_fraction=1.0), num_sms=80)
    matmul = Matmul(64, 64, 401_408, 1, 0.0)
    whole_s = 2 * 128 * 64 * 401_408 / (1e14 / 80)
    assert rates.part("", matmul).seconds == pytest.approx(whole_s / 80, rel=0.35)
