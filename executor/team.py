"""The nodes of one run, as one of them sees them: who they are, how it talks to them, and who goes on.

All of it goes through one store of torch's on node 0 (``HOST:PORT``), the one that torchrun's c10d rendezvous then uses
too. Node 0 hears everybody, decides and tells: what is run, whether somebody is silent, and at the end how it went.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from executor.exchange import Exchange, Host
from executor.host_clock import ClockReading, read_clock
from executor.network import place_in_network
from executor.store_line import StoreLine
from executor.waiting_room import WaitingRoom
from simplan.errors import RunError
from simplan.program.nodes import Nodes
from simplan.program.run_spec import RunSpec

__all__ = ["ANSWER_S", "Team"]

ANSWER_S = 30.0
"""Without an answer for so long, a node counts as lost."""
_LEAVE_S = 3.0  # for node 0 to be told that this node leaves
_Result = TypeVar("_Result")


class Team:
    """This node among the others, after they have met (``executor.meeting.meet``), which makes it.

    Args:
        nodes: The request.
        node_rank, hosts, job: As the attributes.
        store: On node 0.
        line: How it is asked.
        interface: Network interface of the ranks.
        clock_port: Where node 0 tells the time.
        readings: Of this node's clock.
        first_attempt, number, room: As the attributes.

    Attributes:
        node_rank: Place of this node.
        hosts: All nodes, by place.
        job: What all nodes of the run began, as JSON.
        first_attempt: How often ranks had been started again before these nodes went on by themselves.
        number: How many teams there were before this one in the run.
        room: On node 0 of a run that lets nodes in, where these wait.
        exchange: What they tell each other while ranks run.
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
        readings: Sequence[ClockReading] = (),
        first_attempt: int = 0,
        number: int = 0,
        room: WaitingRoom | None = None,
    ) -> None:
        self.node_rank, self.hosts, self.job, self.first_attempt = node_rank, hosts, job, first_attempt
        self.number, self.room = number, room
        self._nodes, self._all_nodes_store, self._line, self._interface = nodes, store, line, interface
        # a node that was given up may still be there, and talk: nobody listens
        self._store = PrefixStore(f"team{number}", store)
        self._clock_port = clock_port
        self._readings = list(readings)
        offset_s = readings[-1].offset_s if readings else 0.0
        self.exchange = Exchange(
            nodes, node_rank, hosts, self._store, line, offset_s, may_regroup=self.is_elastic, door=room
        )

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.node_rank == 0

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on with other nodes when some go or come."""
        return self._nodes.min_nodes is not None

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        per_node = self._nodes.ranks_per_node
        return range(self.node_rank * per_node, (self.node_rank + 1) * per_node)

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return len(self.hosts) * self._nodes.ranks_per_node

    @property
    def num_missing(self) -> int:
        """Nodes that the run could have besides."""
        return self._nodes.num_nodes - len(self.hosts)

    def node_of(self, rank: int) -> str:
        """The name of the node that a rank runs on."""
        return self.name(rank // self._nodes.ranks_per_node)

    def name(self, node_rank: int) -> str:
        """``node 1 (its-host-name)``."""
        return f"node {node_rank} ({self.hosts[node_rank].name})"

    @property
    def me(self) -> str:
        """The same of this node."""
        return self.name(self.node_rank)

    @property
    def readings(self) -> tuple[ClockReading, ...]:
        """Of this node's clock, so far."""
        return tuple(self._readings)

    def torchrun_arguments(self) -> list[str]:
        """How torchrun meets the others: as a client of the store that is there already."""
        nodes = self._nodes
        # without a lost node the others come back only when it has been given up
        wait_s = int(max(nodes.join_timeout_s, 0 if nodes.min_nodes is None else 3 * ANSWER_S)) + 1
        return [
            f"--nnodes={len(self.hosts)}",
            f"--nproc-per-node={nodes.ranks_per_node}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={nodes.endpoint}",
            f"--rdzv-id=simplan-{self.number}",
            f"--rdzv-conf=is_host=false,join_timeout={wait_s}",
            f"--local-addr={self.hosts[self.node_rank].address}",
        ]

    def environment(self) -> dict[str, str]:
        """What ranks need to talk to other nodes."""
        return {"GLOO_SOCKET_IFNAME": self._interface, "NCCL_SOCKET_IFNAME": self._interface}

    def read_clock(self) -> None:
        """Compares this node's clock with node 0's once more; to be called while the network is quiet.

        Raises:
            RunError: Node 0 does not answer.
        """
        if not self.leads:
            try:
                self._readings.append(read_clock(self._nodes.host, self._clock_port))
            except OSError as error:
                raise RunError(f"the clock of {self.name(0)} cannot be asked: {error}") from None

    def following(self, place: int, hosts: Sequence[Host], first_attempt: int) -> Team:
        """The next team, with this node.

        Args:
            place: Of this node in it; the first one is node 0 again.
            hosts, first_attempt: As the attributes.
        """
        return Team(
            self._nodes,
            place,
            tuple(hosts),
            self._all_nodes_store,
            self._line,
            self._interface,
            self.job,
            self._clock_port,
            self._readings[:1],
            first_attempt,
            self.number + 1,
            self.room,
        )

    def job_here(self) -> RunSpec:
        """The job of the run as so many nodes run it."""
        whole = RunSpec.model_validate_json(self.job)
        if len(self.hosts) == self._nodes.num_nodes:
            return whole
        return next(whole.on_nodes(fewer) for fewer in whole.fewer_nodes if fewer.num_nodes == len(self.hosts))

    def face(self, address: str) -> None:
        """On node 0, when nodes come: alone it does not know how others see it.

        Raises:
            SpecError: No network interface leads there.
        """
        if len(self.hosts) == 1:
            self._interface, mine = place_in_network(self._nodes, address)
            self.hosts = (Host(self.hosts[0].name, mine),)

    def leave(self) -> None:
        """Tells the others that this node leaves, if they can be told."""
        self.exchange.leave(_LEAVE_S)

    def ask(self, call: Callable[[], _Result], timeout_s: float = ANSWER_S) -> _Result:
        """Makes a call to the store.

        Raises:
            TimeoutError, RuntimeError: Node 0 cannot be reached.
        """
        return self._line.ask(call, timeout_s)

    def tell(self, key: str, value: str | bytes = "") -> None:
        """Sets a key of the store that these nodes share.

        Raises:
            TimeoutError, RuntimeError: Node 0 cannot be reached.
        """
        self.ask(lambda: self._store.set(key, value))  # type: ignore[arg-type] # bytes, too

    def hear(self, key: str, deadline_s: float) -> bytes | None:
        """The value of a key once it is there.

        Args:
            key: The key.
            deadline_s: On ``time.monotonic``'s clock; None is given when it is over.

        Raises:
            TimeoutError, RuntimeError: Node 0 cannot be reached.
        """
        if self.hear_first((key,), deadline_s) is None:
            return None
        return self.value(key)

    def value(self, key: str) -> bytes:
        """The value of a key that is there; errors are those of ``hear``."""
        found: bytes = self.ask(lambda: self._store.get(key))
        return found

    def hear_first(self, keys: Sequence[str], deadline_s: float) -> str | None:
        """Which of several keys is there first; arguments and errors are those of ``hear``."""
        while True:
            for key in keys:
                if self.ask(lambda key=key: self._store.check([key])):  # type: ignore[misc]
                    return key
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.05)
