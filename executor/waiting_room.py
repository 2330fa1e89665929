"""Hosts that come while a run goes on: they wait, show that they are there, and are let in when the run has a place.

The node that comes writes who it is (``guest/N``) and counts (``here/N``) for as long as it waits. Node 0 looks twice a
second. When there are enough for a larger team it has all ranks stop at a checkpoint (``executor.stopping``), and tells
each that it takes what it is to know (``place/N``): what nodes are told that meet at the beginning, and its place. When
the run is over, it tells those that still wait (``over``).
"""

from __future__ import annotations

import json
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


class WaitingRoom:
    """On node 0; ``look``, ``admit`` and ``close`` ask the store.

    Args:
        store: Of all nodes.
        me: Node 0.
        sizes: Numbers of nodes that can run the job.
    """

    def __init__(self, store: Store, me: Introduction, sizes: Sequence[int]) -> None:
        self._store, self._me, self._sizes = store, me, sorted(sizes, reverse=True)
        self._guests: dict[int, Guest] = {}
        self._num_seen = 0

    def look(self) -> None:
        """Sees who has come and who is still there; who was asked something else is told so and sent away."""
        while self._store.check([f"guest/{self._num_seen + 1}"]):
            self._num_seen += 1
            met = Introduction.from_json(self._store.get(f"guest/{self._num_seen}"))
            said = disagreement((self._me, met), (f"node 0 ({self._me.host.name})", met.host.name))
            if said is None:
                self._guests[self._num_seen] = Guest(self._num_seen, met)
            else:
                self._answer(self._num_seen, {"error": said, "exit_code": SpecError.exit_code})
        for guest in self._guests.values():
            guest.look(self._store.add(f"here/{guest.number}", 0))

    @property
    def here(self) -> list[Guest]:
        """Those that wait, in the order in which they came."""
        return [guest for guest in self._guests.values() if guest.is_here]

    def lets_grow(self, num_nodes: int) -> bool:
        """Whether a team of so many nodes and those that wait could be a larger one."""
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


def wait_for_place(nodes: Nodes, store: Store, me: Introduction) -> dict[str, Any]:
    """On the node that comes: what node 0 tells it once it is let in, or why it is sent away.

    Raises:
        OverError: The run has ended without a failure.
        SimplanError: It has ended with one.
        RunError: There was no place for ``join_timeout_s``.
        torch.distributed.DistError: Node 0 has gone.
    """
    number = store.add("guests", 1)
    store.set(f"guest/{number}", me.to_json())
    deadline_s = time.monotonic() + nodes.join_timeout_s
    while not store.check([f"place/{number}"]):
        if store.check(["over"]):
            over = store.get("over")
            store.set(f"bye-guest/{number}", "")
            if over == b"null":
                raise OverError(f"the run at {nodes.endpoint} has ended, and did not need this node")
            raise Failure.model_validate_json(over).error()
        if time.monotonic() > deadline_s:
            raise RunError(
                f"the run at {nodes.endpoint} had no place for this node within {nodes.join_timeout_s:g} s; start the "
                "command again when it has lost a node, or give a longer --join-timeout"
            )
        store.add(f"here/{number}", 1)
        time.sleep(_COUNT_S)
    told: dict[str, Any] = json.loads(store.get(f"place/{number}"))
    return told
