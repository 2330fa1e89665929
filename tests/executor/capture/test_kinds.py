"""Operators of kinds that no measurement was fitted to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from executor.capture.capture import model_from_module
from simplan import catalog
from simplan.job import Job
from simplan.model.captured.kernels import _KINDS
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.training import TrainingSpec


def test_kinds_are_operators_of_torch() -> None:
    words = [word for kind in _KINDS for word in kind.words]
    assert len(words) == len({*words})
    assert [word for word in words if not hasattr(torch.ops.aten, word)] == []


class Moving(nn.Module):
    """Reads and writes a tensor many times the size of its weights."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.stem, self.head = how, nn.Linear(8, 4096), nn.Linear(4096, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(8):
            x = x.cumsum(1) if self.how == "cumsum" else x.sort(1).values if self.how == "sort" else x.sin()
        out: Tensor = self.head(x).square().mean()
        return out


def predicted(how: str) -> Prediction:
    captured = model_from_module(Moving(how), lambda number: (torch.randn(number, 8),), precisions=("fp32",))
    model = ModelSpec(name=how, family="captured", captured=captured)
    training, plan = TrainingSpec(global_batch_size=16384, precision="fp32"), ParallelPlan(microbatch_size=16384)
    return predict(Job(model, catalog.cluster("dgx-h100", 1), training, plan, catalog.software("torch")))


def width(prediction: Prediction) -> float:
    low_s, high_s = prediction.step_time_interval_s
    return high_s / low_s


@pytest.mark.parametrize("how", ["cumsum", "sort"])
def test_time_that_is_not_known_widens_the_interval(how: str) -> None:
    plain, unknown = predicted("sin"), predicted(how)
    assert unknown.step_time_s > plain.step_time_s
    assert width(unknown) > 1.5 * width(plain)
