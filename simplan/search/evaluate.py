"""Memory and step time of plans, as in ``predict``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256
from pickle import dumps
from typing import Any

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict.step_summary import evaluate_step
from simplan.predict.truncated import extent_of
from simplan.sim.engine_choice import load_compiled

_ALONE_S = 4.0  # seconds in this process before workers start: workers take about 4 s to start

_PER_WORKER = 4  # plans that a worker evaluates before the next ones are chosen

_LOADING_S = 0.4  # seconds to load the compiled engine

Numbers = tuple[int, float | None]
"""Device bytes of the worst rank with the full allocator reserve, and step time in seconds (None if not simulated)."""


class Evaluator:
    """Evaluates plans in one process or in several.

    Args:
        jobs: Worker processes, or workers of the active joblib backend; -1 for one per core.
    """

    def __init__(self, job: Job, calibration: Calibration | None = None, jobs: int = 1) -> None:
        self._job, self._calibration, self._jobs = job, calibration, jobs
        self._pool: Any = None
        self._spent_s = 0.0
        self._token = ""

    @property
    def batch_size(self) -> int:
        """Number of plans to evaluate at a time: 1 in this process, several per worker process."""
        if self._is_alone:
            return 1
        from joblib import effective_n_jobs

        return _PER_WORKER * int(effective_n_jobs(self._jobs))

    @property
    def _is_alone(self) -> bool:
        return self._jobs == 1 or self._spent_s <= _ALONE_S

    def numbers(self, plans: Sequence[ParallelPlan], max_bytes: int | None, *, whole: bool = False) -> list[Numbers]:
        """Memory and step time of plans that violate no rule; see ``evaluate_step``."""
        job, calibration = self._job, self._calibration
        if self._is_alone:
            if self._spent_s > _LOADING_S:
                load_compiled()
            start_s = time.monotonic()
            found = [evaluate_step(job.with_plan(plan), calibration, max_bytes, whole=whole) for plan in plans]
            self._spent_s += time.monotonic() - start_s
            return found
        from joblib import Parallel, delayed

        if self._pool is None:
            self._pool = Parallel(n_jobs=self._jobs, batch_size=1)
            self._token = sha256(dumps((job, calibration))).hexdigest()
        calls = (delayed(_worker_numbers)(self._token, job, calibration, plan, max_bytes, whole) for plan in plans)
        return list(self._pool(calls))

    def is_approximate(self, plan: ParallelPlan) -> bool:
        """True if a truncated step may give other numbers than ``predict``."""
        job = self._job.with_plan(plan)
        if job.cluster.cores_per_node is not None:
            return False
        deals = plan.shards_optimizer_only and job.software.optimizer_shards == "parameters"
        return deals or extent_of(job).period > 0


_asked: dict[str, tuple[Job, Calibration | None]] = {}  # per process: one Job, so that its layers are made once


def _worker_numbers(
    token: str, job: Job, calibration: Calibration | None, plan: ParallelPlan, max_bytes: int | None, whole: bool
) -> Numbers:
    if token not in _asked:
        _asked.clear()
        _asked[token] = job, calibration
        load_compiled()
    job, calibration = _asked[token]
    return evaluate_step(job.with_plan(plan), calibration, max_bytes, whole=whole)
