"""Runs a job from beginning to end: checks, nodes, ranks, measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from executor.checks import check_job
from executor.launch.errors import RanksError
from executor.launch.launcher import Launch, Start, launch_ranks
from executor.launch.nodes import Rendezvous
from executor.launch.rank import RankFiles, folder_of
from executor.launch.watchdog import Beats
from executor.profiling.results import Part, gather_parts
from executor.train.checkpoint_folder import check_resume, newest_checkpoint
from simplan.errors import RunError, SimplanError
from simplan.files import write_whole
from simplan.program.measurement import Measurement
from simplan.program.nodes import Nodes
from simplan.program.run_spec import RunSpec
from simplan.units import counted

__all__ = ["Progress", "run_job", "run_on_nodes"]

Progress = Callable[[int, int], None]
"""Called with the steps finished by all ranks of this node and the steps of the run, warm-up included."""

Note = Callable[[str], None]


def run_job(
    job: RunSpec,
    out_dir: Path,
    on_progress: Progress | None = None,
    *,
    rank_module: str = "executor.worker",
    on_note: Note | None = None,
) -> Measurement:
    """Runs a job on this machine and writes ``job.json``, ``measurement.json`` and logs to ``out_dir``.

    A run that fails or is interrupted leaves a measurement of the steps that all ranks had finished, with
    ``complete`` false and ``failure`` saying why.

    Args:
        job: What to run.
        out_dir: Folder for the files of the run; made when missing.
        on_progress: Told about every finished step.
        rank_module: The program of one rank; takes the job file and the folder.
        on_note: Told what a user should know, a sentence at a time: where the run begins, restarts, checkpoints that
            were not written. The measurement has the same.

    Raises:
        SpecError, ProgramError: The job cannot be run here; nothing was started.
        RunError: Ranks failed or hung; all are ended.
    """
    check_job(job)
    run = _Run(job, out_dir, rank_module, on_progress, on_note)
    for found in check_resume(job):
        run.note(found)
    run.launch(None)
    assert run.measurement is not None
    return run.measurement


def run_on_nodes(
    nodes: Nodes,
    job: RunSpec | None,
    out_dir: Path,
    on_progress: Progress | None = None,
    *,
    rank_module: str = "executor.worker",
    on_note: Note | None = None,
) -> None:
    """Runs this node's ranks of a job; the leading node writes the measurement.

    Args:
        nodes: How to meet the others.
        job: On the leading node, what to run; the others take it from there.
        out_dir, on_progress, rank_module, on_note: As of ``run_job``.

    Raises:
        SpecError, ProgramError, RunError: As ``run_job``; nodes did not come, or were not asked the same.
    """
    found = []
    if job is not None:
        check_job(job, nodes.ranks_per_node)
        for fewer in job.fewer_nodes:
            check_job(job.on_nodes(fewer), nodes.ranks_per_node)
        found = check_resume(job)
    rendezvous = Rendezvous(nodes, None if job is None else job.model_dump_json())
    run = _Run(RunSpec.model_validate_json(rendezvous.job), out_dir, rank_module, on_progress, on_note)
    for note in found:
        run.note(note)
    run.launch(rendezvous)


class _Run:
    """One node's part of a run.

    Attributes:
        measurement: Of all ranks; None on nodes that do not lead.
    """

    def __init__(
        self, job: RunSpec, out_dir: Path, rank_module: str, on_progress: Progress | None, on_note: Note | None
    ) -> None:
        self._job, self._out_dir, self._rank_module = job, out_dir.resolve(), rank_module
        self._on_progress, self._on_note = on_progress, on_note
        self._notes: list[str] = []
        self._parts: list[Part] = []
        self._start: Start | None = None
        self._rendezvous: Rendezvous | None = None
        self._told_steps = 0
        self.measurement: Measurement | None = None

    def note(self, sentence: str) -> None:
        """Tells it, and keeps it for the measurement."""
        self._notes.append(sentence)
        if self._on_note is not None:
            self._on_note(sentence)

    def launch(self, rendezvous: Rendezvous | None) -> None:
        """Runs this node's ranks, and gathers what all have measured."""
        job, out_dir, self._rendezvous = self._job, self._out_dir, rendezvous
        out_dir.mkdir(parents=True, exist_ok=True)
        job_file = out_dir / "job.json"
        write_whole(job_file, job.model_dump_json(indent=1))
        for old in out_dir.rglob("rank*.jsonl"):
            old.unlink(missing_ok=True)
        checkpointing = job.checkpointing
        launch = Launch(
            self._rank_module,
            (str(job_file), str(out_dir)),
            job.plan.num_devices if rendezvous is None else rendezvous.nodes.ranks_per_node,
            out_dir,
            job.timeout_s,
            rendezvous,
            0 if checkpointing is None else checkpointing.max_restarts,
            lambda num_ranks: self._folder_of(self._job_on(num_ranks)),
            lambda num_ranks: self._job_on(num_ranks).plan.num_devices,
            job.predicted_memory_bytes,
        )
        failure: str | None = "the run was interrupted"
        try:
            try:
                launch_ranks(launch, self._on_poll, self._on_start)
            except RanksError as error:
                raise error if rendezvous is None else rendezvous.agreed(error) from None
            failure = None
        except SimplanError as error:
            failure = str(error)
            raise
        finally:
            self._gather(rendezvous, failure)

    def _job_on(self, num_ranks: int) -> RunSpec:
        found = self._job.on_ranks(num_ranks)
        if found is None:
            raise RunError(f"no plan was made for {counted(num_ranks, 'rank')}")
        return found

    def _folder_of(self, job: RunSpec) -> Path:
        return folder_of(self._out_dir, self._job.plan.num_devices, job.plan.num_devices)

    def _on_poll(self, beats: Beats) -> None:
        if self._on_progress is None or not beats:
            return
        steps = min((0 if beat is None else beat.step for beat in beats.values()), default=0)
        # every step that is new; after a restart, where ranks are now
        for step in range(min(self._told_steps, steps - 1) + 1, steps + 1) if steps != self._told_steps else ():
            if step:
                self._on_progress(step, self._job.num_all_steps)
        self._told_steps = steps

    def _on_start(self, start: Start, why: RunError | None) -> None:
        self._start = start
        if self._rendezvous is not None:
            self._rendezvous.begin(start.ranks)
        asked, job = self._job.checkpointing, self._job_on(start.num_ranks)
        done = _steps_done(job)
        if why is not None:
            assert asked is not None
            self.note(f"{why}; restart {start.restarts} of {asked.max_restarts}")
        if self._parts and self._parts[-1].job.plan == job.plan:
            return
        per_node = len(start.ranks)
        num_nodes = job.plan.num_devices // per_node
        sentence = ""
        if self._parts or job.plan != self._job.plan:
            who = f"{counted(num_nodes, 'node')} with {counted(job.plan.num_devices, 'rank')}"
            one = "s" if num_nodes == 1 else ""
            verb = f"go{'es' if one else ''} on" if self._parts else f"begin{one}"
            idle = start.num_ranks // per_node - num_nodes
            sentence = f"{who} {verb} after step {done}" if done else f"{who} {verb}"
            sentence += f"; {counted(idle, 'node')} more without work" if idle else ""
            self.note(sentence)
        self._parts.append(Part(job, self._folder_of(job), num_nodes, done, sentence))

    def _gather(self, rendezvous: Rendezvous | None, failure: str | None) -> None:
        if not self._parts:
            self._parts.append(Part(self._job, self._out_dir, 1, 0, ""))
        last = self._parts[-1]
        elsewhere = {}
        if rendezvous is not None:
            ranks = () if self._start is None else self._start.ranks
            rendezvous.leave({rank: _texts(RankFiles(last.folder, rank)) for rank in ranks})
            if not rendezvous.nodes.leads:
                return
            elsewhere = rendezvous.collect(last.job.plan.num_devices, failed=failure is not None)
        measurement = gather_parts(self._parts, failure, elsewhere, self._notes)
        for unwritten in measurement.notes[len(self._notes) :]:
            self.note(unwritten)
        _keep(self._out_dir / "measurement.json", measurement, failure)
        self.measurement = measurement


def _texts(files: RankFiles) -> dict[str, str]:
    return {path.name: path.read_text() for path in (files.steps, files.checkpoints) if path.exists()}


def _steps_done(job: RunSpec) -> int:
    """In the newest whole checkpoint; 0 without one."""
    if job.checkpointing is None:
        return 0
    header, _ = newest_checkpoint(Path(job.checkpointing.folder))
    return 0 if header is None else header.step


def _keep(file: Path, measurement: Measurement, failure: str | None) -> None:
    try:
        write_whole(file, measurement.model_dump_json(indent=1))
    except OSError as error:
        said = f"{file} cannot be written: {error.strerror}"
        raise RunError(said if failure is None else f"{failure}; and {said}") from None
