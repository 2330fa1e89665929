"""Seconds without words are those of prices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.cost.analytic import AnalyticCost
from simplan.cost.kernel_cost import kernel_cost
from simplan.program.program import LayerWork, Message, Phase
from simplan.spec import catalogue
from simplan.spec.layer import CollectiveKind
from simplan.spec.plan import ParallelPlan
from simplan.spec.training import TrainingSpec

CLUSTER = catalogue.cluster("dgx-h100", num_devices=16)
SOFTWARE, TRAINING = catalogue.software("torch"), TrainingSpec(global_batch_size=16)
STATE = SOFTWARE.state(TRAINING, ParallelPlan())
KERNELS = kernel_cost(CLUSTER.device, "bf16", STATE, "adamw", SOFTWARE, num_devices=16, shards_parameters=False)
COST = AnalyticCost(CLUSTER, KERNELS)
LAYERS = catalogue.model("gpt2-124m").layers


@pytest.mark.parametrize("phase", list(Phase))
def test_seconds_of_work(phase: Phase) -> None:
    for layer in LAYERS[:2]:
        work = LayerWork(layer, phase, 4, layer.num_parameters)
        assert COST.compute_s(work) == COST.compute(work).seconds


@given(kind=st.sampled_from(CollectiveKind), num_bytes=st.integers(1, 10**10), num_ranks=st.sampled_from([1, 2, 8, 16]))
def test_seconds_of_messages(kind: CollectiveKind, num_bytes: int, num_ranks: int) -> None:
    if kind in (CollectiveKind.SEND, CollectiveKind.RING):
        num_ranks = 2
    message = Message(kind, num_bytes, tuple(range(num_ranks)))
    assert COST.message_s(message) == COST.message(message).seconds
