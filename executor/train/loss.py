"""The loss: mean cross-entropy, also over logits of which each tensor-parallel rank has a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import functional

from executor.distributed.mesh import ParallelDims, Peers
from executor.train.data import IGNORED

__all__ = ["cross_entropy"]

_SINGLE = ParallelDims()


def cross_entropy(logits: Tensor, targets: Tensor, parallel: ParallelDims = _SINGLE) -> Tensor:
    """Mean cross-entropy over this rank's tokens that have a target, computed in fp32 (in fp64 for fp64 logits).

    Args:
        logits: (batch, tokens, vocab_size), of the rank's part of the vocabulary.
        targets: (batch, tokens) int64, of the whole vocabulary; ``IGNORED`` for none.
        parallel: How the vocabulary is split.
    """
    wide = logits if logits.dtype is torch.float64 else logits.float()
    wide, targets = wide.flatten(0, -2), targets.flatten()
    if parallel.tp.size == 1:
        return functional.cross_entropy(wide, targets, ignore_index=IGNORED)
    loss: Tensor = _SplitCrossEntropy.apply(wide, targets, parallel.tp)  # type: ignore[no-untyped-call]
    return loss


class _SplitCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy without gathering logits (Shoeybi et al. 2019, section 3).

    With m the largest logit of a token, s the sum of exp(logit - m) and t its target: loss = log s - (logit_t - m);
    its gradient by the logits is exp(logit - m) / s, less one at the target. Tokens without a target count nothing.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: Peers) -> Tensor:
        own, foreign = _own_targets(targets, logits.shape[-1], tp)
        largest = tp.all_reduce(logits.amax(dim=-1), ReduceOp.MAX)
        probabilities = logits - largest.unsqueeze(-1)
        at_target = probabilities.gather(-1, own).squeeze(-1).masked_fill_(foreign, 0.0)
        probabilities.exp_()
        both = tp.all_reduce(torch.stack((at_target, probabilities.sum(dim=-1))))
        at_target, total = both.unbind()
        probabilities.div_(total.unsqueeze(-1))
        ctx.tp = tp
        asked = targets != IGNORED
        count = asked.sum()
        ctx.save_for_backward(probabilities, targets, count)
        return (total.log() - at_target).mul_(asked).sum() / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        probabilities, targets, count = ctx.saved_tensors
        own, foreign = _own_targets(targets, probabilities.shape[-1], ctx.tp)
        weight = (targets != IGNORED).unsqueeze(-1) * (grad_outputs[0] / count)
        grad = probabilities * weight
        grad.scatter_add_(-1, own, -weight.masked_fill(foreign.unsqueeze(-1), 0.0))
        return grad, None, None


def _own_targets(targets: Tensor, num_own: int, tp: Peers) -> tuple[Tensor, Tensor]:
    """Index of each target in the rank's part of the vocabulary (tokens, 1), and which are not in it (tokens)."""
    own = targets - tp.rank * num_own
    foreign = (own < 0) | (own >= num_own)
    return own.masked_fill_(foreign, 0).unsqueeze(-1), foreign
