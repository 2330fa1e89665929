"""One rank of a job: ``torchrun ... -m executor.worker JOB.json OUT_DIR``.

``simplan run`` also starts its ranks with torchrun's agent, but watches them and collects their measurements. Without
``simplan run``, rank 0 writes ``OUT_DIR/measurement.json``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from executor.calibration.timing import ReferenceMatmul
from executor.distributed.mesh import ParallelDims
from executor.distributed.precision import allow_tf32
from executor.launch.errors import out_of_memory_explained
from executor.launch.rank import (
    PARENT_VARIABLE,
    ROSTER_VARIABLE,
    THREADS_VARIABLE,
    RankFiles,
    RunLog,
    StopRequest,
    folder_of,
    live_as_rank,
)
from executor.launch.watchdog import Heartbeat, RankState
from executor.profiling.memory import forget_peaks, forget_traced_peak, peak_allocated_bytes, peak_memory, without_bytes
from executor.profiling.recorder import Recorder, make_clock
from executor.train.trainer import Trainer
from simplan.errors import Problem, SpecError
from simplan.io import write_whole
from simplan.optimizers import OPTIMIZERS
from simplan.plan.placement import Placement
from simplan.plan.plan import RankMapping
from simplan.runs.run_spec import RunSpec
from simplan.units import format_bytes

if TYPE_CHECKING:
    from executor.distributed.replicas.membership import Membership
    from executor.launch.roster import Roster
    from executor.train.run_state import RunStateSaver

_AFTER_RESTART = 2
"""Warm-up steps after a restart, where step times cannot tell when the steady state begins."""

_DONE = "simplan/done"
_FAREWELL_S = 1.0


def use_device(device: str, num_ranks: int) -> torch.device:
    """Sets up this rank's device: a separate CUDA device, or the CPU.

    The rank has an equal share of the CPU's cores, for offloaded updates also next to a CUDA device, unless the user
    has set OMP_NUM_THREADS.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA when every rank can have a device.
        num_ranks: Ranks on this machine.
    """
    if not os.environ.get(THREADS_VARIABLE):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    if device == "cuda" or (device == "auto" and torch.cuda.device_count() >= num_ranks):
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # not set for a rehearsed rank
        torch.cuda.set_device(chosen)
        return chosen
    return torch.device("cpu")


def start_rank(
    device: torch.device,
    timeout_s: float,
    num_ranks: int | None = None,
    *,
    on_host: bool = False,
    process: int | None = None,
) -> Store:
    """Joins the default process group: NCCL on CUDA devices, gloo on the CPU, or either where tensors are on both.

    torch's timeout is longer than the launcher's, so that the launcher names the rank that hangs. NCCL creates
    communicators lazily: with eager ones (``device_id``), P2P sends of a pipeline would wait for all other operations
    of their group.

    Args:
        timeout_s: The launcher's timeout.
        num_ranks: Ranks of torchrun's that have work; None for all.
        on_host: Gradients are on the host, also those of CUDA devices.
        process: torchrun's number of this process, which a placement tells apart from RANK; None for RANK.

    Returns:
        The store of these ranks, which the first process or the agent has.
    """
    rank, world_size = int(os.environ["RANK"]), num_ranks or int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=2 * timeout_s + 60)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    common: Store
    process = rank if process is None else process
    if process == 0 and not is_agents and PARENT_VARIABLE in os.environ:  # MASTER_ADDR is an address of this node
        from executor.launch.nodes import listening_store

        common = listening_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)
    else:
        common, _, _ = next(rendezvous("env://", process, world_size, timeout=timeout))
    if is_agents:
        # torch 2.13 keeps the agents' store over restarts, with the addresses of ranks that are gone
        common = PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", common)
    nccl = "cpu:gloo,cuda:nccl" if on_host else "nccl"
    backend = nccl if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=common, rank=rank, world_size=world_size, timeout=timeout)
    return common


def main(argv: list[str]) -> None:
    """Runs the job of ``argv[0]`` with its files in ``argv[1]``.

    torchrun numbers processes by node, so its RANK is the device of the plan, where no node has parameter servers. From
    here on RANK is the rank there.
    """
    spec = RunSpec.model_validate_json(Path(argv[0]).read_bytes())
    process, num_processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = spec.on_ranks(num_processes) or spec
    placement = Placement.of(job.plan)
    if job.num_processes > job.plan.num_devices and ROSTER_VARIABLE not in os.environ:
        num_nodes = num_processes // int(os.environ["LOCAL_WORLD_SIZE"])
        os.environ["RANK"] = str(job.rank_of_process(process, job.plan.num_devices // num_nodes))
    elif placement is not None:
        os.environ["RANK"] = str(placement.rank_of(process))
    folder = folder_of(Path(argv[1]), spec.plan.num_devices, job.plan.num_devices)
    folder.mkdir(parents=True, exist_ok=True)
    live_as_rank(folder, lambda heartbeat, stop, rank: _run(job, folder, Path(argv[1]), heartbeat, stop, rank))


def _run(job: RunSpec, folder: Path, out_dir: Path, heartbeat: Heartbeat, stop: StopRequest, rank: int) -> None:
    is_watched = PARENT_VARIABLE in os.environ  # by the launcher, which has checked the job
    if not is_watched:
        _check(job)
    if rank >= job.num_processes:
        _idle(heartbeat)
        return
    replication = job.plan.replication
    if replication is not None and replication.has_workers:
        _work(job, folder, out_dir, heartbeat, rank, gathers=not is_watched)
        return
    device = use_device(job.device, int(os.environ["LOCAL_WORLD_SIZE"]))
    allow_tf32(allowed=job.training.precision == "tf32")
    if replication is not None and replication.min_replicas is not None:
        _live_in_replica(job, folder, device, heartbeat, stop, rank)
        return
    placement, num_ranks, on_host = Placement.of(job.plan), job.plan.num_devices, job.plan.offload_optimizer
    process = rank if placement is None else placement.device_of(rank)
    store = start_rank(device, job.timeout_s, num_ranks, on_host=on_host, process=process)
    predicted_bytes = job.predicted_memory_bytes[rank] if job.predicted_memory_bytes else None
    files = RankFiles(folder, rank)
    is_logged = job.checkpointing is not None and os.environ["LOCAL_RANK"] == "0"
    with out_of_memory_explained(device, predicted_bytes):
        recorder = _recorder(job, device, heartbeat, rank)
        dims = ParallelDims.of(job, rank, recorder, device_type=device.type)
        _train(job, files, device, dims, recorder, heartbeat, stop, rank, RunLog(out_dir if is_logged else None))
    heartbeat.beat(RankState.WAITING, "waiting for the other ranks to finish")
    _barrier(device)
    if not is_watched:
        _gather(job, files, out_dir)
    if process == 0:
        _end_idle(store, job)
    dist.destroy_process_group()


def _live_in_replica(
    job: RunSpec, folder: Path, device: torch.device, heartbeat: Heartbeat, stop: StopRequest, rank: int
) -> None:
    """Life of a rank whose replica may leave, and which is a world of its own: see ``Membership``."""
    from executor.distributed.replicas.membership import Membership  # only where needed

    replication = job.plan.replication
    assert replication is not None
    assert replication.min_replicas is not None
    roster, incarnation, timeout = _start_in_roster(job, rank, job.plan.num_devices // job.plan.dp_replicate)
    recorder = _recorder(job, device, heartbeat, rank)
    members = Membership(roster, incarnation, rank, replication.min_replicas, timeout, recorder)
    dims = ParallelDims.of(job, rank, recorder, members=members)
    predicted_bytes = job.predicted_memory_bytes[rank] if job.predicted_memory_bytes else None
    with out_of_memory_explained(device, predicted_bytes):
        _train(job, RankFiles(folder, rank), device, dims, recorder, heartbeat, stop, rank, RunLog(None))
    dist.destroy_process_group()
    heartbeat.beat(RankState.FINISHED, "finished")
    members.close()


def _start_in_roster(job: RunSpec, rank: int, num_ranks: int) -> tuple[Roster, int, timedelta]:
    """Makes this rank's replica the default process group; returns roster, incarnation, and timeout of messages."""
    from executor.launch.roster import Roster

    roster, incarnation = Roster.of_rank(job.plan.dp_replicate, num_ranks)
    replica, place = divmod(rank, num_ranks)
    timeout = timedelta(seconds=2 * job.timeout_s + 60)
    store = PrefixStore(f"replica{replica}.{incarnation}", roster.store)
    dist.init_process_group("gloo", store=store, rank=place, world_size=num_ranks, timeout=timeout)
    return roster, incarnation, timeout


def _recorder(job: RunSpec, device: torch.device, heartbeat: Heartbeat, rank: int) -> Recorder:
    return Recorder(job.parsed_table()[RankMapping.of(job.plan).place(rank).pp], make_clock(device), heartbeat)


def _work(job: RunSpec, folder: Path, out_dir: Path, heartbeat: Heartbeat, rank: int, *, gathers: bool) -> None:
    """Life of a worker that does not wait for all others, or of a parameter server, whose transfers are gloo's."""
    from executor.train.asynchronous import WorkersWhoLeave, World, serve, train_worker  # only where needed

    cpu, files, is_server = torch.device("cpu"), RankFiles(folder, rank), rank >= job.plan.num_devices
    num_nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    device = use_device("cpu" if is_server else job.device, job.plan.num_devices // num_nodes)
    allow_tf32(allowed=job.training.precision == "tf32")
    world, replication, store = World(job, rank), job.plan.replication, None
    if replication is not None and replication.min_replicas is not None:
        roster, incarnation, timeout = _start_in_roster(job, rank, num_ranks=1)
        world = WorkersWhoLeave(job, rank, roster, incarnation, timeout)
    else:
        store = start_rank(cpu, job.timeout_s, job.num_processes)
    with out_of_memory_explained(device, dict(enumerate(job.predicted_memory_bytes)).get(rank)):
        if is_server:
            serve(job, rank, heartbeat, world)
        else:
            train_worker(job, rank, files, device, heartbeat, world)
    heartbeat.beat(RankState.WAITING, "waiting for the other ranks to finish")
    _barrier(cpu)
    if gathers:
        _gather(job, files, out_dir)
    if store is not None and rank == 0:
        _end_idle(store, job)
    dist.destroy_process_group()


def _check(job: RunSpec) -> None:
    """Does the launcher's checks.

    Raises:
        SpecError: torchrun has started too few ranks, or the job cannot be run or resumed.
    """
    from executor.checks import check_job
    from executor.train.checkpoint_folder import check_resume

    num_ranks = int(os.environ["WORLD_SIZE"])
    if job.num_processes > num_ranks:
        rule = f"times --nproc-per-node are {num_ranks} ranks, and the plan is for {job.num_processes}"
        raise SpecError(Problem(field="--nnodes", rule=rule))
    check_job(job, int(os.environ["LOCAL_WORLD_SIZE"]))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        for note in check_resume(job):
            sys.stdout.write(f"note: {note}\n")


def _gather(job: RunSpec, files: RankFiles, out_dir: Path) -> None:
    """Rank 0 writes the measurement of all ranks, and prints a line about it."""
    from executor.profiling.results import RunSegment, gather

    written: list[Any] | None = [None] * job.num_processes if dist.get_rank() == 0 else None
    dist.gather_object((socket.gethostname(), files.texts()), written)
    if written is None:
        return
    measurement = gather([RunSegment(job)], dict(enumerate(written)))
    file = out_dir / "measurement.json"
    write_whole(file, measurement.model_dump_json(indent=1))
    peaks = [max(filter(None, rank.peak_memory.model_dump().values()), default=0) for rank in measurement.ranks]
    sys.stdout.write(
        f"step time {1e3 * measurement.step_time_s:.1f} ms, median of {len(measurement.step_times_s)} steps; "
        f"peak memory {format_bytes(max(peaks))} on rank {peaks.index(max(peaks))}; wrote {file}\n"
    )


def _end_idle(store: Store, job: RunSpec) -> None:
    """Ends the ranks without work, if there are any; called by the process that has the store."""
    if job.num_processes < int(os.environ["WORLD_SIZE"]):
        store.set(_DONE, "")
        time.sleep(_FAREWELL_S)


def _idle(heartbeat: Heartbeat) -> None:
    """Life of a rank that no plan needs: it ends or fails with the other ranks, so that torchrun restarts all."""
    from executor.train.run_state import PeerStoppedError

    heartbeat.beat(RankState.WAITING, "no plan needs this rank")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    try:
        store.wait([_DONE], timedelta(days=365))
    except RuntimeError:
        raise PeerStoppedError("the ranks that have work have ended") from None


def _train(
    job: RunSpec,
    files: RankFiles,
    device: torch.device,
    dims: ParallelDims,
    recorder: Recorder,
    heartbeat: Heartbeat,
    stop: StopRequest,
    rank: int,
    log: RunLog,
) -> None:
    """Builds the model, takes the steps and measures memory."""
    heartbeat.beat(RankState.RUNNING, "building the model", 0)

    def build(dims: ParallelDims) -> Trainer:
        return Trainer(job, rank, device, dims, recorder)

    trainer, first, saver = build(dims), 0, None
    reference = ReferenceMatmul(device)
    forget_peaks(device)
    if job.checkpointing is not None:
        from executor.train.run_state import RunStateSaver

        saver = RunStateSaver(job, trainer.state(), files, stop, log)
        heartbeat.beat(RankState.RUNNING, "reading a checkpoint", 0)
        first = saver.restore()  # a run that does not resume has no checkpoints, which the launcher has checked
        trainer.resume(first)
    if dims.members is not None:
        first = _joined(job, trainer, dims.members)
    _keep_steps_before(first, files.steps)
    watched: AbstractContextManager[None] = nullcontext()
    if job.software.compiled or OPTIMIZERS[job.training.optimizer].package == "torchao":
        from executor.distributed.compiling import watched_compilation

        watched = watched_compilation(heartbeat)
    with files.steps.open("a") as file, watched:
        _timed_steps(job, trainer, reference, recorder, file, first, saver, log)
        if dims.members is not None:
            dims = dims.without_members()
        del trainer, saver
        memory = without_bytes(peak_memory(device), reference.held_bytes)
        if device.type == "cpu" and job.profile_memory:
            heartbeat.beat(RankState.RUNNING, "measuring allocations")
            run = partial(_traced_steps, partial(build, dims), recorder, job.traced_steps)
            allocated_bytes = peak_allocated_bytes(run)
            memory = memory.model_copy(update={"allocated_bytes": allocated_bytes})
        print(memory.model_dump_json(), file=file, flush=True)


def _joined(job: RunSpec, trainer: Trainer, members: Membership) -> int:
    """Steps that are done where this replica begins: 0, or those of the others where it has started later."""
    if not members.is_late:
        return 0
    meeting = members.join()
    if meeting is None:
        return job.num_all_steps
    members.receive(trainer.state().handed_on())
    assert job.plan.replication is not None
    return meeting.number * job.plan.replication.inner_steps


def _timed_steps(
    job: RunSpec,
    trainer: Trainer,
    reference: ReferenceMatmul,
    recorder: Recorder,
    file: TextIO,
    first: int,
    saver: RunStateSaver | None,
    log: RunLog,
) -> None:
    """Takes the steps; writes a line for each to the rank's file, outside of the timed part."""
    num_warmup_steps = job.num_warmup_steps
    if num_warmup_steps is None:  # found later by the step times, at the beginning of a run of equal steps
        at_start = job.num_all_steps - job.num_steps if job.round_steps > 1 else 0
        num_warmup_steps = _AFTER_RESTART if first else at_start
    num_warmup_steps, reference_s = max(num_warmup_steps, job.num_whole_steps), 0.0
    for step in range(first, job.num_all_steps):
        batch = trainer.batch(step)
        recorder.waiting(f"waiting for step {step + 1} to start", step)
        replicas = trainer.replicas
        # with backup workers nobody waits for a late rank; communication must not go on in time that is not measured
        goes_on = replicas is not None or trainer.communicates_between_steps
        if not goes_on or step == first:
            reference_s = reference.time_once()
            _barrier(reference.device)
        if step == first:
            log.add("begin", step)
        recorder.begin_step(step)
        losses = trainer.step(*batch)
        start_s, end_s = recorder.end_step()
        is_warmup = step < first + num_warmup_steps
        record = recorder.record(start_s, end_s, list(map(float, losses)), is_warmup=is_warmup, reference_s=reference_s)
        if replicas is not None:
            record = record.model_copy(update={"kept": replicas.kept, "arrived_s": replicas.arrived_s})
        if trainer.meeting is not None:
            record = record.model_copy(update={"members": trainer.meeting.replicas})
        print(record.model_dump_json(), file=file, flush=True)
        log.add("step", step + 1)
        if trainer.meeting is not None and trainer.meeting.joining:
            recorder.waiting("sending the state to a replica that joins", step)
            trainer.hand_on()
        if saver is not None:
            saver.after_step(step + 1, list(record.losses), recorder, is_last=step + 1 == job.num_all_steps)
    trainer.finish()
    recorder.waiting("waiting for the other ranks to measure memory", job.num_all_steps)


def _keep_steps_before(first: int, file: Path) -> None:
    """Removes the steps of an earlier attempt of this run that are repeated."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    kept = (line for line in lines if line.endswith("\n") and json.loads(line).get("step", first) < first)
    write_whole(file, "".join(kept))


def _traced_steps(build: Callable[[], Trainer], recorder: Recorder, steps: Sequence[int]) -> None:
    """Restarts the same training with steps of these indices, to trace allocations.

    States of the optimizer, and of compressed gradients, exist from the second step on in which they are used.
    """
    trainer = build()
    forget_traced_peak()
    for step in steps:
        batch = trainer.batch(step)
        recorder.begin_step(step)
        trainer.step(*batch)
    trainer.finish()


def _barrier(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


if __name__ == "__main__":
    main(sys.argv[1:])
