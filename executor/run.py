"""Runs a job from beginning to end: checks, nodes, ranks, measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from executor.checkpoint_folder import check_resume
from executor.checks import check_job
from executor.exchange import Beats
from executor.host_clock import ClockReading
from executor.launch import launch_ranks
from executor.meeting import meet, refuse
from executor.rank import RankFiles
from executor.results import gather
from executor.settling import on_all_nodes
from executor.team import NodeResult, Team
from simplan.errors import RunError, SimplanError
from simplan.files import write_whole
from simplan.program.job import Job
from simplan.program.measurement import Measurement
from simplan.program.nodes import Nodes
from simplan.program.refusal import Refusal

__all__ = ["Progress", "join_job", "run_job"]

Progress = Callable[[int, int], None]
"""Called with the steps finished by all ranks and the steps of the run, warm-up included."""


def run_job(
    job: Job,
    out_dir: Path,
    on_progress: Progress | None = None,
    *,
    nodes: Nodes | None = None,
    rank_module: str = "executor.worker",
    on_note: Callable[[str], None] | None = None,
) -> Measurement:
    """Runs a job and writes ``job.json``, ``measurement.json`` and the ranks' logs to ``out_dir``.

    A run that fails or is interrupted leaves a measurement of the steps that all ranks had finished, with
    ``complete`` false and ``failure`` saying why.

    Args:
        job: What to run.
        out_dir: Folder for the files of the run; made when missing.
        on_progress: Told about every finished step.
        nodes: How to meet the other nodes, of which this is node 0; None to run all ranks on this machine.
        rank_module: The program of one rank; takes the job file and the folder.
        on_note: Told what a user should know, a sentence at a time: where the run begins, restarts, checkpoints that
            were not written. The measurement has the same.

    Raises:
        SpecError, ProgramError: The job cannot be run here, or the nodes were not asked the same; nothing was started.
        RunError: Ranks failed or hung, or nodes did not come; all are ended.
    """
    _check(job, nodes)
    notes: list[str] = []

    def note(sentence: str) -> None:
        notes.append(sentence)
        if on_note is not None:
            on_note(sentence)

    def say_where_it_begins() -> None:
        for found in check_resume(job):
            note(found)

    def run_ranks() -> None:
        if team is not None:  # now all nodes hear why a run cannot go on
            say_where_it_begins()
        _run_here(job, out_dir, on_progress, rank_module, team, note)

    if nodes is None:
        say_where_it_begins()
    team = None if nodes is None else meet(nodes, job.model_dump_json())
    out_dir = _folder(out_dir)
    failure: str | None = "the run was interrupted"
    readings: dict[int, tuple[ClockReading, ...]] = {}
    try:
        if team is None:
            run_ranks()
        else:
            _run_on_all(team, job, out_dir, run_ranks, readings)
        failure = None
    except SimplanError as error:
        failure = str(error)
        raise
    finally:
        measurement = gather(job, out_dir, failure, readings, notes)
        for unwritten in measurement.notes[len(notes) :]:
            note(unwritten)
        _keep(out_dir / "measurement.json", measurement, failure)
    return measurement


def join_job(nodes: Nodes, out_dir: Path, *, rank_module: str = "executor.worker") -> None:
    """Runs this node's part of a job that node 0 has; returns when all nodes are done.

    Args:
        nodes: How to meet the others.
        out_dir: Folder for the logs of this node's ranks.
        rank_module: As in ``run_job``.

    Raises:
        SpecError: The nodes were not asked the same; nothing was started.
        RunError: Ranks of any node failed or hung, or nodes did not come.
    """
    team = meet(nodes, None)
    job, out_dir = Job.model_validate_json(team.job), _folder(out_dir)
    _run_on_all(team, job, out_dir, lambda: _run_here(job, out_dir, None, rank_module, team, None), {})


def _check(job: Job, nodes: Nodes | None) -> None:
    """As ``check_job``; what node 0 refuses, the others are told."""
    try:
        check_job(job, None if nodes is None else nodes.ranks_per_node)
    except SimplanError as error:
        if nodes is not None:
            refuse(Refusal(nodes=nodes, sentence=str(error), exit_code=error.exit_code))
        raise


def _folder(out_dir: Path) -> Path:
    out_dir = out_dir.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    return out_dir


def _keep(file: Path, measurement: Measurement, failure: str | None) -> None:
    try:
        write_whole(file, measurement.model_dump_json(indent=1))
    except OSError as error:
        said = f"{file} cannot be written: {error.strerror}"
        raise RunError(said if failure is None else f"{failure}; and {said}") from None


def _run_on_all(
    team: Team,
    job: Job,
    out_dir: Path,
    run_ranks: Callable[[], None],
    readings: dict[int, tuple[ClockReading, ...]],
) -> None:
    """Runs this node's ranks, and settles with the others how it went.

    Args:
        team, job, out_dir: As in ``run_job``.
        run_ranks: Runs those of this node.
        readings: On node 0, gets the readings of every other node's clock by rank, also when the run fails.

    Raises:
        SpecError, RunError: What the nodes have agreed on, the same on all of them.
    """

    def work() -> None:
        check_job(job, len(team.ranks))
        run_ranks()
        team.read_clock()

    def keep(result: NodeResult) -> None:
        for rank, lines in result.steps.items():
            write_whole(RankFiles(out_dir, rank).steps, lines)
            readings[rank] = result.readings

    on_all_nodes(team, work, lambda: _steps_of(team, out_dir), keep)


def _steps_of(team: Team, out_dir: Path) -> dict[int, str]:
    """What the ranks of this node have measured."""
    files = {rank: RankFiles(out_dir, rank).steps for rank in team.ranks}
    return {rank: file.read_text() for rank, file in files.items() if file.exists()}


def _run_here(
    job: Job,
    out_dir: Path,
    on_progress: Progress | None,
    rank_module: str,
    team: Team | None,
    on_restart: Callable[[str], None] | None,
) -> None:
    job_file = out_dir / "job.json"
    write_whole(job_file, job.model_dump_json(indent=1))
    num_steps = job.num_all_steps
    told = 0

    def on_poll(beats: Beats) -> None:
        nonlocal told
        finished = min((0 if beat is None else beat.step) for beat in beats)
        while told < finished:
            told += 1
            if on_progress is not None:
                on_progress(told, num_steps)

    launch_ranks(
        rank_module,
        [str(job_file), str(out_dir)],
        num_ranks=job.plan.num_devices,
        out_dir=out_dir,
        timeout_s=job.timeout_s,
        on_poll=on_poll,
        team=team,
        max_restarts=0 if job.checkpointing is None else job.checkpointing.max_restarts,
        on_restart=on_restart,
        predicted_bytes=job.predicted_memory_bytes,
    )
