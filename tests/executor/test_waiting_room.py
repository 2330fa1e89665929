"""Hosts that come while a run goes on, over a store in this process."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import executor.waiting_room
from executor.exchange import Host
from executor.failure import Failure
from executor.introduction import Introduction
from executor.meeting import meet
from executor.waiting_room import OverError, WaitingRoom, wait_for_place
from simplan.errors import RunError, SpecError
from simplan.program.fewer_nodes import FewerNodes, on_fewer_devices
from simplan.program.nodes import Nodes
from tests.executor.conftest import MakeJob
from tests.executor.test_nodes import free_port
from tests.interrupts import heeded_interrupts

PATIENCE_S = 60.0
NODES = Nodes(num_nodes=4, min_nodes=2, ranks_per_node=1, host="a", port=1)


def met(name: str, **asked: str) -> Introduction:
    host = Host(name, f"10.0.0.{ord(name) - 96}")
    return Introduction(host=host, num_nodes=4, torch="2.13", asked={"model": "x", **asked})


def wait_as(store: HashStore, guest: Introduction, nodes: Nodes = NODES) -> dict[str, Any]:
    return wait_for_place(nodes, store, guest, threading.Event())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    monkeypatch.setattr(executor.waiting_room, "_COUNT_S", 0.001)
    return HashStore()


@pytest.fixture
def room(store: HashStore) -> WaitingRoom:
    return WaitingRoom(store, met("a"), [4, 2])


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
        for place, guest in enumerate(room.here, 2):
            room.admit(guest, {"place": place})
        assert first.result(PATIENCE_S) == {"error": None, "place": 2}
        assert second.result(PATIENCE_S) == {"error": None, "place": 3}
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
        room.admit(room.here[0], {})
        came.result(PATIENCE_S)
    said = "this node has another version of simplan than node 0 (a); install one version on all nodes"
    assert json.loads(store.get("place/1")) == {"error": said, "exit_code": 2}


def test_who_dies_before_it_has_said_who_it_is_hides_nobody(room: WaitingRoom, store: HashStore) -> None:
    store.add("guests", 1)
    with ThreadPoolExecutor() as pool:
        came = pool.submit(wait_as, store, met("c"))
        until(room, lambda: [guest.number for guest in room.here] == [2])
        room.admit(room.here[0], {})
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
    told = came.result()
    assert told["error"].startswith("model: differs between node 0 (a) and b; copy the scenario of one to the other")
    assert told["exit_code"] == 2


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (None, OverError, r"^the run at a:1 has ended, and did not need this node$"),
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


def test_nobody_waits_for_longer_than_asked(store: HashStore) -> None:
    said = r"^the run at a:1 had no place for this node within 0.01 s; start the command again when it has lost a node,"
    with pytest.raises(RunError, match=said):
        wait_as(store, met("b"), NODES.model_copy(update={"join_timeout_s": 0.01}))
    assert store.check(["bye-guest/1"])


def test_a_node_that_comes_later_meets_those_that_have_begun(make_job: MakeJob) -> None:
    """Through torch's store on a port, as nodes do: two begin, one waits and is let in after them."""
    job = make_job(dp=3)
    one = FewerNodes(num_nodes=2, plan=on_fewer_devices(job.plan, 2), boundaries=job.boundaries, table=job.table)
    text = job.model_copy(update={"fewer_nodes": (one,)}).model_dump_json()
    nodes = Nodes(num_nodes=2, min_nodes=1, ranks_per_node=1, host="127.0.0.1", port=free_port())
    notes: list[str] = []
    with ThreadPoolExecutor() as pool:
        teams = [pool.submit(meet, nodes, text), pool.submit(meet, nodes, None)]
        first, second = (team.result(PATIENCE_S) for team in teams)
        third = pool.submit(meet, nodes, None, notes.append)
        deadline_s = time.monotonic() + PATIENCE_S
        room = first.room
        assert room is not None
        while not room.here:
            assert time.monotonic() < deadline_s
            first.ask(room.look)
            time.sleep(0.05)
        (guest,) = room.here
        hosts = [*first.hosts, guest.met.host]
        first.ask(lambda: room.admit(guest, first.invitation(2, hosts, 1)))
        came = third.result(PATIENCE_S)
    assert (first.node_rank, second.node_rank, came.node_rank) == (0, 1, 2)
    assert (came.number, came.first_attempt, came.ranks) == (1, 1, range(2, 3))
    assert came.hosts == tuple(hosts)
    assert notes == [f"the run at {nodes.endpoint} has begun; waiting for a place in it"]


def test_a_node_of_another_version_ends_the_meeting_with_a_sentence(make_job: MakeJob) -> None:
    nodes = Nodes(num_nodes=2, ranks_per_node=1, host="127.0.0.1", port=free_port())
    said = "node 1 has another version of simplan than node 0; install one version on all nodes"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, nodes, make_job(dp=2).model_dump_json())
        store = TCPStore("127.0.0.1", nodes.port, is_master=False, wait_for_workers=False)
        store.set("node/1", STRANGERS[0])
        store.set("heard/1", "")
        with pytest.raises(SpecError, match=f"^{said}$"):
            first.result(PATIENCE_S)
        assert json.loads(store.get("verdict")) == {"error": said, "exit_code": 2}


def test_a_node_that_is_interrupted_while_it_waits_says_goodbye(make_job: MakeJob) -> None:
    text = make_job(dp=2).model_dump_json()
    nodes = Nodes(num_nodes=2, min_nodes=1, ranks_per_node=1, host="127.0.0.1", port=free_port())
    main = threading.main_thread().ident
    assert main is not None
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, nodes, text)
        pool.submit(meet, nodes, None).result(PATIENCE_S)
        room, ask = first.result().room, first.result().ask
        assert room is not None
        with heeded_interrupts(), pytest.raises(KeyboardInterrupt):
            meet(nodes, None, lambda note: signal.pthread_kill(main, signal.SIGINT))
        assert ask(lambda: room._store.check(["bye-guest/1"]))
