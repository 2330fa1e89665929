"""Held-out errors of fits; those of step times are stored so that a test can check predictions against them.

``cross_validation.yaml`` contains the constants of five folds, each fitted without the fold. For a few runs of every
file it contains the mean error of predictions with the constants of their folds. The test predicts these runs again,
which takes seconds, where fitting takes minutes. So a change that makes predictions worse shows. ``make fit`` stores
the new figures of a change that makes them better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from joblib import Parallel, delayed

from fit.robust import Floats, Values
from fit.rows import FitRow, fold_of, run_at
from simplan.accuracy.run import PublishedRun
from simplan.predict.step_summary import summarize_step
from simplan.scenario.published.reading import read_published

LEFT_OUT_FILE = Path(__file__).parent / "cross_validation.yaml"
FOLDS = 5
_RUNS_OF_FILE = 4
_DIGITS = 4
_Row = TypeVar("_Row")


def left_out(
    rows: Sequence[_Row],
    part_of: Callable[[_Row], Hashable],
    fit: Callable[[Sequence[_Row]], dict[str, float]],
    log_errors: Callable[[Sequence[_Row], Values], Floats],
    *,
    jobs: int = -1,
) -> tuple[Floats, dict[Hashable, dict[str, float]]]:
    """Held-out log errors, and constants by part; each part is predicted by a fit without it.

    Args:
        rows: All rows.
        part_of: Part of a row.
        fit: Fit of some rows, with values of all constants.
        log_errors: Logarithms of predicted over measured times of some rows.
        jobs: Number of processes; -1 for one per core.
    """

    def without(part: Hashable) -> tuple[Floats, dict[str, float]]:
        values = fit([row for row, part_of_row in zip(rows, parts, strict=True) if part_of_row != part])
        return log_errors(
            [row for row, part_of_row in zip(rows, parts, strict=True) if part_of_row == part], values
        ), values

    parts = [part_of(row) for row in rows]
    names = list(dict.fromkeys(parts))
    fits = Parallel(n_jobs=jobs)(delayed(without)(part) for part in names)
    errors = np.zeros(len(rows))
    for part, (part_errors, _) in zip(names, fits, strict=True):
        errors[[part_of_row == part for part_of_row in parts]] = part_errors
    return errors, {part: values for part, (_, values) in zip(names, fits, strict=True)}


def errors_text(groups: Mapping[str, Sequence[int]], tables: Mapping[str, Floats]) -> Iterator[str]:
    """Yield the lines of a table of absolute percentage errors.

    Args:
        groups: Indices of rows by name.
        tables: Log errors of all rows, by kind of fit.
    """
    yield ""
    yield f"{'mean / median / 90th percentile, %':44}{'rows':>5}" + "".join(f"{name:>24}" for name in tables)
    for name, rows in groups.items():
        cells = []
        for errors in tables.values():
            sizes = 100 * np.abs(np.expm1(errors[rows]))
            cells.append(f"{sizes.mean():10.1f} /{np.median(sizes):5.1f} /{np.quantile(sizes, 0.9):5.1f}")
        yield f"{name:44}{len(rows):5}" + "".join(cells)


def left_out_text(rows: Sequence[FitRow], folds: Sequence[Values]) -> str:
    """Text of cross_validation.yaml, from the constants of each fold, fitted without it."""
    runs_of_source: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: sha256(row.run.id.encode()).hexdigest()):
        if len(runs_of_source[row.source]) < _RUNS_OF_FILE:
            runs_of_source[row.source].append(row.run.id)
    constants = [{name: float(f"{value:.{_DIGITS}g}") for name, value in fold.items()} for fold in folds]
    runs = {row.run.id: (row.source, row.run) for row in rows}
    errors = sample_errors([runs[name] for names in runs_of_source.values() for name in names], constants)
    data: dict[str, Any] = {
        "runs": {source: sorted(names) for source, names in sorted(runs_of_source.items())},
        "mean_error": {source: round(error, 4) for source, error in sorted(errors.items())},
        "folds": constants,
    }
    head = "# Written by `make fit` (python -m fit.step_times); see fit/cross_validation.py.\n"
    return head + yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None)


def sample_errors(runs: Sequence[tuple[str, PublishedRun]], folds: Sequence[Values]) -> dict[str, float]:
    """Mean absolute relative error of the step time by file.

    Args:
        runs: Pairs of file name and run.
        folds: Constants by fold.
    """
    errors = Parallel(n_jobs=-1)(delayed(_error)(run, [dict(fold) for fold in folds]) for _, run in runs)
    by_source: dict[str, list[float]] = defaultdict(list)
    for (source, _), error in zip(runs, errors, strict=True):
        by_source[source].append(error)
    return {source: float(np.mean(errors)) for source, errors in by_source.items()}


def sampled_runs(folder: Path, names: Mapping[str, Sequence[str]]) -> list[tuple[str, PublishedRun]]:
    """Read runs by their ids, which are given by file name."""
    sample = []
    for source, ids in names.items():
        [read] = read_published([folder / f"{source}.yaml"])
        runs = {run.id: run for run in read.runs or ()}
        sample += [(source, runs[name]) for name in ids]
    return sample


def _error(run: PublishedRun, folds: Sequence[Values]) -> float:
    run = run_at(run, folds[fold_of(run.known_job, len(folds))])
    predicted_s = summarize_step(run.known_job, steps_overlap=run.steps_overlap).step_time_s
    measured_s = run.measured.step_time_s
    assert measured_s is not None
    return abs(predicted_s / measured_s - 1)
