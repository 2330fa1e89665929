"""Embeddings and heads of each family."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.models.attention_cores import LayerRequest, soft_capped
from executor.models.norms import as_matmul_dtype, make_norm

_LOGITS_CAP = 30.0  # Gemma 2, final_logit_softcapping


class Embedding(nn.Module):
    """Tokens (batch, tokens) int64 to hidden states (batch, tokens, hidden_size)."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        self.wte = nn.Embedding(request.spec.vocab_size, request.spec.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up tokens."""
        x: Tensor = self.wte(tokens)
        return x


class ScaledEmbedding(Embedding):
    """Rows times the square root of their width (Gemma)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up tokens."""
        return torch.mul(super().forward(tokens), self.wte.embedding_dim**0.5)


class PositionEmbedding(Embedding):
    """Adds a row of a table for every position."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__(request)
        spec = request.spec
        self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.positions: Tensor
        self.register_buffer("positions", request.stage.own_positions(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up tokens and positions."""
        x: Tensor = super().forward(tokens) + self.wpe(self.positions)
        return x


class BertEmbedding(Embedding):
    """Adds rows for types of tokens (a first and a second segment, half of a sequence each) and positions; norms."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__(request)
        spec = request.spec
        self.token_type = nn.Embedding(spec.type_vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.norm = make_norm(spec)
        positions = request.stage.own_positions()
        self.positions: Tensor
        self.types: Tensor
        self.register_buffer("positions", positions, persistent=False)
        self.register_buffer("types", positions * spec.type_vocab_size // spec.seq_len, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up tokens, types and positions."""
        x: Tensor = self.norm(super().forward(tokens) + self.token_type(self.types) + self.wpe(self.positions))
        return x


class PatchEmbedding(nn.Module):
    """Images (batch, channels, height, width) to hidden states of a class token and their patches, with positions."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        h, patch = spec.hidden_size, spec.patch_size
        self.class_token = nn.Parameter(torch.zeros(h))
        self.pos_embedding = nn.Parameter(torch.empty(spec.seq_len, h))
        self.conv_proj = nn.Conv2d(spec.num_channels, h, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """Cuts images into patches."""
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(images), 1, -1)
        return torch.cat((token, patches), dim=1) + self.pos_embedding


class OutputHead(nn.Module):
    """Final norm and output projection: hidden states to logits (batch, tokens, vocab_size).

    Attributes:
        leaves_logits: ``forward`` returns the input of the projection, for a loss in chunks.
    """

    norm: nn.Module
    lm_head: nn.Linear
    leaves_logits = False

    def forward(self, x: Tensor) -> Tensor:
        """Logits, or the hidden states that they are made of."""
        hidden = as_matmul_dtype(self.norm(x))
        return hidden if self.leaves_logits else self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the norm."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class Head(OutputHead):
    """The head of most families.

    Attributes:
        scores: There is one score of every token in place of logits.
    """

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self.norm = make_norm(spec)
        self.scores = spec.objective == "score"
        self.lm_head = nn.Linear(spec.hidden_size, 1 if self.scores else spec.vocab_size, bias=False)


class CappedHead(Head):
    """Logits of Gemma 2, which pass through a scaled tanh; scores of a reward model do not."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the norm."""
        if self.scores:
            return super().logits(hidden)
        return soft_capped(super().logits(hidden), _LOGITS_CAP)


class MaskedHead(nn.Module):
    """BERT's: a matrix and a GELU before the norm, and a bias of the output projection."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self.transform = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.norm = make_norm(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        transformed = functional.gelu(self.transform(x)).to(x.dtype)  # autocast computes norms in FP32
        logits: Tensor = self.lm_head(as_matmul_dtype(self.norm(transformed)))
        return logits


class ClassHead(nn.Module):
    """Final norm, and the classes (batch, 1, num_classes) by the class token."""

    def __init__(self, request: LayerRequest) -> None:
        super().__init__()
        spec = request.spec
        self.norm = make_norm(spec)
        self.head = nn.Linear(spec.hidden_size, spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        token = self.norm(x)[:, :1].clone()  # a copy, so that the other tokens' memory is freed
        logits: Tensor = self.head(as_matmul_dtype(token))
        return logits
