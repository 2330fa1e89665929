"""Stages with several tensors between them, such as states, rotary tables and a mask of a decoder's blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from executor.capture.capture import model_from_module
from simplan import catalog
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.training import TrainingSpec


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = x + self.layer(x) * other
        return x


class Model(nn.Module):
    """Four blocks that all read the same tensors besides the one that they hand on."""

    def __init__(self, num_others: int) -> None:
        super().__init__()
        self.blocks, self.num_others = nn.ModuleList(Block() for _ in range(4)), num_others

    def forward(self, x: Tensor) -> Tensor:
        others = [x * (2 + number) for number in range(self.num_others)]
        for block in self.blocks:
            x = block(x, *others)
        return x


@pytest.mark.parametrize("num_others", [1, 3, 7])
def test_every_tensor_between_stages_is_sent_and_awaited(num_others: int) -> None:
    captured = model_from_module(Model(num_others), lambda number: (torch.zeros(number, 8),), precisions=("fp32",))
    model = ModelSpec(name="blocks", family="captured", captured=captured)
    training = TrainingSpec(global_batch_size=4, precision="fp32")
    job = Job(model, catalog.cluster("dgx-h100", 2), training, ParallelPlan(pp=2), catalog.software("torch"))
    spans = predict(job, name="blocks").timeline.spans
    sent = [span for span in spans if span.action == "0SEND_F0"]
    assert len(sent) == 1 + num_others
    [forward] = [span for span in spans if span.action == "1F0" and span.name.startswith("block 2")]
    assert forward.start_s >= max(span.end_s for span in sent)
