"""The modules of a model, built from its ModelSpec: same parameters, kernels and saved tensors as its LayerSpecs say.

A stage is a plain sequence of layers, whole or as one rank of ``Parallel`` has them. The embedding takes the rank's
tokens (batch, tokens) int64, blocks take and give hidden states (batch, own tokens, hidden_size), the head gives logits
(batch, tokens, own part of the vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from executor.blocks import GptBlock, LlamaBlock
from executor.context_parallel import AttentionCore, ContextAttention, causal_attention
from executor.loss import cross_entropy
from executor.norms import make_norm
from executor.parallel import Parallel
from executor.tensor_parallel import column_linear, embed_tokens
from simplan.spec.layer import LayerKind
from simplan.spec.model import ModelSpec
from simplan.spec.plan import Recompute

__all__ = ["Stage", "build_stage", "cross_entropy", "own_weights"]

_INIT_STD = 0.02  # GPT-2's
_SINGLE = Parallel.single()


class Stage(nn.Module):
    """Consecutive layers of a model.

    Attributes:
        layers: The modules, by the index of their LayerSpec (as text).
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers})

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layers in order."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def build_stage(
    spec: ModelSpec,
    layer_range: Iterable[int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    parallel: Parallel = _SINGLE,
    recompute: Recompute = "none",
) -> Stage:
    """A stage with its weights, which depend on the seed and the layers' indices only, not on how layers are split.

    A tied output head shares the embedding's tensor when both are in the stage, else it holds an equal copy.

    Args:
        spec: The model.
        layer_range: Indices of its layers.
        dtype: Of weights.
        device: Where they are.
        seed: Of the weights.
        parallel: Which part of each layer this rank has.
        recompute: ``none``, ``selective`` (the attention core) or ``full`` (every block).
    """
    assert recompute in ("none", "selective", "full")
    core: AttentionCore = causal_attention
    if recompute == "selective":
        core = partial(checkpoint, causal_attention, use_reentrant=False, preserve_rng_state=False)
    attention = ContextAttention(core, parallel, spec.seq_len, device)
    block_type = GptBlock if spec.family == "gpt" else LlamaBlock
    layers: dict[int, nn.Module] = {}
    for index in layer_range:
        layer: nn.Module
        match spec.layers[index].kind:
            case LayerKind.EMBEDDING:
                layer = _Embedding(spec, parallel)
            case LayerKind.BLOCK:
                layer = block_type(spec, parallel, attention, recompute=recompute == "full")
            case LayerKind.HEAD:
                layer = _Head(spec, parallel)
        _draw_weights(layer, spec, index, seed, parallel)
        layers[index] = layer.to(device=device, dtype=dtype)
    blocks = [layer for layer in layers.values() if isinstance(layer, LlamaBlock)]
    for block in blocks[1:]:  # one pair of tables per stage
        block.cos, block.sin = blocks[0].cos, blocks[0].sin
    embedding, head = layers.get(0), layers.get(len(spec.layers) - 1)
    if spec.tied_embeddings and isinstance(embedding, _Embedding) and isinstance(head, _Head):
        head.lm_head.weight = embedding.wte.weight
    return Stage(layers.items())


def own_weights(whole: Tensor, name: str, shape: tuple[int, ...], spec: ModelSpec, parallel: Parallel) -> Tensor:
    """This rank's part of a weight.

    Args:
        whole: All of it.
        name: Of the parameter inside its layer.
        shape: Of the part: it is split along the dimension where this is smaller.
        spec: The model.
        parallel: The ranks.
    """
    for dim, (size, part) in enumerate(zip(whole.shape, shape, strict=True)):
        if part < size:
            if name.startswith("qkv."):  # each rank has some heads of all three
                kv = spec.num_key_value_heads * spec.head_dim
                parts = torch.split(whole, [size - 2 * kv, kv, kv], dim)
            else:
                parts = (whole,)
            return torch.cat([parallel.own_part(x, dim) for x in parts], dim)
    return whole


def _draw_weights(layer: nn.Module, spec: ModelSpec, layer_index: int, seed: int, parallel: Parallel) -> None:
    """Norms 1, biases 0, matrices normal(0, 0.02), each whole tensor from its own generator."""
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        source = (layer_index, number)
        if name == "lm_head.weight" and spec.tied_embeddings:
            source = (0, 0)  # the embedding's wte.weight
        with torch.no_grad():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed((seed * 100_003 + source[0]) * 101 + source[1])
                whole = parameter.new_empty(spec.layers[layer_index].parameters[number].shape)
                whole.normal_(0.0, _INIT_STD, generator=generator)
                parameter.copy_(own_weights(whole, name, tuple(parameter.shape), spec, parallel))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


class _Embedding(nn.Module):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self._parallel = parallel
        self.wte = nn.Embedding(spec.vocab_size // parallel.shard.tp, spec.hidden_size)
        self.wpe: nn.Embedding | None = None
        if spec.family == "gpt":
            self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
            positions = parallel.positions(spec.seq_len)
            if parallel.splits_tokens:
                positions = parallel.own_part(positions, 0)
            self.positions: Tensor
            self.register_buffer("positions", positions.clone(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = embed_tokens(tokens, self.wte, self._parallel)
        return x if self.wpe is None else x + self.wpe(self.positions)


class _Head(nn.Module):
    """Final norm and output projection."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self._parallel = parallel
        self.norm = make_norm(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size // parallel.shard.tp, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (logits,) = column_linear(self.norm(x), [self.lm_head], self._parallel)
        return logits
