"""Simulated workers of parameter servers, and of Hogwild: closed forms, laws, and two other implementations."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan.sim.workers import CoresOfNodes, Workers, WorkerTimes, simulate_workers

_Seconds = st.floats(0.01, 10.0)


def equal(
    num_workers: int, compute_s: float, transfer_s: float, update_s: float, num_servers: int = 1, **more: Any
) -> Workers:
    transfers = np.full((num_workers, num_servers), transfer_s)
    return unequal([compute_s] * num_workers, update_s, push_s=transfers, num_servers=num_servers, **more)


def unequal(compute_s: list[float], update_s: float, push_s: Any = None, num_servers: int = 1, **more: Any) -> Workers:
    push_s = np.zeros((len(compute_s), num_servers)) if push_s is None else push_s
    finish_s, updates_s = np.zeros(len(compute_s)), np.full(num_servers, update_s)
    return Workers(np.array([compute_s]), finish_s, push_s, push_s, updates_s, **more)


@given(st.integers(1, 6), _Seconds, _Seconds, _Seconds, st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_equal_workers_have_the_throughput_of_a_closed_form(
    num_workers: int, compute_s: float, transfer_s: float, update_s: float, num_servers: int
) -> None:
    """The queue of constant times is periodic: a worker never waits, or the server never idles."""
    times = simulate_workers(equal(num_workers, compute_s, transfer_s, update_s, num_servers), 40)
    alone_s = compute_s + 2 * transfer_s + update_s
    assert times.updates_per_s == pytest.approx(min(num_workers / alone_s, 1 / update_s), rel=1e-6)
    assert times.staleness.mean() == pytest.approx(num_workers - 1, abs=0.1)
    assert times.queued_s == pytest.approx(max(0.0, num_workers * update_s - alone_s), abs=0.05 * alone_s)


@given(st.lists(_Seconds, min_size=2, max_size=5), _Seconds, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_no_worker_is_more_steps_ahead_than_the_bound(compute_s: list[float], update_s: float, bound: int) -> None:
    bounded, free = (
        simulate_workers(unequal(compute_s, update_s, max_ahead=max_ahead), 20) for max_ahead in (bound, None)
    )
    assert bounded.most_ahead <= bound
    # a server can be kept busy with updates of fast workers, at the cost of slow ones
    assert bounded.updates_per_s <= free.updates_per_s * (1 + 0.1)
    assert free.held_s == 0


@given(st.lists(_Seconds, min_size=2, max_size=5))
@settings(max_examples=25, deadline=None)
def test_a_bound_of_0_is_as_fast_as_synchronous_steps(compute_s: list[float]) -> None:
    times = simulate_workers(unequal(compute_s, 1e-9, max_ahead=0), 20)
    assert times.updates_per_s == pytest.approx(len(compute_s) / max(compute_s), rel=1e-5)
    assert times.most_ahead == 0
    assert times.staleness.max() <= len(compute_s) - 1


@given(st.lists(_Seconds, min_size=2, max_size=5), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_a_bound_holds_fast_workers_to_the_slowest(compute_s: list[float], bound: int) -> None:
    """Ho et al. 2013: in the long run, all workers take as many steps, however large the bound is."""
    times = simulate_workers(unequal(compute_s, 1e-9, max_ahead=bound), 40 * (bound + 1))
    assert times.updates_per_s == pytest.approx(len(compute_s) / max(compute_s), rel=0.1)


@given(st.lists(st.floats(1.0, 10.0), min_size=2, max_size=5))
@settings(max_examples=25, deadline=None)
def test_unbounded_workers_take_steps_at_their_own_speed(compute_s: list[float]) -> None:
    """Their updates are as stale as there are others, in the mean: counted pair by pair, rates cancel."""
    times = simulate_workers(unequal(compute_s, 1e-9), 200)
    assert times.updates_per_s == pytest.approx(sum(1 / step_s for step_s in compute_s), rel=1e-6)
    assert times.staleness.mean() == pytest.approx(len(compute_s) - 1, rel=0.03)


def simulated_again(
    compute_s: list[list[float]], transfer_s: float, update_s: float, steps: int
) -> tuple[float, float]:
    """Updates per second and mean staleness of one server, by a heap of arrivals: no SimPy, and no common code."""
    free_s, version = 0.0, 0
    pulled, ends = [0] * len(compute_s), [0.0] * len(compute_s)
    number, stale, applied = [0] * len(compute_s), list[int](), list[float]()
    arrivals = [(steps_s[0] + transfer_s, worker) for worker, steps_s in enumerate(compute_s)]
    heapq.heapify(arrivals)
    while len(applied) < steps:
        arrived_s, worker = heapq.heappop(arrivals)
        free_s = max(free_s, arrived_s) + update_s
        stale.append(version - pulled[worker])
        version += 1
        pulled[worker] = version
        applied.append(free_s)
        number[worker] += 1
        ends[worker] = free_s + transfer_s
        steps_s = compute_s[worker]
        heapq.heappush(arrivals, (ends[worker] + steps_s[number[worker] % len(steps_s)] + transfer_s, worker))
    begin = steps // 4
    return (steps - 1 - begin) / (applied[-1] - applied[begin]), float(np.mean(stale[begin:]))


@pytest.mark.parametrize("update_s", [0.01, 0.2, 0.5])
def test_random_steps_agree_with_another_event_loop(update_s: float) -> None:
    drawn = np.random.default_rng(1).exponential(1.0, (97, 5)) + 0.1
    transfers = np.full((5, 1), 0.05)
    workers = Workers(drawn, np.zeros(5), transfers, transfers, np.array([update_s]))
    times = simulate_workers(workers, 400)
    rate, staleness = simulated_again(drawn.T.tolist(), 0.05, update_s, 2000)
    assert times.updates_per_s == pytest.approx(rate, rel=0.01)
    assert times.staleness.mean() == pytest.approx(staleness, abs=0.03)


@pytest.mark.parametrize(("update_s", "num_workers"), [(0.1, 4), (0.3, 4), (0.3, 8)])
def test_exponential_steps_agree_with_a_machine_repairman(update_s: float, num_workers: int) -> None:
    """A repairman (the server) of machines (workers) that fail at random: constant repairs make shorter queues.

    So the throughput lies between that of exponential repairs (M/M/1//N) and that without any variance.
    """
    drawn = np.random.default_rng(2).exponential(1.0, (2000, num_workers))
    nothing = np.zeros((num_workers, 1))
    workers = Workers(drawn, np.zeros(num_workers), nothing, nothing, np.array([update_s]))
    times = simulate_workers(workers, 2000)
    weights = [1.0]
    for waiting in range(num_workers):
        weights.append(weights[-1] * (num_workers - waiting) * update_s)
    exponential = (1 - weights[0] / sum(weights)) / update_s
    constant = min(num_workers / (1 + update_s), 1 / update_s)
    assert exponential * 0.99 <= times.updates_per_s <= constant


def test_a_lock_makes_updates_wait_and_none_lets_them_overlap() -> None:
    locked, free = (simulate_workers(equal(4, 0.1, 0.0, 1.0, has_lock=lock), 40) for lock in (True, False))
    assert locked.updates_per_s == pytest.approx(1.0)
    assert free.updates_per_s == pytest.approx(4 / 1.1)
    assert free.queued_s == 0
    assert locked.queued_s == pytest.approx(4 - 1.1)


@pytest.mark.parametrize(("num_cores", "expected"), [(2, 2.0), (4, 4.0)])
def test_workers_share_the_cores_of_their_node(num_cores: int, expected: float) -> None:
    cores = CoresOfNodes(num_cores, 1.0, 0.0, [0] * 4, [0])
    times = simulate_workers(equal(4, 1.0, 0.0, 1e-6, cores=cores), 20)
    assert times.updates_per_s == pytest.approx(expected, rel=0.01)


def test_times_are_the_same_in_every_run() -> None:
    drawn = np.random.default_rng(3).exponential(1.0, (50, 3))
    transfers = np.full((3, 2), 0.1)
    workers = Workers(drawn, np.zeros(3), transfers, transfers, np.array([0.1, 0.2]), max_ahead=2)
    first, second = (simulate_workers(workers, 30) for _ in range(2))
    assert isinstance(first, WorkerTimes)
    assert first.updates_per_s == second.updates_per_s
    assert (first.staleness == second.staleness).all()
