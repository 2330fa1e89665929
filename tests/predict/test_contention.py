"""Contention in predictions: closed forms, folding, and traffic of other jobs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simplan import catalog
from simplan.cluster.hardware import BackgroundFlow
from simplan.cluster.topology import Dragonfly, FatTree, LeafSpine, Rail, Sites, Switch, Topology
from simplan.errors import SpecError
from simplan.job import Job
from simplan.plan.plan import RankMapping
from simplan.predict import Simulated, folding_of, predict, predict_step
from simplan.predict.build import expands_all
from simplan.predict.truncated import TruncatedStep, predicted_extent
from simplan.program.folding import unfolded
from simplan.program.program import Stream
from simplan.report.trace import predicted_trace
from simplan.search import search
from simplan.search.space import SearchSpace
from tests.jobs import job_of

ROOT = Path(__file__).parents[2]
LEAF_SPINE = LeafSpine(kind="leaf_spine", nodes_per_leaf=2, oversubscription=8)
RAIL = Rail(kind="rail", nodes_per_group=2, oversubscription=8)
SITES = Sites(kind="sites", nodes_per_site=2, gbit_per_site=50, latency_s=0.001)
PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "fsdp": ("gpt2-1.5b", {"dp_shard": 32}, 2),
    "hsdp": ("gpt2-1.5b", {"dp_replicate": 2, "dp_shard": 16}, 2),
    "pipeline": ("llama3-8b", {"dp_replicate": 4, "tp": 4, "pp": 2}, 4),
    "context": ("llama3-8b", {"dp_shard": 2, "cp": 4, "tp": 4}, 1),
    "placed": ("llama3-8b", {"dp_replicate": 8, "tp": 2, "pp": 2, "placement": ("dp", "tp", "pp")}, 4),
    "experts": ("mixtral-8x7b", {"dp_replicate": 8, "ep": 8, "pp": 4}, 4),
    "sharded experts": ("mixtral-8x7b", {"dp_shard": 16, "ep": 8, "tp": 2}, 1),
}


def job_on(topology: Topology | None, plan: str | dict[str, Any], model: str = "gpt2-1.5b", **fields: Any) -> Job:
    """A job on four nodes of eight devices."""
    if isinstance(plan, str):
        model, plan, fields["num_microbatches"] = PLANS[plan]
    job = job_of(catalog.model(model).model_copy(update={"num_hidden_layers": 4}), plan, **fields)
    return replace(job, cluster=job.cluster.model_copy(update={"topology": topology}))


def step_of(job: Job, *, folded: bool = True) -> TruncatedStep:
    folding = folding_of(job) if folded else unfolded(RankMapping.of(job.plan))
    extent = predicted_extent(job, folding_of(job))
    return TruncatedStep(job, extent, None, 2, folding, expands_all(job, folding_of(job), extent.simulated))


@pytest.mark.parametrize("plan", ["fsdp", "hsdp"])
def test_prediction_without_full_links_is_that_without_a_topology(plan: str) -> None:
    """HSDP's two reductions meet on NVLink for a moment, which nothing but a topology sees."""
    switch = predict(job_on(Switch(kind="switch"), plan))
    assert switch.network is not None
    contention_s = switch.network.contention_s
    assert switch.step_time_s - contention_s == pytest.approx(predict(job_on(None, plan)).step_time_s, rel=1e-9)
    assert contention_s <= (1e-3 if plan == "hsdp" else 1e-9) * switch.step_time_s


@pytest.mark.parametrize("topology", [LEAF_SPINE, RAIL, SITES], ids=lambda topology: topology.kind)
@pytest.mark.parametrize("plan", PLANS)
def test_folded_step_is_the_unfolded_one(plan: str, topology: Topology) -> None:
    job = job_on(topology, plan)
    folded, whole = step_of(job), step_of(job, folded=False)
    assert len(folded.programs[0].ranks) < len(whole.programs[0].ranks)
    step_time_s = float(whole.seconds()[0])
    assert float(folded.seconds()[0]) == pytest.approx(step_time_s, rel=1e-9)
    networks = [step.network(step_time_s, step_time_s) for step in (folded, whole)]
    loads = [{link.name: link for link in network.links} for network in networks if network is not None]
    assert loads[0].keys() == loads[1].keys()
    for name, link in loads[1].items():
        assert loads[0][name].busy_share == pytest.approx(link.busy_share, rel=1e-9)
        assert loads[0][name].num_bytes == pytest.approx(link.num_bytes, rel=1e-9)
        assert loads[0][name].lost_s == pytest.approx(link.lost_s, rel=1e-6, abs=1e-9)


def test_fabrics_without_symmetry_are_simulated_whole() -> None:
    hashed = LeafSpine(kind="leaf_spine", nodes_per_leaf=2, spines=4, routing="ecmp")
    dragonfly = Dragonfly(kind="dragonfly", nodes_per_router=1, routers_per_group=2, global_gbit=400.0)
    for topology in (hashed, dragonfly, FatTree(kind="fat_tree", radix=20, levels=2)):
        assert len(folding_of(job_on(topology, "fsdp")).ranks) == 32


@pytest.mark.parametrize("plan", PLANS)
def test_contention_never_shortens_a_communication(plan: str) -> None:
    for simulated in step_of(job_on(RAIL, plan)).simulated:
        costs = simulated.program_costs
        assert costs.uncontended_s is not None
        assert (costs.durations_s >= costs.uncontended_s).all()
        assert simulated.times.step_time_s >= simulated.engine.times(costs.uncontended_s).step_time_s


def reductions(simulated: Simulated) -> tuple[np.ndarray, np.ndarray]:
    """Durations of gradient reductions, with and without contention."""
    costs, chosen = simulated.program_costs, simulated.program.on_stream(Stream.DATA)
    assert costs.uncontended_s is not None
    return costs.durations_s[chosen], costs.uncontended_s[chosen]


def test_rings_of_a_full_uplink_take_as_many_times_as_long() -> None:
    # tp inside nodes: eight rings of one rank per node, whose cards have twice the bandwidth of the uplink together
    plan = {"dp_replicate": 4, "tp": 8, "bucket_bytes": 2**39}
    wide, narrow = (
        predict_step(job_on(LeafSpine(kind="leaf_spine", nodes_per_leaf=2, oversubscription=ratio), plan, "llama3-8b"))
        for ratio in (2, 4)
    )
    for (prediction, simulated), factor in ((wide, 1.0), (narrow, 2.0)):
        contended_s, alone_s = reductions(simulated)
        assert simulated.contention is not None
        usage = next(u for u, name in zip(*usages_named(simulated), strict=True) if "data_parallel" in name)
        assert contended_s == pytest.approx(usage.fixed_s + factor * usage.transfer_s, rel=1e-9)
        assert alone_s == pytest.approx(usage.fixed_s + usage.transfer_s, rel=1e-9)
        assert prediction.network is not None
        assert prediction.network.has_contention == (factor > 1)


def usages_named(simulated: Simulated) -> tuple[Any, Any]:
    assert simulated.contention is not None
    return simulated.contention.usages, simulated.contention.names


def test_detours_of_a_dragonfly_avoid_the_one_link_between_two_routers() -> None:
    """Two routers of a Cray EX: the rings over eight nodes overload the link between them, and detours relieve it."""
    fields = catalog.topology_fields("cray-ex")
    adaptive, minimal = (
        Dragonfly.model_validate({**fields, "routing": routing}) for routing in ("adaptive", "minimal")
    )
    one_router = Dragonfly.model_validate({**fields, "nodes_per_router": 8})
    steps = {}
    for name, topology in (("adaptive", adaptive), ("minimal", minimal), ("one router", one_router)):
        job = job_on(topology, "fsdp")
        cluster = job.cluster.model_copy(
            update={"devices_per_node": 4, "nics_per_node": 4, "inter_link": catalog.network_link(200)}
        )
        steps[name] = predict(replace(job, cluster=cluster))
    assert steps["adaptive"].step_time_s == pytest.approx(steps["one router"].step_time_s, rel=1e-6)
    assert steps["minimal"].step_time_s > 1.5 * steps["adaptive"].step_time_s
    loads = [{link.name: link for link in step.network.links} for step in steps.values() if step.network is not None]
    direct, detoured = (load["group0.router0 -> group0.router1"] for load in (loads[1], loads[0]))
    assert direct.num_bytes > 2 * detoured.num_bytes
    legs = [load for name, load in loads[0].items() if name.startswith("group0.router0 -> group0.router")]
    assert sum(load.num_bytes for load in legs) == pytest.approx(direct.num_bytes, rel=1e-9)


def test_background_traffic_slows_the_links_that_it_crosses() -> None:
    topology = LeafSpine(kind="leaf_spine", nodes_per_leaf=2)
    job = job_on(topology, "fsdp")
    flows = [{"from": "node0", "to": "node2", "gbit": gbit} for gbit in (1.0, 3200.0)]
    quiet, light, heavy = (
        predict(replace(job, cluster=job.cluster.model_copy(update={"background": background})))
        for background in ((), *((BackgroundFlow.model_validate(flow),) for flow in flows))
    )
    assert quiet.step_time_s == pytest.approx(light.step_time_s, rel=1e-3)
    assert heavy.step_time_s > 1.1 * quiet.step_time_s
    assert heavy.network is not None
    assert light.network is not None
    for link in light.network.links:
        if link.series:
            assert np.mean(link.series) == pytest.approx(link.busy_share, rel=1e-6)
    slowest = heavy.network.slowest
    assert slowest is not None
    assert slowest.name.startswith(("node0.nic", "leaf1 -> node2.nic"))
    assert "other jobs, node0 to node2" in heavy.network.contention_words()


@pytest.mark.parametrize(
    ("flow", "topology", "words"),
    [
        (("node0", "node1"), None, "cluster.background: needs links to share, and the cluster has no topology"),
        (("node0", "node4"), RAIL, 'cluster.background.0.to = "node4": is not in the cluster, whose nodes are node0'),
        (("node1", "node1"), RAIL, 'cluster.background.0 = "node1": sends from a node to itself'),
    ],
)
def test_background_traffic_is_refused_by_name(flow: tuple[str, str], topology: Topology | None, words: str) -> None:
    job = job_on(topology, "fsdp")
    background = (BackgroundFlow.model_validate({"from": flow[0], "to": flow[1], "gbit": 10.0}),)
    with pytest.raises(SpecError, match=re.escape(words)):
        predict(replace(job, cluster=job.cluster.model_copy(update={"background": background})))


def test_long_distance_lengthens_every_crossing() -> None:
    near, far = (
        predict(job_on(Sites(kind="sites", nodes_per_site=2, gbit_per_site=12_800, latency_s=latency_s), "fsdp"))
        for latency_s in (0.0, 0.05)
    )
    # two crossings a lap in each collective; the step has at least one all-gather and one reduction in sequence
    assert far.step_time_s > near.step_time_s + 2 * 0.1 * 31 / 32
    assert far.network is not None
    assert far.network.contention_s < far.step_time_s - near.step_time_s


def test_a_step_over_a_distance_takes_as_long_as_its_windows() -> None:
    """A pipeline over two sites: the bytes of all sends over the bytes in flight, and no link is full."""
    plan = {"dp_replicate": 16, "pp": 2}
    far = Sites(kind="sites", nodes_per_site=2, gbit_per_site=12_800, latency_s=0.05)
    wide = far.with_changes(window_bytes=2**40)
    limited, free = (predict(job_on(topology, plan, "llama3-8b", num_microbatches=8)) for topology in (far, wide))
    bytes_per_send = 8192 * 4096 * 4  # fp32
    each_s = bytes_per_send / (2 * 2**20) * 0.1
    # two stages wait for each other in turn: a send forward, one backward, for each of 8 microbatches
    assert limited.step_time_s - free.step_time_s == pytest.approx(16 * each_s, rel=0.01)
    assert limited.network is not None
    assert not limited.network.has_contention


def test_truncated_step_extrapolates_the_load_of_links() -> None:
    job = job_on(LEAF_SPINE, {"dp_replicate": 16, "pp": 2}, num_microbatches=100)
    whole = predict(job).network
    step = TruncatedStep(
        job, predicted_extent(job, folding_of(job))._replace(simulated=30, period=1), None, 2, folding_of(job), True
    )
    seconds = step.seconds(lambda _, costs: [costs.uncontended_s] if costs.uncontended_s is not None else [])
    short = step.network(*seconds.tolist())
    assert whole is not None
    assert short is not None
    assert float(seconds[0]) == pytest.approx(whole.step_time_s, rel=1e-6)
    bytes_of = [{link.name: link.num_bytes for link in network.links} for network in (whole, short)]
    assert bytes_of[0] == pytest.approx(bytes_of[1], rel=1e-9)


def test_search_ranks_plans_by_their_contended_time() -> None:
    job = job_on(SITES, {"dp_shard": 32}, global_batch_size=64, precision="bf16")
    space = SearchSpace(tp=(1,), pp=(1, 2), zero_stage=(1, 3), microbatch_size=(1,), recompute=("none",), top=2)
    result = search(job, space)
    best = result.ranked[0]
    predicted = predict(job.with_plan(best.plan))
    assert best.step_time_s == pytest.approx(predicted.step_time_s, rel=1e-9)
    assert best.step_time_s < predict(job).step_time_s


def test_load_of_links_is_in_trace_and_json() -> None:
    prediction, simulated = predict_step(job_on(RAIL, "hsdp"))
    network = prediction.network
    assert network is not None
    slowest = network.slowest
    assert slowest is not None
    counters = [e for e in predicted_trace(prediction, simulated)["traceEvents"] if "% busy" in e["name"]]
    assert {event["pid"] for event in counters} == {1 + max(simulated.program.ranks)}
    assert max(event["args"]["busy"] for event in counters) <= 100.01
    document = prediction.to_json(timeline=False)["network"]
    assert document["links"][0]["name"] == slowest.name
    for link in network.links:
        if link.series:
            assert np.mean(link.series) == pytest.approx(link.busy_share, rel=1e-6)


def test_prediction_without_a_topology_loads_no_network() -> None:
    code = (
        "import sys; from simplan.scenario import load_scenario; load_scenario('scenarios/ddp.yaml').predict(); "
        "print([name for name in sys.modules if name.startswith('simplan.network') or name == 'numba'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
