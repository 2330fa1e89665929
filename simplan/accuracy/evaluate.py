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
    listed = [(read.file, run, _question(run, read.recipes)) for read in files for run in read.runs or ()]
    asked = {_key(question): question for _, _, question in listed if isinstance(question, PublishedJob)}
    answers = dict(_answers(asked, jobs, on_progress))
    outcomes = []
    for file, run, question in listed:
        answer = answers[_key(question)] if isinstance(question, PublishedJob) else question
        if isinstance(question, PublishedJob) and isinstance(answer, Predicted):
            answer = replace(answer, notes=question.notes)  # equal requests may have different notes
            outcomes.append(RunOutcome(file, run, answer))
        else:
            outcomes.append(RunOutcome(file, run, None, str(answer)))
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


def _question(run: PublishedRun, recipes: Recipes) -> PublishedJob | str:
    """Prediction request of a run, or the reason for a missing one."""
    try:
        return job_of_published_run(run, recipes)
    except Exception as error:
        return sentences(error)


def _key(question: PublishedJob) -> str:
    """Key that is equal for equal requests."""
    job = question.job
    parts = (
        job.model.model_dump_json(exclude={"name", "sources"}),
        job.cluster.model_dump_json(exclude={"source"}),
        job.training.model_dump_json(),
        job.plan.model_dump_json(),
        job.software.model_dump_json(),
        str(question.steps_overlap),
    )
    return sha256("\n".join(parts).encode()).hexdigest()


def _answers(
    asked: dict[str, PublishedJob], jobs: int, on_progress: OnProgress
) -> Iterator[tuple[str, Predicted | str]]:
    if jobs == 1 or len(asked) <= _FEW:
        for number, (key, question) in enumerate(asked.items(), 1):
            yield key, _predict(question)
            on_progress(number, len(asked))
        return
    from joblib import Parallel, delayed

    # longest first, so that no process is still busy when all others are done
    ordered = sorted(asked.items(), key=lambda item: _work(item[1]), reverse=True)
    pool = Parallel(n_jobs=jobs, return_as="generator_unordered")
    for number, found in enumerate(pool(delayed(_answer)(*item) for item in ordered), 1):
        yield found
        on_progress(number, len(asked))


def _work(question: PublishedJob) -> int:
    """Approximate number of simulated operations."""
    plan = question.job.plan
    microbatches = question.job.num_microbatches if question.steps_overlap else 3 * plan.pp
    each = 30 * plan.num_stages
    if plan.pp == 1 or plan.cp > 1:
        each = 60 * question.job.model.num_blocks
    return each * microbatches


def _answer(key: str, question: PublishedJob) -> tuple[str, Predicted | str]:
    return key, _predict(question)


def _predict(question: PublishedJob) -> Predicted | str:
    try:
        summary = summarize_step(question.job, steps_overlap=question.steps_overlap)
    except Exception as error:
        return sentences(error)
    return Predicted(
        step_time_s=summary.step_time_s,
        step_time_interval_s=summary.step_time_interval_s,
        memory_gib={
            "allocated": summary.allocated_bytes / GIB,
            "reserved": summary.reserved_bytes / GIB,
            "device": summary.device_bytes / GIB,
        },
        oom=None if summary.fits is None else not summary.fits,
        flops=step_flops(question.job),
        software=question.job.software.id,
        notes=(),
    )
