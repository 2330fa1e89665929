"""A device that has room for the tensors of a step, but not for all that the caching allocator would keep."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec
from simplan.explain.explanation import explain
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict import Simulated, predict_step
from simplan.predict.memory import RankPeaks, device_memory
from simplan.predict.step_summary import StepSummary, evaluate_step, summarize_step
from simplan.prediction import Prediction
from simplan.report.text import verdict
from simplan.training.training import TrainingSpec
from simplan.units import GIB, MIB

SOFTWARE = catalog.software("megatron-core")
MODEL = catalog.model("gpt2-124m")
PLAN = ParallelPlan(pp=2, dp_replicate=2)
TRAINING = TrainingSpec(global_batch_size=32, precision="bf16")


def with_memory(memory_bytes: int | None) -> ClusterSpec:
    cluster = catalog.cluster("dgx-h100", num_devices=4)
    device = cluster.device.model_copy(update={"memory_bytes": memory_bytes})
    return cluster.model_copy(update={"device": device})


def on_device(memory_bytes: int | None) -> Prediction:
    return step_on_device(memory_bytes)[0]


def step_on_device(memory_bytes: int | None) -> tuple[Prediction, Simulated]:
    return predict_step(Job(MODEL, with_memory(memory_bytes), TRAINING, PLAN, SOFTWARE), name="small")


def brief(memory_bytes: int | None) -> StepSummary:
    return summarize_step(Job(MODEL, with_memory(memory_bytes), TRAINING, PLAN, SOFTWARE))


@pytest.fixture(scope="module")
def roomy() -> Prediction:
    return on_device(80 * GIB)


def least_bytes(prediction: Prediction) -> int:
    """What tensors and context take, in the allocator's blocks of 2 MiB."""
    context = prediction.worst_memory.device_bytes - prediction.worst_memory.reserved_bytes
    return context - (-max(m.allocated_bytes for m in prediction.memory) // (2 * MIB)) * 2 * MIB


def test_the_reserve_ends_where_the_device_does(roomy: Prediction) -> None:
    wanted = roomy.worst_memory.device_bytes
    assert wanted - least_bytes(roomy) > 20 * MIB, "there is a reserve to do without"
    assert roomy.worst_memory.short_bytes == 0
    capacity = (least_bytes(roomy) + wanted) // 2
    tight, simulated = step_on_device(capacity)
    worst = tight.worst_memory
    assert tight.fits
    assert worst.rank == roomy.worst_rank
    assert (worst.device_bytes, worst.short_bytes) == (capacity, wanted - capacity)
    assert worst.allocated_bytes == roomy.worst_memory.allocated_bytes
    assert tight.step_time_s == roomy.step_time_s
    assert verdict(tight).startswith("fits tightly: ")
    assert any("finds" in text and "less than it would reserve" in text for text in tight.assumptions)
    assert sum(part.value for part in explain(tight, simulated).memory) == pytest.approx(worst.device_bytes)
    short = brief(capacity)
    assert (short.device_bytes, short.fits) == (capacity, True)


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_tensors_and_context_decide(roomy: Prediction, missing_bytes: int) -> None:
    capacity = least_bytes(roomy) - missing_bytes
    found, short = on_device(capacity), brief(capacity)
    assert found.fits == short.fits == (not missing_bytes)
    assert found.worst_memory.device_bytes == short.device_bytes == least_bytes(roomy)
    assert verdict(found).startswith("does not fit: " if missing_bytes else "fits tightly: ")


def test_a_search_keeps_room_for_the_reserve(roomy: Prediction) -> None:
    num_bytes, _ = evaluate_step(Job(MODEL, with_memory(least_bytes(roomy)), TRAINING, PLAN, SOFTWARE))
    assert num_bytes == roomy.worst_memory.device_bytes


def test_a_device_of_unknown_size_gives_all(roomy: Prediction) -> None:
    assert on_device(None).memory == roomy.memory


def test_what_is_short_adds_up() -> None:
    """By hand: 10 blocks allocated, 16 reserved, and the context of the driver."""
    block, software = 2 * MIB, SOFTWARE.model_copy(update={"reserve_fraction": 1.0, "flat_updates": False})
    peaks = RankPeaks(resting=4 * block, rebuild=0, passes=6 * block - 1, update=0)
    wanted = device_memory(peaks, Job(MODEL, with_memory(None), TRAINING, PLAN, software))
    context = wanted.device_bytes - wanted.reserved_bytes
    assert (wanted.allocated_bytes, wanted.reserved_bytes) == (10 * block - 1, 16 * block)
    for blocks, short in ((22, 0), (16, 0), (14, 2), (10, 6), (9, 6)):
        small = with_memory(context + blocks * block)
        found = device_memory(peaks, Job(MODEL, small, TRAINING, PLAN, software))
        assert found.short_bytes == short * block
        assert found.wanted_bytes == wanted.wanted_bytes
        assert found.device_bytes - found.reserved_bytes == context
