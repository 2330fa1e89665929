"""The nodes of one run: how they meet, agree on a job, hear of each other's failures, and bring results together.

All of it goes through one store of torch's on node 0 (``HOST:PORT``), the one that torchrun's c10d rendezvous then uses
too. Node 0 hears everybody, decides and tells: what is run, whether somebody is silent, and at the end how it went.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from executor.heartbeat import Beat, RankState
from executor.host_clock import ClockReading, read_clock
from executor.store_line import StoreLine
from simplan.errors import Problem, RunError, SimplanError, SpecError
from simplan.program.nodes import Nodes
from simplan.spec.base import Spec

__all__ = ["Failure", "Host", "LostNodeError", "NodeResult", "OtherNodeError", "Team", "first_cause"]

_EXCHANGE_S = 0.5
_LOST_S = 30.0  # without an answer for so long, a node counts as lost
_LEAST_LOST_S = 5.0
_FAREWELL_S = 10.0
Beats = tuple[Beat | None, ...]
_Result = TypeVar("_Result")


class Failure(Spec):
    """Why a run ended early, as one node sees it.

    Attributes:
        sentence: For people.
        consequence: It may be the consequence of what happened on another node.
        exit_code: Of the error.
    """

    sentence: str
    consequence: bool = False
    exit_code: int = RunError.exit_code

    def error(self) -> SimplanError:
        """The same as an error."""
        if self.exit_code == SpecError.exit_code:
            return SpecError(Problem(field="", rule=self.sentence))
        return RunError(self.sentence)


class NodeResult(Spec):
    """What a node has to say at the end.

    Attributes:
        failure: Why its part ended early; None when it did not.
        steps: What its ranks measured, by rank (``RankFiles.steps``).
        readings: Of its clock.
    """

    failure: Failure | None
    steps: dict[int, str]
    readings: tuple[ClockReading, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """What nodes know of each other.

    Attributes:
        name: Its host name.
        address: Where it is seen from the others.
    """

    name: str
    address: str


_Told = list[tuple[float, int, int, str]]
"""What ranks of a node do: seconds since the beat, step, state, doing; of a rank without a beat, state is -1."""


@dataclass(slots=True)
class _Heard:
    """The last that was heard of a node."""

    at_s: float
    told: _Told = field(default_factory=list)


class OtherNodeError(RunError):
    """Another node has ended the run; ``Team.settle`` tells why."""


class LostNodeError(RunError):
    """A node cannot be reached any more."""


class Team:
    """This node among the others, after they have met (``executor.meeting.meet``).

    Attributes:
        node_rank: Place of this node.
        hosts: All nodes, by place.
        job: What to run, as JSON.
    """

    def __init__(
        self,
        nodes: Nodes,
        node_rank: int,
        hosts: tuple[Host, ...],
        store: Store,
        line: StoreLine,
        interface: str,
        job: str,
        clock_port: int,
    ) -> None:
        self.node_rank, self.hosts, self.job = node_rank, hosts, job
        self._nodes, self._store, self._line, self._interface = nodes, store, line, interface
        self._clock_port = clock_port
        self._readings: list[ClockReading] = []
        others = range(1, nodes.num_nodes) if node_rank == 0 else range(1)
        self._heard = {node: _Heard(time.monotonic()) for node in others}
        self._lost: set[int] = set()
        self._pending: Future[dict[int, _Told]] | None = None
        self._asked_s = 0.0

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.node_rank == 0

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        per_node = self._nodes.ranks_per_node
        return range(self.node_rank * per_node, (self.node_rank + 1) * per_node)

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self._nodes.num_nodes * self._nodes.ranks_per_node

    def name(self, node_rank: int) -> str:
        """``node 1 (its-host-name)``."""
        return f"node {node_rank} ({self.hosts[node_rank].name})"

    @property
    def me(self) -> str:
        """The same of this node."""
        return self.name(self.node_rank)

    def torchrun_arguments(self) -> list[str]:
        """How torchrun meets the others: as a client of the store that is there already."""
        nodes = self._nodes
        wait_s = int(nodes.join_timeout_s) + 1
        return [
            f"--nnodes={nodes.num_nodes}",
            f"--nproc-per-node={nodes.ranks_per_node}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={nodes.endpoint}",
            "--rdzv-id=simplan",
            f"--rdzv-conf=is_host=false,join_timeout={wait_s}",
            f"--local-addr={self.hosts[self.node_rank].address}",
        ]

    def environment(self) -> dict[str, str]:
        """What ranks need to talk to other nodes."""
        return {"GLOO_SOCKET_IFNAME": self._interface, "NCCL_SOCKET_IFNAME": self._interface}

    def read_clock(self) -> None:
        """Compares this node's clock with node 0's; to be called while the network is quiet."""
        if not self.leads:
            self._readings.append(read_clock(self._nodes.host, self._clock_port))

    def exchange(self, beats: Beats, timeout_s: float) -> Beats:
        """Tells the others what this node's ranks do. Node 0 gets the beats of all ranks back, others their own.

        Args:
            beats: By global rank; None for ranks of other nodes.
            timeout_s: Of the job. A silent node is given up in half of it at most, so that the run can end in time.

        Raises:
            OtherNodeError: One of the others has ended the run.
            LostNodeError: A node has not been heard of for too long.
        """
        lost_s = max(_LEAST_LOST_S, min(_LOST_S, timeout_s / 2))
        now_s = time.monotonic()
        if self._pending is not None and self._pending.done():
            for node, told in self._result(self._pending).items():
                self._heard[node] = _Heard(now_s, told)
            self._pending = None
        if self._pending is None and now_s - self._asked_s >= _EXCHANGE_S:
            self._asked_s = now_s
            mine = [_told(beats[rank], now_s) for rank in self.ranks]
            self._pending = self._line.submit(lambda: self._tell_and_hear(mine))
        for node, heard in self._heard.items():
            if now_s - heard.at_s > lost_s:
                raise self._lost_node(node, f"nothing has been heard of it for {lost_s:g} s")
        return self._all_beats(beats) if self.leads else beats

    def settle(self, failure: Failure | None, steps: Mapping[int, str]) -> tuple[Failure | None, list[NodeResult]]:
        """The end of the run on all nodes.

        Args:
            failure: Why it ended early here; None when it did not.
            steps: What this node's ranks measured.

        Returns:
            Why the run ended early, the same on all nodes that can still talk; and on node 0 the results of the others.
        """
        if 0 in self._lost:
            return failure, []
        result = NodeResult(failure=failure, steps=dict(steps), readings=tuple(self._readings))
        try:
            if failure is not None:
                self._ask(lambda: self._store.set("failed", str(self.node_rank)))
            return self._decide(result) if self.leads else (self._hear_decision(result), [])
        except (RuntimeError, TimeoutError):
            lost = Failure(sentence=f"{self.me} lost its connection with {self.name(0)}", consequence=True)
            return failure or lost, []

    def _ask(self, call: Callable[[], _Result], timeout_s: float = _LOST_S) -> _Result:
        return self._line.ask(call, timeout_s)

    def _result(self, pending: Future[dict[int, _Told]]) -> dict[int, _Told]:
        try:
            return pending.result()
        except OtherNodeError:
            raise
        except RuntimeError:
            raise self._lost_node(0, "the connection with it was lost") from None

    def _lost_node(self, node: int, how: str) -> LostNodeError:
        self._lost.add(node)
        where = self.hosts[node]
        return LostNodeError(f"node {node} ({where.name}, {where.address}) cannot be reached: {how}")

    def _tell_and_hear(self, mine: _Told) -> dict[int, _Told]:
        """One exchange, on the store's thread; gives what is new."""
        if self._store.check(["failed"]):
            raise OtherNodeError("another node has ended the run")
        if not self.leads:
            self._store.set(f"beats/{self.node_rank}", json.dumps(mine))
            return {0: []}
        keys = {node: f"beats/{node}" for node in self._heard}
        found = {node: self._store.get(key) for node, key in keys.items() if self._store.check([key])}
        for node in found:
            self._store.delete_key(keys[node])
        return {node: [tuple(rank) for rank in json.loads(text)] for node, text in found.items()}

    def _all_beats(self, beats: Beats) -> Beats:
        """Those of this node and the last that others told, on this node's clock."""
        every = list(beats)
        for node, heard in self._heard.items():
            first = node * self._nodes.ranks_per_node
            for rank, (silent_s, step, state, doing) in enumerate(heard.told, first):
                every[rank] = None if state < 0 else Beat(0, heard.at_s - silent_s, step, RankState(state), doing)
        return tuple(every)

    def _decide(self, mine: NodeResult) -> tuple[Failure | None, list[NodeResult]]:
        """Node 0: waits for the results of the others, finds the first cause, and tells."""
        failures = [mine.failure]
        results = []
        deadline_s = time.monotonic() + _LOST_S
        others = [node for node in range(1, self._nodes.num_nodes) if node not in self._lost]
        told = []
        for node in others:
            packed = self._wait(f"result/{node}", deadline_s)
            if packed is None:
                lost = f"{self.name(node)} has not been heard of for {_LOST_S:g} s"
                failures.append(Failure(sentence=lost, consequence=mine.failure is not None))
                continue
            told.append(node)
            results.append(NodeResult.model_validate_json(zlib.decompress(packed)))
            failures.append(results[-1].failure)
        found = first_cause([failure for failure in failures if failure is not None])
        end = "null" if found is None else found.model_dump_json()
        self._ask(lambda: self._store.set("end", end))
        deadline_s = time.monotonic() + _FAREWELL_S
        for node in told:
            self._wait(f"bye/{node}", deadline_s)
        return found, results

    def _hear_decision(self, mine: NodeResult) -> Failure | None:
        """Another node: sends its result and waits for what node 0 says."""
        packed = zlib.compress(mine.model_dump_json().encode())
        self._ask(lambda: self._store.set(f"result/{self.node_rank}", packed))  # type: ignore[arg-type]
        end = self._wait("end", time.monotonic() + 2 * _LOST_S)
        if end is None:
            raise TimeoutError
        self._ask(lambda: self._store.set(f"bye/{self.node_rank}", ""))
        return None if end == b"null" else Failure.model_validate_json(end)

    def _wait(self, key: str, deadline_s: float) -> bytes | None:
        """The value of a key once it is there; None when the time is over."""
        while not self._ask(lambda: self._store.check([key])):
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.05)
        value: bytes = self._ask(lambda: self._store.get(key))
        return value


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Of what the nodes say, in their order: the first that is no consequence, else the first; None for nothing."""
    return next((failure for failure in failures if not failure.consequence), failures[0] if failures else None)


def _told(beat: Beat | None, now_s: float) -> tuple[float, int, int, str]:
    return (0.0, 0, -1, "") if beat is None else (now_s - beat.time_s, beat.step, int(beat.state), beat.doing)
