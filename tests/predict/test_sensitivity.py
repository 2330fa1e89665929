"""Marginal values against predictions made anew and closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simplan import catalog
from simplan.errors import NotModelledError
from simplan.plan.plan import ParallelPlan
from simplan.predict import Resource, Simulated, marginal_values, predict, predict_step
from simplan.predict.sensitivity import improved
from simplan.prediction import Prediction
from simplan.program.program import Stream
from simplan.scenario import load_scenario
from simplan.sim.engine import CoreUse
from tests.jobs import job_of

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def predicted(name: str) -> tuple[Prediction, Simulated]:
    return load_scenario(SCENARIOS / f"{name}.yaml").predict_step()


def pinned(prediction: Prediction) -> ParallelPlan:
    """The plan with its stages as they are: other rates can balance layers otherwise."""
    if prediction.job.plan.num_stages == 1:
        return prediction.job.plan
    blocks = prediction.assignment.stage_layers(prediction.job.model.num_last_layers)
    return prediction.job.plan.model_copy(update={"stage_layers": blocks})


@pytest.mark.parametrize(
    "name",
    [
        "tensor-fsdp",
        "pipeline-ddp",
        pytest.param("hsdp", marks=pytest.mark.slow),
        pytest.param("three-dimensions", marks=pytest.mark.slow),
        pytest.param("recompute-selective", marks=pytest.mark.slow),
    ],
)
def test_a_marginal_value_is_what_a_prediction_on_better_hardware_says(name: str) -> None:
    prediction, simulated = predicted(name)
    values = {value.resource: value.relative_change for value in marginal_values(prediction, simulated)}
    for resource in Resource:
        cluster = improved(prediction.job.cluster, resource)
        assert (resource in values) == (cluster is not None)
        if cluster is not None:
            again = predict(replace(prediction.job, cluster=cluster, plan=pinned(prediction)), name=name)
            assert again.assignment == prediction.assignment
            assert again.step_time_s / prediction.step_time_s - 1 == pytest.approx(values[resource], abs=1e-12)
    assert list(values.values()) == sorted(values.values())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_faster_compute_never_lengthens_an_interleaved_step(recompute: str) -> None:
    plan = {"pp": 8, "virtual_stages": 2, "recompute": recompute}
    job = job_of("llama2-13b", plan, num_microbatches=16)
    clusters = [improved(job.cluster, Resource.COMPUTE, factor) for factor in (1.0, 1.05, 1.1, 1.3, 2.0)]
    steps_s = [predict(replace(job, cluster=cluster)).step_time_s for cluster in clusters if cluster is not None]
    assert steps_s == sorted(steps_s, reverse=True)


def test_all_rates_together_scale_the_step() -> None:
    """One device, no time beyond the work of kernels: compute and memory share the whole of one percent."""
    cluster = catalog.cluster("dgx-h100", num_devices=1)
    kernels = cluster.device.kernels.model_copy(update={"kernel_overhead_s": 0.0, "tile_overhead_s": 0.0})
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"kernels": kernels})})
    prediction, simulated = predict_step(job_of("gpt2-1.5b", {"microbatch_size": 8}, cluster=cluster))
    values = {value.resource: value.relative_change for value in marginal_values(prediction, simulated)}
    assert set(values) == {Resource.COMPUTE, Resource.MEMORY_BANDWIDTH, Resource.INTRA_LINK}
    assert values[Resource.INTRA_LINK] == 0.0
    assert values[Resource.COMPUTE] + values[Resource.MEMORY_BANDWIDTH] == pytest.approx(1 / 1.01 - 1, rel=1e-3)


def test_a_link_is_worth_its_time_on_the_path() -> None:
    """Exchanges of tensor-parallel ranks, which nothing hides: bandwidth times 1.01, latency as it was."""
    prediction, simulated = predict_step(job_of("llama3-8b", {"tp": 8}))
    values = {value.resource: value.relative_change for value in marginal_values(prediction, simulated)}
    link = prediction.job.cluster.intra_link
    assert link is not None
    moved_s = 0.0
    for op in simulated.program.ops:
        if op.stream is Stream.TENSOR and op.communication is not None:
            # large ones go round a ring with protocol Simple, small reductions twice with LL, at 0.39 of the rate
            laps, share = (2, 0.39) if op.communication.kind == "all_reduce" else (1, 1.0)
            moved_s += laps * 7 / 8 * op.communication.num_bytes / (450e9 * link.bandwidth_share * share)
    moved_s *= prediction.job.software.rates.intra_slowdown
    assert values[Resource.INTRA_LINK] * prediction.step_time_s == pytest.approx(moved_s * (1 / 1.01 - 1))


def test_ranks_that_share_cores_have_none() -> None:
    prediction, simulated = predict_step(job_of("gpt2-1.5b", {"dp_replicate": 2}))
    cores = CoreUse(2, [0] * len(simulated.program.ops), [1.0] * len(simulated.program.ops))
    with pytest.raises(NotModelledError, match="ranks share 2 cores"):
        marginal_values(prediction, replace(simulated, sharing=cores))
