"""A device that has room for the tensors of a step, but not for all that the caching allocator would keep."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from simplan.explain.explanation import explain
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict, predict_step, sweep
from simplan.predict.memory import RankPeaks, device_memory
from simplan.predict.step_summary import evaluate_step, summarize_step
from simplan.prediction import Prediction
from simplan.report.predictions import compared_predictions, predictions_text
from simplan.report.text import prediction_text, verdict
from simplan.software.rates import MemorySpread
from simplan.units import GIB, MIB, format_bytes
from simplan.validate.logged import compare_logged
from simplan.validate.logged_run import LoggedRun
from tests.jobs import job_of

ASKED = job_of("gpt2-124m", {"pp": 2, "dp_replicate": 2}, software="megatron-core", global_batch_size=32)


def with_memory(memory_bytes: int | None) -> Job:
    device = ASKED.cluster.device.model_copy(update={"memory_bytes": memory_bytes})
    return replace(ASKED, cluster=ASKED.cluster.model_copy(update={"device": device}))


@pytest.fixture(scope="module")
def roomy() -> Prediction:
    return predict(with_memory(80 * GIB))


def least_bytes(prediction: Prediction) -> int:
    """What tensors and context take, in the allocator's blocks of 2 MiB."""
    context = prediction.worst_memory.device_bytes - prediction.worst_memory.reserved_bytes
    return context - (-max(m.allocated_bytes for m in prediction.memory) // (2 * MIB)) * 2 * MIB


def test_memory_that_a_plan_wants_is_shown_nowhere_cut_off(roomy: Prediction) -> None:
    wanted = roomy.worst_memory.device_bytes
    assert wanted - least_bytes(roomy) > 20 * MIB, "there is a reserve to do without"
    assert roomy.worst_memory.short_bytes == 0
    capacity = (least_bytes(roomy) + wanted) // 2
    tight, simulated = predict_step(with_memory(capacity))
    worst = tight.worst_memory
    assert tight.fits
    assert worst.rank == roomy.worst_rank
    assert (worst.device_bytes, worst.short_bytes) == (wanted, wanted - capacity)
    assert (worst.measurable_bytes("device"), worst.fits) == (capacity, True)
    assert worst.allocated_bytes == roomy.worst_memory.allocated_bytes
    assert tight.step_time_s == roomy.step_time_s
    tensors_fit = least_bytes(roomy) <= 0.97 * capacity
    assert verdict(tight).startswith("may not fit: " if tensors_fit else "likely does not fit: ")
    document = tight.to_json()
    assert {
        document["peak_memory_gib"]["device"],
        *(rank["peak_memory_gib"]["device"] for rank in document["ranks"]),
    } == {memory.device_bytes / GIB for memory in roomy.memory}
    assert document["fits"] is True
    assert sweep(with_memory(capacity), {"model.seq_len": [1024]})["device_gib"].tolist() == [wanted / GIB]
    assert f"{format_bytes(wanted)} of {format_bytes(capacity)}" in repr(tight)
    assert format_bytes(wanted) in prediction_text(tight)
    assert format_bytes(wanted) in predictions_text(compared_predictions([document]))
    assert repr(tight).count(str(tight.memory_verdict)) == 1
    assert any("finds" in text and "less than it would reserve" in text for text in tight.assumptions)
    assert sum(part.value for part in explain(tight, simulated).memory) == pytest.approx(worst.device_bytes)
    logged = LoggedRun(step_time_s=tight.step_time_s, peak_device_gib=(capacity / GIB,))
    memory_row = next(row for row in compare_logged(document, logged).rows if row.unit == "GiB")
    assert memory_row.predicted == capacity / GIB, "the device has no more"
    short = summarize_step(with_memory(capacity))
    assert (short.peak_bytes["device"], short.measurable_bytes["device"], short.fits) == (wanted, capacity, True)


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_tensors_and_context_decide(roomy: Prediction, missing_bytes: int) -> None:
    capacity = least_bytes(roomy) - missing_bytes
    prediction, short = predict(with_memory(capacity)), summarize_step(with_memory(capacity))
    assert prediction.fits == short.fits == (not missing_bytes)
    assert prediction.worst_memory.measurable_bytes("device") == short.measurable_bytes["device"] == least_bytes(roomy)
    assert prediction.worst_memory.device_bytes == short.peak_bytes["device"] == roomy.worst_memory.device_bytes
    assert verdict(prediction).startswith("likely does not fit: ")


def test_a_search_keeps_room_for_the_reserve(roomy: Prediction) -> None:
    num_bytes, _ = evaluate_step(with_memory(least_bytes(roomy)))
    assert num_bytes == roomy.worst_memory.device_bytes


def test_a_device_of_unknown_size_gives_all(roomy: Prediction) -> None:
    memory = predict(with_memory(None)).memory
    assert memory == tuple(replace(rank, capacity_bytes=None) for rank in roomy.memory)


def test_shortages_add_up() -> None:
    """By hand: 10 blocks allocated, 16 reserved, and the context of the driver."""
    block, software = 2 * MIB, ASKED.software.model_copy(update={"reserve_fraction": 1.0, "flat_updates": False})
    peaks = RankPeaks(resting=4 * block, rebuild=0, passes=6 * block - 1, update=0)
    wanted = device_memory(peaks, replace(with_memory(None), software=software))
    context = wanted.device_bytes - wanted.reserved_bytes
    assert (wanted.allocated_bytes, wanted.reserved_bytes) == (10 * block - 1, 16 * block)
    for blocks, short in ((22, 0), (16, 0), (14, 2), (10, 6), (9, 6)):
        memory = device_memory(peaks, replace(with_memory(context + blocks * block), software=software))
        assert memory.short_bytes == short * block
        assert memory.device_bytes == wanted.device_bytes
        assert memory.device_bytes - memory.reserved_bytes == context


@pytest.mark.parametrize(("kind", "allocator_std"), [("gpu", 0.2), ("cpu", 0.0)])
def test_interval_is_of_transient_tensors_and_of_the_allocator(kind: Any, allocator_std: float) -> None:
    """By hand: 4 GiB of states, 6 GiB of transient tensors, no reserve and no context."""
    fields = {"reserve_fraction": 0.0, "flat_updates": False, "context_bytes": {}}
    spread = MemorySpread(transient_std=0.1, allocator_std=0.2)
    software = ASKED.software.model_copy(update={**fields, "memory_spread": spread})
    job = replace(with_memory(None), software=software)
    device = job.cluster.device.model_copy(update={"kind": kind})
    job = replace(job, cluster=job.cluster.model_copy(update={"device": device}))
    memory = device_memory(RankPeaks(resting=4 * GIB, rebuild=0, passes=6 * GIB, update=0), job)
    for of, std in (("allocated", 0.06), ("reserved", math.hypot(0.06, allocator_std))):
        ends = (10 * GIB * math.exp(sign * 1.645 * std) for sign in (-1, 1))
        assert memory.interval_bytes[of] == pytest.approx(tuple(ends), rel=1e-9)  # type: ignore[index]
    only_states = RankPeaks(resting=10 * GIB, rebuild=0, passes=0, update=0)
    assert device_memory(only_states, job).interval_bytes["allocated"] == (10 * GIB, 10 * GIB), "sums of shapes"
    unsure = software.model_copy(update={"memory_spread": spread.model_copy(update={"finetuning_std": 0.05})})
    tuned = replace(job, software=unsure, training=job.training.model_copy(update={"task": "sft"}))
    for run, std in ((tuned, 0.05), (replace(job, software=unsure), 0.0)):
        high = device_memory(only_states, run).interval_bytes["allocated"][1]
        assert high == pytest.approx(10 * GIB * math.exp(1.645 * std), rel=1e-9)


def test_allocator_reserves_more_where_gathered_parameters_are_freed() -> None:
    fields = {"reserve_fraction": 0.25, "resharding_reserve_fraction": 0.5, "flat_updates": False}
    job = replace(with_memory(None), software=ASKED.software.model_copy(update=fields))
    peaks = RankPeaks(resting=0, rebuild=0, passes=8 * GIB, update=0)
    for plan, reserved in (
        (ParallelPlan(dp_shard=2, zero_stage=3), 12 * GIB),
        (ParallelPlan(dp_shard=2, zero_stage=3, reshard_after_forward=False), 10 * GIB),
        (ParallelPlan(dp_shard=2, zero_stage=2), 10 * GIB),
        (ParallelPlan(dp_replicate=2), 10 * GIB),
    ):
        assert device_memory(peaks, replace(job, plan=plan)).reserved_bytes == reserved


def test_verdict_is_certain_where_the_interval_is_on_one_side() -> None:
    software = ASKED.software.model_copy(update={"reserve_fraction": 0.0})
    worst = predict(replace(with_memory(80 * GIB), software=software)).worst_memory
    low, high = worst.device_interval_bytes
    assert low < worst.device_bytes < high
    enough = math.ceil(worst.unavoidable_bytes / 0.97)  # of which tensors and context leave 3 %
    assert worst.device_bytes < enough < high
    for capacity, words in (
        (high, "fits"),
        (high - 1, "may not fit"),
        (enough, "may not fit"),
        (enough - 1, "likely does not fit"),
        (worst.device_bytes - 1, "likely does not fit"),
        (low, "likely does not fit"),
        (low - 1, "does not fit"),
    ):
        prediction = predict(replace(with_memory(capacity), software=software))
        assert prediction.memory_verdict == words
        assert verdict(prediction).startswith(f"{words}: ")
        assert prediction.fits == (capacity >= worst.device_bytes)
        document = prediction.to_json(timeline=False)
        assert document["memory_verdict"] == words
        assert document["peak_memory_interval_gib"]["device"] == [low / GIB, high / GIB]
