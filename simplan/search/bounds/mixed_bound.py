"""Lower bounds on memory and step time of plans on a cluster of different nodes."""

from __future__ import annotations

from functools import cache

import numpy as np

from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.predict.build import cost_model, layer_times_s
from simplan.search.bounds.layer_sums import Floats
from simplan.search.candidates import Candidates, Column


class MixedBound:
    """Bounds that hold for every split of layers and batch over unequal devices.

    Time is the compute of all layers and sequences, divided over the ranks of a pipeline (and, for balanced
    microbatches, over data-parallel ranks) in proportion to their speed. Memory is the mean of parameters, gradients
    and optimizer states over pipeline ranks.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._cost = cost_model(job.with_plan(ParallelPlan(dp_replicate=job.cluster.num_devices)), None)
        self._layers_s = cache(self._seconds_of_layers)

    def of(self, rows: Candidates) -> tuple[Column, Floats]:
        """``(rows,)`` Lower bounds in bytes and seconds."""
        plans = [rows.plan(row) for row in range(len(rows))]
        num_bytes = np.array([self._state_bytes(plan) for plan in plans], np.int64)
        return num_bytes, np.array([self._seconds(plan) for plan in plans])

    def _state_bytes(self, plan: ParallelPlan) -> int:
        job = self._job
        if job.model.num_trained_parameters != job.model.num_parameters or plan.offload_optimizer:
            return 0
        state = job.software.state(job.training, plan)
        ranks = plan.tp * plan.pp if not job.model.num_experts else plan.num_devices
        shards = plan.dp_shard * plan.cp if not job.model.num_experts else 1
        weights = state.parameter + state.gradient
        optimizer = state.optimizer_bytes(job.training.optimizer)
        total = weights / (shards if plan.shards_parameters else 1) + optimizer / (shards if plan.zero_stage else 1)
        return int(total * job.model.num_parameters / ranks)

    def _seconds(self, plan: ParallelPlan) -> float:
        job = self._job.with_plan(plan)
        size, groups = plan.microbatch_size, job.stage_groups
        plain = plan.model_copy(update={"pp": 1, "schedule": "none", "virtual_stages": 1, "stage_layers": None,
                                        "placement": None, "microbatch_sizes": None})  # fmt: skip
        if plan.microbatch_sizes is None:
            stages_s = [max(self._layers_s(plain, size, group) for group in own) for own in groups]
            return job.num_microbatches / sum(1 / seconds for seconds in stages_s)
        total = plan.dp * size
        speeds = [total / self._layers_s(plain, total, job.group_of(rank) or 0) for rank in range(plan.num_devices)]
        return job.num_microbatches * total * plan.tp * plan.cp / sum(speeds)

    def _seconds_of_layers(self, plan: ParallelPlan, size: int, group: int) -> float:
        return sum(layer_times_s(self._job.with_plan(plan), self._cost, size, group))
