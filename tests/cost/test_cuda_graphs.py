"""What kernels of CUDA graphs take, counted by hand, and beside the same kernels with no time to launch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.cost.compute import KernelCost
from simplan.cost.kernel_cost import kernel_cost
from simplan.program.program import LayerWork, Phase
from simplan.spec import catalogue
from simplan.spec.cuda_graphs import CudaGraph, graphed
from simplan.spec.layer import LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec

LLAMA, DEEPSEEK = catalogue.model("llama3-8b"), catalogue.model("deepseek-v2-lite")
DEVICE = catalogue.device("b200-sxm")
LAUNCH_S, KERNEL_S = DEVICE.kernels.launch_s, DEVICE.kernels.kernel_s
PASSES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
PARTS: list[CudaGraph] = ["attn", "mlp", "moe_router", "moe_preprocess"]


def cost(precision: str = "bf16", launch_s: float = LAUNCH_S, kernel_s: float = KERNEL_S) -> KernelCost:
    software, plan = catalogue.software("megatron-core"), ParallelPlan()
    training = TrainingSpec.model_validate({"global_batch_size": 1, "precision": precision})
    changes = {"launch_s": launch_s, "kernel_s": kernel_s}
    device = DEVICE.model_copy(update={"kernels": DEVICE.kernels.model_copy(update=changes)})
    state = software.state(training, plan)
    how = {"num_devices": 1, "shards_parameters": False}
    return kernel_cost(device, training.precision, state, training.update, software, **how)  # type: ignore[arg-type]


def layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    plan = ParallelPlan(dp_shard=4, ep=4 if model.num_experts else 1)
    software = catalogue.software("megatron-core").model_copy(update={"expert_dispatch": "all_to_all"})
    return tuple({layer.key: layer for layer in software.layers_of(model, plan)}.values())


def seconds(rates: KernelCost, layer: LayerSpec, phase: Phase, kernels: tuple[int, ...] | None = None) -> float:
    return rates.seconds(LayerWork(layer, phase, 1, layer.num_parameters, kernels))


@pytest.mark.parametrize(
    ("part", "forward", "backward"),
    [
        # norm, one product for q, k and v, rotation, attention, projection, sum; two products each in backward
        ("attn", 6, 8),
        # norm, one product for gate and up, activation, product, sum
        ("mlp", 5, 7),
    ],
)
def test_a_graph_is_launched_once_for_all_of_its_kernels(part: CudaGraph, forward: int, backward: int) -> None:
    rates, block = cost(), layers(LLAMA)[1]
    replayed = graphed(block, [part])
    for phase, kernels in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        saved_s = seconds(rates, block, phase) - seconds(rates, replayed, phase)
        assert saved_s == pytest.approx((kernels - 1) * LAUNCH_S, rel=1e-9)
    again_s = seconds(rates, block, Phase.RECOMPUTE) - seconds(rates, replayed, Phase.RECOMPUTE)
    assert again_s == pytest.approx(forward * LAUNCH_S, rel=1e-9)  # it is part of the graph of backward


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_a_graph_of_everything_takes_what_kernels_take_that_nobody_launches(model: ModelSpec, precision: str) -> None:
    """Where launching is all that kernels take beside their work, as without such a time, casts and groups included."""
    rates = cost(precision, launch_s=KERNEL_S)
    free = cost(precision, kernel_s=0.0)
    for layer in layers(model):
        for phase in PASSES:
            whole = seconds(rates, graphed(layer, ["full_iteration"]), phase)
            assert whole == pytest.approx(seconds(free, layer, phase), rel=1e-12)


LAYERS = layers(DEEPSEEK)


@settings(max_examples=40, deadline=None)
@given(
    parts=st.sets(st.sampled_from(PARTS)),
    more=st.sets(st.sampled_from(PARTS)),
    phase=st.sampled_from(PASSES),
    index=st.integers(0, 3),
    launch_s=st.floats(0, 2 * KERNEL_S),
)
def test_graphs_are_never_slower_and_more_of_them_save_more(
    parts: set[CudaGraph], more: set[CudaGraph], phase: Phase, index: int, launch_s: float
) -> None:
    rates, layer = cost(launch_s=launch_s), LAYERS[index]
    no_graphs: set[CudaGraph] = set()
    captures: list[set[CudaGraph]] = [no_graphs, parts, parts | more, {"full_iteration"}]
    none, some, others, whole = (seconds(rates, graphed(layer, sorted(graphs)), phase) for graphs in captures)
    assert none >= some - 1e-15
    assert some >= others - 1e-15
    assert others >= whole - 1e-15


@pytest.mark.parametrize("phase", PASSES)
def test_pieces_of_a_layer_take_what_it_takes(phase: Phase) -> None:
    """However it is cut, its graph is launched once."""
    rates, layer = cost(), graphed(LAYERS[2], ["attn", "moe_router"])
    names = [kernel.name for kernel in layer.kernels]
    cuts = [0, *(names.index(name) for name in ("attention", "norm2", "routing", "experts_gate")), len(names)]
    pieces = [tuple(range(begin, end)) for begin, end in pairwise(cuts)]
    apart_s = sum(seconds(rates, layer, phase, piece) for piece in pieces)
    assert apart_s == pytest.approx(seconds(rates, layer, phase), rel=1e-12)


def test_a_formula_says_how_many_kernels_are_in_a_graph() -> None:
    block = graphed(layers(LLAMA)[1], ["attn"])
    work = LayerWork(block, Phase.FORWARD, 1, block.num_parameters)
    assert cost().price(work).formula.startswith("11 kernels, 6 of them in a CUDA graph, ")
