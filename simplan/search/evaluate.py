"""Numbers of plans as ``predict`` has them: the one road from a plan to its memory and its step time."""

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
from simplan.sim.choice import load_compiled

__all__ = ["Evaluator", "Numbers", "evaluate"]

_ALONE_S = 4.0  # for so long it works alone: other processes take about as long to start

_LOADING_S = 0.4  # what loading the compiled engine takes

Numbers = tuple[int, float | None]
"""Device memory of the worst rank with all that the allocator would like, and the step time, seconds."""


def evaluate(
    job: Job, calibration: Calibration | None = None, max_bytes: int | None = None, *, whole: bool = False
) -> Numbers:
    """Numbers of a plan; no time of one that needs more than ``max_bytes``.

    Args:
        job: What is asked, with the plan.
        calibration: Timings of the device, if there are any.
        max_bytes: None for no limit.
        whole: As much of a long step is simulated as by ``predict``; else it is truncated.
    """
    return evaluate_step(job, calibration, max_bytes, whole=whole)


class Evaluator:
    """Evaluates plans in one process or in several.

    Args:
        job: What every plan shares.
        calibration: Timings of the device, if there are any.
        jobs: Processes, or workers of the backend that joblib is told to use; -1 for one a core.
    """

    def __init__(self, job: Job, calibration: Calibration | None = None, jobs: int = 1) -> None:
        self._job, self._calibration, self._jobs = job, calibration, jobs
        self._pool: Any = None
        self._spent_s = 0.0
        self._token = ""

    def numbers(self, plans: Sequence[ParallelPlan], max_bytes: int | None, *, whole: bool = False) -> list[Numbers]:
        """See ``evaluate``; plans keep the rules."""
        job, calibration = self._job, self._calibration
        if self._jobs == 1 or self._spent_s <= _ALONE_S:
            if self._spent_s > _LOADING_S:
                load_compiled()
            start_s = time.monotonic()
            found = [evaluate(job.with_plan(plan), calibration, max_bytes, whole=whole) for plan in plans]
            self._spent_s += time.monotonic() - start_s
            return found
        from joblib import Parallel, delayed

        if self._pool is None:
            self._pool = Parallel(n_jobs=self._jobs, batch_size=1)
            self._token = sha256(dumps((job, calibration))).hexdigest()
        calls = (delayed(_worker_numbers)(self._token, job, calibration, plan, max_bytes, whole) for plan in plans)
        return list(self._pool(calls))

    def is_approximate(self, plan: ParallelPlan) -> bool:
        """Whether the numbers of a truncated step may differ from those of ``predict``."""
        job = self._job.with_plan(plan)
        if job.cluster.cores_per_node is not None:
            return False
        deals = plan.shards_optimizer_only and job.software.optimizer_shards == "parameters"
        return deals or extent_of(job).period > 0


_asked: dict[str, tuple[Job, Calibration | None]] = {}  # of this process: one object, whose layers are made once


def _worker_numbers(
    token: str, job: Job, calibration: Calibration | None, plan: ParallelPlan, max_bytes: int | None, whole: bool
) -> Numbers:
    if token not in _asked:
        _asked.clear()
        _asked[token] = job, calibration
        load_compiled()
    job, calibration = _asked[token]
    return evaluate(job.with_plan(plan), calibration, max_bytes, whole=whole)
