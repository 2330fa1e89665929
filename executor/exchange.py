"""What nodes tell each other while their ranks run, twice a second, through the store on node 0.

Every node tells node 0 what its ranks do and why attempts to run them have ended, and when it leaves. Node 0 tells
which rank is to be ended because it hangs. Who has been silent longest shows on one clock only, that of node 0. It also
looks who waits to be let in.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch.distributed.distributed_c10d import Store

from executor.failure import Failure
from executor.heartbeat import Beat, RankState
from executor.store_line import StoreLine
from simplan.errors import RunError
from simplan.program.nodes import Nodes
from simplan.spec.base import Spec

__all__ = ["REGROUP", "Beats", "Door", "Exchange", "Heard", "Host", "LostNodeError", "OtherNodeError", "RegroupError"]

_EXCHANGE_S = 0.5
_LOST_S = 30.0  # silent for so long, a node counts as lost
_LEAST_LOST_S = 5.0
REGROUP = "regroup"
"""Key of the store that is there when others than these nodes are to go on."""

Beats = tuple[Beat | None, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """What nodes know of each other.

    Attributes:
        name: Its host name.
        address: Where it is seen from the others.
    """

    name: str
    address: str


class OtherNodeError(RunError):
    """Another node has ended the run; ``Team.settle`` tells why."""


class LostNodeError(RunError):
    """A node cannot be reached any more."""


class RegroupError(RunError):
    """Others than these nodes are to go on: one is lost, one leaves, or one is let in (``executor.regroup``).

    Attributes:
        num_restarts: How often ranks have been started again, as far as this node knows.
        is_restart: Whether this counts as a restart: this node has found that one is lost whose ranks had begun. Before
            that nothing is lost with it: a node that dies as soon as it is let in must not use up the restarts.
    """

    num_restarts = 0
    is_restart = False


class Door(Protocol):
    """Where node 0 sees who wants to be let in (``executor.waiting_room``)."""

    def look(self) -> None:
        """Sees who is there; on the store's thread."""

    def lets_grow(self, num_nodes: int) -> bool:
        """Whether there are enough for a larger team than one of so many nodes."""


class _Sign(NamedTuple):
    """A beat, on node 0's clock."""

    time_s: float
    attempt: int
    step: int
    state: RankState
    doing: str


class _News(Spec):
    """What a node tells node 0: its ranks' signs of life, None for one without, and why attempts have ended."""

    signs: tuple[_Sign | None, ...] = ()
    ended: tuple[Failure, ...] = ()


class Heard(NamedTuple):
    """What a node knows after an exchange.

    Attributes:
        beats: By global rank: on node 0 of all ranks, elsewhere of the node's own.
        ended: On node 0, why attempts have ended on each of the others.
        to_end: Rank of this node that is to be ended, because it hangs; None for none.
        can_grow: On node 0, whether nodes wait with which a larger team could go on.
    """

    beats: Beats
    ended: tuple[tuple[Failure, ...], ...]
    to_end: int | None
    can_grow: bool = False


@dataclass(slots=True)
class _Last:
    """The last that was heard of a node."""

    at_s: float
    news: _News


class Exchange:
    """This node's part in it.

    Args:
        nodes: The request.
        node_rank: Place of this node.
        hosts: All nodes, by place.
        store: On node 0.
        line: How the store is asked.
        offset_s: Node 0's clock minus this node's.
        may_regroup: Whether the others go on when a node is lost; not without node 0.
        door: On node 0 of a run that lets nodes in.

    Attributes:
        lost: Nodes that cannot be reached any more.
        left: Nodes that have said that they leave.
        begun: On node 0, other nodes whose ranks have been heard of.
    """

    def __init__(
        self,
        nodes: Nodes,
        node_rank: int,
        hosts: tuple[Host, ...],
        store: Store,
        line: StoreLine,
        offset_s: float,
        *,
        may_regroup: bool = False,
        door: Door | None = None,
    ) -> None:
        self.lost: set[int] = set()
        self.left: set[int] = set()
        self.begun: set[int] = set()
        self._may_regroup, self._door = may_regroup, door
        self._node_rank, self._hosts, self._store, self._line = node_rank, hosts, store, line
        self._per_node, self._offset_s = nodes.ranks_per_node, offset_s
        others = range(1, len(hosts)) if node_rank == 0 else range(1)
        self._last = {node: _Last(time.monotonic(), _News()) for node in others}
        self._pending: Future[dict[int, _News]] | None = None
        self._asked_s = 0.0
        self._to_end: int | None = None

    def turn(self, beats: Beats, ended: Sequence[Failure], timeout_s: float) -> Heard:
        """Tells and hears; to be called often, returns at once.

        Args:
            beats: By global rank; None for ranks of other nodes.
            ended: Why attempts have ended here, those before the current one.
            timeout_s: Of the job. A silent node is given up in half of it at most, so that the run can end in time.

        Raises:
            OtherNodeError: One of the others has ended the run.
            LostNodeError: A node has not been heard of for too long.
            RegroupError: The same, and the others are to go on without it; or a node leaves.
        """
        now_s = time.monotonic()
        if self._pending is not None and self._pending.done():
            for node, news in self._result(self._pending).items():
                self._last[node] = _Last(now_s, news)
                if any(news.signs):
                    self.begun.add(node)
            self._pending = None
        if self._pending is None and now_s - self._asked_s >= _EXCHANGE_S:
            self._asked_s = now_s
            first = self._node_rank * self._per_node
            signs = tuple(_sign(beat, self._offset_s) for beat in beats[first : first + self._per_node])
            mine = _News(signs=signs, ended=tuple(ended))
            self._pending = self._line.submit(lambda: self._tell_and_hear(mine))
        lost_s = max(_LEAST_LOST_S, min(_LOST_S, timeout_s / 2))
        for node, last in self._last.items():
            if now_s - last.at_s > lost_s:
                raise self._lost_node(node, f"nothing has been heard of it for {lost_s:g} s")
        theirs = tuple(last.news.ended for last in self._last.values())
        can_grow = self._door is not None and self._door.lets_grow(len(self._hosts))
        return Heard(self._all_beats(beats), theirs, self._to_end, can_grow)

    def leave(self, timeout_s: float) -> None:
        """Tells node 0 that this node leaves, if node 0 can be told."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._line.ask(lambda: self._store.set(f"left/{self._node_rank}", ""), timeout_s)

    def end_rank(self, rank: int, attempt: int) -> None:
        """On node 0: has the node of a rank end it, if it is still of that attempt."""
        self._line.submit(lambda: self._store.set(f"hung/{attempt}", str(rank)))

    def _tell_and_hear(self, mine: _News) -> dict[int, _News]:
        """One exchange, on the store's thread; gives what is new."""
        if self._store.check(["failed"]):
            raise OtherNodeError("another node has ended the run")
        if self._node_rank:
            if self._store.check([REGROUP]):
                raise RegroupError("other nodes are to go on")
            self._store.set(f"news/{self._node_rank}", mine.model_dump_json())
            self._to_end = self._hear_whom_to_end(len(mine.ended))
            return {0: _News()}
        self.left |= {node for node in self._last if self._store.check([f"left/{node}"])}
        if self.left:
            raise RegroupError("a node leaves")
        if self._door is not None:
            self._door.look()
        keys = {node: f"news/{node}" for node in self._last}
        found = {node: self._store.get(key) for node, key in keys.items() if self._store.check([key])}
        for node in found:
            self._store.delete_key(keys[node])
        return {node: _News.model_validate_json(text) for node, text in found.items()}

    def _hear_whom_to_end(self, attempt: int) -> int | None:
        key = f"hung/{attempt}"
        rank = int(self._store.get(key)) if self._store.check([key]) else None
        return rank if rank is not None and rank // self._per_node == self._node_rank else None

    def _all_beats(self, beats: Beats) -> Beats:
        """Those of this node and the last that others told."""
        every = list(beats)
        for node, last in self._last.items():
            for rank, sign in enumerate(last.news.signs, node * self._per_node):
                every[rank] = None if sign is None else _beat(sign)
        return tuple(every)

    def _result(self, pending: Future[dict[int, _News]]) -> dict[int, _News]:
        try:
            return pending.result()
        except (OtherNodeError, RegroupError):
            raise
        except RuntimeError:
            raise self._lost_node(0, "the connection with it was lost") from None

    def _lost_node(self, node: int, how: str) -> LostNodeError | RegroupError:
        self.lost.add(node)
        where = self._hosts[node]
        sentence = f"node {node} ({where.name}, {where.address}) cannot be reached: {how}"
        if node == 0 and self._may_regroup:
            sentence += "; it has the store of the run, which ends without it"
        if node == 0 or not self._may_regroup:
            return LostNodeError(sentence)
        error = RegroupError(sentence)
        error.is_restart = node in self.begun
        return error


def _sign(beat: Beat | None, offset_s: float) -> _Sign | None:
    return None if beat is None else _Sign(beat.time_s + offset_s, beat.attempt, beat.step, beat.state, beat.doing)


def _beat(sign: _Sign) -> Beat:
    """Without a process: what another node's ranks are called there means nothing here."""
    return Beat(0, sign.time_s, sign.step, sign.state, sign.doing, sign.attempt)
