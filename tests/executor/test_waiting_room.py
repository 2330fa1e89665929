"""Hosts that wait to be let in, before a run begins and while it goes on, over a store in this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import executor.guest
import executor.waiting_room
from executor.exchange import Host
from executor.failure import Failure
from executor.guest import NotNeededError, wait_for_place
from executor.introduction import Introduction
from executor.waiting_room import Guest, WaitingRoom, by_place
from simplan.errors import RunError, SpecError
from simplan.program.nodes import Nodes
from tests.executor.conftest import MakeJob

PATIENCE_S = 60.0
HERE = socket.gethostname()
NODES = Nodes(num_nodes=4, min_nodes=2, ranks_per_node=1, host="a", port=1)


def met(name: str, node_rank: int | None = None, **asked: str) -> Introduction:
    host = Host(name, f"10.0.0.{ord(name) - 96}")
    return Introduction(host=host, num_nodes=4, node_rank=node_rank, torch="2.13", asked={"model": "x", **asked})


def wait_as(store: HashStore, guest: Introduction, nodes: Nodes = NODES) -> dict[str, Any]:
    return wait_for_place(nodes, store, guest, threading.Event())


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.guest, "_COUNT_S", 0.001)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def early(store: HashStore) -> WaitingRoom:
    """Before the run begins."""
    return WaitingRoom(store, met("a"), [4, 2])


@pytest.fixture
def room(early: WaitingRoom, make_job: MakeJob) -> WaitingRoom:
    """Of a run that goes on."""
    early.begin(make_job().model_dump_json(), 1, lets_in=True)
    return early


def let_in(room: WaitingRoom, num_nodes: int) -> list[str]:
    """Makes so many nodes a larger team with those that are there; gives the names of these by place."""
    seated = room.seat(num_nodes)
    hosts = [Host(f"old-{place}", "") for place in range(num_nodes)] + [guest.met.host for guest in seated]
    room.admit(seated, 1, hosts, 0)
    return [guest.met.host.name for guest in seated]


def until(room: WaitingRoom, wanted: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not wanted():
        assert time.monotonic() < deadline_s
        room.look()
        time.sleep(0.001)


def test_a_run_grows_when_enough_wait_and_not_before(room: WaitingRoom, store: HashStore) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(wait_as, store, met("b"))
        until(room, lambda: len(room.here) == 1)
        assert [room.lets_grow(n) for n in (1, 2, 3, 4)] == [True, False, True, False]
        second = pool.submit(wait_as, store, met("c"))
        until(room, lambda: len(room.here) == 2)
        assert room.lets_grow(2)
        assert [guest.met.host.name for guest in room.here] == ["b", "c"]
        assert let_in(room, 2) == ["b", "c"]
        assert first.result(PATIENCE_S) == {"error": None, "place": 2, "team": 1}
        assert second.result(PATIENCE_S) == {"error": None, "place": 3, "team": 1}
    told = json.loads(store.get("team/1"))
    assert [host["name"] for host in told["hosts"]] == ["old-0", "old-1", "b", "c"]
    assert room.here == []


def test_who_came_and_is_gone_does_not_count(
    room: WaitingRoom, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("guests", 1)
    store.set("guest/1", met("b").to_json())
    store.add("here/1", 7)
    room.look()
    room.look()
    assert room.here == []  # it may have been gone before node 0 looked
    store.add("here/1", 1)
    room.look()
    assert len(room.here) == 1
    monkeypatch.setattr(executor.waiting_room, "_GONE_S", 0.0)
    assert room.here == []
    assert not room.lets_grow(3)


FULL = json.loads(met("b").to_json())
STRANGERS = [
    json.dumps({**FULL, "more": 1}),
    json.dumps({key: value for key, value in FULL.items() if key != "torch"}),
    json.dumps({**FULL, "host": "b"}),
    "[]",
    "junk",
]
"""What nodes of other versions may say of themselves."""


@pytest.mark.parametrize("said", STRANGERS, ids=["more", "less", "other", "list", "junk"])
def test_who_has_another_version_is_sent_away_and_the_run_goes_on(
    said: str, room: WaitingRoom, store: HashStore
) -> None:
    store.add("guests", 1)
    store.set("guest/1", said)
    with ThreadPoolExecutor() as pool:
        came = pool.submit(wait_as, store, met("c"))
        until(room, lambda: [guest.met.host.name for guest in room.here] == ["c"])
        assert let_in(room, 3) == ["c"]
        came.result(PATIENCE_S)
    said = "this node has another version of simplan than node 0 (a); install one version on all nodes"
    assert json.loads(store.get("place/1")) == {"error": said, "exit_code": 2}


def test_who_dies_before_it_has_said_who_it_is_hides_nobody(room: WaitingRoom, store: HashStore) -> None:
    store.add("guests", 1)
    with ThreadPoolExecutor() as pool:
        came = pool.submit(wait_as, store, met("c"))
        until(room, lambda: [guest.number for guest in room.here] == [2])
        assert let_in(room, 3) == ["c"]
        came.result(PATIENCE_S)


def test_who_waits_no_longer_is_gone_at_once(room: WaitingRoom, store: HashStore) -> None:
    leaving = threading.Event()
    with ThreadPoolExecutor() as pool:
        came = pool.submit(wait_for_place, NODES, store, met("b"), leaving)
        until(room, lambda: len(room.here) == 1)
        leaving.set()
        with pytest.raises(RunError):
            came.result(PATIENCE_S)
    room.look()
    assert room.here == []


def test_ranks_do_not_stop_again_at_once_for_nobody(
    room: WaitingRoom, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("guests", 1)
    store.set("guest/1", met("b").to_json())
    until(room, lambda: bool(store.add("here/1", 1) and room.here))
    assert room.lets_grow(3)
    room.pause()
    assert not room.lets_grow(3)
    monkeypatch.setattr(executor.waiting_room, "_PAUSE_S", 0.0)
    room.pause()
    assert room.lets_grow(3)


def test_who_was_asked_something_else_is_sent_away(room: WaitingRoom, store: HashStore) -> None:
    with ThreadPoolExecutor() as pool:
        came = pool.submit(wait_as, store, met("b", model="y"))
        until(room, came.done)
    with pytest.raises(
        SpecError, match=r"^model: differs between node 0 \(a\) and b \(10.0.0.2\); copy the scenario of"
    ):
        came.result()


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (None, NotNeededError, r"^the run at a:1 has ended, and did not need this node$"),
        (Failure(sentence="rank 1 died"), RunError, "^rank 1 died$"),
    ],
)
def test_who_waits_when_the_run_ends_hears_how(
    failure: Failure | None, error: type[RunError], said: str, room: WaitingRoom, store: HashStore
) -> None:
    with ThreadPoolExecutor() as pool:
        came = pool.submit(wait_as, store, met("b"))
        until(room, lambda: len(room.here) == 1)
        room.close(failure)
        with pytest.raises(error, match=said):
            came.result(PATIENCE_S)


def test_nobody_waits_for_longer_than_asked(room: WaitingRoom, store: HashStore) -> None:
    said = r"^the run at a:1 had no place for this node within 0.01 s; start the command again when it has lost a node,"
    with pytest.raises(RunError, match=said):
        wait_as(store, met("b"), NODES.model_copy(update={"join_timeout_s": 0.01}))
    assert store.check(["bye-guest/1"])


# before a run begins


def test_who_was_asked_something_else_before_the_run_begins_ends_it(early: WaitingRoom, store: HashStore) -> None:
    said = r"^model: differs between node 0 \(a\) and c \(10.0.0.3\); copy"
    with ThreadPoolExecutor() as pool:
        second = pool.submit(wait_as, store, met("b"))
        until(early, lambda: len(early.here) == 1)
        third = pool.submit(wait_as, store, met("c", model="y"))
        with pytest.raises(SpecError, match=said) as caught:
            until(early, lambda: False)
        early.close(Failure(sentence=str(caught.value), exit_code=2))
        for came in (second, third):
            with pytest.raises(SpecError, match=said):
                came.result(PATIENCE_S)


def test_two_nodes_cannot_have_the_same_place(early: WaitingRoom, store: HashStore) -> None:
    """The second one is told; where the first one died, it has the place."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(wait_as, store, met("b", 2))
        until(early, lambda: len(early.here) == 1)
        second = pool.submit(wait_as, store, met("c", 2))
        until(early, second.done)
        with pytest.raises(SpecError, match=r"^--node-rank = 2: is taken by another node; give each its own$"):
            second.result()
        assert let_in(early, 1) == ["b"]
        first.result(PATIENCE_S)


def test_the_place_of_a_node_that_died_is_free(
    early: WaitingRoom, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("guests", 1)
    store.set("guest/1", met("b", 2).to_json())
    early.look()
    monkeypatch.setattr(executor.waiting_room, "_GONE_S", 0.0)
    with ThreadPoolExecutor() as pool:
        again = pool.submit(wait_as, store, met("b", 2))
        monkeypatch.setattr(executor.waiting_room, "_ROLL_CALL_S", 0.5)
        deadline_s = time.monotonic() + PATIENCE_S
        while not (seated := early.seat(1)):
            assert time.monotonic() < deadline_s
        assert [guest.number for guest in seated] == [2]
        early.admit(seated, 0, [Host("a", ""), seated[0].met.host], 0)
        again.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("asked", "places"),
    [
        ({"b": None, "c": None, "d": None}, {1: "b", 2: "c", 3: "d"}),
        ({"b": 3, "c": None, "d": 1}, {1: "d", 2: "c", 3: "b"}),
        ({"b": None, "c": 1}, {1: "c", 2: "b"}),
        ({"b": 7, "c": 5}, {5: "c", 7: "b"}),
    ],
)
def test_places_are_those_asked_for_and_then_those_that_are_free(
    asked: dict[str, int | None], places: dict[int, str]
) -> None:
    guests = [Guest(number, met(name, place)) for number, (name, place) in enumerate(asked.items(), 1)]
    assert {place: guest.met.host.name for place, guest in by_place(guests).items()} == places
    assert list(by_place(guests)) == sorted(places)


def test_who_goes_while_it_is_let_in_either_goes_or_comes(room: WaitingRoom, store: HashStore) -> None:
    """In the same moment, many times: node 0 and the node never think differently of it."""
    came = gone = 0
    with ThreadPoolExecutor() as pool:
        for k in range(50):
            leaving = threading.Event()
            guest = pool.submit(wait_for_place, NODES, store, met("b"), leaving)
            until(room, lambda: len(room.here) == 1)
            threading.Timer(0.001 * k, leaving.set).start()
            if let_in(room, 3):
                assert guest.result(PATIENCE_S)["place"] == 3
                came += 1
            else:
                with pytest.raises(RunError):
                    guest.result(PATIENCE_S)
                gone += 1
    assert came
    assert gone


def test_two_come_at_once_and_there_is_one_place(store: HashStore, make_job: MakeJob) -> None:
    room = WaitingRoom(store, met("a"), [3, 2])
    room.begin(make_job().model_dump_json(), 1, lets_in=True)
    leaving = threading.Event()
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(wait_for_place, NODES, store, met(name), leaving) for name in "bc"]
        until(room, lambda: len(room.here) == 2)
        (name,) = let_in(room, 2)
        let, waits = both if name == "b" else reversed(both)
        assert let.result(PATIENCE_S)["place"] == 2
        assert let_in(room, 3) == []
        assert not waits.done()
        leaving.set()
        with pytest.raises(RunError):
            waits.result(PATIENCE_S)


def test_who_cannot_come_alone_keeps_waiting_and_may_go(
    room: WaitingRoom, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would have made four nodes of two; one of them goes just before it gets its seat."""
    leaving = threading.Event()
    with ThreadPoolExecutor() as pool:
        stays = pool.submit(wait_for_place, NODES, store, met("b"), leaving)
        until(room, lambda: len(room.here) == 1)
        store.add("guests", 1)
        store.set("guest/2", met("c").to_json())
        until(room, lambda: bool(store.add("here/2", 1)) and len(room.here) == 2)
        monkeypatch.setattr(WaitingRoom, "_call_roll", lambda room: room.here)
        store.add("seat/2", 1)
        assert let_in(room, 2) == []
        assert not stays.done()
        leaving.set()
        with pytest.raises(RunError):
            stays.result(PATIENCE_S)
