"""The only module that uses torch's private pipelining runtime; it runs an action table literally.

torch's ``_PipelineScheduleRuntime`` executes a list of actions loaded as ``compute_comms``. Private names used, with
the same meaning in torch 2.11 and 2.13 (``tests/executor/distributed/test_pipeline.py`` pins them): the runtime class
and its ``_prepare_schedule_with_comms``, ``_split_inputs``, ``_maybe_compute_loss``, ``_maybe_get_loss``,
``_update_losses``; ``_Action``; the stage's ``fwd_cache`` and ``bwd_cache``; and, of 2.13 only,
``_warmup_forward_vote`` and ``_warmup_backward_result``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from executor.distributed.gradients import divide_gradients
from executor.distributed.mesh import Peers
from executor.profiling.recorder import Recorder
from simplan.program.action import Action, ActionKind, Table
from simplan.program.tables.complete import stage_to_rank


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that enters or leaves a stage, for one microbatch.

    Attributes:
        returns: Backward returns a gradient, if the tensor has numbers in floating point.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    returns: bool = True

    def example(self) -> Tensor:
        """Tensor on the meta device with shape and dtype, so that torch needs no trial run to find them."""
        has_gradient = self.returns and self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=has_gradient)


@dataclass(frozen=True, slots=True)
class StageModule:
    """A stage of this rank.

    Attributes:
        module: Layers of the stage, plain, sharded by FSDP or wrapped in DistributedDataParallel.
        inputs, outputs: Tensors that enter and leave the stage.
        complete_gradients: Called in REDUCE_GRAD, after gradients are averaged over data parallelism and microbatches.
    """

    index: int
    module: nn.Module
    inputs: Sequence[Boundary]
    outputs: Sequence[Boundary]
    complete_gradients: Callable[[], None]


class PipelineEngine:
    """Runs one rank's row of an action table, except OPTIM, which the trainer runs.

    Args:
        table: Action table of the whole pipeline; this rank's row is that of its index in ``peers``.
        peers: The ranks of the pipeline, first stage first.
        loss: Returns the loss of a microbatch from the last stage's output and the targets.
        alone: No other rank exists (see ``executor.dry_run.rehearse``).
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        table: Table,
        peers: Peers,
        *,
        num_microbatches: int,
        loss: Callable[[Tensor, Any], Tensor],
        device: torch.device,
        recorder: Recorder,
        alone: bool = False,
    ) -> None:
        num_stages = len(stage_to_rank(table))
        kind = _AloneStage if alone else _RecordedStage
        self._stages = [
            kind(
                stage.module,
                stage.index,
                num_stages,
                device,
                input_args=tuple(tensor.example() for tensor in stage.inputs),
                output_args=tuple(tensor.example() for tensor in stage.outputs),
                group=peers.group,
                recorder=recorder,
                complete_gradients=stage.complete_gradients,
            )
            for stage in stages
        ]
        self._runtime = _Runtime(self._stages, num_microbatches, loss_fn=loss)
        self._runtime._prepare_schedule_with_comms(
            {rank: _torch_actions(row) for rank, row in enumerate(table)}, format="compute_comms"
        )

    @property
    def sent(self) -> list[Tensor]:
        """Tensors that are held until the end of the step because they are being sent."""
        return [tensor for stage in self._stages for _, tensor in stage.sends]

    def run(self, tokens: Tensor | list[Any], targets: Tensor | None) -> list[Tensor]:
        """One step up to and including REDUCE_GRAD.

        Args:
            tokens: (num_microbatches * microbatch_size, seq_len) int64, or a list of the batches of all stages.
            targets: The tokens that follow them; None where the module gives the loss.

        Returns:
            Loss of every microbatch in order, detached; empty on ranks without the last stage.
        """
        inputs = (tokens,) if isinstance(tokens, list) or any(stage.is_first for stage in self._stages) else ()
        has_last = any(stage.is_last for stage in self._stages)
        self._runtime.step(*inputs, target=targets if has_last else None, return_outputs=False)
        for stage in self._stages:
            stage.complete_sends()
        return self._runtime.take_losses()


def _torch_actions(row: Sequence[Action]) -> list[_Action | None]:
    return [_Action.from_str(str(action)) for action in row if action.kind is not ActionKind.OPTIM]


class _RecordedStage(PipelineStage):
    """A stage that records its actions; waits for P2P receives are outside of the recorded spans."""

    def __init__(self, *args: Any, recorder: Recorder, complete_gradients: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = recorder
        self._complete_gradients = complete_gradients
        self._receives: dict[Action, list[int]] = {}
        self.sends: list[tuple[int, Tensor]] = []  # torch's works keep the tensors alive, but fake works do not

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        action = Action(self.stage_index, ActionKind.FORWARD, fwd_chunk_id)
        self._received(Action(self.stage_index, ActionKind.RECV_F, fwd_chunk_id))
        if self.is_last:  # the loss belongs to the action; _Runtime ends it
            self.recorder.open(action)
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        with self.recorder.span(action):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        kind = ActionKind.BACKWARD if full_backward else ActionKind.BACKWARD_INPUT
        self._received(Action(self.stage_index, ActionKind.RECV_B, bwd_chunk_id))
        with self.recorder.span(Action(self.stage_index, kind, bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.recorder.span(Action(self.stage_index, ActionKind.BACKWARD_WEIGHT, bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with self.recorder.span(Action(self.stage_index, ActionKind.REDUCE_GRAD)):
            super().perform_reduce_grad(grad_scale_factor)
            self._complete_gradients()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """As torch does it, in one call for all gradients."""
        if grad_scale_factor != 1:
            divide_gradients(self.submod.parameters(), grad_scale_factor)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._p2p_ops(ActionKind.RECV_F, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._p2p_ops(ActionKind.RECV_B, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._p2p_ops(ActionKind.SEND_F, fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        gradients = self.bwd_cache[bwd_chunk_id]  # of a split backward, as autograd made them
        self.bwd_cache[bwd_chunk_id] = tuple(None if g is None else g.contiguous() for g in gradients)
        return self._p2p_ops(ActionKind.SEND_B, bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def complete_sends(self) -> None:
        """The runtime has waited for all sends of the step."""
        for handle, _ in self.sends:
            self.recorder.complete(handle)
        self.sends.clear()

    def _p2p_ops(self, kind: ActionKind, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        action = Action(self.stage_index, kind, microbatch)
        me = dist.get_rank()
        self.recorder.begin(action)
        for op in ops:
            if kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                self.sends.append((self.recorder.issue("send", (me, op.peer), op.tensor.nbytes), op.tensor))
            else:
                handle = self.recorder.issue("recv", (op.peer, me), op.tensor.nbytes)
                self._receives.setdefault(action, []).append(handle)
        self.recorder.end(action)
        return ops

    def _received(self, action: Action) -> None:
        for handle in self._receives.pop(action, ()):
            self.recorder.complete(handle)


class _AloneStage(_RecordedStage):
    """Stage of a rank without peers: received numbers are random, and the warmup vote on known shapes is skipped."""

    def _p2p_ops(self, kind: ActionKind, microbatch: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                received = op.tensor.detach()
                received.normal_() if received.is_floating_point() else received.zero_()  # an index is valid
        return super()._p2p_ops(kind, microbatch, ops)

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """The shapes are known."""

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)


class _Runtime(_PipelineScheduleRuntime):
    """Pipelining runtime of torch with losses by microbatch: forwards run in any order, and logits are freed early."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._graphs: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}

    def take_losses(self) -> list[Tensor]:
        """The losses of the finished step, in order of microbatches."""
        losses = [loss for _, loss in sorted(self._losses.items())]
        self._losses.clear()
        return losses

    def _split_inputs(self, args: Any, kwargs: Any = None) -> Any:
        """As torch's, of tensors; batches in a list are given to every stage by name."""
        if args and isinstance(args[0], list):
            return [()] * len(args[0]), [{"batch": batch} for batch in args[0]]
        return super()._split_inputs(args, kwargs)

    def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, mb_index: int, *loss_kwargs: Any) -> None:
        # loss_kwargs is new in torch 2.13; we pass none.
        if not stage.is_last:
            return
        assert self._loss_fn is not None
        loss = self._loss_fn(output, None if target_mbs is None else target_mbs[mb_index])
        self._graphs[mb_index] = loss
        self._losses[mb_index] = loss.detach()
        # torch keeps the logits until backward, which needs only the loss.
        _, input_values = stage.fwd_cache[mb_index]
        stage.fwd_cache[mb_index] = ((), input_values)
        stage.recorder.close()

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._graphs.pop(mb_index) if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        """Losses are taken with ``take_losses``."""
