"""Rules of captured models: what their capture does not say."""

from __future__ import annotations

from collections.abc import Iterator

from simplan import catalog
from simplan.errors import Problem
from simplan.job import Job, computed_in
from simplan.rules.rule import not_modelled, problem_of, rule, unmodelled
from simplan.wording import either

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@rule("a captured model must have been captured in the precision of the job")
def precision_of_capture(job: Job) -> Iterator[Problem]:
    captured = job.model.captured
    if captured is None or job.training.precision not in _PRECISIONS:
        return
    needed = computed_in(job)
    if needed in captured.graphs:
        return
    reason = captured.refused.get(needed)
    why = f": forward fails in it ({reason})" if reason else ""
    where = "of weights and activations" if needed == "bf16" else "under autocast" if needed == "autocast" else ""
    sentence = f"needs layers computed in {needed if needed != 'autocast' else 'bf16'} {where}".rstrip() + why
    known = either([f"training.precision = {word}" for word in _possible(job)])
    yield problem_of(job, "training.precision", sentence, f"use {known}" if known else "capture the model again")


def _possible(job: Job) -> list[str]:
    """Precisions in which the job would have layers."""
    captured = job.model.captured
    assert captured is not None, "a job of a captured model"
    jobs = {word: job.with_changes({"training.precision": word}) for word in ("fp32", "bf16")}
    return [word for word, other in jobs.items() if computed_in(other) in captured.graphs]


@unmodelled("low precision of captured modules is not modeled")
def precision_modelled(job: Job) -> Iterator[Problem]:
    if job.model.captured is not None and job.training.precision not in _PRECISIONS:
        what = f"{job.training.precision} of captured modules"
        yield not_modelled(job, "training.precision", what, f"use {either(_PRECISIONS)}")


@unmodelled("captured modules are trained by frameworks that take modules")
def software_of_modules(job: Job) -> Iterator[Problem]:
    if job.model.captured is not None and not job.software.trains_modules:
        takes = [name for name in catalog.names("software") if catalog.software(name).trains_modules]
        sentence = f"{job.software.title} with modules of a user's own is not modeled yet"
        yield Problem(field="software", value=job.software.id, rule=sentence, fix=f"use {either(takes)}")


@unmodelled("torch.compile of captured modules is not modeled")
def compiled_capture(job: Job) -> Iterator[Problem]:
    if job.model.captured is not None and job.software.compiled:
        yield not_modelled(
            job, "software.compiled", "torch.compile of captured modules", "use software.compiled = false"
        )


@unmodelled("captured modules are not calibrated")
def calibration_of_captures(job: Job) -> Iterator[Problem]:
    if job.model.captured is not None and job.cluster.cores_per_node is not None:
        sentence = "the time of captured modules on a machine that simplan calibrates is not modeled yet"
        yield Problem(field="cluster", value=job.cluster.id, rule=sentence, fix="use a cluster of the catalog")
