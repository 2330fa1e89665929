"""Seconds without words are those of prices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan import catalog
from simplan.cost.analytic import AnalyticCost
from simplan.cost.compute.kernel_cost import kernel_cost
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.program.program import Communication, LayerWork, Phase
from simplan.software.rates import FrameworkRates
from simplan.training.training import TrainingSpec

CLUSTER = catalog.cluster("dgx-h100", num_devices=16)
SOFTWARE, TRAINING = catalog.software("torch"), TrainingSpec(global_batch_size=16)
STATE = SOFTWARE.state(TRAINING, ParallelPlan())
KERNELS = kernel_cost(CLUSTER.device, "bf16", STATE, "adamw", SOFTWARE, num_devices=16, shards_parameters=False)
COST = AnalyticCost(CLUSTER, KERNELS)
LAYERS = catalog.model("gpt2-124m").layers


@pytest.mark.parametrize("phase", list(Phase))
def test_seconds_of_work(phase: Phase) -> None:
    for layer in LAYERS[:2]:
        work = LayerWork(layer, phase, 4, layer.num_parameters)
        assert COST.compute_s(work) == COST.compute(work).seconds


@given(kind=st.sampled_from(CollectiveKind), num_bytes=st.integers(1, 10**10), num_ranks=st.sampled_from([1, 2, 8, 16]))
def test_seconds_of_communications(kind: CollectiveKind, num_bytes: int, num_ranks: int) -> None:
    if kind in (CollectiveKind.SEND, CollectiveKind.RING):
        num_ranks = 2
    communication = Communication(kind, num_bytes, tuple(range(num_ranks)))
    assert COST.communication_s(communication) == COST.communication(communication).seconds


@pytest.mark.parametrize(("num_ranks", "times"), [(8, 1.5), (16, 3.0)])
def test_communications_in_training_take_so_many_times_as_long_as_alone(num_ranks: int, times: float) -> None:
    """Inside a node of eight and between two."""
    trained = AnalyticCost(CLUSTER, KERNELS, FrameworkRates(intra_slowdown=1.5, inter_slowdown=3.0))
    communication = Communication(CollectiveKind.ALL_REDUCE, 10**8, tuple(range(num_ranks)))
    alone, cost_estimate = COST.communication(communication), trained.communication(communication)
    assert cost_estimate.seconds == trained.communication_s(communication) == pytest.approx(times * alone.seconds)
    assert cost_estimate.formula == f"{times:.2f} x ({alone.formula})"
    assert cost_estimate.relative_std == alone.relative_std


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm"])
def test_a_device_of_an_unknown_architecture_is_unsure_enough_to_be_a_known_one(name: str) -> None:
    """With the same datasheet and nothing known of its kernels the interval holds what is predicted with that."""
    known = catalog.cluster({"h": "dgx-h100", "a": "dgx-a100-80gb", "b": "dgx-b200"}[name[0]])
    kernels = catalog.kernel_rates("other")
    unknown = known.device.model_copy(update={"architecture": "other", "kernels": kernels, "matmul_flop_per_s": {}})
    asked = (TrainingSpec(global_batch_size=16), ParallelPlan(dp_shard=8), catalog.software("torchtitan"))
    model = catalog.model("llama3-8b")
    low_s, high_s = predict(
        Job(model, known.model_copy(update={"device": unknown}), *asked), name=""
    ).step_time_interval_s
    assert known.device.id == name
    assert low_s < predict(Job(model, known, *asked), name="").step_time_s < high_s
