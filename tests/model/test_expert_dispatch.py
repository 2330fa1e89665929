"""How tokens come to their experts: what is sent and copied, against a draw of experts by lot and counts by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from simplan import catalog
from simplan.model.implementations.expert_dispatch import ExpertDispatch
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layer
from simplan.model.layer import Attention, ExpertDraw, LayerCollective, LayerSpec, Pointwise
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.plan.shard import Shard
from simplan.program.program import LayerWork, Phase
from tests.cost.rates import cost_of
from tests.model.test_moe import model_of

TOKENS, H, EXPERTS, TOP_K, EP = 64, 64, 16, 4, 4
MODEL: ModelSpec = model_of(seq_len=TOKENS, num_experts=EXPERTS, top_k=TOP_K, num_dense_layers=1, capacity_factor=1.0)
WHOLE, PLACES = TOKENS * H, TOKENS * TOP_K * H
WAYS: tuple[ExpertDispatch, ...] = ("copies", "all_to_all", "deepep", "hybridep")


def block(way: ExpertDispatch = "copies", *, ep: int = EP, **implementation: Any) -> LayerSpec:
    return implemented_layer(
        MODEL.layers_of(Shard(ep=ep))[2], LayerImplementation(expert_dispatch=way, **implementation), dropout=False
    )


def copies(layer: LayerSpec) -> dict[str, tuple[int, int]]:
    names = ("dispatch", "sort by expert", "sort by rank", "combine")
    return {k.name: (k.reads, k.writes) for k in layer.kernels if isinstance(k, Pointwise) and k.name in names}


def sent(layer: LayerSpec) -> set[int]:
    return {kernel.elements for kernel in layer.kernels if isinstance(kernel, LayerCollective) and kernel.axis == "ep"}


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(16, 4, 4), (256, 8, 32), (8, 2, 8), (128, 8, 8)])
def test_places_of_a_token_are_those_of_a_draw(experts: int, top_k: int, ranks: int) -> None:
    lot = random.Random(0)
    draws = [lot.sample(range(experts), top_k) for _ in range(20_000)]
    mean = sum(len({expert * ranks // experts for expert in drawn}) for drawn in draws) / len(draws)
    assert ExpertDraw(experts, top_k).places(ranks) == pytest.approx(mean, rel=0.01)


def test_a_kernel_for_each_copy_reads_or_writes_a_token_once() -> None:
    assert copies(block())["dispatch"] == (PLACES, PLACES)
    copies_of = copies(block("all_to_all"))
    assert (copies_of["dispatch"], copies_of["combine"]) == ((WHOLE, PLACES), (PLACES, WHOLE))
    assert copies_of["sort by expert"] == copies_of["sort by rank"] == (PLACES, PLACES)
    assert sent(block("all_to_all")) == sent(block()) == {PLACES}


def test_a_token_is_sent_once_to_a_rank() -> None:
    once = round(WHOLE * ExpertDraw(EXPERTS, TOP_K).places(EP))
    assert WHOLE < once < PLACES
    assert sent(block("deepep")) == sent(block("hybridep")) == {once}
    assert copies(block("deepep")) == {
        "sort by expert": (once, PLACES),
        "sort by rank": (PLACES, once),
        "combine": (once, WHOLE),
    }
    assert copies(block("hybridep")) == {"combine": (once, WHOLE)}


def test_without_other_ranks_nothing_is_sent() -> None:
    assert not any(sent(block(way, ep=1)) for way in WAYS)
    assert block("deepep", ep=1).kernels == block("hybridep", ep=1).kernels == block("all_to_all", ep=1).kernels


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ep", [1, EP])
@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_that_is_read_has_a_maker(way: ExpertDispatch, ep: int, fused: bool) -> None:
    layer = block(way, ep=ep, fused_experts=fused, expert_streams=4)
    read = {name for operator in layer.operators for name in operator.reads}
    assert read <= {*layer.tensors}
    plain = block(ep=ep)
    combine = next(index for index, kernel in enumerate(plain.kernels) if kernel.name == "combine")
    # what is made with the results that are weighed
    eager = [t for t in plain.saved if way == "copies" or plain.makers.get(t.name) != combine]
    assert sum(t.elements for t in layer.saved) == sum(t.elements for t in eager)


def test_layers_that_differ_have_keys_that_do() -> None:
    styles: list[dict[str, Any]] = [{}, {"expert_streams": 2}, {"fused_experts": True}]
    layers = [block(way, **implementation) for way in WAYS for implementation in styles]
    assert len({layer.key for layer in layers}) == len({layer.kernels for layer in layers}) == len(layers)
    dense = MODEL.layers_of(Shard(ep=EP))[1]
    assert (
        implemented_layer(dense, LayerImplementation(expert_dispatch="hybridep", expert_streams=4), dropout=False)
        is dense
    )


def test_experts_one_by_one_take_a_kernel_more_for_each_round_and_fused_ones_no_cast() -> None:
    """Four experts of a rank, in mxfp8 on a B200: rounds of two kernels at once instead of one for all.

    Of the two in a round the one's fixed time is hidden by the other but for a part. Casts come one after the other.
    """
    device, plan = catalog.device("b200-sxm"), ParallelPlan(dp_replicate=EP, ep=EP)
    cost = cost_of(device, "mxfp8", "megatron-bridge", num_devices=EP, plan=plan)

    def seconds(layer: LayerSpec, phase: Phase) -> float:
        return cost.seconds(LayerWork(layer, phase, 1, 0))

    grouped, alone, fused = (
        block("hybridep", fused_gemms=True, **implementation)
        for implementation in ({}, {"expert_streams": 2}, {"fused_experts": True, "expert_streams": 2})
    )
    kernel_overhead_s = device.kernels.kernel_overhead_s * cost.slowest
    # forward, of gate with up and of down: a product, two orders of scales, and in line casts of input and of weights
    more_s = seconds(alone, Phase.FORWARD) - seconds(grouped, Phase.FORWARD)
    on_streams = (1 + 2) * (1 + 2 * (1 - device.kernels.stream_overlap))
    assert more_s == pytest.approx(2 * (on_streams + 2 * (4 - 1)) * kernel_overhead_s)
    assert (
        seconds(fused, Phase.FORWARD) < seconds(grouped, Phase.FORWARD) - 2 * kernel_overhead_s
    )  # activation and its cast
    assert seconds(fused, Phase.BACKWARD) < seconds(grouped, Phase.BACKWARD) - 2 * kernel_overhead_s


def test_views_cost_one_move_in_backward() -> None:
    device = catalog.device("b200-sxm")
    cost = cost_of(device, num_devices=EP, plan=ParallelPlan(dp_replicate=EP, ep=EP))
    layer = block()
    names = [kernel.name for kernel in layer.kernels]

    def times(name: str) -> float:
        forward, backward = (
            cost.seconds(LayerWork(layer, phase, 512, 0, (names.index(name),)))
            - device.kernels.kernel_overhead_s * cost.slowest
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        return backward / forward

    factors = {name: times(name) for name in ("sort by expert", "sort by rank")}
    assert factors == pytest.approx(dict.fromkeys(factors, 1.0))
    assert 2 < times("combine") < 3


def test_a_bias_that_is_weighed_is_added_in_fp32_and_activations_are_limited_before() -> None:
    """Bytes of each value by hand, over what eager torch reads and writes of 16 bits, forward and backward."""
    model = MODEL.model_copy(update={"expert_bias": True})
    plain, apart = (
        implemented_layer(model.layers_of(Shard(ep=EP))[2], LayerImplementation(expert_streams=streams), dropout=False)
        for streams in (None, 4)
    )
    passes = [kernel for kernel in apart.kernels if isinstance(kernel, Pointwise) and kernel not in plain.kernels]
    assert [kernel for kernel in apart.kernels if kernel not in passes and isinstance(kernel, Pointwise)] == [
        kernel for kernel in plain.kernels if isinstance(kernel, Pointwise)
    ]
    moved = [(kernel.reads + kernel.writes, 1 if kernel.moves else 2) for kernel in passes]
    rows, width = TOKENS * TOP_K, MODEL.moe_intermediate_size
    limit = 2 * (1 + 1) + (2 + 2)  # two halves read and written, and both joined
    back = 2 * (2 + 1) + (2 + 2)  # gradient and half read, gradient written; and both joined
    bias = (4 + (2 + 4 + 4) + (4 + 4) + (4 + 2)) // 2  # times weights; added; joined; cast
    bias_back = ((2 + 4) + (4 + 2) + (4 + 4 + 4) + (4 + 4 + 4) + (2 + 2)) // 2
    assert sum(elements for elements, _ in moved) == rows * (limit * width + bias * H)
    assert sum(elements * times for elements, times in moved) == rows * (back * width + bias_back * H)
    assert apart.saved == plain.saved
    launches = {kernel.name: kernel.launches for kernel in passes if kernel.launches != (1, 1)}
    local_experts = model.num_experts // EP
    forward = len(("times weights", "added"))
    backward = len(
        ("cast", "bias: times weights", "bias: sum", "bias: cast", "bias: to others", "weights: times", "sum")
    )
    assert launches == {"experts_weigh_bias": (local_experts * forward, local_experts * backward)}


def test_without_biases_nothing_is_added_apart() -> None:
    names = [[kernel.name for kernel in block(expert_streams=streams).kernels] for streams in (None, 4)]
    assert names[0] == names[1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_kernel_that_knows_windows_needs_no_table_and_one_that_knows_sinks_no_pass(number: int) -> None:
    """gpt-oss, every second of whose blocks attends in a window."""
    layer = catalog.model("gpt-oss-20b").layers_of(Shard())[1 + number]
    plain, skipping = (
        implemented_layer(layer, LayerImplementation(skips_keys=skips), dropout=False) for skips in (False, True)
    )
    (core,) = (kernel for kernel in skipping.kernels if isinstance(kernel, Attention))
    assert core.computed_flops == core.flops
    windowed = core.window > 0
    assert sorted(t.name for t in plain.constants) == sorted(["attention mask"] * windowed + ["rotary tables"])
    assert [t.name for t in skipping.constants] == ["rotary tables"]
    names = {kernel.name for kernel in skipping.kernels}
    assert {kernel.name for kernel in plain.kernels} - names == {"sinks"}
    assert {name for operator in skipping.operators for name in operator.reads} <= {*skipping.tensors}
    assert windowed == (core.flops < core.full_flops / 10)


def test_weights_in_the_activation_leave_no_expert_outputs_to_save() -> None:
    """Megatron Core since core_v0.13.0, with and without moe_permute_fusion; eager modules weight the outputs."""
    outputs = TOKENS * TOP_K * H

    def saved(layer: LayerSpec) -> int:
        return sum(layer.saved_bytes(2))

    eager, weighted = block(), block(weighted_activations=True)
    weights = TOKENS * TOP_K * 2
    assert saved(eager) - saved(weighted) == 2 * outputs + weights + TOKENS * TOP_K  # and a mask of dropped tokens
    assert saved(weighted) == saved(block("all_to_all"))
    assert weighted.key != eager.key
    profiles = {name for name in catalog.names("software") if catalog.software(name).layers.weighted_activations}
    assert profiles == {"megatron-core", "megatron-bridge", "nemo-mlperf"}  # those of Megatron Core of October 2025
