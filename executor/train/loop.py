"""The plain loop that runs a table without pipeline stages, one action after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from executor.models.lora import trained_parameters
from executor.profiling.recorder import Recorder
from executor.train.optimizers import divide_gradients
from simplan.program.action import Action, ActionKind

__all__ = ["LoopEngine"]


class LoopEngine:
    """Runs the row of a rank without pipeline parallelism, except OPTIM, which the trainer runs.

    Args:
        module: The model, plain, sharded by FSDP or wrapped in DistributedDataParallel.
        row: Actions of the rank.
        num_microbatches: Number of microbatches per step.
        loss: Returns the loss of a microbatch from the module's output and the targets.
        complete_gradients: Called in REDUCE_GRAD, before gradients are divided.
        sync_each: Reduce gradients after every microbatch, not only after the last.
        recorder: Records the actions.
    """

    def __init__(
        self,
        module: nn.Module,
        row: Sequence[Action],
        num_microbatches: int,
        *,
        loss: Callable[[Tensor, Tensor], Tensor],
        complete_gradients: Callable[[], None],
        sync_each: bool,
        recorder: Recorder,
    ) -> None:
        self._module = module
        self._trained = trained_parameters(module)
        self._loss = loss
        self._complete_gradients = complete_gradients
        self._sync_each = sync_each
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
                    self._complete_gradients()
                    if self._num_microbatches > 1:  # sums become means, as in torch's pipelining runtime
                        divide_gradients(self._trained, self._num_microbatches)
                elif action.kind is ActionKind.FORWARD:
                    assert microbatch is not None
                    with self._ddp_synchronized(microbatch):
                        loss = self._loss(self._module(inputs[microbatch]), wanted[microbatch])
                    graphs[microbatch], losses[microbatch] = loss, loss.detach()
                    del loss
                else:
                    assert action.kind is ActionKind.BACKWARD
                    assert microbatch is not None
                    if isinstance(self._module, FSDPModule):
                        self._module.set_requires_gradient_sync(self._synchronizes(microbatch))
                    graphs.pop(microbatch).backward()  # type: ignore[no-untyped-call]
        return [loss for _, loss in sorted(losses.items())]

    def _synchronizes(self, microbatch: int) -> bool:
        return self._sync_each or microbatch == self._last_microbatch

    def _ddp_synchronized(self, microbatch: int) -> AbstractContextManager[object]:
        """DDP reduces gradients in the backward of a forward run outside of ``no_sync``."""
        if isinstance(self._module, DistributedDataParallel) and not self._synchronizes(microbatch):
            return self._module.no_sync()
        return nullcontext()
