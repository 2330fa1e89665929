"""Layers of LitGPT against modules that are written as LitGPT writes them, in what autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from simplan import catalog
from simplan.model.base_weights import BaseWeights
from simplan.model.layer import LayerKind, LayerSpec
from simplan.model.model import ModelSpec
from simplan.model.recompute import Recomputation
from simplan.plan.plan import ParallelPlan
from simplan.program.memory.tensors import LayerTensors
from simplan.training import TrainingSpec

LITGPT = catalog.software("litgpt")
SIZES: dict[str, Any] = {
    "family": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8,
    "vocab_size": 320, "seq_len": 256, "tied_embeddings": False,
}  # fmt: skip
BATCH, RANK, CHUNK = 2, 4, 128


class Attend(torch.autograd.Function):
    """The tensors of FlashAttention on CUDA, whose output has heads inside of tokens; the CPU's has tokens inside."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, torch.empty(q.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(saved) for saved in ctx.saved_tensors[:3])


class Norm(nn.Module):
    """litgpt/model.py, RMSNorm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        result: Tensor = (normed * self.weight.float()).to(dtype=x.dtype)
        return result


class Adapted(nn.Module):
    """litgpt/lora.py, LoRALinear."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        if rank:
            self.lora_A, self.lora_B = (nn.Parameter(torch.ones(s)) for s in ((rank, inputs), (outputs, rank)))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        if self.rank:
            result = result + (x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * 2.0
        return result


class AdaptedQKV(nn.Module):
    """litgpt/lora.py, LoRAQKVLinear: adapters of those of q, k and v that ``parts`` names."""

    def __init__(self, inputs: int, widths: dict[str, int], parts: str, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, sum(widths.values()), bias=False)
        self.shapes = [widths[part] for part in parts]
        if parts:
            self.lora_A = nn.Parameter(torch.ones(rank * len(parts), inputs))
            self.lora_B = nn.Parameter(torch.ones(sum(self.shapes), rank))
        ends = torch.tensor([0, *widths.values()]).cumsum(0).tolist()
        places = [range(ends["qkv".index(part)], ends["qkv".index(part) + 1]) for part in parts]
        self.register_buffer(
            "places", torch.tensor([place for place_list in places for place in place_list], dtype=torch.long)
        )
        self.is_whole = len(parts) == len("qkv")

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.linear(x)
        if not self.shapes:
            return base
        low = functional.linear(x, self.lora_A).transpose(-2, -1).chunk(len(self.shapes), dim=1)
        matrices = torch.split(self.lora_B.unsqueeze(-1), self.shapes)
        pairs = zip(low, matrices, strict=True)
        high = torch.cat([functional.conv1d(a, b) for a, b in pairs], dim=1).transpose(-2, -1)
        if not self.is_whole:
            zeros = high.new_zeros(*high.shape[:-1], base.shape[-1])
            high = zeros.index_copy_(dim=-1, index=self.get_buffer("places"), source=high)
        return base + high * 2.0


class Block(nn.Module):
    """litgpt/model.py, Block with CausalSelfAttention and LLaMAMLP."""

    def __init__(self, spec: ModelSpec, parts: str, rank: int) -> None:
        super().__init__()
        h, width = spec.hidden_size, spec.intermediate_size
        self.heads, self.groups, self.size = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        widths = {"q": self.heads * self.size, "k": self.groups * self.size, "v": self.groups * self.size}
        self.norm_1, self.norm_2 = Norm(h), Norm(h)
        self.qkv, self.proj = AdaptedQKV(h, widths, parts, RANK), Adapted(widths["q"], h, rank)
        self.fc_1, self.fc_2, self.out = Adapted(h, width, rank), Adapted(h, width, rank), Adapted(width, h, rank)
        table = torch.ones(spec.seq_len, self.size)
        self.register_buffer("table", table)

    def _turned(self, x: Tensor) -> Tensor:
        half = self.size // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        table = self.get_buffer("table")
        return torch.cat(((x * table + turned * table).to(x.dtype), x[..., self.size :]), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        sizes = [n * self.size for n in (self.heads, self.groups, self.groups)]
        q, k, v = torch.split(self.qkv(self.norm_1(x)), sizes, -1)
        q, k, v = (heads.view(b, t, -1, self.size).transpose(1, 2) for heads in (q, k, v))
        q, k = self._turned(q), self._turned(k)
        if self.groups != self.heads:
            k, v = (heads.repeat_interleave(self.heads // self.groups, dim=1) for heads in (k, v))
        y: Tensor = Attend.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch has no types for it
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, -1))
        normed = self.norm_2(x)
        result: Tensor = x + self.out(functional.silu(self.fc_1(normed)) * self.fc_2(normed))
        return result


def saved_by(module: nn.Module, *inputs: Tensor, run: Any = None) -> int:
    """Bytes that autograd saves besides parameters, buffers and inputs, and those of FP32 copies of norms' weights."""
    tensors = [*module.parameters(), *module.buffers(), *inputs]
    known, sizes = {tensor.untyped_storage().data_ptr() for tensor in tensors}, {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.dim() > 1:
            sizes[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = (run or module)(*inputs)
    assert result.requires_grad
    return sum(size for size, _ in sizes.values())


def predicted(kind: LayerKind, base: BaseWeights | None = None, **model: Any) -> tuple[LayerSpec, LayerTensors]:
    """The last layer of a kind, and its tensors."""
    task: Any = "lora" if model.get("lora_rank") else "sft"
    training = TrainingSpec(global_batch_size=BATCH, precision="bf16", pure_bf16=True, task=task, base_weights=base)
    spec, plan = ModelSpec(**SIZES | model), ParallelPlan()
    layer = [candidate for candidate in LITGPT.layers_of(spec, plan, training) if candidate.kind is kind][-1]
    saved = Recomputation(frozenset(tensor.name for tensor in layer.saved))
    return layer, LayerTensors(layer, BATCH, LITGPT.state(training, plan), saved)


@pytest.mark.parametrize("parts", ["qv", "qkv", ""])
@pytest.mark.parametrize("groups", [8, 2])
def test_blocks_save_what_autograd_saves(parts: str, groups: int) -> None:
    """With adapters of queries and values, of everything, and in full training; keys of every head or of a group."""
    options: dict[str, Any] = {"num_key_value_heads": groups}
    if parts:
        options |= {"lora_rank": RANK, "lora_targets": ("q", "v") if parts == "qv" else ("all",)}
    block = Block(ModelSpec(**SIZES | options), parts, RANK if parts == "qkv" else 0).to(torch.bfloat16)
    block.table = block.table.float()
    if parts:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_("lora_" in name)
    x = torch.ones(BATCH, SIZES["seq_len"], SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    _, tensors = predicted(LayerKind.BLOCK, **options)
    assert tensors.saved_bytes == saved_by(block, x)


def test_a_head_saves_logits_once_in_fp32_and_its_log_probabilities() -> None:
    """The loop holds the logits in place of autograd, which saves none."""
    vocab, n = SIZES["vocab_size"], SIZES["seq_len"]
    head = nn.Linear(SIZES["hidden_size"], vocab, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.ones(BATCH, n, SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(BATCH, n, dtype=torch.long)
    held: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        held.extend([head(part).float() for part in torch.split(x, CHUNK, dim=1)])
        pairs = zip(held, torch.split(targets, CHUNK, dim=1), strict=True)
        losses = [functional.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="none") for a, b in pairs]
        return torch.cat(losses).sum()

    saved = saved_by(head, x, run=run)
    _, tensors = predicted(LayerKind.HEAD, lora_rank=RANK, lora_targets=("q", "v"))
    assert saved == 4 * BATCH * n * vocab
    assert tensors.saved_logits == saved + sum(logits.nbytes for logits in held)


def test_old_bitsandbytes_keeps_inputs_of_this_microbatch_and_of_the_last_one() -> None:
    """bitsandbytes 0.42, autograd/_functions.py: ctx.tensors = (A, B), which backward does not free."""
    h, width = SIZES["hidden_size"], SIZES["intermediate_size"]
    options: dict[str, Any] = {"lora_rank": RANK, "lora_targets": ("q", "v")}
    _, new = predicted(LayerKind.BLOCK, BaseWeights(format="nf4"), **options)
    _, old = predicted(LayerKind.BLOCK, BaseWeights(format="nf4", keeps_inputs=True), **options)
    kept = h + width  # of gate and up, and of down: the adapters keep that of q, k and v, and attention that of proj
    kept_before = h + h + h + width
    assert old.saved_bytes - new.saved_bytes == 2 * BATCH * SIZES["seq_len"] * (kept + kept_before)


def test_the_head_is_stored_in_few_bits_and_unpacked_into_two_copies() -> None:
    """Lightning quantizes every linear layer, from FP16: bitsandbytes unpacks into it and casts to BF16."""
    elements = SIZES["vocab_size"] * SIZES["hidden_size"]
    layer, tensors = predicted(LayerKind.HEAD, BaseWeights(format="nf4"), lora_rank=RANK, lora_targets=("q", "v"))
    stored = next(p.stored for p in layer.parameters if p.name == "lm_head.weight")
    assert stored is not None
    assert stored.shard_bytes((SIZES["vocab_size"], SIZES["hidden_size"]), 1) == elements // 2 + 4 * elements // 64 + 64
    assert (
        stored.scratch_bytes(SIZES["vocab_size"], SIZES["hidden_size"], 1, 2, forward=True) >= 2 * 2 * elements - 1024
    )
    assert tensors.saved_logits == 8 * BATCH * SIZES["seq_len"] * SIZES["vocab_size"]
