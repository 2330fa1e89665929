"""Groups of different nodes in a scenario file: devices in order, the slowest links, and the mean price."""

from __future__ import annotations

import pytest

from simplan import catalog
from simplan.errors import NotModelledError
from simplan.interop.chakra import export
from simplan.scenario import Scenario, parse_scenario

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
