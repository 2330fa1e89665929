"""Memory and step time of plans, as in ``predict``, and bounds on them."""

from __future__ import annotations

import time
from functools import cached_property, lru_cache
from pickle import dumps, loads
from typing import Any

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict.step_summary import evaluate_step
from simplan.predict.truncated import extent_of
from simplan.search.bounds.candidate_bounds import Bounded, Bounds
from simplan.search.candidates import Candidates
from simplan.sim.compiled import load_compiled

_LOADING_S = 0.4  # seconds to load the compiled engine
_MAX_KEPT = 8  # evaluators that a worker keeps

Numbers = tuple[int, float | None]
"""Device bytes of the worst rank with the full allocator reserve, and step time in seconds (None if not simulated)."""


class Evaluator:
    """Evaluates plans of one job. In a worker, equal evaluators are one, so that layers of its job are made once."""

    def __init__(self, job: Job, calibration: Calibration | None = None) -> None:
        self.job, self.calibration = job, calibration
        self._spent_s = 0.0

    @cached_property
    def bounds(self) -> Bounds:
        """Bounds on candidates of the job."""
        return Bounds(self.job, self.calibration)

    def numbers(self, plan: ParallelPlan, max_bytes: int | None, *, whole: bool = False) -> Numbers:
        """Memory and step time of a plan that violates no rule; see ``evaluate_step``."""
        if self._spent_s > _LOADING_S:
            load_compiled()
        start_s = time.monotonic()
        evaluated = evaluate_step(self.job.with_plan(plan), self.calibration, max_bytes, whole=whole)
        self._spent_s += time.monotonic() - start_s
        return evaluated

    def bounded(self, rows: Candidates, max_bytes: float | None) -> Bounded:
        """Bounds of candidates; see ``Bounds``."""
        return self.bounds.of(rows, max_bytes)

    def is_approximate(self, plan: ParallelPlan) -> bool:
        """True if a truncated step may give other numbers than ``predict``."""
        job = self.job.with_plan(plan)
        if job.cluster.cores_per_node is not None:
            return False
        deals = plan.shards_optimizer_only and job.software.optimizer_shards == "parameters"
        return deals or extent_of(job).period > 0

    @cached_property
    def _pickled(self) -> bytes:
        return dumps((self.job, self.calibration))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the job and its calibration only."""
        return _unpickled, (self._pickled,)


@lru_cache(_MAX_KEPT)
def _unpickled(pickled: bytes) -> Evaluator:
    return Evaluator(*loads(pickled))
