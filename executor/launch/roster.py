"""The roster of replicas that may leave and join: what their launchers and ranks write into the store of the run.

A *replica* is as many ranks as one copy of the model takes; all start and end together. Each start of a replica is an
*incarnation* of it, from 1. A rank beats twice a second from a thread of its own, however long its steps take. A
replica has left when its launcher says so, or when one of its ranks has not beaten for ``LEASE_S``: its host is lost or
cut off.

Clocks of hosts are not compared: a beat is a text that changes, and each reader times the changes itself.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from executor.launch.rank import ROSTER_VARIABLE
from simplan.errors import RunError
from simplan.units import counted

LEASE_S = 15.0
"""Seconds without a beat after which a rank is gone. A host that stands still for longer has to join anew."""

_BEAT_S = 0.5
_POLL_S = 0.2
_MAX_PAUSE_S = 0.02
_ANSWER_S = 15.0  # of the store; without one, this rank is cut off
_START_S = 300.0  # for a rank that has not beaten yet, which imports torch on a busy host
_GONE = "gone"


def connect(host: str, port: int) -> TCPStore:
    """A connection of its own to the store: a wait on a connection holds up all else on it."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_S))


def appears(store: Store, key: str, within_s: float = _POLL_S) -> bool:
    """True when a key is in the store, now or within some seconds.

    Raises:
        RuntimeError: The store does not answer.
    """
    end_s, pause_s = time.monotonic() + within_s, 1e-3
    while not store.check([key]):  # a wait that ends without the key would be a warning of torch's
        if time.monotonic() > end_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    return True


class Roster:
    """Entries of all replicas, for launchers and ranks.

    Args:
        store: Store of the run.
        num_replicas: Replicas of the plan.
        num_ranks: Ranks of a replica.
        address: Host and port of the store.
    """

    def __init__(self, store: Store, num_replicas: int, num_ranks: int, address: tuple[str, int]) -> None:
        self.store = PrefixStore("roster", store)
        self.num_replicas, self.num_ranks, self.address = num_replicas, num_ranks, address

    def ranks_of(self, replica: int) -> range:
        """Global ranks of a replica."""
        return range(replica * self.num_ranks, (replica + 1) * self.num_ranks)

    def open(self) -> None:
        """Prepares the store; called once, on the node that has it, which gets the first replicas."""
        for rank in range(self.num_replicas * self.num_ranks):
            self.store.set(f"beat/{rank}", _beat(0, 0))
        self.store.add("nodes", 1)
        self.store.set("open", "")

    def claim(self, num_here: int, timeout_s: float, *, leads: bool) -> list[int]:
        """Replicas of this node: the next ones, or those of a node that has left.

        Waits until all nodes are there, or for a node to leave.

        Args:
            num_here: Replicas on each node.
            leads: This node has opened the roster.

        Raises:
            RunError: Other nodes did not come in time, or none has left.
        """
        num_nodes, end_s = self.num_replicas // num_here, time.monotonic() + timeout_s
        self.store.wait(["open"], timedelta(seconds=timeout_s))
        place = 0 if leads else self.store.add("nodes", 1) - 1
        if place < num_nodes:
            if place == num_nodes - 1:
                self.store.set("all nodes", "")
            elif not appears(self.store, "all nodes", timeout_s):
                raise RunError(f"{counted(num_nodes, 'node')} did not join within {timeout_s:g} s")
            return [*range(place * num_here, (place + 1) * num_here)]
        watch = Watch(self)
        while time.monotonic() < end_s:
            watch.look()
            for first in range(0, self.num_replicas, num_here):
                here = [*range(first, first + num_here)]
                if all(map(watch.has_left, here)) and self._is_mine(first):
                    return here
            time.sleep(_BEAT_S)
        raise RunError(f"no node has left the run within {timeout_s:g} s, and {counted(num_nodes, 'node')} are in it")

    def _is_mine(self, replica: int) -> bool:
        """True for the first node that claims a replica after this incarnation."""
        return bool(self.store.add(f"claimed/{replica}.{self.incarnation(replica)}", 1) == 1)

    def starts(self, replica: int) -> int:
        """Notes that a replica starts; returns its incarnation."""
        incarnation = int(self.store.add(f"incarnation/{replica}", 1))
        for rank in self.ranks_of(replica):
            self.store.set(f"beat/{rank}", _beat(incarnation, 0))
        return incarnation

    def incarnation(self, replica: int) -> int:
        """Newest incarnation of a replica; 0 before its first start."""
        return int(self.store.add(f"incarnation/{replica}", 0))

    def leaves(self, replica: int) -> None:
        """Notes that the processes of a replica have ended."""
        for rank in self.ranks_of(replica):
            self.store.set(f"beat/{rank}", _GONE)

    def finish(self) -> None:
        """Notes that a replica has taken the last step of the run."""
        self.store.set("finished", "")

    @property
    def is_finished(self) -> bool:
        """True once a replica has taken the last step."""
        return bool(self.store.check(["finished"]))

    def wait_for_others(self) -> None:
        """Waits until the run is finished, or every replica has left: the store ends with this process."""
        watch = Watch(self)
        while not self.is_finished:
            watch.look()
            if all(map(watch.has_left, range(self.num_replicas))):
                return
            time.sleep(_BEAT_S)

    def end_with(self, replicas: list[int]) -> None:
        """Notes the replicas in the last outer step, or those that were there when servers ended."""
        self.store.set("last", json.dumps(replicas))

    @property
    def last_ranks(self) -> list[int]:
        """Ranks of the replicas that were there last; all before any replica said so."""
        has_met = self.store.check(["last"])
        replicas = json.loads(self.store.get("last")) if has_met else range(self.num_replicas)
        return [rank for replica in replicas for rank in self.ranks_of(replica)]

    def environment(self, incarnation: int) -> Mapping[str, str]:
        """Variables for ranks of an incarnation."""
        host, port = self.address
        return {ROSTER_VARIABLE: f"{host} {port} {incarnation}"}

    @classmethod
    def of_rank(cls, num_replicas: int, num_ranks: int) -> tuple[Roster, int]:
        """Roster and incarnation of the rank that is this process.

        Raises:
            RunError: The rank was not started by a launcher that has a roster.
        """
        told = os.environ.get(ROSTER_VARIABLE)
        if told is None:
            raise RunError(
                "plan.replication.min_replicas needs the launcher of `simplan run`, and torchrun started this"
            )
        host, port, incarnation = told.split()
        address = host, int(port)
        return cls(connect(*address), num_replicas, num_ranks, address), int(incarnation)


class Watch:
    """Who beats, as one process sees it."""

    def __init__(self, roster: Roster) -> None:
        self._roster, now_s = roster, time.monotonic()
        self._keys = [f"beat/{rank}" for rank in range(roster.num_replicas * roster.num_ranks)]
        self._beats = [_beat(0, 0)] * len(self._keys)
        self._changed_s = [now_s] * len(self._keys)

    def look(self, store: Store | None = None) -> None:
        """Reads the beats of all ranks.

        Args:
            store: Connection of the calling thread; None for that of the roster.
        """
        beats, now_s = (store or self._roster.store).multi_get(self._keys), time.monotonic()
        for rank, beat in enumerate(map(bytes.decode, beats)):
            if beat != self._beats[rank]:
                self._beats[rank], self._changed_s[rank] = beat, now_s

    def has_left(self, replica: int, incarnation: int = 0) -> bool:
        """True if a rank of the replica is gone, or of an incarnation after the given one."""
        now_s = time.monotonic()
        for rank in self._roster.ranks_of(replica):
            beat, silent_s = self._beats[rank], now_s - self._changed_s[rank]
            if beat == _GONE:
                return True
            newest, number = map(int, beat.split())
            if silent_s > (LEASE_S if number else _START_S) or 0 < incarnation < newest:
                return True
        return False


@contextmanager
def lifeline(roster: Roster) -> Iterator[None]:
    """Ends this process, and with it its ranks, when the store does not answer for ``2 * LEASE_S`` during the block.

    A host that is cut off gets no error: torch's store waits for answers without a limit (torch 2.13).
    """
    answered_s, ended = [time.monotonic()], threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):  # the ranks say so
            store = connect(*roster.address)
            while not ended.wait(_BEAT_S):
                store.check(["roster/open"])
                answered_s[0] = time.monotonic()

    def listen() -> None:
        while not ended.wait(_BEAT_S):
            if asking.is_alive() and time.monotonic() > answered_s[0] + 2 * LEASE_S:
                host, port = roster.address
                sys.stderr.write(f"the store of the run at {host}:{port} does not answer for {2 * LEASE_S:g} s\n")
                sys.stderr.flush()
                os._exit(RunError.exit_code)

    asking = threading.Thread(target=ask, name="lifeline", daemon=True)
    asking.start()
    threading.Thread(target=listen, name="lifeline's end", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Pulse(Watch):
    """Beats of this rank, and its view of the others: a thread with a connection of its own.

    Attributes:
        error: Why the rank beats no longer; None while it does.
    """

    def __init__(self, roster: Roster, rank: int, incarnation: int) -> None:
        super().__init__(roster)
        self.error: RuntimeError | None = None
        self._rank, self._incarnation, self._ended = rank, incarnation, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        try:
            store, number = PrefixStore("roster", connect(*self._roster.address)), 0
            while True:
                number += 1
                store.set(f"beat/{self._rank}", _beat(self._incarnation, number))
                self.look(store)
                if self._ended.wait(_BEAT_S):
                    return
        except RuntimeError as error:
            self.error = error


def _beat(incarnation: int, number: int) -> str:
    """Text of a beat, numbered from 1; number 0 is written by the launcher, before the first."""
    return f"{incarnation} {number}"
