"""Whether there is any plan within the limits of memory, and which one comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.search.bounds.common import Bounds
from simplan.search.enumeration import Enumeration, Mesh
from simplan.search.evaluate import Evaluator
from simplan.search.jobs import capacity_bytes
from simplan.search.space import SearchSpace

__all__ = ["first_fit"]


def first_fit(
    job: Job,
    space: SearchSpace,
    calibration: Calibration | None = None,
    witness: ParallelPlan | None = None,
    failed: set[ParallelPlan] | None = None,
) -> ParallelPlan | None:
    """A plan that violates no rule and fits; None when there is none. Exact, and done at the first.

    Args:
        job: What is asked.
        space: The ranges.
        calibration: Timings of the device, if there are any.
        witness: Tried first: a plan of another job that is likely to fit this one too.
        failed: Plans that are known not to fit; gets those that are found not to.
    """
    failed = set() if failed is None else failed
    enumeration, capacity = Enumeration(space, job), capacity_bytes(job, space)
    evaluator = Evaluator(job, calibration)
    if witness is not None and witness not in failed and enumeration.filter.first_violated(witness) is None:
        if capacity is None or evaluator.numbers([witness], 0)[0][0] <= capacity:
            return witness
        failed.add(witness)
    for plan in _frugal_first(enumeration, Bounds(job, calibration), capacity):
        if plan in failed:
            continue
        if capacity is None or evaluator.numbers([plan], 0)[0][0] <= capacity:
            return plan
        failed.add(plan)
    return None


def _frugal_first(enumeration: Enumeration, bounds: Bounds, capacity: int | None) -> Iterator[ParallelPlan]:
    """Plans that may fit, mesh by mesh, those first that split most: most searches end soon."""

    def splits(mesh: Mesh) -> tuple[int, int]:
        return mesh.tp * mesh.pp * mesh.dp_shard * mesh.ep, mesh.tp * mesh.cp

    for mesh in sorted(enumeration.meshes, key=splits, reverse=True):
        for table in enumeration.tables(Counter(), [mesh]):
            least_bytes, _ = bounds.of(table, max_bytes=-1)
            for row in np.argsort(least_bytes, kind="stable").tolist():
                if capacity is not None and least_bytes[row] > capacity:
                    break
                yield table.plan(row)
