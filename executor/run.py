"""Runs a job from beginning to end: checks, nodes, ranks, measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

from executor.checks import check_job
from executor.launch.errors import RanksError, RunOverError
from executor.launch.faults import FaultInjector, OnLost
from executor.launch.launcher import Agent, OnLeave, RankLaunch, Start, launch_ranks
from executor.launch.nodes import LOOPBACK, Rendezvous, listening_store
from executor.launch.rank import RankFiles, folder_of
from executor.launch.replicas import ReplicaAgent
from executor.launch.roster import Roster
from executor.launch.watchdog import Beats
from executor.profiling.results import RunSegment, gather, written_here
from executor.profiling.run_times import Launched, forget_log, read_log, run_times
from simplan.errors import RunError, SimplanError
from simplan.io import write_whole
from simplan.plan.placement import Placement
from simplan.runs.checkpoint import Checkpointing, lost_errors
from simplan.runs.elastic import RendezvousOptions
from simplan.runs.lock import exclusive
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.units import counted

_RANK = "executor.worker"
_ALL_HERE_S = 60.0  # for the store of this machine to answer

Progress = Callable[[int, int], None]
"""Called with the steps finished by all ranks of this node and the steps of the run, warm-up included."""

Note = Callable[[str], None]
"""Called with one sentence for the user: where the run listens, restarts, checkpoints that were not written."""


def run_job(
    job: RunSpec,
    out_dir: Path,
    on_progress: Progress | None = None,
    *,
    rank_module: str = _RANK,
    on_note: Note | None = None,
) -> Measurement:
    """Runs a job on this machine and writes ``job.json``, ``measurement.json`` and logs to ``out_dir``.

    A run that fails or is interrupted leaves a measurement of the steps that all ranks had finished, with
    ``complete`` false and ``failure`` the reason.

    Args:
        out_dir: Folder for the files of the run; created when missing.
        rank_module: Program of one rank, which takes the job file and the folder.
        on_note: Called with every note; the measurement has those on the run itself, too.

    Raises:
        SpecError, ProgramError: The job cannot be run here; nothing was started.
        RunError: Ranks failed or hung; all are ended.
    """
    check_job(job)
    run = _Run(job, out_dir.resolve(), on_progress, on_note, None)
    with _owned(job.checkpointing):
        run.launch(_check_resume(job), rank_module)
    assert run.measurement is not None
    return run.measurement


def run_on_nodes(
    nodes: RendezvousOptions,
    job: RunSpec | None,
    out_dir: Path,
    on_progress: Progress | None = None,
    *,
    on_note: Note | None = None,
    on_lost: OnLost | None = None,
) -> None:
    """Runs this node's ranks of a job; the leading node writes the measurement.

    Args:
        job: The job, on the leading node only; the other nodes take it from there.
        out_dir, on_progress, on_note: As in ``run_job``.
        on_lost: Called before a fault of the run ends this node.

    Raises:
        SpecError, ProgramError, RunError: As ``run_job``; or nodes did not come, or have another request.
    """
    resuming: list[str] = []
    with _owned(None if job is None else job.checkpointing):
        if job is not None:
            for plan in (job, *map(job.on_nodes, job.fewer_nodes)):
                check_job(plan, nodes.ranks_per_node)
            resuming = _check_resume(job)
        rendezvous = Rendezvous(nodes, None if job is None else job.model_dump_json())
        if on_note is not None:
            on_note(rendezvous.listening)
        told = RunSpec.model_validate_json(rendezvous.job)
        run = _Run(told, out_dir.resolve(), on_progress, on_note, rendezvous, on_lost)
        run.launch(resuming)


def gather_left(job: RunSpec, out_dir: Path, failure: str) -> None:
    """Writes the measurement of a run on this machine whose launcher was killed: the steps that all ranks finished.

    Args:
        failure: Reason of the early end, for the measurement.

    Raises:
        SpecError: Ranks of the folder still run.
    """
    with exclusive(out_dir, "--output", role=".ranks"):
        measurement = gather([RunSegment(job)], written_here(out_dir, job.plan.num_devices), failure)
        write_whole(out_dir / "measurement.json", measurement.model_dump_json(indent=1))


def _check_resume(job: RunSpec) -> list[str]:
    """As ``check_resume``, whose import of torch.distributed.checkpoint takes a second that other runs are spared."""
    if job.checkpointing is None:
        return []
    from executor.train.checkpoint_folder import check_resume

    return check_resume(job)


def _num_saved_steps(checkpointing: Checkpointing) -> int:
    from executor.train.checkpoint_folder import newest_checkpoint

    header, _ = newest_checkpoint(Path(checkpointing.folder))
    return 0 if header is None else header.step


def _owned(checkpointing: Checkpointing | None) -> AbstractContextManager[None]:
    """The folder of checkpoints, for this run alone; the leading node takes it for all nodes."""
    if checkpointing is None:
        return nullcontext()
    return exclusive(Path(checkpointing.folder), "--checkpoint-dir")


@dataclass(slots=True)
class _Run:
    """This node's part of a run.

    Attributes:
        rendezvous: Connection to the other nodes; None for this machine alone.
        roster: Roster of replicas that may leave; None for others.
        measurement: Measurement of all ranks; None on nodes that do not lead.
    """

    job: RunSpec
    out_dir: Path
    on_progress: Progress | None
    on_note: Note | None
    rendezvous: Rendezvous | None
    on_lost: OnLost | None = None
    faults: FaultInjector | None = None
    launches: list[Launched] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    segments: list[RunSegment] = field(default_factory=list)
    local_ranks: tuple[int, ...] = ()
    reported_steps: int = 0
    measurement: Measurement | None = None
    roster: Roster | None = None

    def launch(self, notes: list[str], rank_module: str = _RANK) -> None:
        """Runs this node's ranks, and collects the measurement of all ranks."""
        for note in notes:
            self._note(note)
        with exclusive(self.out_dir, "--output", role=".ranks"):
            self._launch(rank_module)

    def _launch(self, rank_module: str) -> None:
        job, out_dir, rendezvous = self.job, self.out_dir, self.rendezvous
        job_file = out_dir / "job.json"
        write_whole(job_file, job.model_dump_json(indent=1))
        for old in out_dir.rglob("rank*.jsonl"):
            old.unlink(missing_ok=True)
        forget_log(out_dir)
        if job.faults:
            self.faults = FaultInjector(job.faults, rendezvous, self._rank_of, self.on_lost)
        launch = RankLaunch(
            rank_module,
            (str(job_file), str(out_dir)),
            job.processes_per_node(self._ranks_per_node),
            out_dir,
            job.timeout_s,
            rendezvous,
            0 if job.checkpointing is None else job.checkpointing.max_restarts,
            self._layout,
            self._rank_of,
            job.predicted_memory_bytes,
            self.faults,
            self._replica_agent(),
            self._on_leave,
        )
        failure: str | None = "the run was interrupted"
        try:
            try:
                launch_ranks(launch, self._on_poll, self._on_start)
            except RunOverError as error:
                if rendezvous is None or rendezvous.has_failed():
                    raise error if rendezvous is None else rendezvous.agreed(error) from None
                self._note(f"{error}; this one was a spare")
            except RanksError as error:
                if not self._others_finish():
                    raise error if rendezvous is None else rendezvous.agreed(error) from None
            failure = None
        except SimplanError as error:
            failure = str(error)
            raise
        finally:
            self._gather(failure)

    @property
    def _ranks_per_node(self) -> int:
        return self.job.plan.num_devices if self.rendezvous is None else self.rendezvous.nodes.ranks_per_node

    def _replica_agent(self) -> Callable[[OnLeave], Agent] | None:
        """Makes the agent of replicas that may leave; None for a run that ends with any rank."""
        job, rendezvous, plan = self.job, self.rendezvous, self.job.plan
        if plan.replication is None or plan.replication.min_replicas is None:
            return None
        num_ranks = plan.num_devices // plan.dp_replicate
        timeout_s = _ALL_HERE_S if rendezvous is None else rendezvous.nodes.join_timeout_s
        num_here = plan.dp_replicate if rendezvous is None else rendezvous.nodes.ranks_per_node // num_ranks
        if rendezvous is None:
            store = listening_store(LOOPBACK, 0, timedelta(seconds=timeout_s))
            address = LOOPBACK, store.port
        else:
            store, address = rendezvous.store, rendezvous.address_of_store
        self.roster = Roster(store, plan.dp_replicate, num_ranks, address)
        if leads := rendezvous is None or rendezvous.nodes.leads:
            self.roster.open()
        here = self.roster.claim(num_here, timeout_s, leads=leads)
        ranks_here = job.ranks_by_node(self._ranks_per_node)[here[0] // num_here]
        servers = [rank for rank in ranks_here if rank >= plan.num_devices]
        return partial(ReplicaAgent, self.roster, here, servers, job.replica_restarts)

    def _on_leave(self, ranks: range, why: RanksError) -> None:
        """Tells that a replica of this node has left."""
        plan, roster = self.job.plan, self.roster
        assert roster is not None
        replica = ranks.start // roster.num_ranks
        self._note(f"replica {replica} of {plan.dp_replicate} has left: {why}")

    def _others_finish(self) -> bool:
        """True if replicas of other nodes have finished the run without those of this one, which has the store."""
        if self.roster is None or self.rendezvous is None or not self.rendezvous.nodes.leads:
            return False
        self.roster.wait_for_others()
        return self.roster.is_finished

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        if self.on_note is not None:
            self.on_note(sentence)

    def _job_on(self, num_ranks: int) -> RunSpec:
        job = self.job.on_ranks(num_ranks)
        if job is None:
            raise RunError(f"no plan was made for {counted(num_ranks, 'rank')}")
        return job

    def _layout(self, num_ranks: int) -> tuple[Path, int]:
        job = self._job_on(num_ranks)
        return self._folder_of(job), job.num_processes

    def _rank_of(self, num_ranks: int, process: int) -> int:
        job = self._job_on(num_ranks)
        if job.num_processes > job.plan.num_devices and self.roster is None:
            return job.rank_of_process(process, self._ranks_per_node)
        placement = Placement.of(job.plan)
        return process if placement is None else placement.rank_of(process)

    def _folder_of(self, job: RunSpec) -> Path:
        return folder_of(self.out_dir, self.job.plan.num_devices, job.plan.num_devices)

    def _on_poll(self, beats: Beats) -> None:
        farthest = min if self.roster is None else max  # a replica that joins begins late
        steps = farthest((0 if beat is None else beat.step for beat in beats.values()), default=0)
        if self.on_progress is None or not beats or steps == self.reported_steps:
            return
        # every new step; after a restart, the step from which ranks resume
        for step in range(min(self.reported_steps, steps - 1) + 1, steps + 1):
            if step:
                self.on_progress(step, self.job.num_all_steps)
        self.reported_steps = steps

    def _on_start(self, start: Start, why: RunError | None) -> None:
        self.local_ranks = start.ranks
        if self.rendezvous is not None:
            self.rendezvous.begin(start.ranks)
        checkpointing, job = self.job.checkpointing, self._job_on(start.num_ranks)
        if why is not None:
            assert checkpointing is not None
            self._note(f"{why}; restart {start.restarts} of {checkpointing.max_restarts}")
        per_node = self._ranks_per_node
        num_nodes = job.plan.num_devices // per_node
        self.launches.append(Launched(time.monotonic(), num_nodes, start.ended_s, failed=why is not None))
        if self.segments and self.segments[-1].job.plan == job.plan:
            return
        done = 0 if checkpointing is None else _num_saved_steps(checkpointing)
        sentence = ""
        if self.segments or job.plan != self.job.plan:
            verb = "go on" if self.segments else "begin"
            if num_nodes == 1:
                verb = "goes on" if self.segments else "begins"
            idle = start.num_ranks // per_node - num_nodes
            sentence = f"{counted(num_nodes, 'node')} with {counted(job.plan.num_devices, 'rank')} {verb}"
            sentence += f" after step {done}" if done else ""
            sentence += f"; {counted(idle, 'node')} more without work" if idle else ""
            lost = lost_errors(self.segments[-1].job.plan, job.plan) if self.segments and done else ""
            sentence += f"; {lost}" if lost else ""
            self._note(sentence)
        self.segments.append(RunSegment(job, num_nodes, done, sentence))

    def _gather(self, failure: str | None) -> None:
        segments, rendezvous = self.segments or [RunSegment(self.job)], self.rendezvous
        job = segments[-1].job
        folder = self._folder_of(job)
        written = written_here(folder, job.plan.num_devices) if rendezvous is None else {}
        lost = None
        if rendezvous is not None:
            rendezvous.leave({rank: RankFiles(folder, rank).texts() for rank in self.local_ranks})
            if not rendezvous.nodes.leads:
                return
            expected = range(job.plan.num_devices) if self.roster is None else self.roster.last_ranks
            written = rendezvous.collect(expected, failed=failure is not None)
            missing = [rank for rank in expected if rank not in written]
            if missing and failure is None:
                number = counted(len(missing), "rank")
                lost = failure = f"other nodes did not send what {number} measured, the first of them rank {missing[0]}"
        happened = [] if self.faults is None else self.faults.happened
        times = run_times(self.launches, read_log(self.out_dir), happened) if self.launches else None
        measurement = gather(segments, written, failure, self.notes, times)
        for note in measurement.notes[len(self.notes) :]:
            self._note(note)
        file = self.out_dir / "measurement.json"
        try:
            write_whole(file, measurement.model_dump_json(indent=1))
        except OSError as error:
            said = f"{file} cannot be written: {error.strerror}"
            raise RunError(said if failure is None else f"{failure}; and {said}") from None
        if lost is not None:
            raise RunError(f"{lost}; {file} has what came")
        self.measurement = measurement
