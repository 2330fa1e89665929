"""The loss: mean cross-entropy, also over logits of which each tensor-parallel rank has a part of the vocabulary.

In chunks of tokens it includes the output projection, so that the logits of one chunk exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.distributed.mesh import ParallelDims
from executor.models.embedding_and_head import OutputHead
from executor.train.data import IGNORED
from simplan.model.implementations.loss_in_chunks import ChunkedLoss

_SINGLE = ParallelDims()


def cross_entropy(
    logits: Tensor, targets: Tensor, parallel: ParallelDims = _SINGLE, *, reduction: str = "mean"
) -> Tensor:
    """Mean cross-entropy over this rank's tokens that have a target, computed in fp32 (in fp64 for fp64 logits).

    Args:
        logits: Logits of the rank's part of the vocabulary, (batch, tokens, vocab_size).
        targets: Targets in the whole vocabulary, (batch, tokens) int64; ``IGNORED`` for none.
        parallel: Parallel dimensions; if ``tp`` splits the vocabulary, call forward and backward inside ``split_loss``.
        reduction: ``none`` for that of every token, (batch * tokens), 0 without a target.
    """
    wide = logits if logits.dtype is torch.float64 else logits.float()
    wide, targets = wide.flatten(0, -2), targets.flatten()
    if parallel.tp.mesh is None:
        return functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction=reduction)
    split = DTensor.from_local(wide, parallel.tp.mesh, (Shard(1),), run_check=False)
    del wide
    loss = functional.cross_entropy(split, targets, ignore_index=IGNORED)
    assert isinstance(loss, DTensor)
    return loss.to_local().clone()  # no view: torch's pipelines detach it in place


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of targets (batch, tokens), computed as ``cross_entropy``; 0 without a target."""
    return -cross_entropy(logits, targets, reduction="none").view(targets.shape)


def split_loss(parallel: ParallelDims) -> AbstractContextManager[None]:
    """Context of torch's loss_parallel if ranks split the vocabulary: the loss needs no all-gather of logits."""
    if parallel.tp.mesh is None:
        return nullcontext()
    context: AbstractContextManager[None] = loss_parallel()
    return context


@dataclass(frozen=True, slots=True)
class LossInChunks:
    """Mean cross-entropy of hidden states, chunk by chunk.

    Attributes:
        head: Head of the model, whose ``forward`` returns hidden states.
        chunked: Chunks, and where their gradients come from.
        autocast: Returns the context in which output projections run.
    """

    head: OutputHead
    chunked: ChunkedLoss
    autocast: Callable[[], AbstractContextManager[None]]

    def __call__(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over this rank's tokens that have a target.

        Args:
            hidden: Hidden states, (batch, tokens, hidden_size).
            targets: Targets, (batch, tokens) int64; ``IGNORED`` for none.
        """
        flat, wanted = hidden.flatten(0, -2), targets.flatten()
        count = (wanted != IGNORED).sum()
        if self.chunked.recomputed:
            run = partial(checkpoint, self._sum_of, use_reentrant=False, preserve_rng_state=False)
            with self.autocast():
                sums = [run(*pair) for pair in _chunks(self._tokens(flat), flat, wanted)]
            return torch.stack(sums).sum() / count
        mean, inputs = partial(self._mean_of, count=count), (flat, self.head.lm_head.weight, wanted)
        with self.autocast():
            loss: Tensor = _GradientsInForward.apply(*inputs, self._tokens(flat), mean)  # type: ignore[no-untyped-call]
        return loss

    def log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of targets (batch, tokens); 0 without a target. Arguments as for the mean."""
        flat, wanted = hidden.flatten(0, -2), targets.flatten()
        run = partial(checkpoint, self._each_of, use_reentrant=False, preserve_rng_state=False)
        with self.autocast():
            chunks = [run(*pair) for pair in _chunks(self._tokens(flat), flat, wanted)]
        return -torch.cat(chunks).view(targets.shape)

    def _each_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of every token of one chunk."""
        return cross_entropy(self.head.logits(hidden), targets, reduction="none")

    def _sum_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of one chunk."""
        logits = self.head.logits(hidden)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")

    def _mean_of(self, hidden: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        return self._sum_of(hidden, targets) / count

    def _tokens(self, flat: Tensor) -> int:
        """Tokens of a chunk."""
        return self.chunked.chunk_tokens or -(-len(flat) // (self.chunked.num_chunks or 1))


def loss_in_chunks(
    head: OutputHead, chunked: ChunkedLoss, autocast: torch.dtype | None, device: torch.device
) -> LossInChunks:
    """Makes a head return hidden states; returns the loss that takes them.

    Args:
        autocast: Dtype of output projections under autocast; None without autocast.
    """
    head.leaves_logits = True
    context = nullcontext if autocast is None else partial(torch.autocast, device.type, autocast)
    return LossInChunks(head, chunked, context)


def _chunks(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of tensors with equal numbers of rows, of at most ``tokens`` rows each."""
    for begin in range(0, len(tensors[0]), tokens):
        yield tuple(tensor[begin : begin + tokens] for tensor in tensors)


class _GradientsInForward(torch.autograd.Function):
    """A loss whose gradients exist before backward, which has to begin with this loss and hands them on."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tokens: int, loss_of: Callable[..., Tensor]
    ) -> Tensor:
        of_hidden, of_weight = torch.empty_like(hidden), None
        total: Tensor | None = None
        for part, wanted, gradient in _chunks(tokens, hidden, targets, of_hidden):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                loss = loss_of(leaf, wanted)
            gradients = torch.autograd.grad(loss, (leaf, weight) if weight.requires_grad else (leaf,))
            gradient.copy_(gradients[0])
            if weight.requires_grad:
                of_weight = gradients[1] if of_weight is None else of_weight.add_(gradients[1])
            total = loss.detach() if total is None else total + loss.detach()
            del loss, gradients
        assert total is not None
        ctx.save_for_backward(of_hidden, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden, of_weight, None, None, None
