"""Rounds of replicas that train alone, against closed forms and against one replica by itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from simplan.job import Job
from simplan.predict import predict, predict_step
from simplan.prediction import Prediction, ReplicationRound
from simplan.program.program import MemoryCategory, Stream
from tests.search.jobs import small_job

LARGE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "seq_len": 512,
}
DILOCO = {"kind": "diloco", "inner_steps": 10}
STREAMING = {"kind": "streaming_diloco", "inner_steps": 12, "fragments": 3, "overlap_steps": 2}
REPLICAS: list[dict[str, Any]] = [
    {},
    {"dp_shard": 2, "zero_stage": 0},
    {"dp_shard": 4, "zero_stage": 1},
    {"dp_shard": 4, "zero_stage": 3},
    {"tp": 2},
    {"pp": 2, "schedule": "1f1b"},
    {"dp_shard": 2, "zero_stage": 2, "pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
]
"""Plans of one replica."""


def job_with(
    replica: dict[str, Any], replication: dict[str, Any] | None, *, replicas: int = 2, bytes_per_s: float = 50e9
) -> Job:
    """A job whose replicas are on nodes of their own."""
    plan = {"dp_replicate": replicas, "microbatch_size": 1, **replica}
    ranks = 1
    for axis in ("dp_shard", "tp", "pp"):
        ranks *= plan.get(axis, 1)
    job = small_job("llama", 16, batch=16 * replicas, **LARGE)
    assert job.cluster.inter_link is not None
    link = job.cluster.inter_link.model_copy(update={"bytes_per_s": bytes_per_s})
    job = job.with_changes({"cluster.devices_per_node": ranks, "cluster.inter_link": link})
    job = job.with_num_devices(ranks * replicas)
    return job.with_plan(job.plan.model_copy(update={**plan, "replication": replication}))


def round_of(prediction: Prediction) -> ReplicationRound:
    """The round of a prediction that has one."""
    assert isinstance(prediction.replication, ReplicationRound)
    return prediction.replication


@pytest.mark.parametrize("replica", REPLICAS, ids=str)
def test_inner_steps_are_those_of_one_replica_by_itself(replica: dict[str, Any]) -> None:
    """But for the slowest of more devices, for which steps wait, and which is 2 to 3 % slower."""
    of_round = round_of(predict(job_with(replica, DILOCO)))
    if replica.get("zero_stage") == 0:  # DDP, whose ranks are replicas elsewhere
        alone = job_with({}, None, replicas=2)
        alone = alone.with_changes({"training.global_batch_size": 16, "cluster.devices_per_node": 2})
    else:
        alone = job_with(replica, None, replicas=1)
    assert 1 <= of_round.inner_step_s / predict(alone).step_time_s < 1.05


@pytest.mark.parametrize("replica", REPLICAS, ids=str)
@pytest.mark.parametrize("replication", [{"kind": "local_sgd", "inner_steps": 4}, DILOCO, STREAMING], ids=str)
def test_step_time_is_the_mean_of_a_round(replica: dict[str, Any], replication: dict[str, Any]) -> None:
    prediction = predict(job_with(replica, replication))
    of_round = round_of(prediction)
    num_inner = of_round.inner_steps - of_round.outer_steps * max(1, of_round.steps_beside)
    round_s = num_inner * of_round.inner_step_s + of_round.outer_steps * of_round.outer_s
    assert prediction.step_time_s == pytest.approx(round_s / of_round.inner_steps, rel=1e-9)
    for split in prediction.splits:
        assert sum(asdict(split).values()) == pytest.approx(prediction.step_time_s, rel=1e-6)
    assert prediction.step_time_interval_s[0] < prediction.step_time_s < prediction.step_time_interval_s[1]


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize(("dtype", "num_bits"), [("fp32", 32), ("fp16", 16), ("int8", 8), ("int4", 4)])
def test_a_rank_sends_what_a_ring_sends_of_its_parameters(replicas: int, dtype: str, num_bits: int) -> None:
    job = job_with({"dp_shard": 2, "zero_stage": 3}, {**DILOCO, "outer": {"dtype": dtype}}, replicas=replicas)
    num_parameters = job.padded_model.num_parameters // 2
    scales = 32 / 1024 if num_bits < 16 else 0  # bits
    sent = 2 * (replicas - 1) / replicas * num_parameters * (num_bits + scales) / 8
    assert round_of(predict(job)).sent_bytes == pytest.approx(sent, rel=2e-2)


def test_outer_states_are_two_copies_of_the_parameters() -> None:
    def states(replication: dict[str, Any]) -> tuple[int, int]:
        rank = predict(job_with({}, replication)).memory[0]
        return rank.by_category[MemoryCategory.OPTIMIZER], rank.host_bytes

    num_parameters = job_with({}, None).padded_model.num_parameters
    local, _ = states({"kind": "local_sgd"})
    assert states(DILOCO)[0] - local == 2 * 4 * num_parameters
    assert states({**DILOCO, "outer": {"optimizer": "average"}})[0] - local == 4 * num_parameters
    on_device, on_host = states({**DILOCO, "outer": {"on_host": True}})
    assert on_device == local
    assert on_host >= 2 * 4 * num_parameters


def test_communication_disappears_at_the_bandwidth_that_is_told() -> None:
    """Above it, only the slowdown of what overlaps is left; below it, all that does not fit beside the steps."""
    hidden = round_of(predict(job_with({}, STREAMING, bytes_per_s=1e12)))
    rate = hidden.hiding_bytes_per_s
    above, below = (round_of(predict(job_with({}, STREAMING, bytes_per_s=part * rate))) for part in (1.5, 0.2))
    assert 0 <= above.exposed_s - hidden.exposed_s < 0.3 * above.sent_bytes / (1.5 * rate)
    beside_s = below.outer_steps * below.steps_beside * below.inner_step_s
    left_s = below.sent_bytes / (0.2 * rate) - beside_s
    assert left_s < below.exposed_s < 1.15 * left_s


def test_replicas_that_train_alone_send_nothing_in_inner_steps() -> None:
    job = job_with({"dp_shard": 2, "zero_stage": 3}, DILOCO)
    _, simulated = predict_step(job)
    program = simulated.program
    on_replicas = program.on_stream(Stream.REPLICATE)
    assert on_replicas.sum() == len(program.ranks)  # one all-reduce of each rank
    groups = {tuple(communication.ranks) for op in program.ops for communication in op.communications}
    assert {group for group in groups if len({rank // 2 for rank in group}) > 1} <= {(0, 2), (1, 3)}


@pytest.mark.parametrize("replication", [DILOCO, STREAMING], ids=str)
def test_rounds_on_links_of_a_topology(replication: dict[str, Any]) -> None:
    """Alone on its links, a round takes as long as without a topology."""
    job = job_with({"dp_shard": 8, "zero_stage": 3}, replication)
    plain = predict(job).step_time_s
    prediction = predict(job.with_changes({"cluster.topology": {"kind": "fat_tree", "radix": 4}}))
    assert prediction.network is not None
    assert prediction.step_time_s == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("kind", ["diloco", "local_sgd"])
def test_steps_of_replicas_left_are_those_of_as_many(kind: str) -> None:
    """Each is predicted like a job that has no more replicas, with as many samples for each of them."""
    replication = {"kind": kind, "inner_steps": 10}
    whole = predict(job_with({"dp_shard": 2}, {**replication, "min_replicas": 1}, replicas=4))
    left = round_of(whole).left
    assert [fewer.num_replicas for fewer in left] == [3, 2, 1]
    for fewer in left[:-1]:
        alone = predict(job_with({"dp_shard": 2}, replication, replicas=fewer.num_replicas))
        assert fewer.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
        assert fewer.sequences_per_s == pytest.approx(16 * fewer.num_replicas / fewer.step_time_s, rel=1e-12)
    assert left[-1].step_time_s < left[-2].step_time_s, "the last one has nobody to communicate with"
    without = predict(job_with({"dp_shard": 2}, replication, replicas=4))
    assert whole.step_time_s == without.step_time_s
    assert round_of(without).left == ()


def test_of_many_replicas_the_fewest_left_are_predicted_too() -> None:
    left = round_of(predict(job_with({}, {**DILOCO, "min_replicas": 2}, replicas=12))).left
    assert [fewer.num_replicas for fewer in left] == [11, 10, 9, 2]
