"""Fair rates: Bertsekas and Gallager's example, exact water-filling, and the laws of sharing."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simplan.network.max_min import fair_rates, settle
from simplan.network.running import LinkLists, Paths, Running, Segments, weights_of

Usage = dict[int, tuple[float, float]]  # link -> busy seconds, connections


class Flow(NamedTuple):
    """Equal connections between two devices, each with the same bytes on all links."""

    links: frozenset[int]
    num_bytes: int
    connections: int


def rates_of(usages: list[Usage], limits: list[float]) -> tuple[list[float], list[int]]:
    first = np.cumsum([0, *map(len, usages)]).astype(np.int32)
    link = np.array([used_link for usage in usages for used_link in usage], np.int32)
    pairs = [pair for usage in usages for pair in usage.values()]
    seconds, connections = (np.array([pair[k] for pair in pairs], np.float64) for k in range(2))
    weights = weights_of(seconds, connections)
    running = np.arange(len(usages), dtype=np.int32)
    scratch = np.zeros((4, 1 + max(link, default=0)))
    rates, bottleneck = fair_rates(
        first, link, seconds, weights, np.array(limits), np.ones(scratch.shape[1]), running, scratch
    )
    return rates.tolist(), bottleneck.tolist()


def exact_rates(flows: list[Flow], speeds: list[int], limits: list[float]) -> list[Fraction]:
    """Water-filling with fractions: bytes per second of a connection rise together, one event at a time."""
    rates: dict[int, Fraction] = {}  # bytes per second of each connection
    while len(rates) < len(flows):
        rising = [c for c in range(len(flows)) if c not in rates]
        levels: dict[object, Fraction] = {c: Fraction(limits[c]) * flows[c].num_bytes for c in rising}
        for link, speed in enumerate(speeds):
            used = sum(rates[c] * flows[c].connections for c in rates if link in flows[c].links)
            number = sum(flows[c].connections for c in rising if link in flows[c].links)
            if number:
                levels["link", link] = Fraction(speed - used) / number
        level = min(levels.values())
        for c in rising:
            if levels[c] == level or any(levels.get(("link", link)) == level for link in flows[c].links):
                rates[c] = level
    return [rates[c] / flows[c].num_bytes for c in range(len(flows))]


def test_fair_rates_of_bertsekas_and_gallager() -> None:
    # Data Networks, 2nd edition, section 6.5.2: four links of capacity 1. Sessions 2, 3 and 5 fill the first shared
    # link with 1/3 each; session 1 meets session 5 on the next and gets 2/3; session 4 has its link to itself
    ac, bc, ce, de = range(4)
    paths = [(ac, ce), (bc,), (bc,), (de,), (bc, ce)]
    rates, bottleneck = rates_of([dict.fromkeys(path, (1.0, 1.0)) for path in paths], [np.inf] * 5)
    assert rates == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1.0, 1 / 3], rel=1e-12)
    assert bottleneck == [ce, bc, bc, de, bc]


_ENTRY = st.tuples(st.integers(1, 40).map(float), st.integers(1, 4).map(float))
_USAGES = st.lists(st.dictionaries(st.integers(0, 7), _ENTRY, min_size=1, max_size=4), min_size=1, max_size=9)


_FLOWS = st.lists(
    st.builds(Flow, st.frozensets(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 4)),
    min_size=1,
    max_size=9,
)


@given(_FLOWS, st.lists(st.integers(1, 60), min_size=6, max_size=6), st.data())
def test_fair_rates_over_links_of_different_speed_equal_exact_water_filling(
    flows: list[Flow], speeds: list[int], data: st.DataObject
) -> None:
    limits = [1.0 / data.draw(st.integers(1, 40)) for _ in flows]
    usages = [
        {link: (flow.connections * flow.num_bytes / speeds[link], float(flow.connections)) for link in flow.links}
        for flow in flows
    ]
    rates, _ = rates_of(usages, limits)
    assert rates == pytest.approx([float(rate) for rate in exact_rates(flows, speeds, limits)], rel=1e-9)


def test_a_full_link_gives_equal_parts_whatever_its_users_cross_elsewhere() -> None:
    """Two transfers of 50 GB over a link of 50 GB/s; one goes on over a link of 25 GB/s, which it fills alone."""
    assert rates_of([{0: (1.0, 1.0), 1: (2.0, 1.0)}, {0: (1.0, 1.0)}], [0.5, 1.0])[0] == [0.5, 0.5]


@given(_USAGES, st.data())
def test_fair_rates_obey_the_laws_of_sharing(usages: list[Usage], data: st.DataObject) -> None:
    """No link is more than full; who is slower than alone crosses a full link, and has its part of some link."""
    limits = [1.0 / data.draw(st.floats(1, 40)) for _ in usages]
    rates, bottleneck = rates_of(usages, limits)
    busy, connections = {link: 0.0 for usage in usages for link in usage}, Counter[int]()
    for usage, rate in zip(usages, rates, strict=True):
        for link, (seconds, number) in usage.items():
            busy[link] += rate * seconds
            connections[link] += int(number)
    assert max(busy.values()) <= 1 + 1e-9
    for usage, rate, limit, link in zip(usages, rates, limits, bottleneck, strict=True):
        if link < 0:
            assert rate == limit
            continue
        assert rate <= limit * (1 + 1e-12)
        assert link in usage
        assert max(busy[used_link] for used_link in usage) == pytest.approx(1.0, rel=1e-6)
        assert rate >= min(number / connections[used_link] / s for used_link, (s, number) in usage.items()) * (1 - 1e-9)


def test_two_that_limit_each_other_share_what_is_left() -> None:
    """The first fills link 0 faster, the second link 1: neither link is the bottleneck of both."""
    rates, _ = rates_of([{0: (4.0, 1.0), 1: (1.0, 1.0)}, {0: (1.0, 1.0), 1: (4.0, 1.0)}], [9.0, 9.0])
    assert rates == pytest.approx([0.2, 0.2])


_PATHS = st.lists(st.dictionaries(st.integers(0, 7), _ENTRY, min_size=1, max_size=2), min_size=4, max_size=9)
_BEGINS = st.sampled_from([True, True, False])
_BEGIN_OR_END = st.lists(st.tuples(_BEGINS, st.integers(0, 8), st.floats(1, 2)), min_size=8, max_size=30)


_CHAIN: list[Usage] = [{0: (1.0, 1.0)}, {0: (1.0, 1.0), 1: (1.0, 1.0)}, {1: (1.0, 1.0)}]


@given(_PATHS, _BEGIN_OR_END)
@example(_CHAIN, [(True, 0, 1.0), (True, 1, 1.0), (True, 2, 1.0)])
def test_rates_after_every_change_are_those_of_all_communications_anew(
    usages: list[Usage], changes: list[tuple[bool, int, float]]
) -> None:
    """Communications that a change does not reach keep their rates, which are still the fair ones."""
    first = np.cumsum([0, *map(len, usages)]).astype(np.int32)
    link = np.array([used_link for usage in usages for used_link in usage], np.int32)
    seconds, connections = (np.array([p[k] for u in usages for p in u.values()], np.float64) for k in range(2))
    transfer_s = np.array([max(s for s, _ in usage.values()) for usage in usages])
    paths = Paths.of(first, link, seconds, connections, transfer_s)
    running, lists, segments = Running.empty(32), LinkLists.empty(8, paths), Segments.empty(32 * 61)
    slots: list[int] = []
    num_segments = 0
    for step, (begins, which, scale) in enumerate(changes):
        joined: dict[int, None] = {}
        others = dict.fromkeys(slots)
        begun: list[int] = []
        ended: list[int] = []
        if begins or not slots:
            slots.append(step)
            running.usage[step], running.scale[step], running.left[step] = which % len(usages), scale, 1e6
            begun = [step]
            joined[step] = None
        else:
            ended = [slots.pop(which % len(slots))]
            del others[ended[0]]
            joined[ended[0]] = None
        while grown := [s for s in others if any(_meet(usages, running, s, other) for other in joined)]:
            joined.update(dict.fromkeys(grown))
            others = {slot: None for slot in others if slot not in joined}
        before = num_segments
        changed = np.array(ended, np.int32), np.array(begun, np.int32)
        num_segments, next_s, ending = settle(
            paths, running, lists, np.ones(8), *changed, float(step), segments, num_segments
        )
        assert num_segments - before <= len(joined)  # the others keep their rates
        ends_s = {
            slot: step_s + running.left[slot] / running.rate[slot]
            for slot, step_s in zip(slots, running.updated_s[slots], strict=True)
        }
        assert next_s == min(ends_s.values(), default=np.inf)
        assert ending.tolist() == [slot for slot in sorted(slots) if ends_s[slot] <= next_s * (1 + 1e-14)]
        rates, _ = fair_rates(
            first, link, seconds, paths.weights, paths.limits, np.ones(8), running.usage[slots], lists.scratch
        )
        assert running.rate[slots] == pytest.approx(rates / running.scale[slots], rel=1e-9)
        assert all(running.updated_s[slot] == step for slot in slots if slot in joined)
        assert all(running.updated_s[slot] < step for slot in others)


def _meet(usages: list[Usage], running: Running, first: int, second: int) -> bool:
    """True if the communications of two slots share a link."""
    return bool(usages[running.usage[first]].keys() & usages[running.usage[second]].keys())
