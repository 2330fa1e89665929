"""Hosts that come while a run goes on: they wait, show that they are there, and are let in when the run has a place.

The node that comes writes who it is (``guest/N``) and counts (``here/N``) for as long as it waits, and says so when it
goes (``bye-guest/N``). Node 0 looks twice a second. When there are enough for a larger team it has all ranks stop at a
checkpoint (``executor.stopping``), sees who is still there, and tells each that it takes what it is to know
(``place/N``): what nodes are told that meet at the beginning, and its place. When the run is over, it tells those that
still wait (``over``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.distributed_c10d import Store

from executor.failure import Failure
from executor.introduction import Introduction, disagreement
from simplan.errors import RunError, SpecError
from simplan.program.nodes import Nodes

__all__ = ["Guest", "OverError", "WaitingRoom", "wait_for_place"]

_COUNT_S = 0.5  # a guest counts so often
_GONE_S = 5.0  # and is gone when it has not for so long
_ROLL_CALL_S = 2.0  # for each to count once more before any is let in
_PAUSE_S = 60.0  # after ranks have stopped for nobody
_FAREWELL_S = 5.0


class OverError(RunError):
    """The run has ended, and had no place for this node until then."""


@dataclass(slots=True)
class Guest:
    """A node that waits.

    Attributes:
        number: In the order in which they came, from 1.
        met: Who it is.
    """

    number: int
    met: Introduction
    _count: int = 0
    _counted_s: float = field(default=-_GONE_S)

    def look(self, count: int) -> None:
        """Takes over its count; the first one only says that it was there once."""
        if self._count not in (0, count):
            self._counted_s = time.monotonic()
        self._count = count

    @property
    def is_here(self) -> bool:
        """Whether it has counted lately."""
        return time.monotonic() - self._counted_s < _GONE_S

    def has_counted_since(self, since_s: float) -> bool:
        """Whether it was seen to count after a time on ``time.monotonic``'s clock."""
        return self._counted_s > since_s


class WaitingRoom:
    """On node 0; ``look``, ``call_roll``, ``admit`` and ``close`` ask the store.

    Args:
        store: Of all nodes.
        me: Node 0.
        sizes: Numbers of nodes that can run the job.
    """

    def __init__(self, store: Store, me: Introduction, sizes: Sequence[int]) -> None:
        self._store, self._me, self._sizes = store, me, sorted(sizes, reverse=True)
        self._guests: dict[int, Guest] = {}
        self._num_come = 0
        self._unknown: set[int] = set()  # have come, and not yet said who they are; one that dies then never does
        self._paused_until_s = 0.0

    def look(self) -> None:
        """Sees who has come and who is still there; who was asked something else is told so and sent away."""
        num_come = self._store.add("guests", 0)
        self._unknown |= set(range(self._num_come + 1, num_come + 1))
        self._num_come = num_come
        for number in sorted(self._unknown):
            if self._store.check([f"guest/{number}"]):
                self._unknown.remove(number)
                self._greet(number)
        for guest in list(self._guests.values()):
            if self._store.check([f"bye-guest/{guest.number}"]):
                del self._guests[guest.number]
            else:
                guest.look(self._store.add(f"here/{guest.number}", 0))

    def _greet(self, number: int) -> None:
        """Takes in who was asked the same as node 0."""
        leader = f"node 0 ({self._me.host.name})"
        try:
            met = Introduction.from_json(self._store.get(f"guest/{number}"), "this node", leader)
            said = disagreement((self._me, met), (leader, met.host.name))
        except SpecError as error:
            said = str(error)
        if said is None:
            self._guests[number] = Guest(number, met)
        else:
            self._answer(number, {"error": said, "exit_code": SpecError.exit_code})

    def call_roll(self) -> list[Guest]:
        """Those that count from now on, in the order in which they came; returns when all have, or after a moment.

        ``here`` is not enough to let them in: node 0 may not have looked for long, and who has counted since then and
        died would be let in, be missed by the others, and cost a restart.
        """
        self.look()
        since_s = time.monotonic()
        while True:
            self.look()
            present = [guest for guest in self._guests.values() if guest.has_counted_since(since_s)]
            if len(present) == len(self._guests) or time.monotonic() > since_s + _ROLL_CALL_S:
                return present
            time.sleep(0.02)

    def pause(self) -> None:
        """Ranks have stopped for nobody: whoever comes and goes is not to make them do so again and again."""
        self._paused_until_s = time.monotonic() + _PAUSE_S

    @property
    def here(self) -> list[Guest]:
        """Those that wait, in the order in which they came."""
        return [guest for guest in self._guests.values() if guest.is_here]

    def lets_grow(self, num_nodes: int) -> bool:
        """Whether a team of so many nodes and those that wait could be a larger one, and is not to pause."""
        if time.monotonic() < self._paused_until_s:
            return False
        return (self.largest(num_nodes + len(self.here)) or 0) > num_nodes

    def largest(self, num_nodes: int) -> int | None:
        """Of so many nodes as many as can run the job; None when it takes more."""
        return next((size for size in self._sizes if size <= num_nodes), None)

    def admit(self, guest: Guest, told: Mapping[str, Any]) -> None:
        """Gives a guest its place."""
        del self._guests[guest.number]
        self._answer(guest.number, {"error": None, **told})

    def close(self, failure: Failure | None) -> None:
        """Tells those that wait how the run has ended, and waits a little for them to hear it."""
        self.look()
        here = self.here
        self._store.set("over", "null" if failure is None else failure.model_dump_json())
        deadline_s = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline_s and not all(self._store.check([f"bye-guest/{g.number}"]) for g in here):
            time.sleep(0.05)

    def _answer(self, number: int, told: Mapping[str, Any]) -> None:
        self._store.set(f"place/{number}", json.dumps(told))


def wait_for_place(nodes: Nodes, store: Store, me: Introduction, leaving: threading.Event) -> dict[str, Any]:
    """On the node that comes: what node 0 tells it once it is let in, or why it is sent away.

    Args:
        nodes: The request.
        store: Of all nodes.
        me: This node.
        leaving: Set when it is to wait no longer.

    Raises:
        OverError: The run has ended without a failure.
        SimplanError: It has ended with one.
        RunError: There was no place for ``join_timeout_s``, or until it was to leave.
        torch.distributed.DistError: Node 0 has gone.
    """
    number = store.add("guests", 1)
    store.set(f"guest/{number}", me.to_json())
    deadline_s = time.monotonic() + nodes.join_timeout_s
    place = f"place/{number}"
    while not store.check([place]):
        if store.check(["over"]):
            over = store.get("over")
            store.set(f"bye-guest/{number}", "")
            if over == b"null":
                raise OverError(f"the run at {nodes.endpoint} has ended, and did not need this node")
            raise Failure.model_validate_json(over).error()
        if leaving.is_set() or time.monotonic() > deadline_s:
            store.set(f"bye-guest/{number}", "")
            if store.check([place]):  # node 0 had let it in before
                break
            raise RunError(
                f"the run at {nodes.endpoint} had no place for this node within {nodes.join_timeout_s:g} s; start the "
                "command again when it has lost a node, or give a longer --join-timeout"
            )
        store.add(f"here/{number}", 1)
        leaving.wait(_COUNT_S)
    told: dict[str, Any] = json.loads(store.get(place))
    return told
