"""The functions of ``import simplan``: they take a job, or what makes one, and keys with or without their section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simplan.cost.calibration.format import Calibration
from simplan.errors import SpecError
from simplan.job import Job
from simplan.predict import predict as predict_job
from simplan.predict import sweep as sweep_job
from simplan.prediction import Prediction
from simplan.scenario import Scenario
from simplan.scenario.source import make_job, scenario_with
from simplan.search import SearchProgress, SearchResult, SearchSpace
from simplan.search import search as search_job

if TYPE_CHECKING:
    import pandas as pd

    from simplan.goodput.result import GoodputResult

Source = Job | str | Path | Mapping[str, Any]
"""A job; or a model's name, a file or a mapping, as for ``make_job``."""


def predict(
    source: Source,
    overrides: Mapping[str, Any] | None = None,
    *,
    name: str = "scenario",
    calibration: Calibration | None = None,
    **keys: Any,
) -> Prediction:
    """Predict time and memory of one optimizer step.

    ::

        predict("llama3-8b", num_nodes=2, tp=8, dp_shard=2)
        predict(job, recompute="full")

    Args:
        source: A job; or a model's name, a file or a mapping, as for ``make_job``.
        overrides: Values by key, with or without its section: ``{"plan.tp": 8}``, ``{"tp": 8}``.
        name: Display name.
        calibration: Timings of the cluster's device; required if the cluster is this machine.
        keys: Values by key without its section.

    Raises:
        SpecError: No section has a key, the plan violates rules (all are listed), a cost estimate is not available, or
            the step would exceed the device's peak.
        NotModelledError: The plan uses an option that is not modeled yet.
    """
    return predict_job(_job(source, {**(overrides or {}), **keys}), name=name, calibration=calibration)


def search(
    source: Source,
    space: SearchSpace | Mapping[str, Any] | None = None,
    *,
    name: str = "search",
    calibration: Calibration | None = None,
    jobs: int = 1,
    explain: bool = True,
    on_progress: Callable[[SearchProgress], None] | None = None,
    **keys: Any,
) -> SearchResult:
    """Find the best plans of a space, exactly: by ``predict``, no plan of the space is better.

    ::

        search(job, tp=[1, 2, 4, 8], objective="cost")
        search("llama3-8b", num_nodes=2, global_batch_size=64)

    Equivalent plans have the same parallel degrees and microbatch size, and step times within 0.1%. Each group shows
    its simplest plan and counts the others (``RankedPlan.alike``). Ctrl-C ends the search and returns the best plans so
    far (``interrupted``).

    Args:
        source: A job, whose plan supplies the fields that a search does not vary; or what ``make_job`` takes.
        space: Ranges and objective, also as a mapping such as ``{"tp": [1, 2]}``; None for the default ranges, ranked
            by step time.
        name: Display name.
        calibration: Timings of this machine; only when the cluster is this machine.
        jobs: Worker processes; -1 for one per core. Under ``joblib.parallel_config``, workers of that backend (Dask,
            Ray).
        explain: Report bottleneck and sensitivities of ranked plans, and feasible changes when no plan fits.
        on_progress: Called after every evaluated plan, in this process.
        keys: Values by key without its section. A list is a range of the space, as is every key that only a space has;
            all others are values of the job.

    Raises:
        SpecError: No section has a key, the job is invalid for every plan, the ranges have no plan in common, or cost
            is not available as an objective.
    """
    ranges = {key: value for key, value in keys.items() if _is_range(key, value)}
    job = _job(source, {key: value for key, value in keys.items() if key not in ranges})
    if ranges:
        given = space.model_dump(exclude_unset=True) if isinstance(space, SearchSpace) else dict(space or {})
        space = {**given, **ranges}
    return search_job(
        job, space, name=name, calibration=calibration, jobs=jobs, explain=explain, on_progress=on_progress
    )


def sweep(
    source: Source,
    settings: Mapping[str, Sequence[Any]] | None = None,
    *,
    calibration: Calibration | None = None,
    **keys: Any,
) -> pd.DataFrame:
    """Predict a job for every combination of values of some settings.

    ::

        sweep(job, tp=[1, 2, 4, 8], microbatch_size=[1, 2])
        sweep("llama3-8b", {"tp dp_shard": [(1, 8), (2, 4)]}, num_nodes=1)

    Columns: one per setting; ``seq_len``, unless it is a setting; ``step_time_s`` with its 90 % interval
    ``step_time_low_s`` and ``step_time_high_s``; ``tokens_per_s_per_device``, ``mfu``, ``device_gib`` (memory of the
    worst rank), ``fits``, ``memory_verdict`` and ``error``. Impossible combinations have the violated rule as
    ``error``, and no numbers. Settings that are not swept keep their values, except that data-parallel ranks take all
    devices that another degree leaves: ``dp_shard`` or ``dp_replicate``, which is a column then.

    Args:
        source: A job; or what ``make_job`` takes.
        settings: Values by setting, with or without its section. Several settings that change together are one key,
            separated by spaces, with tuples.
        calibration: As for ``predict``.
        keys: Values by key without its section; a list or range is swept, any other value holds for all rows.

    Raises:
        SpecError: There is no such setting, or there are more than 10,000 combinations.
        ImportError: pandas is not installed.
    """
    swept = {key: value for key, value in keys.items() if isinstance(value, list | range)}
    job = _job(source, {key: value for key, value in keys.items() if key not in swept})
    return sweep_job(job, {**(settings or {}), **swept}, calibration=calibration)


def goodput(
    source: Scenario | str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    calibration: Calibration | None = None,
    trials: int = 500,
    seed: int = 0,
    jobs: int = 1,
    **keys: Any,
) -> GoodputResult:
    """Simulate a whole run with failures, checkpoints and recovery.

    ::

        goodput("run.yaml", spares=4)
        goodput("llama3-8b", num_nodes=8, num_tokens=1e12, reliability={"preset": "llama3-2024"},
                checkpoint={"interval_s": "best", "blocking_s": 30}, recovery={"restart_s": 600}, device_hour=2.5)

    Args:
        source: A scenario; or a model's name, a file or a mapping, as for ``make_job``.
        overrides: Values by key, with or without its section, or whole sections; not for a ``Scenario``.
        calibration: As for ``predict``.
        trials: Simulated runs.
        seed: Seed of their failures; equal seeds give equal results.
        jobs: Worker processes; -1 for one per core. Under ``joblib.parallel_config``, workers of that backend (Dask,
            Ray).
        keys: Values by key without its section, or whole sections by name.

    Raises:
        SpecError: As ``predict``; or the run has no length, never finishes, or its sections contradict the job.
    """
    from simplan.scenario.whole_run.goodput import goodput_of

    scenario = scenario_with(source, {**(overrides or {}), **keys})
    return goodput_of(scenario, calibration=calibration, num_runs=trials, seed=seed, jobs=jobs)


def _job(source: Source, keys: Mapping[str, Any]) -> Job:
    return source.with_changes(keys) if isinstance(source, Job) else make_job(source, keys)


def _is_range(key: str, value: object) -> bool:
    """True for a list of values, and for a key of the space that no section of a job has."""
    if key not in SearchSpace.model_fields:
        return False
    if isinstance(value, list | tuple | range):
        return True
    try:
        Job.full_key(key)
    except SpecError:
        return True
    return False
