"""Workers that update common parameters without waiting for all others, as SimPy processes.

A worker repeats its own step: it computes, pushes its gradients to every server, and goes on when it has pulled the
parameters of all. A server applies one update at a time, in order of arrival. Hogwild is the same without transfers:
one server stands for the parameters in shared memory, which take an update at a time with a lock, and any number
without.

Workers begin one after the other, spread over a step. Equal workers that begin together would share links in lockstep
for hundreds of steps, which the random times of real ones do not allow.

An update is stale by the updates of others that its server has applied since the worker pulled. If workers pull as
soon as their updates are applied, that is the number of other workers in the mean, whatever their speeds: between two
updates of one worker, each of the others is counted once for each of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from simpy import Environment, Event, Resource

from simplan.network.usage import LinkUse
from simplan.program.program import gc_paused
from simplan.sim.engine import SharedCores

_Floats = NDArray[np.float64]
_Process = Generator[Event, object, None]
_LEAST_STEPS = 8
"""Steps of the slowest worker after which a simulation may end."""
_MOST_STEPS = 16
"""Steps per worker, over those asked for, after which it ends in any case."""
_WARMUP = 0.25
"""First fraction of a simulation that is not counted, in which queues fill."""


@dataclass(frozen=True, slots=True, eq=False)
class CoresOfNodes:
    """Cores that workers and servers of CPU nodes share.

    Attributes:
        num_cores: Cores of a node.
        computing: Cores that a worker, or a server that updates, keeps busy.
        transferring: Cores that either end of a transfer inside a node keeps busy.
        workers, servers: Node of each.
    """

    num_cores: int
    computing: float
    transferring: float
    workers: Sequence[int]
    servers: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Links that transfers between workers and servers share.

    Attributes:
        use: Usages of the links.
        push, pull: ``(num_workers, num_servers)`` Usage of each transfer; -1 for one that crosses no link.
    """

    use: LinkUse
    push: NDArray[np.int64]
    pull: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Workers:
    """Workers and servers, with the seconds that each of their parts takes alone.

    Attributes:
        compute_s: ``(num_steps, num_workers)`` Step of a worker up to the push; steps are taken in turn.
        finish_s: ``(num_workers,)`` What a worker does after the pull.
        push_s, pull_s: ``(num_workers, num_servers)`` Transfers.
        update_s: ``(num_servers,)`` Update by one gradient.
        max_ahead: Steps that a worker may be ahead of the slowest (SSP); None for any number.
        has_lock: False if a server applies several updates at the same time, as Hogwild does without a lock.
        cores: Cores that all share; None if each has its own.
        links: Links that transfers share; None if they take as long as alone.
    """

    compute_s: _Floats
    finish_s: _Floats
    push_s: _Floats
    pull_s: _Floats
    update_s: _Floats
    max_ahead: int | None = None
    has_lock: bool = True
    cores: CoresOfNodes | None = None
    links: Links | None = None

    @property
    def num_workers(self) -> int:
        """Workers."""
        return len(self.finish_s)

    @property
    def num_servers(self) -> int:
        """Servers."""
        return len(self.update_s)


class WorkerTimes(NamedTuple):
    """Steps of simulated workers, without the first ones, in which queues fill.

    Attributes:
        updates_per_s: Steps per second of all workers.
        num_steps: Counted steps.
        shares: ``(num_workers,)`` Fraction of the steps that each worker takes.
        staleness: ``(num_updates,)`` Updates of others since the pull, of every update of every server.
        queued_s: Mean seconds for which an update waits for those before it.
        held_s: Mean seconds for which a worker waits for slower ones before it may pull (SSP), of a step.
        most_ahead: Largest number of steps by which a worker that began a step was ahead of the slowest.
    """

    updates_per_s: float
    num_steps: int
    shares: _Floats
    staleness: NDArray[np.int64]
    queued_s: float
    held_s: float
    most_ahead: int


@gc_paused()
def simulate_workers(workers: Workers, steps_per_worker: int) -> WorkerTimes:
    """Simulates workers until they have taken a number of steps in the mean.

    It goes on until the slowest has taken 8, or the mean is 16 times the number that was asked for.
    """
    return _Simulation(workers).run(steps_per_worker)


@dataclass(slots=True)
class _Server:
    """State of one server.

    Attributes:
        turn: Updates that it applies at a time.
        clocks: By worker, updates that it has applied.
        pulled: By worker, updates of all that the parameters had which it pulled last.
        held: Workers that wait for slower ones, each with its event.
    """

    turn: Resource
    clocks: list[int]
    pulled: list[int]
    version: int = 0
    held: list[tuple[int, Event]] = field(default_factory=list)


class _Simulation:
    def __init__(self, workers: Workers) -> None:
        self.workers, self.env = workers, Environment()
        num, capacity = workers.num_workers, 1 if workers.has_lock else workers.num_workers
        self.servers = [_Server(Resource(self.env, capacity), [0] * num, [0] * num) for _ in workers.update_s]
        self.ends_s: list[list[float]] = [[] for _ in range(num)]
        self.updates: list[tuple[float, int, float, float]] = []  # end, staleness, queued and held seconds
        self.most_ahead, self.num_transfers = 0, 0
        self.enough = self.env.event()
        cores = workers.cores
        nodes = set() if cores is None else {*cores.workers, *cores.servers}
        self.nodes = {node: SharedCores(self.env, cores.num_cores) for node in nodes} if cores is not None else {}
        self.links = None
        if workers.links is not None:
            from simplan.sim.links import SharedLinks  # imports numba

            self.links = SharedLinks(self.env, workers.links.use)
            self.crosses = (np.diff(workers.links.use.first) > 0).tolist()

    def run(self, steps_per_worker: int) -> WorkerTimes:
        """Runs all workers, and sums up."""
        num = self.workers.num_workers
        for worker in range(num):
            self.env.process(self.worker(worker, steps_per_worker))
        self.env.run(self.enough)
        first = [int(_WARMUP * len(ends)) for ends in self.ends_s]
        rates = np.array(
            [
                (len(ends) - 1 - begin) / (ends[-1] - ends[begin]) if len(ends) > begin + 1 else 0.0
                for begin, ends in zip(first, self.ends_s, strict=True)
            ]
        )
        kept = [update for update in self.updates if update[0] >= _WARMUP * self.env.now]
        return WorkerTimes(
            updates_per_s=float(rates.sum()),
            num_steps=len(kept) // self.workers.num_servers,
            shares=rates / rates.sum(),
            staleness=np.array([update[1] for update in kept], np.int64),
            queued_s=float(np.mean([update[2] for update in kept])),
            held_s=float(np.mean([update[3] for update in kept])),
            most_ahead=self.most_ahead,
        )

    def worker(self, worker: int, steps_per_worker: int) -> _Process:
        """One worker, without an end."""
        env, w = self.env, self.workers
        compute_s, finish_s = w.compute_s[:, worker].tolist(), float(w.finish_s[worker])
        ends_s, asked = self.ends_s[worker], steps_per_worker * w.num_workers
        number, total = 0, len(compute_s)
        yield env.timeout(worker / w.num_workers * self.alone_s(worker))
        while True:
            slowest = min(min(server.clocks) for server in self.servers)
            self.most_ahead = max(self.most_ahead, number - slowest)
            yield self.computing(worker, compute_s[number % total])
            yield env.all_of([env.process(self.exchange(worker, k)) for k in range(w.num_servers)])
            yield self.computing(worker, finish_s)
            ends_s.append(env.now)
            number += 1
            done = sum(map(len, self.ends_s))
            if not self.enough.triggered and done >= asked:
                slowest = min(map(len, self.ends_s))
                if slowest >= _LEAST_STEPS or done >= _MOST_STEPS * asked:
                    self.enough.succeed()

    def alone_s(self, worker: int) -> float:
        """Seconds of the first step of a worker that meets nobody."""
        w = self.workers
        servers_s = (w.push_s[worker] + w.update_s + w.pull_s[worker]).max()
        return float(w.compute_s[0, worker] + servers_s + w.finish_s[worker])

    def exchange(self, worker: int, number: int) -> _Process:
        """Push, update and pull of one worker at one server."""
        env, server = self.env, self.servers[number]
        yield self.transfer(worker, number, pushes=True)
        arrived_s = env.now
        with server.turn.request() as turn:
            yield turn
            queued_s = env.now - arrived_s
            yield self.updating(worker, number)
            staleness = server.version - server.pulled[worker]
            server.version += 1
            server.clocks[worker] += 1
        applied_s = env.now
        self._release(server)
        if not self._may_go_on(server, worker):
            event = env.event()
            server.held.append((worker, event))
            yield event
        server.pulled[worker] = server.version
        self.updates.append((applied_s, staleness, queued_s, env.now - applied_s))
        yield self.transfer(worker, number, pushes=False)

    def _may_go_on(self, server: _Server, worker: int) -> bool:
        most = self.workers.max_ahead
        return most is None or server.clocks[worker] - min(server.clocks) <= most

    def _release(self, server: _Server) -> None:
        """Lets the workers go on that are no longer too far ahead."""
        for worker, event in [held for held in server.held if self._may_go_on(server, held[0])]:
            server.held.remove((worker, event))
            event.succeed()

    def computing(self, worker: int, seconds: float) -> Event:
        """End of what a worker computes."""
        cores = self.workers.cores
        return self._on_cores(seconds, [(cores.workers[worker], cores.computing)] if cores else [])

    def updating(self, worker: int, number: int) -> Event:
        """End of an update."""
        cores = self.workers.cores
        return self._on_cores(
            float(self.workers.update_s[number]), [(cores.servers[number], cores.computing)] if cores else []
        )

    def transfer(self, worker: int, number: int, *, pushes: bool) -> Event:
        """End of a transfer between a worker and a server."""
        w = self.workers
        seconds = float((w.push_s if pushes else w.pull_s)[worker, number])
        cores, links = w.cores, w.links
        if cores is not None and cores.workers[worker] == cores.servers[number]:
            return self._on_cores(seconds, [(cores.workers[worker], 2 * cores.transferring)])
        if links is None or self.links is None or seconds <= 0.0:
            return self.env.timeout(seconds)
        usage = int((links.push if pushes else links.pull)[worker, number])
        if usage < 0 or not self.crosses[usage]:
            return self.env.timeout(seconds)
        done = self.env.event()
        self.num_transfers += 1
        self.links.run(done, len(links.use.usage) + self.num_transfers, usage, seconds)
        return done

    def _on_cores(self, seconds: float, demands: Sequence[tuple[int, float]]) -> Event:
        for node, demand in demands:
            if seconds > 0.0 and demand > 0.0:
                done = self.env.event()
                self.nodes[node].run(done, seconds, demand)
                return done
        return self.env.timeout(seconds)
