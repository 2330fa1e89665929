"""Adaptive routing on a dragonfly: closed forms of its capacity, and where detours lead."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.network.build import fabric_of
from simplan.network.detours import on_detours, splits_of
from simplan.network.fabric import Fabric
from simplan.network.usage import LinkUsage
from tests.network.test_fabric import cluster_with


def dragonfly(groups: int, routers: int, **fields: Any) -> Fabric:
    """One node per router, and so a link between each two groups."""
    topology = {"kind": "dragonfly", "nodes_per_router": 1, "routers_per_group": routers, "global_gbit": 100} | fields
    return fabric_of(cluster_with(topology, nodes=groups * routers, per_node=1))


def between(fabric: Fabric, first: str, second: str) -> int:
    return fabric.link_named(f"{first} -> {second}")


def loads_after(fabric: Fabric, demand: dict[int, float]) -> np.ndarray:
    """Busy shares of all links, by the traffic of some links' minimal paths."""
    load = np.zeros(len(fabric.links))
    load[[*demand]] = [*demand.values()]
    assert fabric.interconnect is not None
    splits = splits_of(load, fabric.links, fabric.interconnect.detours)
    loads = np.zeros(len(load))
    for link, busy in demand.items():
        ones = np.array([busy])
        usage = LinkUsage(np.array([link], np.int32), ones, ones, 0.0, busy, ones)
        spread = on_detours(usage, splits)
        loads[spread.links] += spread.seconds
    return loads


@pytest.mark.parametrize("groups", [3, 5, 9])
def test_a_pair_of_groups_has_its_own_link_and_detours_over_all_other_groups(groups: int) -> None:
    """1 + (G - 2) paths of one link's bandwidth each: a demand of G - 1 links fills all of them."""
    fabric = dragonfly(groups, 1)
    load = loads_after(fabric, {between(fabric, "group0.router0", "group1.router0"): groups - 1.0})
    assert load.max() == pytest.approx(1.0, rel=1e-6)
    assert np.count_nonzero(load) == 1 + 2 * (groups - 2)


@pytest.mark.parametrize("routers", [3, 8, 32])
def test_a_pair_of_routers_has_its_own_link_and_detours_over_the_rest_of_the_group(routers: int) -> None:
    fabric = dragonfly(2, routers)
    load = loads_after(fabric, {between(fabric, "group0.router0", "group0.router1"): 2.0 * (routers - 1)})
    assert load.max() == pytest.approx(2.0, rel=1e-6)
    assert np.count_nonzero(load) == 1 + 2 * (routers - 2)


def test_detours_take_no_more_than_what_overloads_the_minimal_path() -> None:
    fabric = dragonfly(4, 1)
    link = between(fabric, "group0.router0", "group1.router0")
    load = loads_after(fabric, {link: 1.5})
    assert load[link] == pytest.approx(1.0, rel=1e-6)
    assert load.sum() == pytest.approx(1.0 + 2 * 0.5, rel=1e-6)


@pytest.mark.parametrize("groups", [4, 8])
def test_a_shift_by_one_group_has_half_of_the_bandwidth_of_all_groups(groups: int) -> None:
    """The worst case of minimal paths (Kim et al. 2008). Detours cross two links, so G links carry G / 2 of traffic."""
    fabric = dragonfly(groups, 1)
    names = [f"group{group}.router0" for group in range(groups)]
    shift = {between(fabric, names[group], names[(group + 1) % groups]): 1.0 * groups for group in range(groups)}
    assert loads_after(fabric, shift).max() == pytest.approx(2.0, rel=0.01)


def test_uniform_traffic_takes_its_minimal_paths() -> None:
    fabric = dragonfly(5, 1)
    links = [i for i, link in enumerate(fabric.links) if link.name.count("router") == 2]
    assert loads_after(fabric, dict.fromkeys(links, 3.0))[links] == pytest.approx(3.0, rel=1e-6)


def test_minimal_routing_has_no_detours() -> None:
    fabric = dragonfly(4, 2, routing="minimal")
    assert fabric.interconnect is not None
    assert not fabric.interconnect.has_detours


@given(groups=st.integers(1, 6), routers=st.integers(1, 5))
def test_detours_lead_from_one_end_of_a_link_to_the_other(groups: int, routers: int) -> None:
    """Detours of a local link do so; those between groups begin and end at any routers of the two groups."""
    if groups * routers == 1:
        return
    fabric = dragonfly(groups, routers)
    assert fabric.interconnect is not None
    for index, link in enumerate(fabric.links):
        ends = [fabric.vertices[vertex] for vertex in (link.source, link.destination)]
        detours = fabric.interconnect.detours(index)
        if not all("router" in end for end in ends):
            assert not detours
            continue
        local = ends[0].partition(".")[0] == ends[1].partition(".")[0]
        assert len(detours) == (routers if local else groups) - 2
        for detour in detours:
            legs = [fabric.links[leg] for leg in detour]
            assert all(before.destination == after.source for before, after in pairwise(legs))
            reached = [fabric.vertices[vertex] for vertex in (legs[0].source, legs[-1].destination)]
            assert (
                reached == ends
                if local
                else [r.partition(".")[0] for r in reached] == [end.partition(".")[0] for end in ends]
            )
