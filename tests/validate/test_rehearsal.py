"""A step from measured computing: what it must be when computing takes what was predicted, or a multiple."""

from __future__ import annotations

from collections import defaultdict

import pytest

from simplan.plan.plan import ParallelPlan
from simplan.predict import Simulated, predict_step, run_spec_of
from simplan.prediction import Prediction
from simplan.program.program import LayerWork, Stream
from simplan.runs.measurement import ActionTime, PeakMemory, Rehearsal
from simplan.validate.rehearsal import rehearsal_step
from tests.jobs import job_of, tiny_model

MODEL = tiny_model(
    "llama", num_hidden_layers=8, hidden_size=2048, num_attention_heads=16, num_key_value_heads=8,
    intermediate_size=5632, vocab_size=32000, seq_len=2048,
)  # fmt: skip
PLANS = {
    "one": ParallelPlan(),
    "ddp": ParallelPlan(dp_replicate=8),
    "fsdp": ParallelPlan(dp_shard=8),
    "tp": ParallelPlan(tp=4),
    "1f1b": ParallelPlan(pp=4, schedule="1f1b"),
    "1f1b x tp": ParallelPlan(pp=2, tp=2, schedule="1f1b"),
}


def predicted(plan: ParallelPlan) -> tuple[Prediction, Simulated]:
    return predict_step(job_of(MODEL, plan, num_microbatches=8), name="test")


def rehearsal_of(prediction: Prediction, simulated: Simulated, rank: int, factor: float) -> Rehearsal:
    """With times that are a multiple of what layers were priced at."""
    seconds: dict[str, float] = defaultdict(float)
    for op in simulated.program.ops:
        if op.rank == simulated.program.stands_for[rank] and op.stream is Stream.COMPUTE and op.meeting is None:
            parts = [part for part in op.work if isinstance(part, LayerWork)]
            seconds[str(op.action)] += factor * sum(
                simulated.program_costs.by_work[part].cost_estimate.seconds for part in parts
            )
    return Rehearsal(
        job=run_spec_of(prediction),
        rank=rank,
        fake=False,
        peak_memory=PeakMemory(allocated_bytes=1),
        peak_by_category={},
        peak_action="",
        actions=tuple(ActionTime(action=action, seconds=(value,) * 3) for action, value in seconds.items()),
    )


@pytest.mark.parametrize("name", PLANS)
def test_computing_as_predicted_gives_the_prediction(name: str) -> None:
    prediction, simulated = predicted(PLANS[name])
    for rank in {0, prediction.job.plan.num_devices - 1}:
        rehearsed = rehearsal_step(prediction, simulated, rehearsal_of(prediction, simulated, rank, 1.0))
        assert rehearsed.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-9)
        assert rehearsed.split.total_s == pytest.approx(prediction.step_time_s, rel=1e-9)


def test_one_device_takes_what_its_actions_take() -> None:
    prediction, simulated = predicted(PLANS["one"])
    measured = rehearsal_of(prediction, simulated, 0, 1.7)
    rehearsed = rehearsal_step(prediction, simulated, measured)
    assert rehearsed.step_time_s == pytest.approx(sum(time.median_s for time in measured.actions), rel=1e-9)
    assert rehearsed.measured_share == 1.0
    assert rehearsed.step_time_interval_s == pytest.approx((rehearsed.step_time_s, rehearsed.step_time_s), rel=1e-9)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])
def test_communication_stays_what_it_was(name: str) -> None:
    """With slow computing all that can overlap does; what is exposed of tensor parallelism is the same seconds."""
    prediction, simulated = predicted(PLANS[name])
    rehearsed = rehearsal_step(prediction, simulated, rehearsal_of(prediction, simulated, 0, 3.0))
    before = prediction.splits[0]
    lost_s = sum(term.seconds for term in prediction.terms if term.name == "overlap slowdown of compute")
    same_s = 3 * (before.compute_s - lost_s) + lost_s
    more_s = (
        prediction.job.cluster.device.kernels.overlap_slowdown * before.exposed_communication_s
    )  # now beside something
    assert same_s * (1 - 1e-6) <= rehearsed.split.compute_s <= (same_s + more_s) * (1 + 1e-6)
    if name == "tp":
        assert rehearsed.split.exposed_communication_s == pytest.approx(before.exposed_communication_s, rel=1e-6)
    else:
        assert rehearsed.split.exposed_communication_s <= before.exposed_communication_s * (1 + 1e-9)


def test_other_stages_are_scaled_alike() -> None:
    prediction, simulated = predicted(PLANS["1f1b"])
    rehearsed = rehearsal_step(prediction, simulated, rehearsal_of(prediction, simulated, 1, 2.0))
    assert rehearsed.step_time_s == pytest.approx(
        2 * prediction.step_time_s, rel=0.02
    )  # communications are not twice as long
    computed_s = [split.compute_s for split in prediction.splits]
    assert rehearsed.measured_share == pytest.approx(computed_s[1] / sum(computed_s), rel=0.02)
