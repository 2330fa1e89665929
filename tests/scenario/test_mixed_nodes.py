"""Groups of different nodes in a scenario file: devices in order, the slowest links, and the mean price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplan import catalog
from simplan.errors import NotModelledError
from simplan.interop.chakra import export
from simplan.predict import predict
from simplan.scenario import Scenario, parse_scenario
from tests.support.problems import refuses

TEXT = """
model: {preset: llama3-8b}
cluster:
  price_per_device_hour: 2.5
  nodes:
    - {preset: dgx-h100, num_nodes: 3}
    - {preset: dgx-a100-80gb, price_per_device_hour: 1.5}
training: {global_batch_size: 64, num_tokens: 1e12}
plan: {dp_shard: 32}
"""


def scenario(text: str = TEXT) -> Scenario:
    return parse_scenario(text)


def test_groups_have_their_devices_and_links_in_order() -> None:
    cluster = scenario().job.cluster
    assert cluster.num_devices == 32
    assert cluster.devices_in_words == "24 x h100-sxm-80gb + 8 x a100-sxm-80gb"
    assert [cluster.device_of(device).id for device in (0, 23, 24, 31)] == ["h100-sxm-80gb"] * 2 + ["a100-sxm-80gb"] * 2
    assert cluster.inter_link == catalog.node("dgx-a100-80gb").inter_link
    assert cluster.as_group(0).inter_link == catalog.node("dgx-h100").inter_link


def test_price_is_the_mean_over_all_devices() -> None:
    assert scenario().budget.price_per_device_hour == pytest.approx((3 * 2.5 + 1.5) / 4)
    assert scenario(TEXT.replace("  price_per_device_hour: 2.5\n", "")).budget.price_per_device_hour is None


def test_exports_refuse_different_nodes_by_name() -> None:
    with pytest.raises(NotModelledError, match=r"cluster\.nodes = 24 x h100"):
        export(scenario().job, "mixed")


@pytest.mark.parametrize("topology", ["{kind: switch}", "{kind: leaf_spine, nodes_per_leaf: 2, oversubscription: 8}"])
def test_a_topology_joins_nodes_that_differ_in_their_devices(topology: str) -> None:
    """With equal devices in both groups, all is as for equal nodes."""
    text = TEXT.replace("dgx-a100-80gb, price_per_device_hour: 1.5", "dgx-h200")
    text = text.replace("dp_shard: 32", "dp_shard: 32, recompute: full")
    with_topology = text.replace("  nodes:\n", f"  topology: {topology}\n  nodes:\n")
    mixed = predict(scenario(with_topology).job)
    assert mixed.network is not None
    assert mixed.network.has_contention == ("oversubscription" in topology)
    if not mixed.network.has_contention:
        assert mixed.step_time_s == pytest.approx(predict(scenario(text).job).step_time_s, rel=1e-9)
    alike = scenario(with_topology.replace("dgx-h200", "dgx-h100")).job
    equal = alike.cluster.as_group(0)
    assert equal.topology == alike.cluster.topology
    expected_s = predict(replace(alike, cluster=equal)).step_time_s
    assert predict(alike).step_time_s == pytest.approx(expected_s, rel=1e-9)


def test_a_topology_of_nodes_with_different_links_is_refused_by_name() -> None:
    with refuses("cluster.nodes.1", rule="has another intra_link than the first"):
        scenario(TEXT.replace("  nodes:\n", "  topology: {kind: switch}\n  nodes:\n"))


def test_background_jobs_on_different_nodes_are_refused_by_name() -> None:
    job = "{name: other, model: {preset: gpt2-124m}, training: {global_batch_size: 64}, plan: {dp_shard: 8}}"
    text = TEXT.replace("dgx-a100-80gb, price_per_device_hour: 1.5", "dgx-h200").replace(
        "  nodes:\n", f"  topology: {{kind: switch}}\n  background: [{{nodes: [1], job: {job}}}]\n  nodes:\n"
    )
    with refuses("cluster.background", rule="has jobs, and several jobs", kind=NotModelledError):
        predict(scenario(text).job)
