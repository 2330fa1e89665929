"""T5's layers, which forward encoder states, decoder states and the tables of relative positions.

Encoder states (batch, seq_len, hidden_size), decoder states (batch, decoder_seq_len, hidden_size), and for every
sequence the same two tables (batch, 2, buckets, heads), the encoder's first.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention_cores import LayerRequest
from executor.models.norms import RMSNorm, as_matmul_dtype

_LARGEST_DISTANCE = 128  # Hugging Face's relative_attention_max_distance: from there on all are alike


States = tuple[Tensor, Tensor, Tensor]
"""Outputs of layers; torch's pipelines support plain tuples only."""


class T5Embedding(nn.Module):
    """Tokens of both stacks (batch, seq_len + decoder_seq_len) int64 to states."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self._lengths = [spec.seq_len, spec.decoder_seq_len]
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.encoder_bias = nn.Embedding(spec.relative_attention_buckets, spec.num_attention_heads)
        self.decoder_bias = nn.Embedding(spec.relative_attention_buckets, spec.num_attention_heads)

    def forward(self, tokens: Tensor) -> States:
        """Looks up tokens; copies, so that each tensor can be sent and freed separately."""
        encoder, decoder = (part.clone() for part in torch.split(self.wte(tokens), self._lengths, dim=1))
        tables = torch.stack((self.encoder_bias.weight, self.decoder_bias.weight))
        return encoder, decoder, tables.expand(len(tokens), -1, -1, -1).clone()


class T5Block(nn.Module):
    """Base of encoder and decoder blocks: RMSNorm before every part, an MLP at the end.

    Attributes:
        causal: True for causal self-attention.
    """

    causal: ClassVar[bool]

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self._tables, self._num_heads, self._spec = request.stage.tables, spec.num_attention_heads, spec
        self._core = request.stage.maybe_again(self._biased_attention)

    def _linears(self) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
        """Linear layers of queries, keys, values and the output projection."""
        h, width = self._spec.hidden_size, self._num_heads * self._spec.head_dim
        made = [nn.Linear(h, width, bias=False) for _ in range(3)]
        return made[0], made[1], made[2], nn.Linear(width, h, bias=False)

    def _make_mlp(self) -> None:
        h, i = self._spec.hidden_size, self._spec.intermediate_size
        if self._spec.gated_mlp:
            self.gate = nn.Linear(h, i, bias=False)
        self.up = nn.Linear(h, i, bias=False)
        self.down = nn.Linear(i, h, bias=False)

    def _mlp(self, x: Tensor) -> Tensor:
        x = as_matmul_dtype(x)
        if not self._spec.gated_mlp:
            return self.down(functional.relu(self.up(x)))  # type: ignore[no-any-return]
        gate, up = self.gate(x), self.up(x)
        return self.down(functional.gelu(gate, approximate="tanh") * up)  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None) -> Tensor:
        """Queries (batch, queries, width), keys and values (batch, keys, width) to (batch, queries, width)."""
        heads = (torch.unflatten(x, -1, (self._num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        return self._core(*heads, table).transpose(1, 2).flatten(-2)

    def _biased_attention(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Tensor:
        return eager_attention(q, k, v, None if table is None else self._bias(table))

    def _bias(self, table: Tensor) -> Tensor:
        """Bias of the scores, (heads, queries, keys), from a table of relative positions (buckets, heads)."""
        shared, causal = self._tables, self.causal
        name = "earlier" if causal else "all"
        if name not in shared:
            length = self._spec.decoder_seq_len if causal else self._spec.seq_len
            distances = torch.arange(length).unsqueeze(0) - torch.arange(length).unsqueeze(1)
            buckets = relative_buckets(distances, self._spec.relative_attention_buckets, causal=causal)
            shared[name] = buckets.to(table.device)
            if causal:
                shared["later"] = (distances > 0).to(table.device)
        bias = functional.embedding(shared[name], table).permute(2, 0, 1)
        return bias.masked_fill(shared["later"], -torch.inf) if causal else bias


class T5Encoder(T5Block):
    """Attention to all tokens with a bias by their distance, then an MLP; the last block also norms its output."""

    causal = False

    def __init__(self, request: LayerRequest) -> None:
        super().__init__(request)
        spec = request.spec
        self.norm1 = RMSNorm(spec.hidden_size)
        self.q, self.k, self.v, self.proj = self._linears()
        self.norm2 = RMSNorm(spec.hidden_size)
        self._make_mlp()
        self._is_last = request.index == spec.num_hidden_layers
        if self._is_last:
            self.norm3 = RMSNorm(spec.hidden_size)

    def forward(self, states: States) -> States:
        """Encoder states to encoder states."""
        encoder, decoder, tables = states
        return self.transform(encoder, tables), decoder, tables

    def transform(self, x: Tensor, tables: Tensor) -> Tensor:
        """The block's output; the part that backward may recompute."""
        normed = as_matmul_dtype(self.norm1(x))
        x = x + self.proj(self._attend(self.q(normed), self.k(normed), self.v(normed), tables[0, 0]))
        x = x + self._mlp(self.norm2(x))
        return as_matmul_dtype(self.norm3(x)) if self._is_last else x


class T5Decoder(T5Block):
    """Attention to earlier tokens with a bias by their distance, attention to the encoder's output, then an MLP."""

    causal = True

    def __init__(self, request: LayerRequest) -> None:
        super().__init__(request)
        spec = request.spec
        self.norm0 = RMSNorm(spec.hidden_size)
        self.q, self.k, self.v, self.proj = self._linears()
        self.norm1 = RMSNorm(spec.hidden_size)
        self.cross_q, self.cross_k, self.cross_v, self.cross_proj = self._linears()
        self.norm2 = RMSNorm(spec.hidden_size)
        self._make_mlp()

    def forward(self, states: States) -> States:
        """Decoder states to decoder states."""
        encoder, decoder, tables = states
        return encoder, self.transform(encoder, decoder, tables), tables

    def transform(self, encoder: Tensor, x: Tensor, tables: Tensor) -> Tensor:
        """The block's output; the part that backward may recompute."""
        normed = as_matmul_dtype(self.norm0(x))
        x = x + self.proj(self._attend(self.q(normed), self.k(normed), self.v(normed), tables[0, 1]))
        q, encoder = self.cross_q(as_matmul_dtype(self.norm1(x))), as_matmul_dtype(encoder)
        x = x + self.cross_proj(self._attend(q, self.cross_k(encoder), self.cross_v(encoder)))
        return x + self._mlp(self.norm2(x))


class T5Head(nn.Module):
    """Final norm and output projection of the decoder's states; scaled where the projection is the embedding."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self.norm = RMSNorm(spec.hidden_size)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self._scale = spec.hidden_size**-0.5 if spec.tied_embeddings else None

    def forward(self, states: States) -> Tensor:
        """Logits (batch, decoder_seq_len, vocab_size)."""
        _, x, _ = states
        x = self.norm(x)
        if self._scale is not None:
            x = x * self._scale
        logits: Tensor = self.lm_head(as_matmul_dtype(x))
        return logits


def t5_block(request: LayerRequest) -> T5Block:
    """Encoder or decoder block, by the layer's index."""
    return T5Encoder(request) if request.index <= request.spec.num_hidden_layers else T5Decoder(request)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention with unscaled scores; tensors are (batch, heads, tokens, head_dim); softmax in FP32.

    Args:
        bias: Added to the scores, (heads, queries, keys).
    """
    scores = q @ k.transpose(-1, -2)
    if bias is not None:
        scores.add_(bias)
    wide = torch.float64 if scores.dtype is torch.float64 else torch.float32
    return functional.softmax(scores, dim=-1, dtype=wide).to(v.dtype) @ v


def relative_buckets(distances: Tensor, num_buckets: int, *, causal: bool) -> Tensor:
    """Row of the table for each distance of a key from its query (Raffel et al. 2020, section 2.1).

    For one direction, the first half of the rows are for one distance each, the others for logarithmic ranges of
    distances up to 128. Without causality, each direction has half of the rows.

    Args:
        distances: Position of the key minus position of the query, int64.
        causal: Keys after the query are masked; they get the row of distance 0.
    """
    first = torch.zeros_like(distances)
    if causal:
        far = (-distances).clamp(min=0)
    else:
        num_buckets //= 2
        first, far = (distances > 0) * num_buckets, distances.abs()
    exact = num_buckets // 2
    share = (far.clamp(min=exact) / exact).log() / math.log(_LARGEST_DISTANCE / exact)
    ranged = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return first + torch.where(far < exact, far, ranged)
