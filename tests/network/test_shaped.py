"""Comparison with shaped hosts: the networks are those of their scenarios, and reports count errors and orders."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.network.cases import NETWORKS, PLANS, ShapedNetwork, scenario_text, star
from benchmarks.network.measure import Measurements
from benchmarks.network.report import CaseResult, NetworkReport, seconds_alone
from simplan import load_scenario
from simplan.model.layer import CollectiveKind
from simplan.network.build import fabric_of
from simplan.program.program import Communication
from simplan.units import MIB
from tests.hosts import unavailable


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_cables_are_those_of_the_scenario(network: ShapedNetwork, tmp_path: Path) -> None:
    """The narrowest cable between two hosts has the bandwidth of the narrowest link of the scenario's path."""
    file = tmp_path / "scenario.yaml"
    file.write_text(scenario_text(network, PLANS[0]))
    fabric = fabric_of(load_scenario(file).job.cluster)
    for source in range(network.num_hosts):
        for destination in set(range(network.num_hosts)) - {source}:
            path = fabric.path(source, destination)
            least = min(fabric.links[link].bytes_per_s for link in path if not fabric.links[link].is_inside_node)
            assert least * 8 / 1e6 == pytest.approx(narrowest(network, source, destination))


def narrowest(network: ShapedNetwork, source: int, destination: int) -> float:
    """Mbit/s of the narrowest cable on the path of the fewest cables."""
    paths = [([f"node{source}"], float("inf"))]
    while paths:
        path, least = paths.pop(0)
        if path[-1] == f"node{destination}":
            return least
        for wire in network.wires:
            for here, there in (wire.ends, wire.ends[::-1]):
                if here == path[-1] and there not in path:
                    paths.append(([*path, there], min(least, wire.mbit_per_s or least)))
    raise AssertionError("no path")


def result(network: str, predicted_s: float, measured_s: float) -> CaseResult:
    return CaseResult(network, "DDP", "DDP over 4", predicted_s, measured_s, measured_s, measured_s)


def test_a_report_names_pairs_in_the_wrong_order() -> None:
    star_, tiers, slow = result("star", 1.0, 1.1), result("two tiers", 2.0, 1.9), result("slow link", 1.9, 4.0)
    report = NetworkReport("here", (), (star_, tiers, slow))
    assert len(report.pairs) == 3
    assert report.wrong == [(tiers, slow)]
    assert not report.meets_goals
    assert "Wrong order: DDP, two tiers is faster than DDP, slow link." in report.to_markdown()
    alike = NetworkReport("here", (), (result("star", 1.0, 1.0), result("two tiers", 0.9, 1.04)))
    assert alike.pairs == [], "measurements within 5 % have no order"
    assert alike.meets_goals


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_collectives_are_timed_on_shaped_hosts(tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    measurements, network = Measurements(tmp_path), star(2)
    measurements.time_collectives(network)
    timed = {
        (timing["kind"], timing["num_bytes"]): timing["seconds"]
        for timing in json.loads(measurements.collectives(network).read_text())
    }
    seconds = timed[CollectiveKind.ALL_REDUCE, 4 * MIB]
    wire_s = 4 * MIB * 1538 / 1448 / (network.mbit_per_s * 1e6 / 8)  # both ranks send all bytes once, in two halves
    assert statistics.median(seconds) == pytest.approx(wire_s, rel=0.1)


def test_a_stream_of_another_job_leaves_the_rest_of_the_uplink(tmp_path: Path) -> None:
    """A ring crosses the uplink with one flow: it has the 60 of 100 Mbit/s that the stream leaves."""
    network = next(network for network in NETWORKS if network.stream is not None)
    seconds = seconds_alone(network, Measurements(tmp_path))
    found_s = seconds(Communication(CollectiveKind.ALL_REDUCE, 4 * MIB, (0, 1, 2, 3)))
    assert found_s == pytest.approx(1.5 * 4 * MIB / (0.94 * 60e6 / 8), rel=0.01)
