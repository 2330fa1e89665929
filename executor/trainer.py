"""One rank's share of a training: its stage, its engine and its optimizer, one step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.data import make_batch
from executor.ddp import wrap_ddp
from executor.groups import Groups
from executor.loop import LoopEngine
from executor.model import Stage, build_stage
from executor.recorder import Recorder
from simplan.program.action import Action, ActionKind
from simplan.program.job import Job
from simplan.spec.plan import RankMapping

if TYPE_CHECKING:
    from executor.pipeline import PipelineEngine

__all__ = ["TORCH_DTYPES", "Trainer", "make_optimizer"]

TORCH_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_LEARNING_RATE = 1e-3


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a job (``adam``, ``adamw`` or ``sgd``), its step one fused kernel."""
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[name](parameters, lr=_LEARNING_RATE, fused=True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


class Trainer:
    """What one rank holds and does.

    Args:
        job: The job; already checked.
        rank: This rank.
        device: Where it computes.
        groups: Its process groups.
        recorder: Gets what it does.
    """

    def __init__(self, job: Job, rank: int, device: torch.device, groups: Groups, recorder: Recorder) -> None:
        self._job = job
        self._device = device
        self._groups = groups
        self._recorder = recorder
        plan = job.plan
        pp_rank, self._dp_rank = RankMapping(plan.pp, plan.dp).place(rank)
        table = job.parsed_table()
        self._num_microbatches = job.training.global_batch_size // (plan.dp * plan.microbatch_size)
        self._optim_action = Action(table[pp_rank][0].stage, ActionKind.OPTIM)
        assert table[pp_rank][-1] == self._optim_action

        layer_range = job.assignment.layer_range(pp_rank)
        dtype = TORCH_DTYPES[job.dtype]
        self.stage = build_stage(job.model, layer_range, dtype, device, job.seed)
        self._tied = _tied_weight(self.stage) if groups.tied is not None else None
        for parameter in self.stage.parameters():
            parameter.grad = torch.zeros_like(parameter)  # every step finds gradients to add to
        self.optimizer = make_optimizer(job.training.optimizer, list(self.stage.parameters()))
        module: nn.Module = self.stage
        if groups.dp is not None:
            module = wrap_ddp(module, groups.dp, plan.bucket_bytes, recorder)
        self._engine: LoopEngine | PipelineEngine
        if groups.pp is None:
            self._engine = LoopEngine(module, table[0], self._num_microbatches, recorder)
        else:
            from executor.pipeline import Boundary, PipelineEngine  # seconds to import: only where needed

            tokens = Boundary((plan.microbatch_size, job.model.seq_len), torch.int64)
            hidden = Boundary((*tokens.shape, job.model.hidden_size), dtype)
            logits = Boundary((*tokens.shape, job.model.vocab_size), dtype)
            self._engine = PipelineEngine(
                module,
                table,
                groups.pp,
                inputs=hidden if pp_rank > 0 else tokens,
                outputs=hidden if pp_rank < plan.pp - 1 else logits,
                num_microbatches=self._num_microbatches,
                device=device,
                recorder=recorder,
            )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this rank's samples of a step."""
        num_samples = self._num_microbatches * self._job.plan.microbatch_size
        tokens, targets = make_batch(
            self._job.model.vocab_size,
            self._job.model.seq_len,
            seed=self._job.seed,
            step=step,
            first_sample=self._dp_rank * num_samples,
            num_samples=num_samples,
        )
        return tokens.to(self._device), targets.to(self._device)

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """One optimizer step; gives the losses of the microbatches where this rank computes them."""
        losses = self._engine.run(tokens, targets)
        self._finish_gradients()
        with self._recorder.span(self._optim_action):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)  # they stay allocated
        return losses

    def _finish_gradients(self) -> None:
        """Sums the gradients of a tied weight over both ends; part of OPTIM, but mostly waiting, so not in its span."""
        self._recorder.begin(self._optim_action)
        if self._tied is not None:
            self._sum_tied_gradients(self._tied)

    def _sum_tied_gradients(self, weight: nn.Parameter) -> None:
        """Both ends of the pipeline hold the embedding; each has computed a part of its gradient."""
        group = self._groups.tied
        assert group is not None
        assert weight.grad is not None
        handle = self._recorder.issue("all_reduce", group.ranks, weight.grad.nbytes)
        dist.all_reduce(weight.grad, group=group.handle)
        self._recorder.complete(handle)


def _tied_weight(stage: Stage) -> nn.Parameter:
    """The end's copy of the tied weight."""
    (weight,) = (p for name, p in stage.named_parameters() if name.endswith(("wte.weight", "lm_head.weight")))
    return weight
