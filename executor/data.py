"""Synthetic tokens that do not depend on the plan: sample i of step n is the same for one process and for any split."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["make_batch"]


def make_batch(
    vocab_size: int, seq_len: int, *, seed: int, step: int, first_sample: int, num_samples: int
) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, (num_samples, seq_len) int64 each, of consecutive samples of one step.

    Args:
        vocab_size: Tokens are drawn evenly from this many.
        seq_len: Tokens of one sample.
        seed: Of the run.
        step: Index of the step in the run.
        first_sample: Index in the global batch of the first sample wanted.
        num_samples: How many.
    """
    rows = []
    for sample in range(first_sample, first_sample + num_samples):
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * 1_000_003 + sample)
        rows.append(torch.randint(vocab_size, (seq_len + 1,), generator=generator))
    samples = torch.stack(rows)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
