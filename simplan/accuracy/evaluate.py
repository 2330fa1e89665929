"""Prediction of published runs in several processes; equal requests are predicted once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import sha256

from simplan.accuracy.outcome import Predicted, RunOutcome
from simplan.accuracy.published_job import PublishedJob, job_of_published_run
from simplan.accuracy.reading import ReadFile
from simplan.accuracy.recipe import Recipes
from simplan.accuracy.schema import PublishedRun
from simplan.accuracy.statistics import step_flops
from simplan.errors import SimplanError, SpecError
from simplan.predict.step_summary import summarize_step
from simplan.units import GIB

OnProgress = Callable[[int, int], None]
"""Callback with the number of finished predictions and their total."""

_FEW = 24  # predictions that take about the time of starting processes


def predict_runs(
    files: Iterable[ReadFile], *, jobs: int = 1, on_progress: OnProgress = lambda done, of: None
) -> list[RunOutcome]:
    """Predict every run from its configuration, in the order of the files, in ``jobs`` processes (-1: one per core)."""
    listed = [(read.file, run, _published_job(run, read.recipes)) for read in files for run in read.runs or ()]
    jobs_by_key = {
        _key(published_job): published_job for _, _, published_job in listed if isinstance(published_job, PublishedJob)
    }
    predictions = dict(_predictions(jobs_by_key, jobs, on_progress))
    outcomes = []
    for file, run, published_job in listed:
        prediction = predictions[_key(published_job)] if isinstance(published_job, PublishedJob) else published_job
        if isinstance(published_job, PublishedJob) and isinstance(prediction, Predicted):
            prediction = replace(prediction, notes=published_job.notes)  # equal requests may have different notes
            outcomes.append(RunOutcome(file, run, prediction))
        else:
            outcomes.append(RunOutcome(file, run, None, str(prediction)))
    return outcomes


def sentences(error: Exception) -> str:
    """Reason for a missing prediction, on one line; a bug must not hide the results of other runs."""
    if isinstance(error, SpecError):
        return "; ".join(problem.sentence() for problem in error.problems)
    if isinstance(error, SimplanError):
        return str(error)
    if os.environ.get("SIMPLAN_DEBUG"):
        raise error
    return f"this is a bug of simplan ({type(error).__name__}: {error})"


def _published_job(run: PublishedRun, recipes: Recipes) -> PublishedJob | str:
    """Prediction request of a run, or the reason for a missing one."""
    try:
        return job_of_published_run(run, recipes)
    except Exception as error:
        return sentences(error)


def _key(published_job: PublishedJob) -> str:
    """Key that is equal for equal requests."""
    job = published_job.job
    parts = (
        job.model.model_dump_json(exclude={"name", "sources"}),
        job.cluster.model_dump_json(exclude={"source"}),
        job.training.model_dump_json(),
        job.plan.model_dump_json(),
        job.software.model_dump_json(),
        str(published_job.steps_overlap),
    )
    return sha256("\n".join(parts).encode()).hexdigest()


def _predictions(
    jobs_by_key: dict[str, PublishedJob], num_jobs: int, on_progress: OnProgress
) -> Iterator[tuple[str, Predicted | str]]:
    if num_jobs == 1 or len(jobs_by_key) <= _FEW:
        for number, (key, published_job) in enumerate(jobs_by_key.items(), 1):
            yield key, _predict(published_job)
            on_progress(number, len(jobs_by_key))
        return
    from joblib import Parallel, delayed

    # longest first, so that no process is still busy when all others are done
    ordered = sorted(jobs_by_key.items(), key=lambda item: _work(item[1]), reverse=True)
    pool = Parallel(n_jobs=num_jobs, return_as="generator_unordered")
    for number, found in enumerate(pool(delayed(_keyed_prediction)(*item) for item in ordered), 1):
        yield found
        on_progress(number, len(jobs_by_key))


def _work(published_job: PublishedJob) -> int:
    """Approximate number of simulated operations."""
    plan = published_job.job.plan
    microbatches = published_job.job.num_microbatches if published_job.steps_overlap else 3 * plan.pp
    each = 30 * plan.num_stages
    if plan.pp == 1 or plan.cp > 1:
        each = 60 * published_job.job.model.num_blocks
    return each * microbatches


def _keyed_prediction(key: str, published_job: PublishedJob) -> tuple[str, Predicted | str]:
    return key, _predict(published_job)


def _predict(published_job: PublishedJob) -> Predicted | str:
    try:
        summary = summarize_step(published_job.job, steps_overlap=published_job.steps_overlap)
    except Exception as error:
        return sentences(error)
    return Predicted(
        step_time_s=summary.step_time_s,
        step_time_interval_s=summary.step_time_interval_s,
        memory_gib={kind: num_bytes / GIB for kind, num_bytes in summary.measurable_bytes.items()},
        memory_interval_gib={
            kind: (low / GIB, high / GIB) for kind, (low, high) in summary.peak_interval_bytes.items()
        },
        oom=None if summary.fits is None else not summary.fits,
        flops=step_flops(published_job.job),
        software=published_job.job.software.id,
        notes=(),
    )
