"""Shared links against published results of other simulators: SimGrid and ASTRA-sim.

SimGrid (simgrid/simgrid at 12a63c78cdaa): systems of src/kernel/lmm/maxmin_test.cpp and bmf_test.cpp, and runs of
teshsuite/models, model ptask_L07, without TCP windows. A *consumption weight* over a capacity is our busy seconds, and
the inverse of a *sharing penalty* is our connections. ASTRA-sim (astra-sim/astra-network-analytical at 599a0473a9a7):
test/test_congestion_aware.cpp, which sends whole chunks from link to link, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from simpy import Environment

from simplan.network.usage import LinkUsage, link_use
from simplan.sim.links import SharedLinks
from tests.network.test_max_min import rates_of

UNBOUND = float("inf")


@pytest.mark.parametrize(
    ("penalties", "bounds", "systems", "expected"),
    [
        ([1, 2], [UNBOUND] * 2, [(3, {0: 1, 1: 1})], [2, 1]),
        ([1, 1], [UNBOUND] * 2, [(3, {0: 1, 1: 2})], [1, 1]),
        ([1, 2], [UNBOUND] * 2, [(20, {0: 1, 1: 2})], [10, 5]),
        ([1, 2, 1], [UNBOUND] * 3, [(20, {0: 1, 1: 2}), (60, {0: 2, 2: 1})], [10, 5, 40]),
        ([1, 2, 2], [UNBOUND] * 3, [(8, {0: 1, 1: 1, 2: 1})], [4, 2, 2]),
        ([1, 1, 1], [UNBOUND] * 3, [(1, {0: 1, 1: 1, 2: 0.05}), (1, {0: 0.05, 1: 0.05, 2: 1})], [1 / 2.05] * 3),
        ([1, 1], [0.1, UNBOUND], [(1, {0: 2, 1: 1})], [0.1, 0.8]),
        ([1, 1], [1, UNBOUND], [(1, {0: 1, 1: 1})], [0.5, 0.5]),
    ],
    ids=["penalty", "weight", "both", "two links", "three flows", "cross traffic", "bound", "loose bound"],
)
def test_rates_are_those_of_simgrids_unit_tests(
    penalties: list[float], bounds: list[float], systems: list[tuple[float, dict[int, float]]], expected: list[float]
) -> None:
    """Systems of links: capacity, and the consumption weight of each variable on the link."""
    usages = [
        {
            link: (weights[variable] / capacity, weights[variable] / capacity / penalty)
            for link, (capacity, weights) in enumerate(systems)
            if variable in weights
        }
        for variable, penalty in enumerate(penalties)
    ]
    rates, _ = rates_of(usages, bounds)
    assert rates == pytest.approx(expected, rel=1e-12)


class Transfer(NamedTuple):
    """A communication that starts at time zero: bytes over each link, with one connection, and its latency."""

    num_bytes: dict[str, float]
    latency_s: float = 0.0


def ends_s(transfers: Sequence[Transfer], bytes_per_s: dict[str, float]) -> list[float]:
    """Ends of transfers that share links."""
    numbers = {name: number for number, name in enumerate(bytes_per_s)}
    usages = []
    for transfer in transfers:
        seconds = np.array([sent / bytes_per_s[name] for name, sent in transfer.num_bytes.items()])
        links = np.array([numbers[name] for name in transfer.num_bytes], np.int32)
        sent = np.array([*transfer.num_bytes.values()])
        usages.append(LinkUsage(links, seconds, np.ones(len(links)), transfer.latency_s, float(seconds.max()), sent))
    indices = np.arange(len(transfers))
    use = link_use(usages, indices, indices, len(numbers))
    env, ended_s = (
        Environment(),
        [transfer.latency_s + usage.transfer_s for transfer, usage in zip(transfers, usages, strict=True)],
    )
    links_of_env = SharedLinks(env, use)

    def note(number: int, _: object) -> None:
        ended_s[number] = env.now

    for number in np.flatnonzero(use.usage >= 0).tolist():
        done = env.event()
        assert done.callbacks is not None
        done.callbacks.append(partial(note, number))
        links_of_env.run(done, number, int(use.usage[number]), ended_s[number])
    env.run()
    return ended_s


def route(source: int, destination: int, num_bytes: float = 1.0) -> Transfer:
    """Two hosts of SimGrid's ptask_L07.xml: a half-duplex link of 1 B/s and 0.5 s each, and a switch of 1 s."""
    return Transfer({f"link{source}": num_bytes, f"link{destination}": num_bytes}, 2.0)


HALF_DUPLEX = {f"link{host}": 1.0 for host in range(4)}


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [
        ([route(0, 1)], [3.0]),
        ([route(0, 1), route(0, 1)], [4.0, 4.0]),
        ([route(0, 1), route(1, 0)], [4.0, 4.0]),
        ([route(0, 1), route(2, 3)], [3.0, 3.0]),
        ([route(0, 1), route(0, 2, 2.0), route(0, 3, 3.0)], [5.0, 7.0, 8.0]),
        ([route(start, other) for start in range(4) for other in range(4) if start != other], [8.0] * 12),
    ],
    ids=["one", "same direction", "opposite directions", "independent", "scatter", "all-to-all"],
)
def test_transfers_end_as_in_simgrid(transfers: list[Transfer], expected: list[float]) -> None:
    """teshsuite/models/ptask_L07_usage; its scatter names the phases of 3, 2 and 1 seconds."""
    assert ends_s(transfers, HALF_DUPLEX) == pytest.approx(expected, rel=1e-9)


def test_a_large_transfer_next_to_a_small_one_ends_as_in_simgrid() -> None:
    transfers = [Transfer({"link6": num_bytes}, 1e-4) for num_bytes in (1e8, 1.0)]
    assert round(max(ends_s(transfers, {"link6": 125e6})), 4) == 0.8001


def test_two_flows_of_one_communication_share_as_one_activity_of_simgrid() -> None:
    """teshsuite/models/ptask-subflows: 1.5 bytes next to another transfer take 3 s after a latency of 1 s.

    There an activity has one part of a link whatever its flows are, as with one connection here. simplan counts a
    connection for each flow, so that two flows take 2.25 s; SimGrid's bottleneck max fairness (BMF) gives 2.5 s.
    """
    both = [Transfer({"backbone": 1.5}, 1.0), Transfer({"backbone": 10.0}, 1.0)]
    assert ends_s(both, {"backbone": 1.0})[0] == pytest.approx(4.0, rel=1e-9)


def test_all_gather_on_a_ring_takes_as_long_as_in_astra_sim() -> None:
    """Every NPU of a ring of 16 sends 1 MiB to every other one the shorter way, and clockwise to the opposite one.

    ASTRA-sim: 704,116 ns. Fluid flows lack its 500 ns per hop, of which the busiest link pays 1,000 ns.
    """
    num, chunk = 16, 2.0**20
    transfers = []
    for source in range(num):
        for hops in range(1, num):
            forward = hops <= num // 2
            steps = range(hops) if forward else range(num - hops)
            places = [(source + step if forward else source - step) % num for step in steps]
            transfers.append(Transfer({f"{place}{'+' if forward else '-'}": chunk for place in places}))
    links = {f"{place}{sign}": 50 * 2.0**30 for place in range(num) for sign in "+-"}
    assert max(ends_s(transfers, links)) * 1e9 == pytest.approx(704_116 - 2 * 500, rel=2e-5)
