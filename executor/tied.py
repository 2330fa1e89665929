"""A weight that the first and the last stage share: each end has a copy, and their gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from executor.groups import Group
from executor.model import Stage
from executor.recorder import Recorder
from simplan.program.run_spec import RunSpec

__all__ = ["TiedWeights"]

_NAMES = ("wte.weight", "lm_head.weight")


class TiedWeights:
    """One rank's copies: both where it has both ends, else one, or none.

    Args:
        job: The job.
        stages: The rank's stages by index.
        ends: The ranks with the two ends; None where one rank has both.
        recorder: Is told of the all-reduce.
    """

    def __init__(self, job: RunSpec, stages: Mapping[int, Stage], ends: Group | None, recorder: Recorder) -> None:
        last = job.plan.num_stages - 1
        there = job.model.tied_embeddings and not job.model.lora_rank and last > 0
        held = [stage for index, stage in stages.items() if there and index in (0, last)]
        self._copies = [p for stage in held for name, p in stage.named_parameters() if name.endswith(_NAMES)]
        self._has_last, self._ends, self._recorder = last in stages, ends, recorder

    @property
    def second_copies(self) -> list[nn.Parameter]:
        """The copy of the last stage, which a norm over all weights must not count again."""
        return self._copies[-1:] if self._has_last else []

    def sum_gradients(self) -> None:
        """Each end has computed a part of the gradient."""
        if not self._copies:
            return
        gradients = [weight.grad for weight in self._copies if weight.grad is not None]
        assert len(gradients) == len(self._copies)
        if self._ends is None:  # both ends are on this rank
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
            return
        handle = self._recorder.issue("all_reduce", self._ends.ranks, gradients[0].nbytes)
        dist.all_reduce(gradients[0], group=self._ends.handle)
        self._recorder.complete(handle)
