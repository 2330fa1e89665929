"""Where nodes wait to be let in, before a run begins and while it goes on: node 0's side.

A node that comes (``executor.guest``) writes who it is (``guest/N``) and counts (``here/N``) for as long as it waits.
Node 0 looks, and lets in as many as make a team that can run the job: it tells each that it takes its place
(``place/N``) and which team that is (``team/K``). That the run has begun is told once, with the job (``run``); that it
is over, too (``over``), and those who still wait go.

A node may go in the very moment in which it is let in. Both it and node 0 then count its seat (``seat/N``): who counts
first has it, so that either it goes and all know, or it is let in and knows. One that dies cannot say so; all that are
let in must have counted a moment ago (``call_roll``), and one that dies still later is lost, without a restart.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from torch.distributed.distributed_c10d import Store

from executor.exchange import Host
from executor.failure import Failure
from executor.introduction import Introduction, disagreement
from simplan.errors import Problem, SpecError

__all__ = ["Guest", "WaitingRoom", "by_place"]

_GONE_S = 5.0  # a guest is gone when it has not counted for so long
_ROLL_CALL_S = 2.0  # for each to count once more before any is let in
_PAUSE_S = 60.0  # after ranks have stopped for nobody
_FAREWELL_S = 5.0


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
    _came_s: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """``its-host-name (its address)``."""
        return f"{self.met.host.name} ({self.met.host.address})"

    def look(self, count: int) -> None:
        """Takes over its count; the first one only says that it was there once."""
        if self._count not in (0, count):
            self._counted_s = time.monotonic()
        self._count = count

    @property
    def is_here(self) -> bool:
        """Whether it has counted lately."""
        return time.monotonic() - self._counted_s < _GONE_S

    @property
    def may_be_here(self) -> bool:
        """The same, or it has only just come."""
        return self.is_here or time.monotonic() - self._came_s < _GONE_S

    def has_counted_since(self, since_s: float) -> bool:
        """Whether it was seen to count after a time on ``time.monotonic``'s clock."""
        return self._counted_s > since_s


class WaitingRoom:
    """On node 0; ``look``, ``seat``, ``admit``, ``begin`` and ``close`` ask the store.

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
        self._has_begun = False

    def look(self) -> None:
        """Sees who has come and who is still there; who was asked something else is told so and sent away.

        Raises:
            SpecError: The same, before the run has begun, which then does not.
        """
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
        who, leader = "this node" if self._has_begun else "a node that joins", f"node 0 ({self._me.host.name})"
        try:
            met = Introduction.from_json(self._store.get(f"guest/{number}"), who, leader)
            guest = Guest(number, met)
            said = disagreement((self._me, met), (leader, guest.name))
        except SpecError as error:
            said = str(error)
        if said is not None and not self._has_begun:
            raise SpecError(Problem(field="", rule=said))
        if said is None and not self._has_begun:
            said = self._taken(guest)
        if said is None:
            self._guests[number] = guest
        else:
            self._answer(number, {"error": said, "exit_code": SpecError.exit_code})

    def _taken(self, guest: Guest) -> str | None:
        """Why it cannot have the place that it asks for; None when it can."""
        place = guest.met.node_rank
        if place is None or all(place != g.met.node_rank for g in self._guests.values() if g.may_be_here):
            return None
        fix = "give each its own"
        return str(SpecError(Problem(field="--node-rank", value=str(place), rule="is taken by another node", fix=fix)))

    def seat(self, num_nodes: int) -> list[Guest]:
        """Gives seats to as many of those that wait as make a larger team with so many nodes, in the order of places.

        All of them are there and can go no more without saying so as members of that team; ``admit`` is to follow.
        """
        present = list(by_place(self._call_roll()).values())
        while True:
            number = self.largest(num_nodes + len(present))
            wanted = present[: max(0, (number or 0) - num_nodes)]
            seated = [guest for guest in wanted if self._store.add(f"seat/{guest.number}", 1) == 1]
            if len(seated) == len(wanted):
                return seated
            self.unseat(seated)
            present = [guest for guest in present if guest in seated or guest not in wanted]

    def unseat(self, guests: Sequence[Guest]) -> None:
        """Takes the seats back: they wait as before, and may go."""
        for guest in guests:
            self._store.delete_key(f"seat/{guest.number}")

    def _call_roll(self) -> list[Guest]:
        """Those that count from now on, in the order in which they came; returns when all have, or after a moment.

        ``here`` is not enough to let them in: node 0 may not have looked for long, and who has counted since then and
        died would be let in, and be missed by the others.
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

    def admit(self, guests: Sequence[Guest], team: int, hosts: Sequence[Host], first_attempt: int) -> None:
        """Tells guests that have seats that they are the last nodes of a team.

        Args:
            guests: In the order of their places.
            team: How many teams there were before.
            hosts: All nodes of it, by place.
            first_attempt: How often ranks have been started again before.
        """
        told = {"hosts": [asdict(host) for host in hosts], "first_attempt": first_attempt}
        self._store.set(f"team/{team}", json.dumps(told))
        for place, guest in enumerate(guests, len(hosts) - len(guests)):
            self._guests.pop(guest.number, None)
            self._answer(guest.number, {"error": None, "place": place, "team": team})

    def begin(self, job: str, clock_port: int, *, lets_in: bool) -> None:
        """Tells all that the run has begun; who has no place by now may get one later, or goes.

        Args:
            job: What is run, as JSON.
            clock_port: Where node 0 tells the time.
            lets_in: Whether nodes that come later may be let in.
        """
        self._has_begun = True
        self._store.set("run", json.dumps({"job": job, "clock_port": clock_port, "lets_in": lets_in}))

    def close(self, failure: Failure | None, farewell_s: float = _FAREWELL_S) -> None:
        """Tells those that wait how the run has ended, and waits a little for them to hear it."""
        self._has_begun = True
        self._store.set("over", "null" if failure is None else failure.model_dump_json())
        deadline_s = time.monotonic() + farewell_s
        self.look()
        while time.monotonic() < deadline_s and any(guest.may_be_here for guest in self._guests.values()):
            time.sleep(0.05)
            self.look()

    def _answer(self, number: int, told: dict[str, object]) -> None:
        self._store.set(f"place/{number}", json.dumps(told))


def by_place(guests: Sequence[Guest]) -> dict[int, Guest]:
    """In order: those that ask for a place have it, the others the free ones as they came."""
    asked = {guest.met.node_rank: guest for guest in guests if guest.met.node_rank is not None}
    others = [guest for guest in guests if guest not in asked.values()]
    free = (place for place in itertools.count(1) if place not in asked)
    return dict(sorted({**asked, **dict(zip(free, others, strict=False))}.items()))
