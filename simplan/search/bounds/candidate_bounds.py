"""Lower bounds on memory and step time of many candidates, from the cost estimates of ``predict``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from simplan.cost.calibration.format import Calibration
from simplan.job import Job
from simplan.plan.plan import ParallelPlan
from simplan.plan.schedules import SCHEDULE_FACTS, stage_ranks
from simplan.search.bounds.layer_sums import Floats, LayerConfiguration, Layers, LayersCache, Pipeline
from simplan.search.bounds.memory_bound import MemoryBound, whole_bytes
from simplan.search.bounds.replicas import Replica, replicas_of
from simplan.search.bounds.step_time_bound import StepTimeBound
from simplan.search.candidates import Candidates, Column

_MESH = "dp_replicate", "dp_shard", "placement"
_WAY = (
    "tp", "sequence_parallel", "cp", "cp_comm", "ep", "microbatch_size", "recompute", "recompute_modules"
)  # fmt: skip
_REPLICA = *_MESH, "pp", "zero_stage", "microbatch_sizes", *_WAY[:-2]


class Bounded(NamedTuple):
    """Lower bounds, one per candidate row.

    Attributes:
        device_bytes: ``(rows,)`` Lower bound on the memory of the worst device. If devices differ, bytes on smaller
            ones are scaled to the largest.
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
        self._layers = LayersCache(job, calibration)
        self._known: dict[Hashable, Layers] = {}  # by fields of a plan that its layers depend on
        self._memory = MemoryBound(job)
        self._times: StepTimeBound | None = None
        schedules = ("none", *SCHEDULE_FACTS)
        facts = [SCHEDULE_FACTS.get(name) for name in schedules]
        self._splits = np.array([of is not None and of.splits_backward for of in facts])
        self._in_v = np.array([of is not None and of.placement == "v" for of in facts])

    def of(self, rows: Candidates, max_bytes: float | None = None) -> Bounded:
        """Bounds of candidates: those of the slowest and the fullest replica, or of the least one if any may be it.

        Args:
            rows: Candidates that violate no rule.
            max_bytes: Step times are computed only up to this memory bound; None for no limit.
        """
        limit = np.inf if max_bytes is None else max_bytes
        if not self._job.cluster.is_mixed or not len(rows):
            return self._of_replicas(rows, np.zeros(len(rows), np.int64), (None,), limit)
        _, first, kind = np.unique(
            np.stack([rows[name] for name in _REPLICA]), axis=1, return_index=True, return_inverse=True
        )
        kind = kind.reshape(-1)
        by_kind = [replicas_of(self._job.with_plan(rows.plan(row))) for row in first.tolist()]
        replicas = tuple(dict.fromkeys(replica for of in by_kind for replica in of))
        numbers = {replica: number for number, replica in enumerate(replicas)}
        counts = np.array([len(of) for of in by_kind])[kind]
        which = np.array([numbers[replica] for kind_index in kind.tolist() for replica in by_kind[kind_index]])
        bounds = self._of_replicas(rows.take(np.repeat(np.arange(len(rows)), counts)), which, replicas, limit)
        starts, every = counts.cumsum() - counts, rows.has("microbatch_sizes", None)
        return Bounded(
            np.where(every, *(of.reduceat(bounds.device_bytes, starts) for of in (np.maximum, np.minimum))),
            np.where(every, *(of.reduceat(bounds.step_time_s, starts) for of in (np.maximum, np.minimum))),
        )

    def _of_replicas(
        self, rows: Candidates, which: Column, replicas: tuple[Replica | None, ...], limit: float
    ) -> Bounded:
        """Bounds of single replicas of candidates.

        Args:
            which: ``(rows,)`` Index of the replica.
            replicas: Replicas; None for the only one of equal nodes.
            limit: Memory bound up to which step times are computed.
        """
        num_bytes, seconds = np.zeros(len(rows), np.int64), np.full(len(rows), np.inf)
        shapes = np.stack([
            rows["pp"], rows["virtual_stages"], self._splits[rows["schedule"]], self._in_v[rows["schedule"]]
        ])  # fmt: skip
        _, place = np.unique(shapes, axis=1, return_inverse=True)
        order = np.argsort(place.reshape(-1), kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(place.reshape(-1)[order])) + 1) if len(rows) else ():
            part = rows.take(here)
            pipeline, configs = self._pipeline(part, which[here], replicas)
            of_part = whole_bytes(self._memory.bytes(part, pipeline, configs) * self._least_scales(pipeline)[configs])
            if not pipeline.has_split:
                self._reject_by_first_split(part, pipeline, configs, of_part, limit)
            num_bytes[here] = of_part
            near = np.flatnonzero(of_part <= limit)
            if len(near):
                if self._times is None:
                    self._times = StepTimeBound(self._job, self._layers.cost_cache(part.plan(0)))
                used, index = np.unique(configs[near], return_inverse=True)
                seconds[here[near]] = self._times.seconds(part.take(near), pipeline.take(used), index.reshape(-1))
        return Bounded(num_bytes, seconds)

    def _pipeline(
        self, rows: Candidates, which: Column, replicas: tuple[Replica | None, ...]
    ) -> tuple[Pipeline, Column]:
        """The pipeline that all rows share, and by row the index of its layer configuration."""
        columns = [*(rows[name] for name in _WAY), rows.shards_parameters, which]
        if not self._is_uniform(rows):  # the mesh decides which groups cross nodes
            columns += [rows[name] for name in _MESH]
        if self._layers.in_low_precision:
            columns.append(self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"]))
        numbers, first, configs = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
        if self._is_uniform(rows):
            pipelines = self._uniform_configs(rows, first, numbers)
        else:
            plans = [rows.plan(row) for row in first.tolist()]
            numbers_of_replicas = which[first].tolist()
            pipelines = [
                self._config(plan, replicas[number] or replicas_of(self._job.with_plan(plan))[0])
                for plan, number in zip(plans, numbers_of_replicas, strict=True)
            ]
        plan = rows.plan(0)
        placement = stage_ranks(plan.schedule, plan.pp, plan.num_stages) or ()
        return Pipeline.of(pipelines, placement, splits=bool(self._splits[rows["schedule"][0]])), configs.reshape(-1)

    def _is_uniform(self, rows: Candidates) -> bool:
        """True if layers do not depend on the mesh: equal nodes, and ranks in the order of the mesh."""
        return not self._job.cluster.is_mixed and not rows["placement"].any()

    def _uniform_configs(self, rows: Candidates, first: Column, numbers: Column) -> list[LayerConfiguration]:
        """Layer configurations of some rows on equal nodes; most are known from other pipelines.

        Args:
            first: Rows, one for each layer configuration.
            numbers: ``(fields, configurations)`` All that the layers of a pipeline depend on.
        """
        cluster, num_ranks = self._job.cluster, int(rows["pp"][0])
        width = cluster.num_devices // num_ranks
        aligned = width % cluster.devices_per_node == 0 or cluster.devices_per_node % width == 0
        of_pipeline = bool(self._splits[rows["schedule"][0]]), 0 if aligned else num_ranks
        uniform = []
        for row, key in zip(first.tolist(), map(tuple, numbers.T.tolist()), strict=True):
            layers = self._known.get((of_pipeline, key))
            if layers is None:
                plan = rows.plan(row)
                layers = self._known[of_pipeline, key] = self._layers.layers(plan, plan.microbatch_size)
            uniform.append(layers)
        devices = tuple(range(0, cluster.num_devices, width))
        plan = rows.plan(0)
        return [
            LayerConfiguration([layers] * num_ranks, devices, self._layers.boundaries(plan, layers))
            for layers in uniform
        ]

    def _config(self, plan: ParallelPlan, replica: Replica) -> LayerConfiguration:
        """Layer configuration of a plan on the devices of a replica."""
        cluster = self._job.cluster
        groups = [cluster.group_of(device) if cluster.is_mixed else None for device in replica.devices]
        by_group = {group: self._layers.layers(plan, replica.microbatch_size, group) for group in {*groups}}
        ranks = [by_group[group] for group in groups]
        first = self._layers.first_boundaries(plan, ranks) if cluster.is_mixed else None
        return LayerConfiguration(ranks, replica.devices, self._layers.boundaries(plan, ranks[0]), first)

    def _reject_by_first_split(
        self, rows: Candidates, pipeline: Pipeline, configs: Column, num_bytes: Column, limit: float
    ) -> None:
        """Raise the memory bounds of plans that keep the split of layers that is tried first, and do not fit with it.

        Stages that do not fit give away blocks, all but one (``TruncatedStep.assignment``). If they have none to give,
        or so many that no split is left, the first split stays.

        Args:
            rows, pipeline, configs: Plans whose split of layers is unknown.
            num_bytes: ``(rows,)`` Memory bounds; updated.
            limit: Memory bound up to which a bound is raised.
        """
        if (largest := self._job.cluster.largest_memory_bytes) is None:
            return
        known = np.array([config.first_boundaries is not None for config in pipeline.configs])
        here = np.flatnonzero((num_bytes <= limit) & known[configs])
        if not len(here):
            return
        used, index = np.unique(configs[here], return_inverse=True)
        tried, index, plan = [pipeline.configs[config] for config in used.tolist()], index.reshape(-1), rows.plan(0)
        splits = np.array([config.first_boundaries for config in tried])
        placement = np.array(stage_ranks(plan.schedule, plan.pp, plan.num_stages) or range(plan.num_stages))
        first = [config._replace(boundaries=split) for config, split in zip(tried, splits, strict=True)]
        tensors, wanted = self._memory.of_ranks(rows.take(here), Pipeline(first, placement, pipeline.splits), index)
        device_bytes = self._device_bytes(tried)[index]
        blocks, model = np.diff(splits, axis=1)[index], self._job.model
        blocks[:, 0] -= 1
        blocks[:, -1] -= model.num_last_layers
        lacking = np.maximum(0, 1 - device_bytes / tensors)[:, placement]
        fewer = np.maximum(1, blocks - np.maximum(1, np.ceil(blocks * lacking)))
        max_blocks = np.where(lacking > 0, fewer, model.num_blocks)
        stays = (max_blocks.sum(axis=1) < model.num_blocks) | (max_blocks == blocks).all(axis=1)
        of_largest = wanted * (largest / device_bytes)
        num_bytes[here[stays]] = np.maximum(num_bytes[here], whole_bytes(of_largest.max(axis=1)))[stays]

    def _least_scales(self, pipeline: Pipeline) -> Floats:
        """``(configs,)`` Memory of the largest device over that of the largest one in the pipeline."""
        largest = self._job.cluster.largest_memory_bytes
        if not self._job.cluster.is_mixed or largest is None:
            return np.ones(len(pipeline.configs))
        return np.asarray(largest / self._device_bytes(pipeline.configs).max(axis=1))

    def _device_bytes(self, configs: Sequence[LayerConfiguration]) -> Floats:
        """``(configs, ranks)`` Memory of devices."""
        cluster = self._job.cluster
        sizes = ([cluster.device_of(device).memory_bytes or np.inf for device in config.devices] for config in configs)
        return np.asarray([*sizes], np.float64)
