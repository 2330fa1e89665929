"""Runs a job from beginning to end: checks, ranks, measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from executor.checks import check_job
from executor.launch import Beats, launch_ranks
from executor.results import gather
from simplan.errors import RunError
from simplan.files import write_whole
from simplan.program.job import Job
from simplan.program.measurement import Measurement

__all__ = ["Progress", "run_job"]

Progress = Callable[[int, int], None]
"""Called with the steps finished by all ranks and the steps of the run, warm-up included."""


def run_job(
    job: Job, out_dir: Path, on_progress: Progress | None = None, *, rank_module: str = "executor.worker"
) -> Measurement:
    """Runs a job on this machine and writes ``job.json``, ``measurement.json`` and the ranks' logs to ``out_dir``.

    A run that fails or is interrupted leaves a measurement of the steps that all ranks had finished, with
    ``complete`` false and ``failure`` saying why.

    Args:
        job: What to run.
        out_dir: Folder for the files of the run; made when missing.
        on_progress: Told about every finished step.
        rank_module: The program of one rank; takes the job file and the folder.

    Raises:
        SpecError, ProgramError: The job cannot be run here; nothing was started.
        RunError: Ranks failed or hung; all are ended.
    """
    check_job(job)
    out_dir = out_dir.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    job_file = out_dir / "job.json"
    write_whole(job_file, job.model_dump_json(indent=1))
    num_steps = job.num_warmup_steps + job.num_steps
    told = 0

    def on_poll(beats: Beats) -> None:
        nonlocal told
        finished = min((0 if beat is None else beat.step) for beat in beats)
        while told < finished:
            told += 1
            if on_progress is not None:
                on_progress(told, num_steps)

    failure: str | None = "the run was interrupted"
    try:
        launch_ranks(
            rank_module,
            [str(job_file), str(out_dir)],
            num_ranks=job.plan.num_devices,
            out_dir=out_dir,
            timeout_s=job.timeout_s,
            on_poll=on_poll,
        )
        failure = None
    except RunError as error:
        failure = str(error)
        raise
    finally:
        measurement = gather(job, out_dir, failure)
        write_whole(out_dir / "measurement.json", measurement.model_dump_json(indent=1))
    return measurement
