"""What nodes tell each other while ranks run, over a store in this process, and what is told of restarts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import executor.attempts
import executor.exchange
from executor.attempts import Attempts
from executor.exchange import Exchange, Heard, Host, LostNodeError, OtherNodeError, RegroupError
from executor.failure import Failure
from executor.heartbeat import Beat, RankState
from executor.rank import RankFiles
from executor.store_line import StoreLine
from simplan.program.nodes import Nodes

NODES = Nodes(num_nodes=2, ranks_per_node=2, host="a", port=1)
HOSTS = (Host("a", "10.0.0.1"), Host("b", "10.0.0.2"))
AHEAD_S = 1000.0  # node 1's clock
PATIENCE_S = 60.0


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def two(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> tuple[Exchange, Exchange]:
    monkeypatch.setattr(executor.exchange, "_EXCHANGE_S", 0.0)
    return (
        Exchange(NODES, 0, HOSTS, store, StoreLine(), 0.0),
        Exchange(NODES, 1, HOSTS, store, StoreLine(), -AHEAD_S),
    )


def until(wanted: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not wanted():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_node_0_hears_of_all_ranks_on_its_own_clock(two: tuple[Exchange, Exchange]) -> None:
    here, there = two
    mine = (Beat(11, 5.0, 3, RankState.RUNNING, "0F1", 1), None, None, None)
    beat = Beat(12, AHEAD_S + 6.0, 4, RankState.WAITING, "1B0", 1)
    ended = [Failure(sentence="boom")]
    heard = here.turn(mine, [], 60.0)

    def all_is_heard() -> bool:
        nonlocal heard
        there.turn((None, None, None, beat), ended, 60.0)
        heard = here.turn(mine, [], 60.0)
        return heard.beats[3] is not None

    until(all_is_heard)
    assert heard.beats == (*mine[:3], Beat(0, 6.0, 4, RankState.WAITING, "1B0", 1))
    assert heard.ended == (tuple(ended),)


def test_only_the_node_of_a_hanging_rank_is_to_end_it_and_only_in_its_attempt(two: tuple[Exchange, Exchange]) -> None:
    here, there = two
    here.end_rank(1, 0)  # a rank of node 0
    here.end_rank(3, 1)
    none: tuple[None, ...] = (None,) * 4
    told: list[int | None] = []

    def to_end(num_ended: int) -> int | None:
        told.append(there.turn(none, [Failure(sentence="boom")] * num_ended, 60.0).to_end)
        return told[-1]

    until(lambda: to_end(1) == 3)
    until(lambda: to_end(2) is None)
    for _ in range(50):
        to_end(0)
        time.sleep(0.001)
    assert set(told) == {None, 3}


def test_the_end_on_another_node_and_silence_are_errors(
    two: tuple[Exchange, Exchange], store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two
    none: tuple[None, ...] = (None,) * 4
    monkeypatch.setattr(executor.exchange, "_LEAST_LOST_S", 0.0)
    with pytest.raises(LostNodeError, match=r"^node 1 \(b, 10.0.0.2\) cannot be reached: nothing has been heard of it"):
        until(lambda: here.turn(none, [], 0.02) is None)
    assert here.lost == {1}
    store.set("failed", "1")
    with pytest.raises(OtherNodeError):
        until(lambda: there.turn(none, [], 60.0) is None)


NONE: tuple[None, ...] = (None,) * 4


@pytest.fixture
def elastic(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> tuple[Exchange, Exchange]:
    """Of a run that goes on when nodes go."""
    monkeypatch.setattr(executor.exchange, "_EXCHANGE_S", 0.0)
    return (
        Exchange(NODES, 0, HOSTS, store, StoreLine(), 0.0, may_regroup=True),
        Exchange(NODES, 1, HOSTS, store, StoreLine(), 0.0, may_regroup=True),
    )


def test_a_node_that_leaves_is_not_waited_for_and_no_restart(elastic: tuple[Exchange, Exchange]) -> None:
    here, there = elastic
    there.leave(PATIENCE_S)
    with pytest.raises(RegroupError) as caught:
        until(lambda: here.turn(NONE, [], 2 * PATIENCE_S) is None)  # silent for half of it, it would be lost
    assert (here.left, here.lost, caught.value.is_restart) == ({1}, set(), False)


def test_a_lost_node_is_a_restart_and_node_0_the_end(
    elastic: tuple[Exchange, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = elastic
    monkeypatch.setattr(executor.exchange, "_LEAST_LOST_S", 0.0)
    said = r"^node 0 \(a, 10.0.0.1\) cannot be reached: .*; it has the store of the run, which ends without it$"
    with pytest.raises(LostNodeError, match=said):
        until(lambda: there.turn(NONE, [], -1.0) is None)
    mine = (None, None, None, Beat(12, 6.0, 4, RankState.WAITING, "1B0", 0))
    until(lambda: bool(there.turn(mine, [], 60.0) and here.turn(NONE, [], 60.0).beats[3]))
    with pytest.raises(RegroupError, match=r"^node 1 ") as caught:
        until(lambda: here.turn(NONE, [], 0.02) is None)
    assert caught.value.is_restart


def test_a_node_that_is_lost_before_its_ranks_are_heard_of_is_no_restart(
    elastic: tuple[Exchange, Exchange], store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = elastic
    there.turn(NONE, [], 60.0)
    until(lambda: store.check(["news/1"]))
    until(lambda: here.turn(NONE, [], 60.0) is not None and not store.check(["news/1"]))
    monkeypatch.setattr(executor.exchange, "_LEAST_LOST_S", 0.0)
    with pytest.raises(RegroupError, match=r"^node 1 ") as caught:
        until(lambda: here.turn(NONE, [], 0.02) is None)
    assert (here.lost, caught.value.is_restart) == ({1}, False)


def test_a_restart_is_told_with_the_cause_when_all_nodes_have_said_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    failures = tmp_path / "failures.json"
    files = [RankFiles(tmp_path, rank) for rank in range(2)]
    attempts = Attempts(failures, files, tmp_path / "log", None, 2, told.append, ())
    failures.write_text(json.dumps([]) + "\n")  # ranks of another node were the first to fail
    attempts.look((None, None))
    assert len(attempts.ended) == 1
    attempts.tell([[]])
    assert told == []
    attempts.tell([[Failure(sentence="node 1: boom")]])
    attempts.tell([[Failure(sentence="node 1: boom")]])
    assert told == ["node 1: boom; restart 1 of 2"]
    failures.write_text(failures.read_text() + json.dumps([{"rank": 0, "exitcode": -9}]) + "\n")
    old, new = (Beat(11 * attempt, 0.0, 3, RankState.RUNNING, "0F1", attempt) for attempt in (1, 2))
    attempts.look((old, None))
    attempts.tell([[Failure(sentence="node 1: boom")]], last=True)
    assert told[1:] == ["rank 0 was killed by signal 9 in 0F1 of step 4; restart 2 of 2"]
    assert attempts.beats_of_this((old, new)) == (None, new)
    killed: list[int] = []
    monkeypatch.setattr(executor.attempts, "kill_sessions", killed.extend)
    attempts.heed(Heard((old, new), (), 0))  # of an attempt that is over
    attempts.heed(Heard((old, new), (), 1))
    assert killed == [22]
