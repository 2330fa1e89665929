"""The plain loop that runs a table without pipeline stages, one action after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from executor.distributed.gradients import StepOverError, divide_gradients
from executor.profiling.recorder import Recorder
from simplan.program.action import Action, ActionKind

if TYPE_CHECKING:
    from executor.distributed.replicas.backup_workers import FirstReplicas


@dataclass(frozen=True, slots=True)
class LoopEngine:
    """Runs the row of a rank without pipeline parallelism.

    Attributes:
        module: The model, plain, sharded by FSDP or wrapped in DistributedDataParallel.
        row: Actions of the rank, except OPTIM, which the trainer runs.
        trained: Trained parameters of the model.
        loss: Returns the loss of a microbatch from the module, its input and the targets.
        complete_gradients: Called in REDUCE_GRAD, before gradients are divided.
        sync_each: Reduce gradients after every microbatch, not only after the last.
        replicas: With backup workers, the replicas that average their gradients after the last backward; else None.
    """

    module: nn.Module
    row: Sequence[Action]
    trained: Sequence[nn.Parameter]
    num_microbatches: int
    loss: Callable[[nn.Module, Any, Any], Tensor]
    complete_gradients: Callable[[], None]
    sync_each: bool
    recorder: Recorder
    replicas: FirstReplicas | None = None

    def run(self, tokens: Tensor | list[Any], targets: Tensor | None) -> list[Tensor]:
        """One step up to and including REDUCE_GRAD.

        Args:
            tokens: (num_microbatches * microbatch_size, seq_len) int64, or a list of the module's inputs.
            targets: The tokens that follow them; None where the module gives the loss.

        Returns:
            Loss of every microbatch in order, detached; none if the step drops the gradients of this replica.
        """
        with suppress(StepOverError):
            return self._run_row(tokens, targets)
        assert self.replicas is not None
        self.recorder.close()
        self.replicas.take_mean()
        self._divide()
        return []

    def _run_row(self, tokens: Tensor | list[Any], targets: Tensor | None) -> list[Tensor]:
        number = self.num_microbatches
        inputs = tokens.chunk(number) if isinstance(tokens, Tensor) else tokens
        wanted = [None] * number if targets is None else targets.chunk(number)
        graphs: dict[int, Tensor] = {}
        losses: dict[int, Tensor] = {}
        for action in self.row:
            microbatch = action.microbatch
            with self.recorder.span(action):
                if action.kind is ActionKind.REDUCE_GRAD:
                    self.complete_gradients()
                    self._divide()
                elif action.kind is ActionKind.FORWARD:
                    assert microbatch is not None
                    with self._ddp_synchronized(microbatch):
                        loss = self.loss(self.module, inputs[microbatch], wanted[microbatch])
                    graphs[microbatch], losses[microbatch] = loss, loss.detach()
                    del loss
                else:
                    assert action.kind is ActionKind.BACKWARD
                    assert microbatch is not None
                    if isinstance(self.module, FSDPModule):
                        self.module.set_requires_gradient_sync(self._synchronizes(microbatch))
                    graphs.pop(microbatch).backward()  # type: ignore[no-untyped-call]
                    if self.replicas is not None and self._synchronizes(microbatch):
                        self.replicas.average()
        return [loss for _, loss in sorted(losses.items())]

    def _divide(self) -> None:
        if self.num_microbatches > 1:  # sums become means, as in torch's pipelining runtime
            divide_gradients(self.trained, self.num_microbatches)

    def _synchronizes(self, microbatch: int) -> bool:
        last = next(action for action in reversed(self.row) if action.kind is ActionKind.BACKWARD)
        return self.sync_each or microbatch == last.microbatch

    def _ddp_synchronized(self, microbatch: int) -> AbstractContextManager[object]:
        """DDP reduces gradients in the backward of a forward run outside of ``no_sync``."""
        if isinstance(self.module, DistributedDataParallel) and not self._synchronizes(microbatch):
            return self.module.no_sync()
        return nullcontext()
