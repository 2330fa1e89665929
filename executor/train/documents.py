"""Packed sequences: attention, positions and targets within each document.

Attention is one call per document on its part of the tensors. Alternatives of torch were measured (2.13, two CPU
cores, sequences of 2048 tokens): one call with a mask takes 4 to 19 times as long, nested tensors have no CPU kernel,
and ``torch.nn.attention.varlen`` supports only CUDA and 16-bit dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.distributed.context_parallel import AttentionCore
from executor.distributed.mesh import ParallelDims
from simplan.model.model import ModelSpec

__all__ = ["DocumentAttention", "has_target", "token_positions"]

_HEADS, _TOKENS = 1, 2  # the dimensions


class DocumentAttention:
    """Applies a core to each document and to the padding; concatenates the outputs.

    Tensors are split and concatenated in the layout of the projections, (batch, tokens, heads, head_dim). One split
    makes all parts, so that backward concatenates the gradients of all documents in one copy.

    Args:
        core: Attention of (batch, heads, tokens, head_dim).
        lengths: Tokens of each document, and of the padding.
    """

    def __init__(self, core: AttentionCore, lengths: Sequence[int]) -> None:
        self._core, self._lengths = core, list(lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, tokens, head_dim) each, as is the result."""
        parts = (torch.split(x.transpose(_HEADS, _TOKENS), self._lengths, dim=_HEADS) for x in (q, k, v))
        outs = [
            self._core(*(x.transpose(_HEADS, _TOKENS) for x in document)).transpose(_HEADS, _TOKENS)
            for document in zip(*parts, strict=True)
        ]
        return torch.cat(outs, dim=_HEADS).transpose(_HEADS, _TOKENS)


def token_positions(spec: ModelSpec, parallel: ParallelDims) -> Tensor:
    """Position in its document of each of this rank's tokens, (seq_len / cp) int64."""
    whole = torch.cat([torch.arange(length) for length in spec.segments])
    return whole[parallel.positions(spec.seq_len)]


def has_target(spec: ModelSpec) -> Tensor:
    """Mask of tokens that are followed by a token of the same document, (seq_len) bool; False for padding."""
    found = torch.zeros(spec.seq_len, dtype=torch.bool)
    start = 0
    for length in spec.document_lengths:
        found[start : start + length - 1] = True
        start += length
    return found
