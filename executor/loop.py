"""The plain loop that runs a table without pipeline stages, one action after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from executor.model import cross_entropy
from executor.recorder import Recorder
from simplan.program.action import Action, ActionKind

__all__ = ["LoopEngine"]


class LoopEngine:
    """Runs the row of a rank that holds the whole model, OPTIM excepted, which is the trainer's.

    Args:
        module: The model, perhaps wrapped in DistributedDataParallel.
        row: Its actions.
        num_microbatches: Microbatches of one step.
        recorder: Gets the actions.
    """

    def __init__(self, module: nn.Module, row: Sequence[Action], num_microbatches: int, recorder: Recorder) -> None:
        self._module = module
        self._row = [action for action in row if action.kind is not ActionKind.OPTIM]
        self._num_microbatches = num_microbatches
        self._recorder = recorder
        backwards = [action for action in self._row if action.kind is ActionKind.BACKWARD]
        self._last_microbatch = backwards[-1].microbatch

    def run(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """One step up to and including REDUCE_GRAD.

        Args:
            tokens: (num_microbatches * microbatch_size, seq_len) int64.
            targets: The tokens that follow them.

        Returns:
            Loss of every microbatch in order, detached.
        """
        inputs, wanted = tokens.chunk(self._num_microbatches), targets.chunk(self._num_microbatches)
        graphs: dict[int, Tensor] = {}
        losses: dict[int, Tensor] = {}
        for action in self._row:
            microbatch = action.microbatch
            with self._recorder.span(action):
                if action.kind is ActionKind.REDUCE_GRAD:
                    self._scale_gradients()
                elif action.kind is ActionKind.FORWARD:
                    assert microbatch is not None
                    with self._synchronized(microbatch):
                        loss = cross_entropy(self._module(inputs[microbatch]), wanted[microbatch])
                    graphs[microbatch], losses[microbatch] = loss, loss.detach()
                    del loss
                else:
                    assert action.kind is ActionKind.BACKWARD
                    assert microbatch is not None
                    graphs.pop(microbatch).backward()  # type: ignore[no-untyped-call]
        return [loss for _, loss in sorted(losses.items())]

    def _synchronized(self, microbatch: int) -> AbstractContextManager[object]:
        """DDP reduces gradients in the backward of a forward run outside of ``no_sync``: that of the last backward."""
        if microbatch != self._last_microbatch and isinstance(self._module, DistributedDataParallel):
            return self._module.no_sync()
        return nullcontext()

    def _scale_gradients(self) -> None:
        """Sums of gradients become means over microbatches, as torch's pipelining runtime does it."""
        if self._num_microbatches == 1:
            return
        for parameter in self._module.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(self._num_microbatches)
