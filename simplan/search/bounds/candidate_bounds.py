"""Lower bounds on memory and step time of many candidates, from the cost estimates of ``predict``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.schedules import SCHEDULE_FACTS, stage_ranks
from simplan.search.bounds.layer_sums import Floats, LayerSumsCache, Pipeline, StageSums
from simplan.search.bounds.memory_bound import MemoryBound
from simplan.search.bounds.mixed_bound import MixedBound
from simplan.search.bounds.step_time_bound import StepTimeBound
from simplan.search.candidates import Candidates, Column

_WAY = (
    "tp", "sequence_parallel", "cp", "cp_comm", "ep", "microbatch_size", "recompute", "recompute_modules"
)  # fmt: skip


class Bounded(NamedTuple):
    """Lower bounds, one per candidate row.

    Attributes:
        device_bytes: ``(rows,)`` Lower bound on the memory of the worst device.
        step_time_s: ``(rows,)`` Lower bound on the step time; infinite where the memory bound exceeds ``max_bytes``.
    """

    device_bytes: Column
    step_time_s: Floats


class Bounds:
    """Lower bounds on candidates of one job.

    Args:
        job: Job without the searched plan fields.
    """

    def __init__(self, job: Job, calibration: Calibration | None = None) -> None:
        self._job = job
        self._mixed = MixedBound(job) if job.cluster.is_mixed else None
        self._sums = LayerSumsCache(job, calibration)
        self._memory = MemoryBound(job)
        self._times: StepTimeBound | None = None
        schedules = ("none", *SCHEDULE_FACTS)
        facts = [SCHEDULE_FACTS.get(name) for name in schedules]
        self._splits = np.array([of is not None and of.splits_backward for of in facts])
        self._in_v = np.array([of is not None and of.placement == "v" for of in facts])

    def of(self, rows: Candidates, max_bytes: float | None = None) -> Bounded:
        """Bounds of candidates.

        Args:
            rows: Candidates that violate no rule.
            max_bytes: Step times are computed only up to this memory bound; None for no limit.
        """
        if self._mixed is not None:
            num_bytes, seconds = self._mixed.of(rows)
            alone = np.flatnonzero(rows["pp"] == 1)
            if len(alone):  # every rank has all layers, however fast its device is
                part = rows.take(alone)
                num_bytes[alone] = np.maximum(num_bytes[alone], self._memory.bytes(part, *self._pipeline(part)))
            return Bounded(num_bytes, seconds)
        num_bytes, seconds = np.zeros(len(rows), np.int64), np.full(len(rows), np.inf)
        shapes = np.stack([
            rows["pp"], rows["virtual_stages"], self._splits[rows["schedule"]], self._in_v[rows["schedule"]]
        ])  # fmt: skip
        _, place = np.unique(shapes, axis=1, return_inverse=True)
        order = np.argsort(place.reshape(-1), kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(place.reshape(-1)[order])) + 1) if len(rows) else ():
            part = rows.take(here)
            pipeline, ways = self._pipeline(part)
            of_part = self._memory.bytes(part, pipeline, ways)
            num_bytes[here] = of_part
            near = np.flatnonzero(of_part <= (np.inf if max_bytes is None else max_bytes))
            if len(near):
                if self._times is None:
                    self._times = StepTimeBound(self._job, self._sums.cost_cache(part.plan(0)))
                seconds[here[near]] = self._times.seconds(part.take(near), pipeline, ways[near])
        return Bounded(num_bytes, seconds)

    def _pipeline(self, rows: Candidates) -> tuple[Pipeline, Column]:
        """The pipeline that all rows share, and by row the index of its layer configuration."""
        columns = [rows[name] for name in _WAY] + [rows.shards_parameters]
        if (placed := rows["placement"]).any():  # it decides with the data-parallel degrees which groups cross nodes
            columns += [placed, np.where(placed, rows["dp_replicate"], 0), np.where(placed, rows["dp_shard"], 0)]
        if self._sums.in_low_precision:
            columns.append(self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"]))
        _, first, ways = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
        plans = [rows.plan(row) for row in first.tolist()]
        layers, boundaries = [self._sums.of(plan) for plan in plans], [self._sums.boundaries(plan) for plan in plans]
        placement = np.array(stage_ranks(plans[0].schedule, plans[0].pp, plans[0].num_stages))
        splits = bool(self._splits[rows["schedule"][0]])
        return Pipeline(layers, boundaries, StageSums.of(layers, boundaries), placement, splits), ways.reshape(-1)
