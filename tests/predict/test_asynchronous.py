"""Predictions of asynchronous parameter servers: against closed forms, links, memory, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, Straggler
from simplan.errors import SpecError
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.prediction import Prediction, ReplicationWorkers
from simplan.scenario import Scenario, parse_scenario
from tests.jobs import job_of, problems, tiny_model
from tests.support.problems import says

MODEL = tiny_model(hidden_size=256, vocab_size=8192)
PARAMETER_BYTES = 4 * MODEL.num_parameters


def predicted(
    num_workers: int, cluster: ClusterSpec | str = "dgx-h100", **keys: Any
) -> tuple[Prediction, ReplicationWorkers]:
    optimizer = keys.pop("optimizer", "sgd")
    replication = {"kind": "parameter_server", "staleness": "unbounded", **keys}
    plan = {"dp_replicate": num_workers, "replication": replication}
    job = job_of(MODEL, plan, cluster=cluster, num_microbatches=1, precision="fp32", optimizer=optimizer)
    prediction = predict(job)
    assert isinstance(prediction.replication, ReplicationWorkers)
    return prediction, prediction.replication


def nodes_of_one(num_nodes: int, gbit: float) -> ClusterSpec:
    """Nodes of one device, whose network is slow."""
    cluster = {"device": "a100-sxm-40gb", "num_devices": num_nodes, "devices_per_node": 1, "nic_gbit": gbit}
    training = {"global_batch_size": num_nodes, "precision": "fp32"}
    return asked(
        {"name": "a", "model": {"preset": "gpt2-124m"}, "cluster": cluster, "training": training,
         "plan": {"dp_replicate": num_nodes}}
    ).job.cluster  # fmt: skip


def asked(scenario: dict[str, Any]) -> Scenario:
    return parse_scenario(json.dumps(scenario))


def server_update_s(prediction: Prediction) -> float:
    return sum(term.count * term.seconds for term in prediction.terms if "optimizer" in term.name)


@pytest.mark.parametrize("num_workers", [2, 4, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_step_time_is_that_of_the_closed_form(num_workers: int, optimizer: str) -> None:
    """On one node, where no links are shared: 1 / (compute + transfers + update) of each worker, or 1 / update."""
    prediction, workers = predicted(num_workers, optimizer=optimizer)
    ends_s = [max(span.end_s for span in prediction.timeline.spans if span.rank == rank) for rank in range(num_workers)]
    rate = min(sum(1 / end_s for end_s in ends_s), 1 / server_update_s(prediction))
    # workers are not alike, as the first one is beside the server, and at times they meet in its queue
    assert 0.999 * num_workers / rate <= prediction.step_time_s <= 1.06 * num_workers / rate
    assert workers.updates_per_s == pytest.approx(num_workers / prediction.step_time_s)
    assert workers.staleness_mean == pytest.approx(num_workers - 1, abs=0.1)
    assert workers.pushed_bytes == workers.pulled_bytes == PARAMETER_BYTES + 16
    low_s, high_s = prediction.step_time_interval_s
    assert low_s < prediction.step_time_s < high_s


SLOW = {"server_nodes": "apart", "servers": 1}


def test_network_of_the_server_limits_updates() -> None:
    """Gradients of all workers come over its card, and parameters go over the other direction of it.

    It is not full all the time: transfers that share it end together, and so do updates and pulls behind them.
    """
    prediction, workers = predicted(8, nodes_of_one(8, gbit=1.0), **SLOW)
    (push_s,) = {term.seconds for term in prediction.terms if term.name == "send"}
    assert push_s > PARAMETER_BYTES / (1e9 / 8)
    assert 8 * push_s <= prediction.step_time_s < 1.2 * 8 * push_s
    assert workers.busiest_link_share is not None
    assert 0.75 < workers.busiest_link_share <= 1


def test_more_servers_share_the_load() -> None:
    cluster = nodes_of_one(8, gbit=1.0)
    times = [predicted(8, cluster, **{**SLOW, "servers": servers})[0].step_time_s for servers in (1, 2, 4)]
    assert times[0] > 1.4 * times[1]
    assert times[1] > 1.4 * times[2]


def test_placement_of_whole_parameters_is_uneven() -> None:
    cluster = nodes_of_one(4, gbit=1.0)
    keys = {**SLOW, "servers": 2}
    whole, parts = (predicted(4, cluster, **keys, parameter_placement=how) for how in ("whole", "parts"))
    assert whole[0].step_time_s > parts[0].step_time_s
    assert whole[1].server_bytes > parts[1].server_bytes


def test_a_worker_beside_its_server_gives_most_updates_over_a_slow_network() -> None:
    """Nobody waits for the others, so its steps count for the rest; a bound holds it to them."""
    cluster = nodes_of_one(8, gbit=1.0)
    free, bounded = (predicted(8, cluster, staleness=bound) for bound in ("unbounded", 4))
    assert free[1].most_share > 0.5
    for _, workers in (free, bounded):
        assert workers.busiest_link_share is not None
        assert 0.3 < workers.busiest_link_share <= 1
    assert bounded[1].most_share == pytest.approx(1 / 8, rel=0.1)
    assert bounded[0].step_time_s > 5 * free[0].step_time_s
    assert "of the updates" in free[1].words


def test_a_straggler_slows_synchronous_workers_more_than_unbounded_ones() -> None:
    cluster = catalog.cluster("dgx-h100", 4)
    slow = cluster.model_copy(update={"stragglers": (Straggler(rank=1, slowdown=3.0),)})
    free, bounded = (predicted(4, slow, staleness=bound) for bound in ("unbounded", 2))
    alone, _ = predicted(4, cluster)
    assert alone.step_time_s < free[0].step_time_s < bounded[0].step_time_s
    assert bounded[1].held_s > 0
    assert bounded[1].most_ahead <= 2
    assert free[1].held_s == 0


def test_jitter_spreads_staleness() -> None:
    cluster = catalog.cluster("dgx-h100", 4)
    jitter = asked(
        {"name": "a", "model": {"preset": "gpt2-124m"}, "training": {"global_batch_size": 4},
         "cluster": {"preset": "dgx-h100", "num_devices": 4, "jitter": {"compute_relative_std": 0.3}},
         "plan": {"dp_replicate": 4}}
    ).job.cluster.jitter  # fmt: skip
    shares = [
        predicted(4, nodes)[1].staleness_shares for nodes in (cluster, cluster.model_copy(update={"jitter": jitter}))
    ]
    assert len(shares[1]) > len(shares[0])
    assert sum(shares[1].values()) == pytest.approx(1)


def test_links_of_a_topology_are_shared() -> None:
    """A leaf-spine network without oversubscription is as fast as two tiers; with it, spine links limit."""
    times = []
    for topology in (None, 1, 16):
        cluster: dict[str, Any] = {"device": "a100-sxm-40gb", "num_devices": 4, "devices_per_node": 1, "nic_gbit": 10}
        if topology is not None:
            cluster["topology"] = {"kind": "leaf_spine", "nodes_per_leaf": 1, "oversubscription": topology}
        replication = {"kind": "parameter_server", "staleness": 2, "servers": 2}
        job = asked(
            {"name": "a", "model": {"preset": "gpt2-124m"}, "cluster": cluster,
             "training": {"global_batch_size": 4, "precision": "bf16", "optimizer": "sgd"},
             "plan": {"dp_replicate": 4, "replication": replication}}
        ).job  # fmt: skip
        times.append(predict(job).step_time_s)
    assert times[1] == pytest.approx(times[0], rel=0.1)
    assert times[2] > 1.5 * times[1]


def test_workers_have_no_optimizer_states_and_servers_do() -> None:
    """The server's host has parameters, states, and gradients of every worker; the worker's has a copy to send."""
    prediction, workers = predicted(4, optimizer="adamw")
    worker = prediction.memory[1]
    assert worker.by_category.get("optimizer", 0) == 0  # type: ignore[call-overload]
    assert worker.host_bytes == PARAMETER_BYTES
    assert workers.server_bytes == (1 + 2 + 4) * PARAMETER_BYTES
    assert prediction.memory[0].host_bytes == worker.host_bytes + workers.server_bytes


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"servers": 2}, {}, "plan.replication.servers = 2: is more than the 1 node that could serve; use 1 or less"),
    ({"server_nodes": "apart"}, {}, "plan.replication.server_nodes = apart: needs the link between nodes"),
    ({}, {"tp": 2}, "asynchronous parameter servers with tp = 2 inside a worker is not modeled yet"),
    ({}, {"dp_shard": 2}, "asynchronous parameter servers with dp_shard = 2 inside a worker is not modeled yet"),
    ({}, {"pp": 2}, "asynchronous parameter servers with pp = 2 inside a worker is not modeled yet"),
    ({}, {"compression": "int8"}, "plan.replication = parameter_server: leaves no gradients to reduce in every step"),
]


@pytest.mark.parametrize(("keys", "plan", "said"), REFUSED)
def test_plans_are_refused_by_name(keys: dict[str, Any], plan: dict[str, Any], said: str) -> None:
    replication = {"kind": "parameter_server", "staleness": "unbounded", **keys}
    refused = problems(MODEL, {"dp_replicate": 2, "replication": replication, **plan}, precision="fp32")
    assert any(said in sentence for sentence in refused), refused


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_hogwild_is_for_one_node_of_cpus(num_nodes: int) -> None:
    plan = {"dp_replicate": 8 * num_nodes, "replication": "hogwild"}
    said = problems(MODEL, plan, precision="fp32", num_microbatches=1)[0]
    assert says(said, "memory of a host", "h100-sxm-80gb")
    assert "use kind: parameter_server with staleness: unbounded" in said


@pytest.mark.parametrize("staleness", [-1, "many", 1.5])
def test_wrong_staleness_is_refused(staleness: Any) -> None:
    with pytest.raises((SpecError, ValueError), match="staleness"):
        ParallelPlan.model_validate(
            {"dp_replicate": 2, "replication": {"kind": "parameter_server", "staleness": staleness}}
        )


def test_momentum_with_unbounded_staleness_is_said() -> None:
    momentum, bounded = (predicted(2, optimizer="sgd_momentum", staleness=bound)[0] for bound in ("unbounded", 4))
    assert any("momentum of 0.9 did in a trial" in sentence for sentence in momentum.assumptions)
    assert not any("momentum of 0.9 did in a trial" in sentence for sentence in bounded.assumptions)
