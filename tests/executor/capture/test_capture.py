"""Captured modules against torch's own counters, and against the layers of families."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from executor.capture import trace
from executor.capture.capture import model_from_module
from executor.models.model import build_stage
from executor.profiling.memory import peak_allocated_bytes
from simplan import catalog
from simplan.errors import SpecError
from simplan.job import Job
from simplan.model.captured.facts import CapturedModel, ComputedIn
from simplan.model.captured.layers import captured_layers
from simplan.model.layer import Gemm, LayerSpec
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict.step import predict, predict_step
from simplan.report.captured import captured_text
from simplan.training import TrainingSpec
from tests.executor.capture import modules
from tests.support.problems import refuses

Batch = Callable[[int], Any]
MODULES: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "unet": (modules.UNet, modules.unet_batch),
    "dit": (modules.DiT, modules.dit_batch),
    "scan": (modules.StateSpaceModel, modules.token_batch),
    "recommender": (modules.Recommender, modules.recommender_batch),
}
NUM_SAMPLES = 5
WIDTHS = {"fp32": (4, 4), "bf16": (2, 2), "autocast": (2, 4)}


def call(module: nn.Module, batch: Any) -> Tensor:
    out = module(**batch) if isinstance(batch, dict) else module(*batch)
    loss: Tensor = out["loss"] if isinstance(out, dict) else out
    return loss


def really_saved(module: nn.Module, batch: Any, precision: ComputedIn) -> int:
    """Bytes of all tensors that torch keeps for backward, weights and the batch excepted."""
    known = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    known |= {t.untyped_storage().data_ptr() for t in (batch.values() if isinstance(batch, dict) else batch)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    context = torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if precision == "autocast" else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(module, batch)
    weights = {tuple(p.shape) for p in module.parameters()}
    copies = precision == "autocast"  # of weights, which are no activations
    return sum(t.untyped_storage().nbytes() for t in kept.values() if not (copies and is_copy(t, weights)))


def is_copy(tensor: Tensor, weights: set[tuple[int, ...]]) -> bool:
    shape = tuple(tensor.shape)
    return tensor.dtype is torch.bfloat16 and (shape in weights or shape[::-1] in weights)


def saved(layers: tuple[LayerSpec, ...], precision: ComputedIn) -> int:
    total = 0
    for layer in layers:
        roots = layer.storages(*WIDTHS[precision])
        kept = {roots[tensor.name].name: roots[tensor.name] for tensor in layer.saved if not tensor.elsewhere}
        total += sum(
            t.num_bytes(*WIDTHS[precision]) * (1 if t.per_microbatch else NUM_SAMPLES)
            for t in kept.values()
            if not t.elsewhere
        )
    return total


@pytest.mark.parametrize("name", MODULES)
def test_flops_parameters_and_saved_bytes_are_those_of_torch(name: str) -> None:
    """Attention and grouped convolutions are left out of FLOPs: torch's counter is wrong for them on CPUs."""
    make, batch = MODULES[name]
    module = make()
    captured = model_from_module(module, batch, precisions=("fp32",))
    layers = captured_layers(captured)
    assert ModelSpec(name=name, family="captured", captured=captured).num_parameters == sum(
        parameter.numel() for parameter in module.parameters()
    )
    data = batch(NUM_SAMPLES)
    assert saved(layers, "fp32") == really_saved(module, data, "fp32")
    with FlopCounterMode(display=False) as forward:
        loss = call(module, data)
    with FlopCounterMode(display=False) as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    matmuls = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Gemm)]
    counted = [
        sum(kernel.flops for kernel in matmuls),
        sum(kernel.flops * kernel.backward_matmuls for kernel in matmuls),
    ]
    assert NUM_SAMPLES * counted[0] == forward.get_total_flops()
    if name != "scan":
        in_backward = sum(kernel.flops * kernel.backward_matmuls for kernel in matmuls)
        assert NUM_SAMPLES * in_backward == backward.get_total_flops()


@pytest.mark.parametrize("name", ["dit", "scan"])
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_saved_bytes_in_other_precisions(name: str, precision: ComputedIn) -> None:
    make, batch = MODULES[name]
    captured = model_from_module(make(), batch, precisions=(precision,))
    module = make()
    data = batch(NUM_SAMPLES)
    if precision == "bf16":
        module = module.bfloat16()
        if isinstance(data, dict):
            data = {key: value.bfloat16() if value.is_floating_point() else value for key, value in data.items()}
    layers = captured_layers(captured)
    assert saved(layers, precision) == really_saved(module, data, precision)


@pytest.mark.parametrize(
    "model",
    [
        ModelSpec(
            family="llama",
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=176,
            vocab_size=96,
            seq_len=32,
        ),
        ModelSpec(family="gpt", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=96, seq_len=32),
        ModelSpec(family="resnet", depths=(2, 2), layer_type="basic", image_size=32, num_classes=10),
    ],
    ids=lambda model: model.family,
)
def test_a_block_is_that_of_its_family(model: ModelSpec) -> None:
    """The executor's module of a family's block has the FLOPs, saved bytes and parameters of the hand-written one."""
    stage = build_stage(model, [0, 1, 2], torch.float32, torch.device("cpu"), 0)
    block, family_block = stage.layers["1"], model.layers[1]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(1, 1), nn.ModuleList([block, stage.layers["2"]])

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.stem(x.new_ones(1))
            for block in self.blocks:
                x = block(x)
            return x

    shape = model.layers[0].output_shapes[0]
    captured = model_from_module(Twice(), lambda number: (torch.randn(number, *shape),), precisions=("fp32",))
    captured_block = captured_layers(captured)[1]
    assert captured_block.flops() == family_block.flops()
    assert captured_block.backward_flops() == family_block.backward_flops()
    assert sum(captured_block.saved_bytes(4)) == sum(family_block.saved_bytes(4))
    assert sorted(p.shape for p in captured_block.parameters) == sorted(p.shape for p in family_block.parameters)


@pytest.mark.parametrize(("name", "rel"), [("unet", 0.1), ("dit", 0.01), ("scan", 0.03), ("recommender", 0.02)])
def test_the_peak_of_one_device_is_that_of_a_real_run(name: str, rel: float) -> None:
    """All tensors count, in plain training of two microbatches; scratch inside of convolutions is not seen."""
    make, batch = MODULES[name]
    size = 64 if name == "recommender" else 8
    captured = model_from_module(make(), batch, precisions=("fp32",))
    job = Job(
        ModelSpec(name=name, family="captured", captured=captured),
        catalog.cluster("dgx-h100", 1),
        TrainingSpec(global_batch_size=2 * size, precision="fp32"),
        ParallelPlan(microbatch_size=size),
        catalog.software("torch"),
    )

    def train() -> None:
        module = make()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        for _ in range(2):
            for inputs in [batch(size) for _ in range(2)]:  # inputs of a whole step, as the executor has them
                loss = call(module, inputs) / 2
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
            optimizer.step()
            optimizer.zero_grad()

    assert predict(job).memory[0].allocated_bytes == pytest.approx(peak_allocated_bytes(train), rel=rel)


def test_repeated_blocks_are_equal_layers_and_a_shared_weight_counts_once() -> None:
    captured = model_from_module(modules.StateSpaceModel(), modules.token_batch, precisions=("fp32",))
    assert captured.modules == ("", "layers.0", "layers.1", "")
    assert captured.graph.order[1] == captured.graph.order[2]
    assert captured_layers(captured)[-1].tied == ("embedding.weight",)
    assert captured.tokens == 12
    assert 0 < captured.inputs[0].high <= 128


def test_dropout_saves_the_mask_of_a_gpu() -> None:
    """One byte per element, where torch on CPUs saves numbers."""
    captured = model_from_module(modules.Dropping(), modules.encoder_batch, precisions=("fp32",))
    dropped = [o for layer in captured.graph.layers for o in layer.operators if o.op == "aten.native_dropout"]
    assert dropped
    assert all(operator.makes[1].width == 1 for operator in dropped)


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin().cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Branching(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.how == "item":
            return x * x.sum().item()
        if self.how == "nonzero":
            return x[x > 0]
        if self.how == "samples":
            return x.relu() if len(x) == 2 else x.tanh()
        if self.how == "function":
            return Hidden.apply(x)  # type: ignore[no-any-return, no-untyped-call]
        if self.how == "checkpoint":
            return checkpoint(torch.sin, x, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "fails":
            return x @ x.new_ones(3, 3)
        return x.detach()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("item", r"test_capture\.py, line \d+: needs values of tensors, which a capture has not: return x \* x\.sum"),
        ("nonzero", r"test_capture\.py, line \d+: needs values of tensors"),
        ("samples", r"module = the model: runs other operators for three samples than for two, from aten\.\w+ on"),
        ("fails", r"test_capture\.py, line \d+: failed with RuntimeError \("),
        ("function", r"module = the model: runs Hidden, an autograd function that saves none of its inputs"),
        ("checkpoint", r"recomputes on its own"),
        ("detached", r"no gradient flows from the loss to a parameter"),
    ],
)
def test_uncapturable_code_is_refused_with_its_line(how: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        model_from_module(Branching(how), lambda number: (torch.randn(number, 4),))


def test_a_loop_of_many_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_OPERATORS", 100)
    with refuses("module", rule="runs more than 100 operators"):
        model_from_module(modules.StateSpaceModel(), modules.token_batch)


class Ending(nn.Module):
    """The last block and the tower take no part in the loss; one runs all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            before, x = x, block(x)
        return before.square().mean()


def test_operators_that_never_reach_the_loss_have_no_backward() -> None:
    captured = model_from_module(Ending(), lambda number: (torch.randn(number, 8),), precisions=("fp32",))
    last = captured_layers(captured)[captured.modules.index("blocks.2")]
    matmul = next(kernel for kernel in last.kernels if isinstance(kernel, Gemm))
    assert (matmul.flops, matmul.backward_matmuls) == (2 * 8 * 8, 0)
    assert all(parameter.frozen for parameter in last.parameters)
    assert "without a part in the loss: tower (144 parameters)" in captured_text(captured)


def test_a_module_is_left_as_it_was() -> None:
    module = modules.DiT()
    before = {name: (id(p), p.requires_grad, p.grad) for name, p in module.named_parameters()}
    model_from_module(module.eval(), modules.dit_batch, precisions=("fp32",))
    assert {name: (id(p), p.requires_grad, p.grad) for name, p in module.named_parameters()} == before
    assert not module.training


def test_a_captured_model_is_read_from_its_file(tmp_path: Any) -> None:
    captured = model_from_module(modules.UNet(), modules.unet_batch, precisions=("fp32", "autocast"))
    text = captured.model_dump_json(exclude_defaults=True)
    assert CapturedModel.model_validate_json(text) == captured


class Masked(nn.Module):
    """Blocks that read a mask, two tables and a trained bias, all made before them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bias, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask, bias = x > 0, self.bias(x)
        places = torch.arange(8, dtype=x.dtype, device=x.device)
        sin, cos = places.sin(), places.cos()
        h = self.stem(x)
        for block in self.blocks:
            h = block(h, mask, sin, cos, bias)
        out: Tensor = self.head(h).sum()
        return out


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, sin: Tensor, cos: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = x + self.linear((x * sin + bias * cos).masked_fill(mask, 0.0))
        return out


def test_stages_hand_on_all_tensors_and_return_the_gradients_that_there_are() -> None:
    """Five tensors for two samples of eight FP32 numbers: a mask of bytes, two tables that do not grow, two others."""
    captured = model_from_module(Masked(), lambda number: (torch.randn(number, 8),), precisions=("fp32",))
    job = Job(
        ModelSpec(name="masked", family="captured", captured=captured),
        catalog.cluster("dgx-h100", 2),
        TrainingSpec(global_batch_size=8, precision="fp32"),
        ParallelPlan(pp=2, schedule="1f1b", microbatch_size=2),
        catalog.software("torch"),
    )
    prediction, simulated = predict_step(job)
    sent: dict[str, list[int]] = {}
    for op in simulated.program.ops:
        if op.stream in ("send_f", "send_b") and op.action is not None and op.action.microbatch == 0:
            sent.setdefault(str(op.stream), []).extend(c.num_bytes for c in op.communications)
    assert sorted(sent["send_f"]) == [2 * 8, 8 * 4, 8 * 4, 2 * 8 * 4, 2 * 8 * 4]
    assert sent["send_b"] == [2 * 8 * 4, 2 * 8 * 4]
    assert prediction.step_time_s > 0
