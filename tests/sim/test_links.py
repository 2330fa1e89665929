"""Shared links in the engine, against closed forms of one and of two equal flows and against laws of sharing."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment, Event

from simplan.network.usage import Flap, LinkUsage, LinkUse, link_use, together
from simplan.sim.compiled import leaders_of
from simplan.sim.engine import CoreUse, simulate
from simplan.sim.links import SharedLinks
from tests.jobs import job_of, lowered, tiny_model


def usage(seconds: dict[int, float], transfer_s: float, fixed_s: float = 0.0) -> LinkUsage:
    links = np.array(list(seconds), np.int32)
    busy_s = np.array(list(seconds.values()))
    return LinkUsage(links, busy_s, np.ones(len(links)), fixed_s, transfer_s, busy_s)


def ends(use: LinkUse, starts: list[float], seconds: list[float]) -> list[float]:
    """End of every operation, each started at a given time."""
    env = Environment()
    links = SharedLinks(env, use)
    ended = [0.0] * len(starts)

    for op in range(len(starts)):
        env.process(transfer(env, links, op, starts[op], seconds[op], ended))
    env.run()
    return ended


def transfer(
    env: Environment,
    links: SharedLinks,
    op: int,
    start_s: float,
    seconds: float,
    ended: list[float],
    usage: int | None = None,
) -> Generator[Event, object, None]:
    yield env.timeout(start_s)
    done = Event(env)
    links.run(done, op, op if usage is None else usage, seconds)
    yield done
    ended[op] = env.now


def use_of(usages: list[LinkUsage], always: list[LinkUsage] | None = None) -> LinkUse:
    ops = np.arange(len(usages))
    return link_use(usages, ops, ops, 8, always or [])


def test_links_that_cannot_be_full_are_left_out() -> None:
    use = use_of([usage({0: 0.5, 1: 1.0}, 1.0), usage({0: 0.5, 2: 1.0}, 1.0), usage({3: 2.0}, 1.0)])
    assert use.usage.tolist() == [-1, -1, 2]  # alone, the last one needs twice its closed form
    same_stream = link_use([usage({0: 1.0}, 1.0)] * 2, np.arange(2), np.zeros(2, int), 8)
    assert same_stream.usage.tolist() == [-1, -1]


def test_two_equal_transfers_on_a_link_take_twice_as_long() -> None:
    use = use_of([usage({0: 3.0}, 3.0)] * 2)
    assert ends(use, [0.0, 0.0], [3.0, 3.0]) == [6.0, 6.0]
    # half of the first is done when the second begins; latency is not shared
    use = use_of([usage({0: 2.0}, 2.0, 1.0)] * 2)
    assert ends(use, [0.0, 1.0], [3.0, 3.0]) == pytest.approx([4.0, 5.0], rel=1e-12)


def test_transfer_that_shares_no_full_link_takes_its_closed_form() -> None:
    use = use_of([usage({0: 2.0, 1: 1.0}, 2.0, 0.5), usage({1: 1.5}, 2.0, 0.5), usage({0: 0.5}, 1.0)])
    assert ends(use, [0.25, 3.0, 2.75], [2.5, 2.5, 1.0]) == pytest.approx([2.75, 5.5, 3.75], rel=1e-9)


def test_constant_flow_leaves_the_rest_of_a_link() -> None:
    use = use_of([usage({0: 4.0}, 4.0)], [usage({0: 0.25}, 1.0)])
    assert ends(use, [1.0], [4.0]) == pytest.approx([1 + 4 / 0.75], rel=1e-12)
    greedy = use_of([usage({0: 4.0}, 4.0)], [usage({0: 0.9}, 1.0)])  # the fair half
    assert ends(greedy, [1.0], [4.0]) == pytest.approx([9.0], rel=1e-12)


def test_equal_transfers_as_one_have_the_rates_of_each() -> None:
    first, second = usage({0: 1.0, 1: 0.5}, 1.0), usage({0: 1.0, 2: 0.5}, 1.0)
    third = usage({0: 1.0}, 1.0)
    apart = ends(use_of([first, second, third]), [0.0, 0.0, 0.5], [1.0] * 3)
    merged = ends(use_of([together([first, second]), third]), [0.0, 0.5], [1.0] * 2)
    assert apart[:2] == pytest.approx([merged[0]] * 2, rel=1e-12)
    assert apart[2] == pytest.approx(merged[1], rel=1e-12)


_SECONDS = st.dictionaries(st.integers(0, 4), st.floats(0.1, 1.0), min_size=1, max_size=3)


@given(st.lists(st.tuples(_SECONDS, st.floats(0, 3), st.floats(0.5, 2)), min_size=1, max_size=8))
def test_sharing_never_shortens_and_keeps_every_byte(drawn: list[tuple[dict[int, float], float, float]]) -> None:
    usages = [usage({link: s * 2 for link, s in busy.items()}, 2.0, 0.1) for busy, _, _ in drawn]
    use = use_of(usages)
    crossing = [op for op in range(len(drawn)) if use.usage[op] >= 0]
    env = Environment()
    links = SharedLinks(env, use)
    ended = [0.0] * len(drawn)
    for op in crossing:
        _, start_s, factor = drawn[op]
        env.process(transfer(env, links, op, start_s, 2.1 * factor, ended))
    env.run()
    segments = links.segments
    for op in crossing:
        _, start_s, factor = drawn[op]
        assert ended[op] - start_s >= 2.1 * factor * (1 - 1e-9)
        moved = ((segments.end_s - segments.start_s) * segments.rate)[segments.op == op]
        assert moved.sum() == pytest.approx(factor, rel=1e-9)


def test_links_are_shared_beside_cores() -> None:
    """Two data-parallel ranks compute on one core, and reduce gradients over a link of half the bandwidth they need."""
    reducing = lowered(job_of(tiny_model(), {"dp_replicate": 2}, num_microbatches=1), 1)
    reduces = np.array([op.communication is not None for op in reducing.ops])
    seconds = np.where(reduces, 3.0, [float(bool(op.work)) for op in reducing.ops])
    cores = CoreUse(1, [0] * len(reducing), np.where(reduces, 0.0, 1.0).tolist())
    alone = simulate(reducing, seconds, cores)
    leaders = [op for op in np.flatnonzero(reduces) if leaders_of(reducing)[op] == op]
    uses = np.full(len(reducing), -1)
    uses[leaders] = 0
    narrow = link_use([usage({0: 4.0}, 2.0, 1.0)], uses, np.arange(len(reducing)), 1)
    times = simulate(reducing, seconds, cores, narrow)
    assert len(leaders) > 0
    assert (times.end_s - times.start_s)[leaders] == pytest.approx(5.0)  # 1 s of latency, and twice 2 s
    assert times.step_time_s == pytest.approx(alone.step_time_s + 2.0 * len(leaders))


def test_usages_in_sequence_wait_each_for_its_own_links() -> None:
    first, second = usage({0: 2.0}, 2.0, 0.5), usage({1: 1.0}, 1.0)._replace(follows=True)
    alone = usage({1: 3.0}, 3.0)
    use = link_use([first, second, alone], np.array([0, 2]), np.arange(2), 8, [usage({0: 0.5}, 1.0)])
    env = Environment()
    links, ended = SharedLinks(env, use), [0.0, 0.0]
    for op, (head, seconds) in enumerate(((0, 3.5), (2, 3.0))):
        env.process(transfer(env, links, op, 0.0, seconds, ended, head))
    env.run()
    # half of link 0 is left, so the first takes 0.5 + 4 s; link 1 is free from 3 s on
    assert ended == pytest.approx([0.5 + 4.0 + 1.0, 3.0], rel=1e-12)
    segments = links.segments
    assert sorted({*zip(segments.op.tolist(), segments.usage.tolist(), strict=True)}) == [
        (0, 0),
        (0, 1),
        (1, 2),
        (2, 3),
    ]


def flapping(usages: list[LinkUsage], flaps: list[Flap]) -> LinkUse:
    ops = np.arange(len(usages))
    return link_use(usages, ops, ops, 8, [], flaps)


def test_a_transfer_over_a_flapping_link_waits_for_the_missing_bandwidth() -> None:
    """At 10 % for a quarter of a second, it moves 0.025 s worth of bytes: the other 0.225 s come later."""
    once = flapping([usage({0: 1.0}, 1.0)], [Flap(0, 0.1, 0.5, 0.25, 3600.0)])
    assert ends(once, [0.0], [1.0]) == pytest.approx([1.225], rel=1e-12)
    assert ends(once, [0.6], [1.0]) == pytest.approx([0.6 + 1 + 0.9 * 0.15], rel=1e-12)
    assert ends(once, [0.75], [1.0]) == pytest.approx([1.75], rel=1e-12)
    latency = flapping([usage({0: 1.0}, 1.0, 0.5)], [Flap(0, 0.1, 0.0, 0.5, 3600.0)])
    assert ends(latency, [0.0], [1.5]) == pytest.approx([1.5], rel=1e-12)  # slow during the latency alone


@settings(max_examples=20)
@given(st.floats(0.05, 0.9), st.floats(0.1, 0.9), st.floats(0.1, 0.5))
def test_many_flaps_are_a_link_with_the_mean_bandwidth(share: float, duty: float, period_s: float) -> None:
    """Up to what one period can add."""
    use = flapping([usage({0: 10.0}, 10.0)], [Flap(0, share, 0.0, duty * period_s, period_s)])
    (end_s,) = ends(use, [0.0], [10.0])
    mean = 1 - duty * (1 - share)
    assert end_s == pytest.approx(10 / mean, abs=period_s / mean)


def test_a_transfer_with_its_fair_part_of_a_flapping_link_is_not_slower() -> None:
    """The second needs 5 % of the link: a fair half of the 10 % that are left."""
    use = flapping([usage({0: 1.0}, 1.0), usage({0: 0.05}, 1.0)], [Flap(0, 0.1, 0.0, 1.0, 2.0)])
    assert ends(use, [0.0, 0.0], [1.0, 1.0]) == pytest.approx([1.95, 1.0], rel=1e-9)
