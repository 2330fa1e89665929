"""Layers for multi-token prediction, against a model with such layers in plain torch; the executor has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from executor.models.norms import RMSNorm
from simplan.model.model import ModelSpec

H, VOCAB, TOKENS, WIDTH = 32, 48, 24, 64


class Block(nn.Module):
    """Any: what one more of them adds is taken off on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = RMSNorm(H), nn.Linear(H, WIDTH, bias=False), nn.Linear(WIDTH, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Depth(nn.Module):
    """Hidden states and embeddings of later tokens, normed, side by side, projected, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.block = RMSNorm(H), RMSNorm(H), Block()
        self.eh_proj = nn.Linear(2 * H, H, bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        out: Tensor = self.block(self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)))
        return out


class Model(nn.Module):
    """The losses of the next token and of those after it, all by one embedding and one output projection."""

    def __init__(self, num_layers: int, depths: int) -> None:
        super().__init__()
        self.wte, self.norm, self.lm_head = nn.Embedding(VOCAB, H), RMSNorm(H), nn.Linear(H, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.depths = nn.ModuleList(Depth() for _ in range(depths))
        self.norms = nn.ModuleList(RMSNorm(H) for _ in range(depths))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.wte(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        outputs = [self.norm(hidden)]
        for number, (depth, norm) in enumerate(zip(self.depths, self.norms, strict=True), start=1):
            hidden = depth(hidden, self.wte(tokens.roll(-number)))
            outputs.append(norm(hidden))
        losses = [
            functional.cross_entropy(self.lm_head(states), tokens.roll(-number - 1))
            for number, states in enumerate(outputs)
        ]
        return torch.stack(losses).sum()


def measured(num_layers: int, depths: int) -> tuple[int, int, int]:
    """Parameters, FLOPs of a step, and bytes that forward keeps for backward."""
    model, tokens = Model(num_layers, depths), torch.arange(TOKENS) % VOCAB
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in pointers and tensor.is_floating_point() and tensor.numel() > 1:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(tokens)
        loss.backward()
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops(), sum(kept.values())


def counted(num_layers: int, depths: int) -> tuple[int, int, int]:
    model = ModelSpec(
        family="llama",
        num_hidden_layers=num_layers,
        hidden_size=H,
        num_attention_heads=4,
        intermediate_size=WIDTH,
        vocab_size=VOCAB,
        seq_len=TOKENS,
        mtp_num_layers=depths,
    )
    kept = sum(sum(layer.saved_bytes(4)) for layer in model.layers)
    return model.num_parameters, model.flops_per_sequence(), kept


@pytest.mark.parametrize("depths", [1, 2])
def test_such_layers_are_what_torch_makes_of_them(depths: int) -> None:
    """What they add beyond as many blocks: parameters, FLOPs, and what is kept for backward."""
    added = [
        [with_depths - blocks for with_depths, blocks in zip(of(1, depths), of(1 + depths, 0), strict=True)]
        for of in (measured, counted)
    ]
    assert added[0] == added[1]
    assert all(added[0])
