"""Modules whose forward runs in parts, against the same modules that run whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.captured.modules import CONFIGS
from executor.capture.calls import CallsPart, PassRecording
from executor.capture.capture import loss_of, model_from_module
from executor.capture.hugging_face import batch_of, module_of_config
from executor.capture.recording import record_calls
from simplan.errors import NotModelledError
from simplan.model.captured.facts import CapturedModel
from simplan.model.captured.layers import captured_layers
from simplan.program.lowering.stage import gradients_between
from tests.executor.capture import modules
from tests.executor.capture.test_capture import Masked
from tests.support.problems import refuses
from tests.support.slow import slow_except

Batch = Callable[[int], Any]
SIZE = 2
CPU = torch.device("cpu")


def recorded(
    module: nn.Module, captured: CapturedModel, batch: Any, dtype: torch.dtype = torch.float64
) -> PassRecording:
    blocks = [path for path in captured.modules if path]
    return record_calls(module, batch, None, blocks=blocks, starts=captured.starts, dtype=dtype, device=CPU)


def gradients_in_parts(module: nn.Module, parts: list[CallsPart], batch: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients; each part begins with leaves, as tensors that are received are."""
    gradients: list[list[Tensor]] = []
    made: list[tuple[Tensor, ...]] = [()]
    for part in parts:
        tensors = zip(made[-1], part.received, strict=True)
        gradients.append([x.detach().clone().requires_grad_(sent.requires_grad) for x, sent in tensors])
        made.append(part.run(module, gradients[-1], batch))
    (loss,) = made.pop()
    loss.backward()  # type: ignore[no-untyped-call]
    for outputs, leaves in zip(reversed(made[1:]), reversed(gradients[1:]), strict=True):
        pairs = [(out, leaf.grad) for out, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
    return loss, [parameter.grad for parameter in module.parameters()]


def assert_parts_equal_the_whole(make: Callable[[], nn.Module], batch: Batch, num_parts: int = 3) -> None:
    """Loss and gradients to the last digits, with the same random numbers; tensors between parts as captured."""
    captured = model_from_module(make(), batch, precisions=("fp32",))
    layers = captured_layers(captured)
    boundaries = sorted({round(len(layers) * part / num_parts) for part in range(num_parts + 1)})
    module = make().double().train()
    inputs = torch.utils._pytree.tree_map(doubled, batch(SIZE))
    parts = recorded(module, captured, inputs).parts(boundaries)
    assert len(parts) == num_parts
    returns = gradients_between(layers)
    for part, (_, last) in zip(parts[:-1], pairwise(boundaries), strict=False):
        layer = layers[last - 1]
        tensors = [layer.tensors[name] for name in layer.outputs]
        assert [prod(sent.shape) for sent in part.sent] == [
            tensor.elements * (1 if tensor.per_microbatch else SIZE) for tensor in tensors
        ]
        assert [sent.requires_grad for sent in part.sent] == list(returns[last - 1])
    torch.manual_seed(1)
    loss, gradients = gradients_in_parts(module, parts, inputs)
    module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    whole = loss_of(module(*args, **kwargs), None)
    whole.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    for (name, parameter), gradient in zip(module.named_parameters(), gradients, strict=True):
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.grad is not None:
            assert torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-13), name


def doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2  # type: ignore[no-any-return]


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.25)
        self.context: Any = 0.0

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, places: Any = None) -> Any:
        self.kept = self.linear(x)
        return x + self.dropout(self.kept) * scale[:, None] + shift[:, None] + self.context


class Tangled(nn.Module):
    """A module whose code between blocks makes views and constants, works in place, and has an autograd function.

    Blocks get views of one tensor, a tensor that they do not read, and one that is not contiguous.
    """

    count: Tensor

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.table = how, torch.linspace(0.5, 1.5, 8)
        self.stem, self.scale, self.head = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(4, device=x.device)
        scale, shift = self.scale(x.mean(1)).chunk(2, -1)
        h = functional.dropout(self.stem(x).transpose(1, 2) * 2, 0.25, self.training).transpose(1, 2)
        with torch.no_grad():
            mask = x.amax(-1, keepdim=True) > 0
        for index, block in enumerate(self.blocks):
            h = block(h, scale, shift=shift, places=places)
            if index == 2:
                h.mul_(self.table).masked_fill_(mask, 0.0)
        h = torch.stack([Cubed.apply(row) for row in h.transpose(0, 1)])  # type: ignore[no-untyped-call]
        return self.head(h).square().mean()  # type: ignore[no-any-return]


class Halves(Block):
    """Returns a part of a tensor."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, places: Any = None) -> Any:
        return torch.cat((super().forward(x, scale, shift), x), -1)[..., :8]


class Refused(Tangled):
    """A module that cannot be cut, and runs as a whole."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        if how == "part":
            self.blocks = nn.ModuleList(Halves() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.stem(x)
        scale = shift = h.mean(1)
        total = h.sum()
        for block in self.blocks:
            assert isinstance(block, Block)
            if self.how == "hidden":
                block.context = total
            if self.how == "buffer":
                h = h * self.count.add_(1.0)
            h = block(h, scale, shift, Box(h) if self.how == "object" else None)
            if self.how == "kept":
                h = h + block.kept
        return self.head(h).square().mean()  # type: ignore[no-any-return]


def tokens(number: int) -> tuple[Tensor, ...]:
    return (torch.randn(number, 4, 8),)


TORCH: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "Tangled": (Tangled, tokens),
    "Masked": (Masked, lambda number: (torch.randn(number, 8),)),
    "Dropping": (modules.Dropping, modules.encoder_batch),
    "UNet": (modules.UNet, modules.unet_batch),
    "DiT": (modules.DiT, modules.dit_batch),
    "StateSpaceModel": (modules.StateSpaceModel, modules.token_batch),
    "Recommender": (modules.Recommender, modules.recommender_batch),
}


@pytest.mark.parametrize("name", slow_except(["Tangled", "Masked"], TORCH))
def test_parts_equal_the_whole(name: str) -> None:
    assert_parts_equal_the_whole(*TORCH[name])


REFUSED = {
    "hidden": r"block blocks\.0 reads a tensor that is not among its arguments; give it as an argument of forward",
    "kept": "add reads a tensor that a block has made and not returned; return it from the forward of the block",
    "object": r"block blocks\.0 takes a Box with tensors inside; give it the tensors",
    "buffer": "add_ changes a buffer or a tensor of the batch that other stages read; use a tensor of its own",
    "part": r"block blocks\.0 returns a part of a larger tensor, which layer 2 or a later one reads; return a copy",
}


@pytest.mark.parametrize("how", REFUSED)
def test_uncuttable_modules_are_refused_with_the_place(how: str) -> None:
    with pytest.raises(NotModelledError, match=f"^plan.pp: the module cannot be cut: {REFUSED[how]}.*; or use 1$"):
        assert_parts_equal_the_whole(lambda: Refused(how), tokens)


def test_a_module_without_modules_at_its_cuts_is_refused() -> None:
    captured = model_from_module(Tangled(), tokens, precisions=("fp32",))
    nowhere = captured.model_copy(update={"starts": ("", *("" for _ in captured.starts[1:]))})
    with refuses("plan.pp", rule="no module begins or ends where", kind=NotModelledError):
        recorded(Tangled(), nowhere, tokens(SIZE))


def test_a_batch_of_another_shape_is_refused() -> None:
    """Shapes are constants of the calls."""
    captured = model_from_module(Tangled(), tokens, precisions=("fp32",))
    module = Tangled().double()
    (part, _) = recorded(module, captured, tokens(SIZE)).parts((0, 2, len(captured.starts)))
    with pytest.raises(ValueError, match=r"batch .*\(3, 4, 8\).*\(2, 4, 8\)"):
        part.run(module, (), tokens(3))


_WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3}
ARCHITECTURES: dict[str, tuple[dict[str, Any], int]] = CONFIGS | {
    "llama": ({"model_type": "llama", **_WIDTHS, "vocab_size": 200}, 32),
    "bert": ({"model_type": "bert", **_WIDTHS, "vocab_size": 200}, 32),
    "gpt2": ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 200}, 32),
    "mamba": ({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 200}, 16),
    "swin": (
        {
            "model_type": "swin",
            "architectures": ["SwinForImageClassification"],
            "image_size": 32,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        1,
    ),
    "t5": (
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 64,
            "d_ff": 128,
            "d_kv": 16,
            "num_heads": 4,
            "num_layers": 3,
            "vocab_size": 200,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        32,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_in_parts_equal_the_whole(name: str) -> None:
    """With the dropout of their configuration."""
    pytest.importorskip("transformers")
    config, seq_len = ARCHITECTURES[name]
    module, read = module_of_config(config)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return module_of_config(config, "cpu")[0]

    assert_parts_equal_the_whole(make, batch_of(module, read, seq_len))
