"""The loss: mean cross-entropy, also over logits of which each tensor-parallel rank has a part of the vocabulary."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from executor.distributed.mesh import ParallelDims
from executor.train.data import IGNORED

_SINGLE = ParallelDims()


def cross_entropy(logits: Tensor, targets: Tensor, parallel: ParallelDims = _SINGLE) -> Tensor:
    """Mean cross-entropy over this rank's tokens that have a target, computed in fp32 (in fp64 for fp64 logits).

    Args:
        logits: Logits of the rank's part of the vocabulary, (batch, tokens, vocab_size).
        targets: Targets in the whole vocabulary, (batch, tokens) int64; ``IGNORED`` for none.
        parallel: Parallel dimensions; if ``tp`` splits the vocabulary, call forward and backward inside ``split_loss``.
    """
    wide = logits if logits.dtype is torch.float64 else logits.float()
    wide, targets = wide.flatten(0, -2), targets.flatten()
    if parallel.tp.mesh is None:
        return functional.cross_entropy(wide, targets, ignore_index=IGNORED)
    split = DTensor.from_local(wide, parallel.tp.mesh, (Shard(1),), run_check=False)
    del wide
    loss = functional.cross_entropy(split, targets, ignore_index=IGNORED)
    assert isinstance(loss, DTensor)
    return loss.to_local().clone()  # no view: torch's pipelines detach it in place


def split_loss(parallel: ParallelDims) -> AbstractContextManager[None]:
    """Context of torch's loss_parallel if ranks split the vocabulary: the loss needs no all-gather of logits."""
    if parallel.tp.mesh is None:
        return nullcontext()
    context: AbstractContextManager[None] = loss_parallel()
    return context
