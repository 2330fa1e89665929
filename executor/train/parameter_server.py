"""Asynchronous parameter servers over gloo's point-to-point transfers: a client in every worker, and the servers.

A message between a worker and a server has a header of ``HEADER`` numbers, and then the slices of all parameters that
the server serves, in FP32. A worker pushes its gradients and waits for the reply, which has the parameters after its
update. Its header has the update: its staleness, seconds queued and held, and the worker's steps ahead of the slowest.
A worker that is done sends a header that begins with -1, and gets no reply. One that starts late asks for parameters by
a header that begins with 2; the reply begins with its first step, or with -1 if there are none left.

A server has one thread per worker, so that a worker that is late delays no other. Threads take turns to update. With
bounded staleness (SSP), a worker gets its reply once it is at most ``staleness`` steps ahead of the slowest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.profiling.recorder import Recorder
from executor.train.optimizers import make_optimizer
from simplan.errors import RunError
from simplan.optimizers import UpdateName
from simplan.plan.replication import Replication
from simplan.program.lowering.servers import FP32_BYTES, HEADER_BYTES
from simplan.runs.measurement import MeasuredUpdate
from simplan.units import counted

HEADER = HEADER_BYTES // FP32_BYTES
_POLL_S = 0.1
_UPDATES, _DONE, _JOINS = 1.0, -1.0, 2.0
"""First number of the header of a worker's message."""


class Connection(NamedTuple):
    """Connection of a worker and a server.

    Attributes:
        group: Process group of both.
        peer: Rank of the other one in it.
    """

    group: dist.ProcessGroup
    peer: int

    def send(self, message: Tensor) -> dist.Work:
        """Begins to send a message."""
        return self.group.send([message], self.peer, 0)

    def recv(self, message: Tensor) -> None:
        """Waits for the next message, which replaces the given one."""
        self.group.recv([message], self.peer, 0).wait()

    @classmethod
    def in_world(cls, rank: int) -> Connection:
        """Connection to a rank of the default process group."""
        world = dist.group.WORLD
        assert world is not None
        return cls(world, rank)


Connect = Callable[[int], Iterator[Connection]]
"""Yields the connections to a worker, one for each time that it starts; the next one when the worker comes back."""


class ServerClient:
    """A worker's side of all servers.

    Args:
        replication: Parameter servers of the plan.
        worker: Rank of the worker.
        num_workers: Workers.
        parameters: Trained parameters, with their gradients, which stay the same tensors.
        recorder: Records every transfer.
    """

    def __init__(
        self,
        replication: Replication,
        worker: int,
        num_workers: int,
        parameters: Sequence[nn.Parameter],
        recorder: Recorder,
    ) -> None:
        self._worker, self._recorder = worker, recorder
        self._servers: Sequence[Connection] = ()
        self._server_ranks = [replication.server_rank(k, num_workers, worker) for k in range(replication.servers)]
        slices = replication.server_slices([parameter.numel() for parameter in parameters])
        sizes = [HEADER + sum(end - begin for _, begin, end in of_server) for of_server in slices]
        device = parameters[0].device
        self._joined = torch.zeros(sum(sizes), device=device)
        self._sent = self._joined if device.type == "cpu" else torch.zeros(sum(sizes), pin_memory=True)
        self._messages = torch.split(self._sent, sizes)
        self._slots: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._gradients: list[Tensor] = []
        for message, of_server in zip(torch.split(self._joined, sizes), slices, strict=True):
            place = HEADER
            for index, begin, end in of_server:
                weight, gradient = parameters[index].detach(), parameters[index].grad
                assert gradient is not None
                self._slots.append(message[place : place + end - begin])
                self._weights.append(weight.view(-1)[begin:end])
                self._gradients.append(gradient.view(-1)[begin:end])
                place += end - begin

    def connect(self, servers: Sequence[Connection]) -> None:
        """Takes the connections to all servers. Without, nothing is sent, so that a worker's memory can be traced."""
        self._servers = servers

    def start(self) -> None:
        """Gives the servers their first parameters; all workers have the same, and the first one sends them."""
        if self._worker:
            return
        torch._foreach_copy_(self._slots, self._weights)
        self._copy(self._sent, self._joined)
        for server, message in zip(self._servers, self._messages, strict=True):
            server.send(message).wait()

    def join(self) -> int | None:
        """Takes the parameters that the servers have; returns the first step, or None if all others are done."""
        if not self._servers:
            return None
        first = [self._join(server, message) for server, message in zip(self._servers, self._messages, strict=True)]
        self._copy(self._joined, self._sent)
        torch._foreach_copy_(self._weights, self._slots)
        return None if min(first) < 0 else max(first)

    @staticmethod
    def _join(server: Connection, message: Tensor) -> int:
        message[0] = _JOINS
        server.send(message).wait()
        server.recv(message)
        return int(message[0])

    def exchange(self) -> tuple[MeasuredUpdate, ...]:
        """Pushes gradients and pulls parameters; returns the update of each server."""
        torch._foreach_copy_(self._slots, self._gradients)
        if not self._servers:
            return ()
        if self._sent is not self._joined:
            self._copied("to_host", self._sent, self._joined)
        for message in self._messages:
            message[0] = _UPDATES
        messages = list(zip(self._servers, self._messages, self._server_ranks, strict=True))
        pushed = [
            (self._recorder.issue("send", (self._worker, server_rank), message.nbytes), server.send(message))
            for server, message, server_rank in messages
        ]
        for handle, work in pushed:
            work.wait()
            self._recorder.complete(handle)
        updates = []
        for server, message, server_rank in messages:
            handle = self._recorder.issue("recv", (server_rank, self._worker), message.nbytes)
            server.recv(message)
            self._recorder.complete(handle)
            staleness, queued_s, held_s, ahead = message[:HEADER].tolist()
            update = MeasuredUpdate(staleness=int(staleness), queued_s=queued_s, held_s=held_s, steps_ahead=int(ahead))
            updates.append(update)
        if self._sent is not self._joined:
            self._copied("from_host", self._joined, self._sent)
        torch._foreach_copy_(self._weights, self._slots)
        return tuple(updates)

    def leave(self) -> None:
        """Tells the servers that no more gradients come from this worker."""
        for server, message in zip(self._servers, self._messages, strict=True):
            message[0] = _DONE
            server.send(message).wait()

    def _copied(self, kind: str, destination: Tensor, source: Tensor) -> None:
        handle = self._recorder.issue("to_host" if kind == "to_host" else "from_host", (self._worker,), source.nbytes)
        self._copy(destination, source)
        self._recorder.complete(handle)

    @staticmethod
    def _copy(destination: Tensor, source: Tensor) -> None:
        """Copies between the buffers of the device and of the host; nothing to do where they are the same."""
        if destination is not source:
            destination.copy_(source)
            if source.device.type == "cuda":
                torch.cuda.current_stream().synchronize()


@dataclass(slots=True)
class _Clocks:
    """Updates of one server by worker, under its lock.

    Attributes:
        applied: Updates of each worker; infinite for one that is done or has left.
        pulled: Updates of all that the parameters had which each worker has.
        version: Updates of all workers.
    """

    applied: list[float]
    pulled: list[int]
    version: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


class ParameterServer:
    """One server: parameters, the states of their optimizer, and a thread per worker.

    Args:
        replication: Parameter servers of the plan.
        number: Number of this server.
        num_workers: Workers, which are the first processes.
        sizes: Elements of every trained parameter.
        update: Optimizer.
        connect: See ``Connect``; None for workers that are ranks of the default process group.

    Attributes:
        parameters: Slices of parameters that the server has.
        missing: Workers that have left, and are not back.
    """

    def __init__(
        self,
        replication: Replication,
        number: int,
        num_workers: int,
        sizes: Sequence[int],
        update: UpdateName,
        connect: Connect | None = None,
    ) -> None:
        self._max_ahead, self._num_workers = replication.max_steps_ahead, num_workers
        self._min_workers, self.missing = replication.min_replicas, set[int]()
        self._connections = [(connect or _in_world)(worker) for worker in range(num_workers)]
        self._first: Connection | None = None
        slices = replication.server_slices(sizes)[number]
        self.parameters = [nn.Parameter(torch.zeros(end - begin)) for _, begin, end in slices]
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self._weights = [parameter.detach() for parameter in self.parameters]
        self._optimizer = make_optimizer(update, self.parameters)
        self._clocks = _Clocks([0.0] * num_workers, [0] * num_workers)
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Takes the first parameters from the first worker."""
        message, self._first = self._message(), next(self._connections[0])
        self._first.recv(message)
        torch._foreach_copy_(self._weights, self._slots(message))

    def serve(self, on_poll: Callable[[int], None]) -> None:
        """Serves until all workers have left.

        Args:
            on_poll: Called ten times per second with the steps that all workers have finished.

        Raises:
            RuntimeError: A worker is gone that may not leave.
            RunError: Fewer workers than ``min_replicas`` are left.
        """
        threads = [
            threading.Thread(target=self._follow_one, args=(worker,), name=f"worker {worker}", daemon=True)
            for worker in range(self._num_workers)
        ]
        for thread in threads:
            thread.start()
        num_done = 0
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_POLL_S / len(threads))
            if self._failure is not None:
                raise self._failure
            least = min(self._clocks.applied)
            num_done = num_done if least == float("inf") else int(least)
            on_poll(num_done)

    def answer(self, worker: int, message: Tensor) -> None:
        """Updates by the gradients of a message, and writes the reply into it.

        Waits for the turn of this worker, and until it may go on.
        """
        clocks, arrived_s = self._clocks, time.monotonic()
        with clocks.changed:
            queued_s = time.monotonic() - arrived_s
            self._apply(worker, message)
            staleness = clocks.version - clocks.pulled[worker]
            clocks.version += 1
            clocks.applied[worker] += 1
            clocks.changed.notify_all()
            applied_s = time.monotonic()
            clocks.changed.wait_for(lambda: self._ahead(worker) <= (self._max_ahead or float("inf")))
            held_s = time.monotonic() - applied_s
            clocks.pulled[worker] = clocks.version
            torch._foreach_copy_(self._slots(message), self._weights)
            message[:HEADER] = torch.tensor([staleness, queued_s, held_s, self._ahead(worker)])

    def _apply(self, worker: int, message: Tensor) -> None:
        """Updates parameters by the gradients of a message; ``worker`` is whose."""
        del worker
        for parameter, slot in zip(self.parameters, self._slots(message), strict=True):
            parameter.grad = slot
        self._optimizer.step()

    def _ahead(self, worker: int) -> float:
        return self._clocks.applied[worker] - min(self._clocks.applied)

    def _follow_one(self, worker: int) -> None:
        try:
            self._follow(worker)
        except BaseException as error:  # the main thread raises it
            self._failure = error

    def _follow(self, worker: int) -> None:
        message, connections = self._message(), self._connections[worker]
        if worker == 0 and self._first is not None:
            connections = chain([self._first], connections)
        for connection in connections:
            try:
                self._follow_connection(worker, connection, message)
            except RuntimeError:
                if self._min_workers is None:
                    raise
                self._forget(worker)
                self.missing.add(worker)
                if (left := self._num_workers - len(self.missing)) < self._min_workers:
                    of_all = f"{left} of {counted(self._num_workers, 'worker')}"
                    rule = f"plan.replication.min_replicas = {self._min_workers}"
                    raise RunError(f"only {of_all} are left, and {rule}") from None
            else:
                self._forget(worker)
                return

    def _follow_connection(self, worker: int, connection: Connection, message: Tensor) -> None:
        """Answers a worker until it is done."""
        while True:
            connection.recv(message)
            if message[0] == _DONE:
                return
            if message[0] == _JOINS:
                self._take_in(worker, message)
            else:
                self.answer(worker, message)
            connection.send(message).wait()

    def _take_in(self, worker: int, message: Tensor) -> None:
        """Writes the parameters into a message, and the step of the slowest worker, from which this one goes on."""
        clocks = self._clocks
        with clocks.changed:
            slowest = min(clocks.applied)
            if slowest != float("inf"):
                clocks.applied[worker], clocks.pulled[worker] = slowest, clocks.version
            self.missing.discard(worker)
            torch._foreach_copy_(self._slots(message), self._weights)
            message[0] = -1.0 if slowest == float("inf") else slowest

    def _forget(self, worker: int) -> None:
        """Has no other worker wait for this one."""
        with self._clocks.changed:
            self._clocks.applied[worker] = float("inf")
            self._clocks.changed.notify_all()

    def _message(self) -> Tensor:
        return torch.zeros(HEADER + sum(self._sizes))

    def _slots(self, message: Tensor) -> list[Tensor]:
        """Slices of a message, one for each of the parameters."""
        return list(torch.split(message[HEADER:], self._sizes))


def _in_world(worker: int) -> Iterator[Connection]:
    """Yields the only connection to a worker that is a rank of the default process group."""
    yield Connection.in_world(worker)
