"""The clock of faults, and who hears of them: launchers without ranks, joined by a list in place of a store."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from executor.launch import faults
from executor.launch.faults import FaultInjector
from executor.launch.watchdog import Beat, RankState
from simplan.runs.faults import Fault

PIDS = {0: 100, 1: 101, 2: 102, 3: 103}


class Store:
    """Rendezvous of one node of several that share a list."""

    def __init__(self, told: list[str], *, leads: bool) -> None:
        self.nodes, self._told = SimpleNamespace(leads=leads), told

    def tell(self, text: str) -> None:
        self._told.append(text)

    def num_told(self) -> int:
        return len(self._told)

    def told_since(self, number: int) -> Iterator[str]:
        yield from self._told[number:]


class Cluster:
    """Injectors of nodes, a clock that the test sets, and the signals that ranks got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, schedule: list[Fault], num_nodes: int) -> None:
        self.now_s, self.hit, self.lost = 0.0, list[tuple[int, int]](), list[float | None]()
        told: list[str] = []
        self.nodes = [
            FaultInjector(schedule, self._store(told, k), lambda number, process: process, self.lost.append)
            for k in range(num_nodes)
        ]
        monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(faults, "children_by_rank", lambda: PIDS)
        monkeypatch.setattr(faults, "signal_ours", lambda pid, number: self.hit.append((pid, number)))
        monkeypatch.setattr("os.kill", lambda pid, number: self.hit.append((0, number)))

    def _store(self, told: list[str], k: int) -> Any:
        return Store(told, leads=k == 0)

    def start(self, meeting: str, *nodes: int) -> None:
        """Two ranks on each of these nodes."""
        for place, k in enumerate(nodes):
            self.nodes[k].ranks_start(meeting, (2 * place, 2 * place + 1), 2 * len(nodes), 2 * len(nodes))

    def at(self, now_s: float, step: int = 0) -> list[tuple[int, int]]:
        """Signals so far, after all nodes have looked at this time."""
        self.now_s = now_s
        for node in self.nodes:
            node.poll({0: Beat(100, now_s, step, RankState.RUNNING, "0F0")})
        for node in self.nodes:
            node.poll({})
        return self.hit


def kill(**when: Any) -> Fault:
    return Fault(kind="kill", **when)


def test_age_begins_with_the_first_step_and_stands_still_from_a_fault_to_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, [kill(at_s=10.0, rank=1), kill(at_s=15.0, rank=0)], 1)
    cluster.start("a", 0)
    assert cluster.at(100.0) == [], "the first step begins"
    assert cluster.at(109.9) == []
    assert cluster.at(110.0) == [(101, signal.SIGKILL)]
    assert cluster.at(300.0) == [(101, signal.SIGKILL)], "no rank runs"
    cluster.start("b", 0)
    assert cluster.at(304.9) == [(101, signal.SIGKILL)]
    assert cluster.at(305.0)[1:] == [(100, signal.SIGKILL)]
    assert [fault.time_s for fault in cluster.nodes[0].happened] == [110.0, 305.0]


def test_faults_of_steps_happen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, [kill(at_step=5, rank=1)], 1)
    cluster.start("a", 0)
    assert cluster.at(1.0, step=4) == []
    assert len(cluster.at(2.0, step=5)) == 1
    cluster.start("b", 0)
    assert len(cluster.at(3.0, step=6)) == 1


def test_other_nodes_hear_of_their_faults_and_a_spare_does_not_meet_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = [kill(at_s=1.0, rank=3), kill(at_s=2.0, node=1, for_s=7.0)]
    cluster = Cluster(monkeypatch, schedule, 3)
    cluster.start("a", 0, 1)
    cluster.at(0.0)
    assert cluster.at(1.0) == [(103, signal.SIGKILL)]
    cluster.start("b", 0, 2)  # the spare has now the ranks that were hit
    assert cluster.at(1.5) == [(103, signal.SIGKILL)]
    assert cluster.lost == []
    assert cluster.at(2.0)[1:] == [(0, signal.SIGKILL)], "the launcher itself"
    assert cluster.lost == [7.0]


def test_nodes_are_counted_without_the_one_at_the_endpoint_and_from_the_first_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node 3 of two is node 1, wherever the leading one stands."""
    cluster = Cluster(monkeypatch, [Fault(kind="stop", at_s=1.0, node=3)], 2)
    cluster.start("a", 1, 0)
    cluster.at(0.0)
    assert sorted(cluster.at(1.0)) == [(100, signal.SIGSTOP), (101, signal.SIGSTOP)]
