"""Workers that do not wait for all others: their steps alone, and what servers and shared links make of them.

The step of one worker is a Program. It gives the seconds of each part: computing up to the push, transfers, the update
by a server, and the end of the step. ``simplan.sim.workers`` repeats the steps of all workers beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cost.model import CostModel
from simplan.cost.program_costs import ProgramCosts
from simplan.job import Job
from simplan.plan.replication import Replication
from simplan.predict.build import cores_of_ranks, is_static
from simplan.prediction import ReplicationWorkers
from simplan.program.action import ActionKind
from simplan.program.lowering.servers import FP32_BYTES
from simplan.program.program import Communication, Program, Stream
from simplan.program.timeline import SpanKind
from simplan.sim.compiled import compile_program
from simplan.sim.workers import CoresOfNodes, Links, Workers, WorkerTimes, simulate_workers

if TYPE_CHECKING:
    from simplan.network.usage import LinkUsage
    from simplan.predict.simulated import Simulated

_Floats = NDArray[np.float64]


class _Transfer(NamedTuple):
    """Transfer between a worker and a server of another node; a push, or else a pull."""

    worker: int
    server: int
    pushes: bool
    communication: Communication


_STEPS = 40
"""Simulated steps per worker, of which the first quarter is not counted; half of them for the interval."""
_MAX_TRANSFERS = 10_000
"""Transfers and updates of a simulation; many workers and servers have fewer steps, at least ``_FEWEST_STEPS``."""
_FEWEST_STEPS = 16
_JITTERED_STEPS = 64
"""Steps with durations of their own, which workers take in turn where the cluster has jitter."""


@dataclass(frozen=True, eq=False)
class AsynchronousStep:
    """Steps of workers of a job.

    Attributes:
        job, cost: Job and its cost model.
        simulated: Step of all workers as if each were alone; of a truncated step the longer one, then the shorter one.
        num_periods: Differences of both that the full step is longer than the longer one.
    """

    job: Job
    cost: CostModel
    simulated: Sequence[Simulated]
    num_periods: int

    @property
    def _replication(self) -> Replication:
        replication = self.job.plan.replication
        assert replication is not None
        assert replication.has_workers
        return replication

    @property
    def _num_workers(self) -> int:
        return self.job.plan.dp_replicate

    def seconds(self, others: Callable[[Program, ProgramCosts], list[_Floats]]) -> _Floats:
        """``(1 + num_others,)`` Seconds in which as many gradients are applied as there are workers.

        Args:
            others: See ``TruncatedStep.seconds``.
        """
        moved = [others(item.program, item.program_costs) for item in self.simulated]
        durations = [
            [item.program_costs.durations_s, *vectors] for item, vectors in zip(self.simulated, moved, strict=True)
        ]
        moved_times = (
            self._times([*vectors], self._steps // 2) for vectors in islice(zip(*durations, strict=True), 1, None)
        )
        times = [self.times, *moved_times]
        return self._num_workers / np.array([item.updates_per_s for item in times])

    @cached_property
    def times(self) -> WorkerTimes:
        """Simulated steps."""
        return self._times([simulated.program_costs.durations_s for simulated in self.simulated], self._steps)

    @property
    def _steps(self) -> int:
        """Simulated steps per worker."""
        transfers = self._num_workers * (self._replication.servers if self._replication.has_servers else 1)
        return max(_FEWEST_STEPS, min(_STEPS, _MAX_TRANSFERS // transfers))

    def _times(self, durations_s: list[_Floats], steps: int) -> WorkerTimes:
        """Simulated steps with these durations of each simulated Program."""
        return simulate_workers(self._workers(durations_s), steps)

    def _workers(self, durations_s: list[_Floats]) -> Workers:
        parts = [_Parts.of(step, durations[None]) for step, durations in zip(self.simulated, durations_s, strict=True)]
        longer, *shorter = parts
        compute_s = longer.compute_s
        if shorter:
            compute_s = compute_s + self.num_periods * (compute_s - shorter[0].compute_s)
        simulated, jitter = self.simulated[0], self.job.cluster.jitter
        if jitter is not None:
            from simplan.predict.jitter import Factors  # imports numba

            factors = Factors.of(simulated.program, simulated.program_costs, jitter)
            rows = [row for number in range(_JITTERED_STEPS // 8) for part in factors.parts(number) for row in part]
            drawn = _Parts.of(simulated, np.array(rows) * durations_s[0]).compute_s
            compute_s = compute_s * drawn / longer.compute_s
        replication = self._replication
        served = np.array(self.served_elements)
        update_s = longer.update_s * served / served.max() if replication.has_servers else np.array([longer.update_s])
        return Workers(
            compute_s,
            longer.finish_s,
            longer.push_s,
            longer.pull_s,
            update_s,
            replication.max_steps_ahead,
            has_lock=replication.has_servers or replication.lock,
            cores=self._cores,
            links=self._links,
        )

    @cached_property
    def served_elements(self) -> list[int]:
        """By server, the elements of trained parameters that it serves."""
        return [sum(end - begin for _, begin, end in slices) for slices in self._replication.server_slices(self._sizes)]

    @cached_property
    def _sizes(self) -> list[int]:
        """Elements of every trained parameter."""
        return [
            parameter.num_elements
            for layer in self.job.padded_model.layers
            for parameter in layer.parameters
            if not parameter.frozen and parameter.name not in layer.tied
        ]

    @cached_property
    def _cores(self) -> CoresOfNodes | None:
        job = self.job
        shared = cores_of_ranks(job.cluster, self.cost)
        if shared is None:
            return None
        cores, threads, transferring = shared
        workers = [job.node_of(worker) for worker in range(self._num_workers)]
        return CoresOfNodes(cores, float(threads), transferring, workers, self._nodes_of_servers)

    @property
    def _nodes_of_servers(self) -> list[int]:
        """Node of each server; those apart follow the nodes of the cluster."""
        replication, job = self._replication, self.job
        if not replication.has_servers:
            return [0]
        if replication.server_nodes == "apart":
            return [job.cluster.num_nodes + server for server in range(replication.servers)]
        return [job.node_of(replication.server_rank(k, self._num_workers, 0)) for k in range(replication.servers)]

    @cached_property
    def _links(self) -> Links | None:
        job, replication = self.job, self._replication
        if not replication.has_servers or (job.cluster.num_nodes == 1 and replication.server_nodes == "workers"):
            return None
        from simplan.network.usage import LinkUsage, link_use  # predictions with one node load no network

        usages, places = list[LinkUsage](), list[int]()
        shape = (self._num_workers, replication.servers)
        numbers = {True: np.full(shape, -1, np.int64), False: np.full(shape, -1, np.int64)}
        find: Callable[[_Transfer], list[LinkUsage]] = self._usages_of_nodes
        if is_static(job.cluster):
            num_links = 2 * (job.cluster.num_nodes + replication.servers)
        else:
            from simplan.network.build import fabric_of

            num_links, find = len(fabric_of(job.cluster).links), self._usages_of_fabric()
        for transfer in self._transfers():
            numbers[transfer.pushes][transfer.worker, transfer.server] = len(usages)
            places.append(len(usages))
            usages += find(transfer)
        heads = np.array(places, np.int64)
        return Links(link_use(usages, heads, np.arange(len(heads)), num_links), numbers[True], numbers[False])

    def _transfers(self) -> Iterator[_Transfer]:
        """Yield every transfer between nodes."""
        program, job = self.simulated[0].program, self.job
        nodes = self._nodes_of_servers
        for worker in range(self._num_workers):
            for number, index in enumerate(_transfers_of(program, worker)):
                back, server = divmod(number, self._replication.servers)
                communication = program.op(index).communication
                assert communication is not None
                if job.node_of(worker) != nodes[server]:
                    yield _Transfer(worker, server, not back, communication)

    def _usages_of_nodes(self, transfer: _Transfer) -> list[LinkUsage]:
        """Links out of a node and into another, of which every device has an equal part."""
        from simplan.network.usage import LinkUsage

        job, cost, communication = self.job, self.cost, transfer.communication
        alone_s = cost.communication(communication).seconds
        fixed_s = min(alone_s, cost.communication(communication._replace(num_bytes=1)).seconds)
        ends = [job.node_of(transfer.worker), self._nodes_of_servers[transfer.server]]
        if not transfer.pushes:
            ends.reverse()
        busy_s = (alone_s - fixed_s) / job.cluster.devices_per_node
        links = np.array([2 * ends[0], 2 * ends[1] + 1], np.int32)
        num_bytes = np.full(2, float(communication.num_bytes))
        return [LinkUsage(links, np.full(2, busy_s), np.ones(2), fixed_s, alone_s - fixed_s, num_bytes)]

    def _usages_of_fabric(self) -> Callable[[_Transfer], list[LinkUsage]]:
        """Links of the cluster's topology."""
        from simplan.cost.communication.collectives import algorithm_of
        from simplan.cost.communication.route import route_of
        from simplan.network.build import fabric_of
        from simplan.network.usage import Usages

        job = self.job
        fabric = Usages(job.cluster, fabric_of(job.cluster))

        def find(transfer: _Transfer) -> list[LinkUsage]:
            communication = transfer.communication
            devices = tuple(map(job.device_of, communication.ranks))
            way = algorithm_of(communication, job.cluster, route_of(devices, job.cluster))
            (usage,) = fabric.of(communication, way, devices)
            return usage.windowed().flows()

        return find

    def result(self, step_time_s: float) -> ReplicationWorkers:
        """Summary of the simulated steps.

        Args:
            step_time_s: Seconds in which as many gradients are applied as there are workers.
        """
        times, replication = self.times, self._replication
        staleness = times.staleness
        values, counts = np.unique(staleness, return_counts=True)
        program = self.simulated[0].program
        moved = [program.op(index).communications for index in _transfers_of(program, 0)]
        sizes = [sum(communication.num_bytes for communication in communications) for communications in moved]
        return ReplicationWorkers(
            num_workers=self._num_workers,
            num_steps=times.num_steps,
            updates_per_s=times.updates_per_s,
            least_share=float(times.shares.min()),
            most_share=float(times.shares.max()),
            staleness_mean=float(staleness.mean()),
            staleness_p90=float(np.quantile(staleness, 0.9, method="inverted_cdf")),
            staleness_shares={
                int(value): count / len(staleness)
                for value, count in zip(values.tolist(), counts.tolist(), strict=True)
            },
            queued_s=times.queued_s,
            held_s=times.held_s,
            most_ahead=times.most_ahead,
            pushed_bytes=sum(sizes[: len(sizes) // 2]),
            pulled_bytes=sum(sizes[len(sizes) // 2 :]),
            busiest_link_share=self._busiest_link_share(step_time_s),
            server_bytes=max(self.server_bytes) if replication.has_servers else 0,
        )

    def _busiest_link_share(self, step_time_s: float) -> float | None:
        """Fraction of the time for which the busiest link is full; None if no links are shared."""
        links = self._links
        if links is None:
            return None
        use, steps = links.use, np.zeros(len(links.use.head))  # steps of the worker of each usage in that time
        for worker, share in enumerate(self.times.shares.tolist()):
            crossed = np.concatenate([links.push[worker], links.pull[worker]])
            steps[crossed[crossed >= 0]] = share * self._num_workers
        owner = np.repeat(np.arange(len(use.head)), np.diff(use.first))
        busy_s = np.bincount(use.link, use.seconds * steps[use.head[owner]], use.num_links)
        return min(1.0, float(busy_s.max(initial=0.0) / step_time_s))  # slow workers have taken few steps

    @cached_property
    def server_bytes(self) -> list[int]:
        """By server, bytes of its parameters, optimizer states, and the gradients of every worker."""
        job = self.job
        states = int(job.software.state(job.training, job.plan).optimizer_bytes(job.training.optimizer))
        element_bytes = (1 + self._num_workers) * FP32_BYTES + states
        return [elements * element_bytes for elements in self.served_elements] if self._replication.has_servers else []

    def with_servers(self, host_bytes: list[int]) -> list[int]:
        """Host bytes by rank, of which the ranks beside which servers are have those of the servers, too."""
        held_bytes, replication = [*host_bytes], self._replication
        if replication.has_servers and replication.server_nodes == "workers" and self._cores is None:
            for server, num_bytes in enumerate(self.server_bytes):
                held_bytes[replication.server_rank(server, self._num_workers, 0)] += num_bytes
        return held_bytes


def _transfers_of(program: Program, rank: int) -> list[int]:
    """Operations of a rank that push to each server, and then those that pull from each."""
    indices = program.rank_indices[rank]
    return [int(index) for index in indices[program.on_stream(Stream.REPLICATE, indices=indices)]]


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Parts of the steps of all workers alone; see ``Workers``.

    Attributes:
        update_s: Update by the server with the most parameters, or of shared ones.
    """

    compute_s: _Floats
    finish_s: _Floats
    push_s: _Floats
    pull_s: _Floats
    update_s: float

    @classmethod
    def of(cls, simulated: Simulated, durations_s: _Floats) -> _Parts:
        """Parts of a simulated step with durations ``(num_steps, num_ops)``; those behind computing of the first."""
        program = simulated.program
        start_s, end_s = compile_program(program).spans(durations_s)
        compute, finish, pushes, pulls, update_s = [], [], [], [], 0.0
        for rank in program.ranks:
            indices = program.rank_indices[rank]
            transfers = _transfers_of(program, rank)
            half = len(transfers) // 2
            update = _update_of(program, rank)
            update_s = max(update_s, float(durations_s[0, update]))
            first, last = (transfers[0], transfers[-1]) if transfers else (update, update)
            compute.append(start_s[:, first])
            finish.append(float(end_s[0, indices].max() - end_s[0, last]))
            pushes.append(durations_s[0, transfers[:half]] if half else np.zeros(1))
            pulls.append(durations_s[0, transfers[half:]] if half else np.zeros(1))
        return cls(np.array(compute).T, np.array(finish), np.array(pushes), np.array(pulls), update_s)


def _update_of(program: Program, rank: int) -> int:
    """Operation that updates parameters: between push and pull, or else the last of OPTIM."""
    indices, transfers = program.rank_indices[rank], _transfers_of(program, rank)
    updates = program.of_kind(SpanKind.OPTIMIZER, indices=indices) & program.of_action(
        ActionKind.OPTIM, indices=indices
    )
    updating = indices[updates & program.on_stream(Stream.COMPUTE, indices=indices)]
    if transfers:
        updating = updating[(updating > transfers[0]) & (updating < transfers[-1])]
    return int(updating[-1])
