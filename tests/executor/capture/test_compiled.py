"""Compiled blocks of captured modules, against torch's own partitioner and against one process that is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

from executor.capture.capture import model_from_module
from executor.run import run_job
from simplan import catalog
from simplan.cost.compute.traffic import layer_traffic
from simplan.job import Job
from simplan.model.captured.compiled import MAX_FUSED, compiled_blocks
from simplan.model.captured.layers import captured_layers
from simplan.model.implementations.layer_implementation import LayerImplementation, implemented_layers
from simplan.model.layer import LayerSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.training import TrainingSpec
from tests.executor.capture import modules
from tests.executor.capture.test_running import NUM_MICROBATCHES, PLANS, SIZE, captured, job_of, one_process
from tests.executor.conftest import RANK_PROGRAMS
from tests.executor.train.test_equality import RELATIVE
from tests.jobs import problems
from tests.support.slow import slow_except

NUM_SAMPLES = 4


class Blocks(nn.Module):
    """Blocks of a kind, with what they read besides."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(1, 1), nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        scale = self.stem(x.new_ones(1))
        x, scaled = x * scale, [other * scale for other in others]
        for block in self.blocks:
            x = block(x, *scaled)
        return x.square().mean()


BLOCKS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "DiT": (lambda: modules.DiffusionBlock(64, 4), [(64, 64), (64,)]),
    "UNet": (lambda: modules.ResidualBlock(32, 32, 32), [(32, 16, 16), (32,)]),
}


def saved_by_torch(block: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Bytes that the backward graph of torch.compile gets from the forward graph, weights excepted."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    saved: list[Tensor] = []
    weights = {tuple(parameter.shape) for parameter in block.parameters()}

    def partition(graph: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, joint_inputs, **(kwargs | {"compiler": "inductor"}))

    def backward(graph: Any, gradients: Sequence[Any]) -> Any:
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        pairs = zip(places, gradients, strict=True)
        for node, value in pairs:
            is_weight = node.name.startswith("primals") and tuple(value.shape) in weights
            if isinstance(value, Tensor) and not is_weight and not node.name.startswith("tangents"):
                saved.append(value)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        bw_compiler=backward,
        partition_fn=partition,
        decompositions=select_decomp_table,
    )
    torch.compile(block, backend=backend, dynamic=False)(*inputs).sum().backward()
    return sum(tensor.nbytes for tensor in saved)


def saved_bytes(layer: LayerSpec) -> int:
    return NUM_SAMPLES * sum(layer.saved_bytes(4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of itself
@pytest.mark.parametrize("name", slow_except(["UNet"], BLOCKS))
def test_a_compiled_block_saves_what_torch_saves(name: str) -> None:
    make, shapes = BLOCKS[name]
    plain = captured_layers(
        model_from_module(Blocks(make), lambda n: tuple(torch.randn(n, *s) for s in shapes), precisions=("fp32",))
    )
    inputs = [torch.randn(NUM_SAMPLES, *shape, requires_grad=True) for shape in shapes]
    predicted = saved_bytes(compiled_blocks(plain, "fp32")[2])
    assert predicted == pytest.approx(saved_by_torch(make(), inputs), rel=0.005)
    assert predicted < 0.9 * saved_bytes(plain[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "error"), [("DiT", 0.02), ("UNet", 0.06)])
def test_backward_moves_what_inductor_says(name: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that its kernels read and write, without sums of biases and copies to the layout of convolutions."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    make, shapes = BLOCKS[name]
    moved, generate = [], GraphLowering.codegen

    def counted(graph: Any) -> Any:
        result = generate(graph)
        for node in graph.scheduler.nodes if graph.is_backward else ():
            parts = [part for part in node.get_nodes() if part.node is not None]
            origins = {str(origin.target) for part in parts for origin in part.node.origins}
            of_weights = all(part.is_reduction() and part.node.get_size()[0] == 1 for part in parts)
            is_layout = origins == {"aten.convolution_backward.default"}
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode) and not (
                of_weights or is_layout
            ):
                moved.append(node.get_read_write_buffers_sizes())
        return result

    monkeypatch.setattr(GraphLowering, "codegen", counted)
    torch._dynamo.reset()
    inputs = [torch.randn(NUM_SAMPLES, *shape, requires_grad=True) for shape in shapes]
    torch.compile(make(), dynamic=False)(*inputs).sum().backward()
    graph = model_from_module(Blocks(make), lambda n: tuple(torch.randn(n, *s) for s in shapes), precisions=("fp32",))
    traffic = layer_traffic(compiled_blocks(captured_layers(graph), "fp32")[2], 4, 4, "compiled")
    assert NUM_SAMPLES * sum(of_layer.backward_bytes for of_layer in traffic) == pytest.approx(sum(moved), rel=error)


def test_a_fused_kernel_moves_what_enters_and_leaves_it() -> None:
    """The kernels of a diffusion transformer's block, counted by hand in FP32, for 64 tokens of width 64.

    The condition's activation; a norm, scaled and shifted; a sum, which is written, and the second norm; an activation;
    and the last sum. Norms write two numbers for each token, which backward reads.
    """
    make, shapes = BLOCKS["DiT"]
    graph = model_from_module(Blocks(make), lambda n: tuple(torch.randn(n, *s) for s in shapes), precisions=("fp32",))
    h, tokens = 64, 64 * 64
    kernels = [2 * h, 2 * tokens, 4 * tokens, 8 * tokens, 3 * tokens]
    others = [0, 6 * h + 2 * 64, 6 * h + 2 * 64, 0, 6 * h]  # the condition is read whole
    traffic_of_kernels = layer_traffic(compiled_blocks(captured_layers(graph), "fp32")[2], 4, 4, "compiled")
    wanted = [4 * (kernel + other) for kernel, other in zip(kernels, others, strict=True)]
    assert [traffic.forward_bytes for traffic in traffic_of_kernels if traffic.forward_launches] == wanted


@pytest.mark.slow
def test_a_compiled_llama_is_that_of_the_family() -> None:
    pytest.importorskip("transformers")
    from benchmarks.architectures import small_config
    from executor.capture.hugging_face import batch_of, module_of_config
    from simplan.interop.huggingface import model_fields_from_config

    module, config = module_of_config(small_config("llama"))
    spec = ModelSpec(**model_fields_from_config(config.to_dict(), name="llama", seq_len=64))
    graph = model_from_module(module, batch_of(module, config, 64), precisions=("fp32",))
    theirs = compiled_blocks(captured_layers(graph), "fp32")[1]
    ours = implemented_layers(spec.layers, LayerImplementation(compiled=True), spec.family)[1]
    assert (ours.flops(), ours.backward_flops()) == (theirs.flops(), theirs.backward_flops())
    assert saved_bytes(theirs) == pytest.approx(saved_bytes(ours), rel=0.01)
    moved = [layer_traffic(layer, 4, 4, "compiled") for layer in (theirs, ours)]
    for direction in ("forward_bytes", "backward_bytes"):
        first, second = (sum(getattr(traffic, direction) for traffic in layer) for layer in moved)
        assert first == pytest.approx(second, rel=0.05), direction


STAGES: dict[str, dict[str, Any]] = {"stages": {"pp": 2, "schedule": "1f1b"}}
RUNS = ["ddp", "zero3", "zero3, recomputed", "stages"]
COMPILED = catalog.software("torch").model_copy(update={"compiled": True})


@pytest.mark.parametrize("plan", slow_except([], RUNS))
def test_compiled_ranks_equal_one_process(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ParallelPlan(microbatch_size=SIZE, **(PLANS | STAGES)[plan])
    training = TrainingSpec(global_batch_size=NUM_MICROBATCHES * SIZE * made.dp, precision="fp32")
    model = ModelSpec(name="DiT", family="captured", captured=captured("DiT"))
    prediction = predict(Job(model, catalog.cluster("dgx-h100", made.num_devices), training, made, COMPILED))
    job = job_of(prediction, dtype="fp64")
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    measurement = run_job(job, tmp_path, rank_module="compiling_worker")
    losses, gradients = one_process(job, job.num_all_steps)
    assert measurement.losses == pytest.approx(losses, rel=RELATIVE)
    for rank in measurement.ranks:
        assert int((tmp_path / f"graphs.rank{rank.rank}").read_text()) > 0
        of_rank = torch.load(tmp_path / f"gradients.rank{rank.rank}.step0.pt")
        for name, gradient in of_rank.items():
            wanted = gradients[0][name.removeprefix("module.")]
            assert torch.allclose(gradient, wanted, rtol=1e-8, atol=1e-12), name


@pytest.mark.parametrize(("name", "said"), [("UNet", "without blocks"), ("Chain", "memory-bound operators in a row")])
def test_uncompiled_options_are_refused(name: str, said: str) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            for _ in range(MAX_FUSED + 1):
                x = x.sin()
            return x

    if name == "UNet":
        graph = model_from_module(modules.UNet(), modules.unet_batch, precisions=("fp32",))
    else:
        graph = model_from_module(Blocks(Chain), lambda n: (torch.randn(n, 4),), precisions=("fp32",))
    model = ModelSpec(family="captured", captured=graph)
    [sentence] = problems(model, software=COMPILED, precision="fp32")
    assert sentence.startswith("software.compiled = true")
    assert said in sentence
