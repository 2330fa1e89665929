"""Sequences that several documents share: attention within each, positions that start anew, targets within it.

Attention is one call for each document on its part of the tensors. torch's alternatives were tried (2.13, two CPU
cores, sequences of 2048 tokens): one call with a table of what counts takes 4 to 19 times as long, nested tensors find
no kernel on a CPU, and ``torch.nn.attention.varlen`` is for CUDA alone and 16 bits alone.
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
    """Applies a core to each document and to the padding; joins what they give.

    Tensors are cut and joined in the order (batch, tokens, heads, head_dim), in which projections make and take them,
    and cut all at once, so that backward joins the gradients of all documents in one copy.

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
    """Where in its document each of this rank's tokens is, (seq_len / cp) int64."""
    whole = torch.cat([torch.arange(length) for length in spec.segments])
    return whole[parallel.positions(spec.seq_len)]


def has_target(spec: ModelSpec) -> Tensor:
    """Which tokens of a sequence are followed by one of the same document, (seq_len) bool; of padding none."""
    found = torch.zeros(spec.seq_len, dtype=torch.bool)
    start = 0
    for length in spec.document_lengths:
        found[start : start + length - 1] = True
        start += length
    return found
