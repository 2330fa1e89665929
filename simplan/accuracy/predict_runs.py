"""Prediction of published runs in several processes; equal requests are predicted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256

from simplan.accuracy.outcome import Predicted, RunOutcome
from simplan.accuracy.run import PublishedRun, ReadFile, sentences
from simplan.accuracy.statistics import step_flops
from simplan.predict.step_summary import summarize_step
from simplan.units import GIB

OnProgress = Callable[[int, int], None]
"""Callback with the number of finished predictions and their total."""

_FEW = 24  # predictions that take about the time of starting processes


def predict_runs(
    files: Iterable[ReadFile], *, jobs: int = 1, on_progress: OnProgress = lambda done, of: None
) -> list[RunOutcome]:
    """Predict every run from its configuration, in the order of the files, in ``jobs`` processes (-1: one per core)."""
    listed = [(read.file, run) for read in files for run in read.runs or ()]
    by_key = {_key(run): run for _, run in listed if run.job is not None}
    predictions = dict(_predictions(by_key, jobs, on_progress))
    outcomes = []
    for file, run in listed:
        predicted = run.reason if run.job is None else predictions[_key(run)]
        outcomes.append(
            RunOutcome(file, run, predicted)
            if isinstance(predicted, Predicted)
            else RunOutcome(file, run, None, predicted)
        )
    return outcomes


def _key(run: PublishedRun) -> str:
    """Key that is equal for equal requests."""
    job = run.known_job
    parts = (
        job.model.model_dump_json(exclude={"name", "sources"}),
        job.cluster.model_dump_json(exclude={"source"}),
        job.training.model_dump_json(),
        job.plan.model_dump_json(),
        job.software.model_dump_json(),
        str(run.steps_overlap),
    )
    return sha256("\n".join(parts).encode()).hexdigest()


def _predictions(
    by_key: dict[str, PublishedRun], num_jobs: int, on_progress: OnProgress
) -> Iterator[tuple[str, Predicted | str]]:
    if num_jobs == 1 or len(by_key) <= _FEW:
        for number, (key, run) in enumerate(by_key.items(), 1):
            yield key, _predict(run)
            on_progress(number, len(by_key))
        return
    from joblib import Parallel, delayed

    # longest first, so that no process is still busy when all others are done
    ordered = sorted(by_key.items(), key=lambda item: _work(item[1]), reverse=True)
    pool = Parallel(n_jobs=num_jobs, return_as="generator_unordered")
    for number, predicted in enumerate(pool(delayed(_keyed_prediction)(*item) for item in ordered), 1):
        yield predicted
        on_progress(number, len(by_key))


def _work(run: PublishedRun) -> int:
    """Approximate number of simulated operations."""
    job = run.known_job
    plan = job.plan
    microbatches = job.num_microbatches if run.steps_overlap else 3 * plan.pp
    of_pass = 30 * plan.num_stages
    if plan.pp == 1 or plan.cp > 1:
        of_pass = 60 * job.model.num_blocks
    return of_pass * microbatches


def _keyed_prediction(key: str, run: PublishedRun) -> tuple[str, Predicted | str]:
    return key, _predict(run)


def _predict(run: PublishedRun) -> Predicted | str:
    job = run.known_job
    try:
        summary = summarize_step(job, steps_overlap=run.steps_overlap)
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
        flops=step_flops(job),
        software=job.software.id,
    )
