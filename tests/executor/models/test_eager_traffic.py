"""Bytes of memory-bound kernels against those of the operations that torch's dispatcher runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simplan.cost.compute.traffic import layer_traffic
from simplan.model.model import ModelSpec

B, T, H = 2, 64, 64
COMPUTE = ("mm", "addmm", "convolution", "convolution_backward", "max_pool2d")
VIEWS = ("view", "_unsafe_view", "t", "transpose", "expand", "split", "detach", "empty_like", "_to_copy")
TWO_KERNELS = ("native_layer_norm_backward", "native_batch_norm_backward")
"""On CUDA one kernel makes the gradients of inputs, another one those of weights."""


class CountedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations read and write, without matmuls, attention, convolutions and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in (*COMPUTE, *VIEWS) and "scaled_dot_product" not in name:
            read, written = (
                sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, Tensor))
                for tree in ((args, kwargs), out)
            )
            in_place = name.endswith("_")
            self.num_bytes += read * (2 if name in TWO_KERNELS else 1) + (0 if in_place else written)
            self.num_bytes += args[0].numel() * args[0].element_size() if in_place else 0
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(B, T, 4, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(H, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, H))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return hidden


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(256, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.conv2, self.bn2 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        inner = functional.relu(self.bn2(self.conv2(inner)), inplace=True)
        return functional.relu(self.bn3(self.conv3(inner)) + x, inplace=True)


GPT = ModelSpec(family="gpt", num_hidden_layers=1, hidden_size=H, num_attention_heads=4, seq_len=T, vocab_size=64)
RESNET = ModelSpec(family="resnet", depths=(2,), layer_type="bottleneck", image_size=32, num_classes=10)


@pytest.mark.parametrize(
    ("module", "shape", "model", "index"),
    [(Transformer, (B, T, H), GPT, 1), (Bottleneck, (B, 256, 8, 8), RESNET, 2)],
    ids=["transformer", "bottleneck"],
)
def test_eager_blocks_move_the_bytes_torch_moves(module: Any, shape: Any, model: ModelSpec, index: int) -> None:
    """Batch norms read their input twice in forward, which the dispatcher does not see: 10% of a bottleneck."""
    block, x = module(), torch.randn(shape, requires_grad=True)
    with CountedBytes() as forward:
        y = block(x)
    gradient = torch.ones_like(y)
    with CountedBytes() as backward:
        y.backward(gradient)
    traffic = layer_traffic(model.layers[index], 4, 4, "single")
    assert B * sum(t.forward_bytes for t in traffic) == pytest.approx(forward.num_bytes, rel=0.2)
    counted = B * sum(t.backward_bytes + t.bias_bytes for t in traffic)
    assert counted == pytest.approx(backward.num_bytes, rel=0.1)


def test_eager_rotation_moves_the_bytes_torch_moves() -> None:
    """Of queries and keys, by the code of Hugging Face's models; tables are small."""
    cos, sin = torch.randn(2, T, H)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        result: Tensor = x * cos + torch.cat((-b, a), dim=-1) * sin
        return result

    queries, keys = (torch.randn(B, 8, T, H, requires_grad=True) for _ in range(2))
    with CountedBytes() as forward:
        out = rotated(queries), rotated(keys)
    gradients = [torch.ones_like(tensor) for tensor in out]
    with CountedBytes() as backward:
        torch.autograd.backward(out, gradients)
    llama = ModelSpec(
        family="llama",
        num_hidden_layers=1,
        hidden_size=8 * H,
        intermediate_size=64,
        num_attention_heads=8,
        seq_len=T,
        vocab_size=64,
    )
    place = next(i for i, kernel in enumerate(llama.layers[1].kernels) if kernel.name == "rotary")
    traffic = layer_traffic(llama.layers[1], 4, 4, "eager")[place]
    assert B * traffic.forward_bytes == pytest.approx(forward.num_bytes, rel=0.15)
    assert B * traffic.backward_bytes == pytest.approx(backward.num_bytes, rel=0.15)
