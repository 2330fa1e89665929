"""Training of workers that do not wait for all others: with parameter servers, or on shared memory (Hogwild)."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from executor.calibration.timing import ReferenceMatmul
from executor.distributed.gradients import zero_gradients
from executor.distributed.mesh import ParallelDims
from executor.distributed.replicas.membership import gloo_group
from executor.launch.rank import RankFiles
from executor.launch.roster import Pulse, Roster, appears, connect
from executor.launch.watchdog import Heartbeat, RankState
from executor.profiling.memory import forget_peaks, peak_allocated_bytes, peak_memory, without_bytes
from executor.profiling.recorder import Recorder, make_clock
from executor.train.parameter_server import Connect, Connection, ParameterServer, ServerClient
from executor.train.trainer import Trainer
from simplan.runs.measurement import MeasuredUpdate
from simplan.runs.run_spec import RunSpec

_TIMINGS = 3
"""Timings of the reference matmul before the first step: between steps, it would slow the other workers down."""


class WorkerTrainer(Trainer):
    """Training of one worker, whose ``update`` reaches the parameters of all.

    Args:
        common: Memory that Hogwild's workers share; None for others.

    Attributes:
        updates: Updates of the last step, one per server.
    """

    def __init__(
        self,
        job: RunSpec,
        rank: int,
        device: torch.device,
        recorder: Recorder,
        common: Common | None = None,
    ) -> None:
        super().__init__(job, rank, device, ParallelDims(job.plan.shard), recorder)
        self.updates: tuple[MeasuredUpdate, ...] = ()
        replication = job.plan.replication
        assert replication is not None
        self._replication, self._common = replication, common
        self._client: ServerClient | None = None
        if replication.has_servers:
            num_workers = job.plan.dp_replicate
            self._client = ServerClient(replication, rank, num_workers, self._parameters, recorder)

    def _make_optimizers(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        replication = self._job.plan.replication
        assert replication is not None
        return [] if replication.has_servers else super()._make_optimizers(parameters)

    def start(self, world: World) -> int:
        """Shares the first parameters, or takes those of the servers; returns the first step.

        Args:
            world: The other workers and the servers.
        """
        if self._client is None:
            if self._common is not None:
                self._common.share(self._parameters)
            return 0
        if world.is_late:
            self._client.connect(world.servers())
            first = self._client.join()
            return self._job.num_all_steps if first is None else first
        world.tell_sizes([parameter.numel() for parameter in self._parameters])
        self._client.connect(world.servers())
        self._client.start()
        return 0

    def step(self, tokens: Tensor | list[Any], targets: Tensor | None) -> list[Tensor]:
        """See ``Trainer.step``."""
        if self._common is not None:
            self._common.begin()
        return super().step(tokens, targets)

    def update(self) -> None:
        """See ``Trainer.update``."""
        with self._recorder.span(self._optim_action):
            if self._client is not None:
                self.updates = self._client.exchange()
            elif self._common is not None:
                self.updates = self._common.update(self.optimizers, locks=self._replication.lock)
            else:
                for optimizer in self.optimizers:
                    optimizer.step()
            zero_gradients(self._parameters, drop=self._drops_gradients)

    def leave(self) -> None:
        """Ends the last step: others do not wait for this worker any more."""
        if self._client is not None:
            self._client.leave()


class Common:
    """Parameters and clocks of Hogwild's workers, in memory that the processes of a host share.

    Every worker counts its own updates, in a place that no other writes. The first one makes the memory, as files that
    are removed once all have them.

    Args:
        worker: Rank of the worker.
        num_workers: Workers.
    """

    def __init__(self, worker: int, num_workers: int) -> None:
        self._worker, self._num_workers, self._before = worker, num_workers, 0
        folders: list[str | None] = [tempfile.mkdtemp(prefix="simplan-", dir="/dev/shm") if worker == 0 else None]
        dist.broadcast_object_list(folders)
        assert folders[0] is not None
        self._folder = Path(folders[0])
        self._clocks = self._shared("clocks", num_workers, torch.int64)
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)

    def share(self, parameters: list[nn.Parameter]) -> None:
        """Moves parameters into the memory of all; every worker must call this."""
        weights = self._shared("parameters", sum(parameter.numel() for parameter in parameters), torch.float32)
        slots = torch.split(weights, [parameter.numel() for parameter in parameters])
        if self._worker == 0:
            for parameter, slot in zip(parameters, slots, strict=True):
                slot.copy_(parameter.detach().view(-1))
        dist.barrier()
        for parameter, slot in zip(parameters, slots, strict=True):
            parameter.data = slot.view_as(parameter)
        dist.barrier()
        if self._worker == 0:
            for file in self._folder.iterdir():
                file.unlink()
            self._folder.rmdir()

    def begin(self) -> None:
        """The worker begins a step, with the parameters as they are now."""
        self._before = self._updates_of_others()

    def update(self, optimizers: list[torch.optim.Optimizer], *, locks: bool) -> tuple[MeasuredUpdate, ...]:
        """Updates the parameters of all, by this worker's gradients and optimizer states."""
        with self._turn() if locks else _no_turn() as queued_s:
            for optimizer in optimizers:
                optimizer.step()
            staleness = self._updates_of_others() - self._before
            self._clocks[self._worker] += 1
        ahead = int(self._clocks[self._worker] - self._clocks.min())
        return (MeasuredUpdate(staleness=staleness, queued_s=queued_s, held_s=0.0, steps_ahead=ahead),)

    def _updates_of_others(self) -> int:
        return int(self._clocks.sum() - self._clocks[self._worker])

    @contextmanager
    def _turn(self) -> Iterator[float]:
        """Waits for the lock, which Linux frees if its holder ends."""
        since_s = perf_counter()
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield perf_counter() - since_s
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _shared(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that all workers share."""
        file = self._folder / name
        if self._worker == 0:
            file.write_bytes(bytes(size * dtype.itemsize))
        dist.barrier()
        return torch.from_file(str(file), shared=True, size=size, dtype=dtype)


@contextmanager
def _no_turn() -> Iterator[float]:
    yield 0.0


class World:
    """Workers and servers as ranks of the default process group, which ends with any of them.

    Args:
        job: The job.
        rank: Rank of this worker, or of this server behind the workers.
    """

    is_late = False

    def __init__(self, job: RunSpec, rank: int) -> None:
        self._num_workers, self._num_servers = job.plan.dp_replicate, job.num_processes - job.plan.dp_replicate
        self._rank = rank

    def servers(self) -> list[Connection]:
        """Connections of this worker."""
        return [Connection.in_world(self._num_workers + number) for number in range(self._num_servers)]

    def tell_sizes(self, sizes: list[int]) -> None:
        """Tells servers the elements of every trained parameter."""
        dist.broadcast_object_list([sizes])

    def sizes(self) -> list[int]:
        """Waits on a server for the elements of every trained parameter."""
        told: list[list[int]] = [[]]
        dist.broadcast_object_list(told)
        return told[0]

    @property
    def connect(self) -> Connect | None:
        """Connections of this server."""
        return None

    def finish(self) -> None:
        """Called by a worker that is done."""

    def tell_missing(self, workers: Collection[int]) -> None:
        """Called by a server that is done, with the workers that have left."""


class WorkersWhoLeave(World):
    """Workers that may leave and come back: each is a world of its own, with a pair of ranks for every server.

    Args:
        roster: Roster of the run.
        incarnation: Incarnation of this worker; 1 for a server.
        timeout: Longest time for a message.
    """

    def __init__(self, job: RunSpec, rank: int, roster: Roster, incarnation: int, timeout: timedelta) -> None:
        super().__init__(job, rank)
        self._roster, self._incarnation, self._timeout = roster, incarnation, timeout
        self.is_late = incarnation > 1
        # without a beat, the node of a worker that is lost could not come back
        self._pulse = Pulse(roster, rank, incarnation) if rank < self._num_workers else None

    def servers(self) -> list[Connection]:
        """Connections of this worker."""
        if self._roster.is_finished:
            return []
        self._roster.store.set(f"connects/{self._rank}.{self._incarnation}", "")
        return [
            Connection(self._pair(self._rank, self._incarnation, number, 0), 1) for number in range(self._num_servers)
        ]

    def tell_sizes(self, sizes: list[int]) -> None:
        """Tells servers the elements of every trained parameter."""
        self._roster.store.set("sizes", json.dumps(sizes))

    def sizes(self) -> list[int]:
        """Waits on a server for the elements of every trained parameter."""
        while not appears(self._roster.store, "sizes"):
            pass
        sizes: list[int] = json.loads(self._roster.store.get("sizes"))
        return sizes

    @property
    def connect(self) -> Connect | None:
        """Connections of this server."""
        return self._connections

    def _connections(self, worker: int) -> Iterator[Connection]:
        store = PrefixStore("roster", connect(*self._roster.address))  # a thread for each worker
        for incarnation in count(1):
            key = f"connects/{worker}.{incarnation}"
            while not appears(store, key):
                if store.check(["finished"]) and not store.check([key]):
                    return
            yield Connection(self._pair(worker, incarnation, self._rank - self._num_workers, 1), 0)

    def _pair(self, worker: int, incarnation: int, server: int, place: int) -> dist.ProcessGroup:
        store = PrefixStore(f"worker/{worker}.{incarnation}/{server}", connect(*self._roster.address))
        return gloo_group(store, place, 2, self._timeout)

    def finish(self) -> None:
        """Called by a worker that is done."""
        self._roster.finish()
        if self._pulse is not None:
            self._pulse.end()

    def tell_missing(self, workers: Collection[int]) -> None:
        """Called by a server that is done, with the workers that have left."""
        self._roster.end_with([worker for worker in range(self._num_workers) if worker not in workers])


def train_worker(
    job: RunSpec, rank: int, files: RankFiles, device: torch.device, heartbeat: Heartbeat, world: World
) -> None:
    """Builds the model of a worker, takes its steps and measures memory; writes a line for each step."""
    heartbeat.beat(RankState.RUNNING, "building the model", 0)
    recorder = Recorder(job.parsed_table()[0], make_clock(device), heartbeat)
    replication = job.plan.replication
    assert replication is not None
    common = None if replication.has_servers else Common(rank, job.plan.dp_replicate)
    trainer = WorkerTrainer(job, rank, device, recorder, common)
    first = trainer.start(world)
    reference = ReferenceMatmul(device)
    forget_peaks(device)
    batches = [(step, trainer.batch(step)) for step in range(job.num_all_steps)]
    recorder.waiting("waiting for the other workers to start", 0)
    reference_s = sorted(reference.time_once() for _ in range(_TIMINGS))[_TIMINGS // 2]
    dist.barrier()
    with files.steps.open("a") as file:
        for step, batch in batches[first:]:
            recorder.begin_step(step)
            losses = trainer.step(*batch)
            start_s, end_s = recorder.end_step()
            record = recorder.record(
                start_s,
                end_s,
                list(map(float, losses)),
                is_warmup=step < (job.num_warmup_steps or 0),
                reference_s=reference_s,
            )
            record = record.model_copy(update={"updates": trainer.updates})
            print(record.model_dump_json(), file=file, flush=True)
        recorder.waiting("waiting for the other workers", job.num_all_steps)
        trainer.leave()
        world.finish()
        del trainer, batches
        memory = without_bytes(peak_memory(device), reference.held_bytes)
        dist.barrier()  # so that no worker is slowed down
        if device.type == "cpu" and job.profile_memory:
            heartbeat.beat(RankState.RUNNING, "measuring allocations")
            allocated_bytes = peak_allocated_bytes(partial(_first_steps, job, rank, device, recorder))
            memory = memory.model_copy(update={"allocated_bytes": allocated_bytes})
        print(memory.model_dump_json(), file=file, flush=True)


def _first_steps(job: RunSpec, rank: int, device: torch.device, recorder: Recorder) -> None:
    """Repeats the first steps of a worker without others, to trace allocations."""
    trainer = WorkerTrainer(job, rank, device, recorder)
    for step in range(2):
        batch = trainer.batch(step)
        recorder.begin_step(step)
        trainer.step(*batch)


def serve(job: RunSpec, rank: int, heartbeat: Heartbeat, world: World) -> None:
    """Life of a server process, whose rank follows those of the workers."""
    replication = job.plan.replication
    assert replication is not None
    heartbeat.beat(RankState.WAITING, "waiting for the first worker", 0)
    sizes, num_workers = world.sizes(), job.plan.dp_replicate
    server = ParameterServer(replication, rank - num_workers, num_workers, sizes, job.training.update, world.connect)
    server.start()
    reference = ReferenceMatmul(torch.device("cpu"))
    for _ in range(_TIMINGS):
        reference.time_once()
    dist.barrier()
    server.serve(lambda steps: heartbeat.beat(RankState.WAITING, "serving workers", steps))
    world.tell_missing(server.missing)
    dist.barrier()
    heartbeat.beat(RankState.WAITING, "waiting for the workers to measure memory", job.num_all_steps)
