"""A device that has room for the tensors of a step, but not for all that the caching allocator would keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplan.explain.explanation import explain
from simplan.job import Job
from simplan.predict import predict, predict_step
from simplan.predict.memory import RankPeaks, device_memory
from simplan.predict.step_summary import evaluate_step, summarize_step
from simplan.prediction import Prediction
from simplan.report.text import verdict
from simplan.units import GIB, MIB
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


def test_the_reserve_ends_where_the_device_does(roomy: Prediction) -> None:
    wanted = roomy.worst_memory.device_bytes
    assert wanted - least_bytes(roomy) > 20 * MIB, "there is a reserve to do without"
    assert roomy.worst_memory.short_bytes == 0
    capacity = (least_bytes(roomy) + wanted) // 2
    tight, simulated = predict_step(with_memory(capacity))
    worst = tight.worst_memory
    assert tight.fits
    assert worst.rank == roomy.worst_rank
    assert (worst.device_bytes, worst.short_bytes) == (capacity, wanted - capacity)
    assert worst.allocated_bytes == roomy.worst_memory.allocated_bytes
    assert tight.step_time_s == roomy.step_time_s
    assert verdict(tight).startswith("fits, tight: ")
    assert any("finds" in text and "less than it would reserve" in text for text in tight.assumptions)
    assert sum(part.value for part in explain(tight, simulated).memory) == pytest.approx(worst.device_bytes)
    short = summarize_step(with_memory(capacity))
    assert (short.peak_bytes["device"], short.fits) == (capacity, True)


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_tensors_and_context_decide(roomy: Prediction, missing_bytes: int) -> None:
    capacity = least_bytes(roomy) - missing_bytes
    prediction, short = predict(with_memory(capacity)), summarize_step(with_memory(capacity))
    assert prediction.fits == short.fits == (not missing_bytes)
    assert prediction.worst_memory.device_bytes == short.peak_bytes["device"] == least_bytes(roomy)
    assert verdict(prediction).startswith("likely does not fit: " if missing_bytes else "fits, tight: ")


def test_a_search_keeps_room_for_the_reserve(roomy: Prediction) -> None:
    num_bytes, _ = evaluate_step(with_memory(least_bytes(roomy)))
    assert num_bytes == roomy.worst_memory.device_bytes


def test_a_device_of_unknown_size_gives_all(roomy: Prediction) -> None:
    assert predict(with_memory(None)).memory == roomy.memory


def test_what_is_short_adds_up() -> None:
    """By hand: 10 blocks allocated, 16 reserved, and the context of the driver."""
    block, software = 2 * MIB, ASKED.software.model_copy(update={"reserve_fraction": 1.0, "flat_updates": False})
    peaks = RankPeaks(resting=4 * block, rebuild=0, passes=6 * block - 1, update=0)
    wanted = device_memory(peaks, replace(with_memory(None), software=software))
    context = wanted.device_bytes - wanted.reserved_bytes
    assert (wanted.allocated_bytes, wanted.reserved_bytes) == (10 * block - 1, 16 * block)
    for blocks, short in ((22, 0), (16, 0), (14, 2), (10, 6), (9, 6)):
        memory = device_memory(peaks, replace(with_memory(context + blocks * block), software=software))
        assert memory.short_bytes == short * block
        assert memory.wanted_bytes == wanted.wanted_bytes
        assert memory.device_bytes - memory.reserved_bytes == context
