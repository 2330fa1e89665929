"""Compute beside communication, against a clock that walks both, and published counts and slowdowns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.cost.contention import beside_s, lost_share, num_channels
from simplan.cost.route import Route, route_of
from simplan.program.program import Message
from simplan.spec import catalogue
from simplan.spec.layer import CollectiveKind


def route(ranks: range) -> Route:
    cluster = catalogue.cluster("dgx-a100-80gb", 16)
    return route_of(Message(CollectiveKind.ALL_REDUCE, 2**30, tuple(ranks)), cluster)


@given(st.integers(1, 200), st.integers(0, 200), st.sampled_from([0.0, 0.125, 0.25, 0.5]))
def test_work_gets_done_at_the_speed_of_the_moment(compute: int, communication: int, lost: float) -> None:
    """A clock of eighths of a second."""
    left, ticks = 8.0 * compute, 0
    while left > 1e-9:
        speed = 1 - lost if ticks < 8 * communication else 1.0
        left -= speed
        ticks += 1
    assert beside_s(float(compute), float(communication), lost) == pytest.approx(ticks / 8, abs=1 / 8)


def test_channels_that_nccl_takes() -> None:
    """24 inside a node, 16 of two DGX A100 with eight NICs each, 2 where each node has one device and one NIC."""
    assert [num_channels(route(ranks)) for ranks in (range(8), range(16), range(0, 16, 8))] == [24, 16, 2]


def test_slowdowns_are_of_the_measured_size() -> None:
    """Lee et al. 2025: 18.9 % on average on four devices of a node, 40 % at most."""
    for num_multiprocessors in (108, 132):
        slower = beside_s(1.0, 10.0, lost_share(route(range(4)), num_multiprocessors)) - 1
        assert 0.189 < slower < 0.4
