"""Runs a job from beginning to end: checks, nodes, ranks, measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from executor.checkpoint_folder import check_resume
from executor.checks import check_job
from executor.decision import NodeResult
from executor.departure import Departure, told_to_leave
from executor.exchange import Beats, RegroupError
from executor.guest import NotNeededError
from executor.host_clock import ClockReading
from executor.launch import launch_ranks
from executor.meeting import meet, refuse
from executor.rank import RankFiles
from executor.regroup import Part, first_part, first_step, part_of, regroup
from executor.results import gather_parts
from executor.settling import on_all_nodes
from executor.team import Team
from simplan.errors import RunError, SimplanError
from simplan.files import write_whole
from simplan.program.measurement import Measurement
from simplan.program.nodes import Nodes
from simplan.program.refusal import Refusal
from simplan.program.run_spec import RunSpec

__all__ = ["Progress", "join_job", "run_job"]

Progress = Callable[[int, int], None]
"""Called with the steps finished by all ranks and the steps of the run, warm-up included."""


def run_job(
    job: RunSpec,
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

    if nodes is None:
        say_where_it_begins()
    team = None if nodes is None else meet(nodes, job.model_dump_json())
    out_dir = _folder(out_dir)
    resumes = job.checkpointing is not None and job.checkpointing.resume
    on_poll = _telling(on_progress, job.num_all_steps)
    failure: str | None = "the run was interrupted"
    readings: dict[int, tuple[ClockReading, ...]] = {}
    parts: list[Part] = []

    def run_ranks(part: Part, departure: Departure) -> None:
        if part.team is not None and not parts[1:]:  # now all nodes hear why a run cannot go on
            say_where_it_begins()
        _run_here(part, on_poll, rank_module, note, departure)

    def begin(part: Part | None) -> Part:
        assert part is not None, "node 0 is always needed"
        parts.append(part)
        readings.clear()
        if part.why:
            note(part.why)
        return part

    part = begin(first_part(job, team, out_dir, first_step(job) if resumes else 0))
    try:
        with told_to_leave(heeds=team is not None and team.is_elastic) as departure:
            while (cause := _run_part(part, run_ranks, readings, departure)) is not None:
                part = begin(regroup(part, out_dir, cause))
        failure = None
    except SimplanError as error:
        failure = str(error)
        raise
    finally:
        measurement = gather_parts(parts, failure, readings, notes)
        for unwritten in measurement.notes[len(notes) :]:
            note(unwritten)
        _keep(out_dir / "measurement.json", measurement, failure)
    return measurement


def join_job(
    nodes: Nodes,
    out_dir: Path,
    *,
    rank_module: str = "executor.worker",
    on_note: Callable[[str], None] | None = None,
) -> None:
    """Runs this node's part of a job that node 0 has; returns when all nodes are done, or this one is not needed.

    Args:
        nodes: How to meet the others.
        out_dir: Folder for the logs of this node's ranks.
        rank_module: As in ``run_job``.
        on_note: Told what a user of this node should know: that it is let in, waits, or was not needed.

    Raises:
        SpecError: The nodes were not asked the same; nothing was started.
        RunError: Ranks of any node failed or hung, or nodes did not come.
        LeftError: This node was told to leave, and has.
    """

    def note(sentence: str) -> None:
        if on_note is not None:
            on_note(sentence)

    try:
        waits = _take_part(meet(nodes, None, note), out_dir, rank_module, note)
    except NotNeededError as unneeded:
        note(str(unneeded))
        return
    while waits:  # as a node does that comes later: it may be needed again
        try:
            team = meet(nodes, None, note)
        except RunError as error:
            note(str(error))
            return
        waits = _take_part(team, out_dir, rank_module, note)


def _take_part(team: Team, out_dir: Path, rank_module: str, note: Callable[[str], None]) -> bool:
    """From a meeting on; gives whether this node could go on and is not needed, else the run is over."""

    def run_ranks(part: Part, departure: Departure) -> None:
        _run_here(part, lambda beats: None, rank_module, None, departure)

    out_dir = _folder(out_dir)
    if team.number == 0:
        part: Part | None = first_part(RunSpec.model_validate_json(team.job), team, out_dir)
    else:
        part = part_of(team, out_dir)
        note(f"joining the run, which goes on with {len(team.hosts)} nodes, as {team.me}")
    with told_to_leave(heeds=team.is_elastic) as departure:
        while part is not None and (cause := _run_part(part, run_ranks, {}, departure)) is not None:
            part = regroup(part, out_dir, cause)
    if part is None:
        note(f"the others go on without {team.me}, which is not needed now")
    return part is None


def _check(job: RunSpec, nodes: Nodes | None) -> None:
    """As ``check_job``, on all nodes and on fewer; what node 0 refuses, the others are told."""
    try:
        check_job(job, None if nodes is None else nodes.ranks_per_node)
        for fewer in job.fewer_nodes:
            check_job(job.on_nodes(fewer), None if nodes is None else nodes.ranks_per_node)
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


def _run_part(
    part: Part,
    run_ranks: Callable[[Part, Departure], None],
    readings: dict[int, tuple[ClockReading, ...]],
    departure: Departure,
) -> RegroupError | None:
    """Runs this node's ranks, and settles with the others how it went.

    Args:
        part: What is run.
        run_ranks: Runs those of this node.
        readings: On node 0, gets the readings of every other node's clock by rank, also when the run fails.
        departure: Whether this node is to leave.

    Returns:
        Why others than these nodes are to go on; nothing is settled then.

    Raises:
        SpecError, RunError: What the nodes have agreed on, the same on all of them.
        LeftError: This node has left.
    """
    team = part.team
    if team is None:
        run_ranks(part, departure)
        return None

    def work() -> None:
        check_job(part.job, len(team.ranks))
        run_ranks(part, departure)
        team.read_clock()

    def keep(result: NodeResult) -> None:
        for rank, lines in result.steps.items():
            write_whole(RankFiles(part.folder, rank).steps, lines)
            readings[rank] = result.readings

    try:
        on_all_nodes(team, work, lambda: _steps_of(team, part.folder), keep)
    except RegroupError as cause:
        return cause
    return None


def _steps_of(team: Team, folder: Path) -> dict[int, str]:
    """What the ranks of this node have measured."""
    files = {rank: RankFiles(folder, rank).steps for rank in team.ranks}
    return {rank: file.read_text() for rank, file in files.items() if file.exists()}


def _telling(on_progress: Progress | None, num_steps: int) -> Callable[[Beats], None]:
    """Tells about every step that all ranks have finished, once."""
    told = 0

    def on_poll(beats: Beats) -> None:
        nonlocal told
        finished = min((0 if beat is None else beat.step) for beat in beats)
        while told < finished:
            told += 1
            if on_progress is not None:
                on_progress(told, num_steps)

    return on_poll


def _run_here(
    part: Part,
    on_poll: Callable[[Beats], None],
    rank_module: str,
    on_restart: Callable[[str], None] | None,
    departure: Departure,
) -> None:
    job, job_file = part.job, part.folder / "job.json"
    write_whole(job_file, job.model_dump_json(indent=1))
    launch_ranks(
        rank_module,
        [str(job_file), str(part.folder)],
        num_ranks=job.plan.num_devices,
        out_dir=part.folder,
        timeout_s=job.timeout_s,
        on_poll=on_poll,
        team=part.team,
        max_restarts=0 if job.checkpointing is None else job.checkpointing.max_restarts,
        on_restart=on_restart,
        predicted_bytes=job.predicted_memory_bytes,
        departure=departure,
    )
