"""Simulated runs: many by the compiled engine in chunks, one with its stretches by the reference."""

from __future__ import annotations

import numpy as np

from simplan.errors import Problem, SpecError
from simplan.goodput.engines.draws import Draws, check_seed
from simplan.goodput.setup import OneRun, Runs, RunSetup

_CHUNK = 250
"""Runs of one call of a worker."""
_LONGEST = 100
"""Multiple of its undisturbed time beyond which a run does not finish."""
_LEAST_LIMIT_S = 10 * 365 * 86400.0
"""Even short runs may wait as long as this."""
_MAX_STOPS = 1_000_000


def simulate(setup: RunSetup, *, num_runs: int, seed: int = 0, jobs: int = 1) -> Runs:
    """Returns ``num_runs`` simulated runs.

    Args:
        setup: Numbers of the run.
        num_runs: Number of runs, above zero.
        seed: Seed of the random numbers. Equal seeds give equal bytes, also with other ``jobs``; the first runs of more
            runs are the same.
        jobs: Worker processes; -1 for one per core. Under ``joblib.parallel_config``, workers of that backend (Dask,
            Ray) where it is -1.

    Raises:
        SpecError: The seed is wrong, or a run does not finish.
    """
    check_seed(seed)
    chunks = [range(begin, min(begin + _CHUNK, num_runs)) for begin in range(0, num_runs, _CHUNK)]
    if jobs == 1 or len(chunks) == 1:
        parts = [_simulate_chunk(setup, seed, chunk) for chunk in chunks]
    else:
        from joblib import Parallel, delayed

        parts = Parallel(n_jobs=jobs)(delayed(_simulate_chunk)(setup, seed, chunk) for chunk in chunks)
    return Runs(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Runs.__slots__})


def one_run(setup: RunSetup, *, seed: int = 0, number: int = 0) -> OneRun:
    """Returns a run of ``simulate`` by its number, with its stretches, by the reference.

    Raises:
        SpecError: The seed is wrong, or the run does not finish.
    """
    from simplan.goodput.engines.reference import EndlessRunError, run

    try:
        return run(setup, Draws(seed, number), limit_s=_limit_s(setup), max_stops=_MAX_STOPS)
    except EndlessRunError:
        raise _endless(setup) from None


def _simulate_chunk(setup: RunSetup, seed: int, numbers: range) -> Runs:
    from simplan.goodput.engines.compiled import engine

    runs = engine.simulate(setup, seed, numbers, limit_s=_limit_s(setup), max_stops=_MAX_STOPS)
    if runs is None:
        raise _endless(setup)
    return runs


def _limit_s(setup: RunSetup) -> float:
    return max(_LONGEST * setup.undisturbed_s, _LEAST_LIMIT_S)


def _endless(setup: RunSetup) -> SpecError:
    rule = (
        f"a run of {setup.undisturbed_s / 3600:.3g} h without failures has not finished after "
        f"{_limit_s(setup) / 86400:.3g} days or {_MAX_STOPS:,} stops"
    )
    fix = "let failures be rarer, restarts or repairs shorter, or checkpoints more frequent"
    return SpecError(Problem(field="reliability", rule=rule, fix=fix))
