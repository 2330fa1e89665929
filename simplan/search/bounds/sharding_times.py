"""Lower bounds on the time of FSDP all-gathers and reduce-scatters, per layer and per microbatch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import ParallelPlan
from simplan.program.lowering.fsdp_units import Unit, fsdp_units
from simplan.search.bounds.device_groups import groups_of
from simplan.search.bounds.layer_sums import CostCache, Floats
from simplan.search.candidates import Candidates

_SHARDED = ("dp_replicate", "dp_shard", "cp", "tp", "sequence_parallel", "ep", "placement")


class _PassCommunications(NamedTuple):
    """Seconds of FSDP collectives in one microbatch without a pipeline.

    Attributes:
        first_gather_s: All-gather of the first layer, which overlaps nothing.
        forward_s: All all-gathers in forward.
        backward_s: All-gathers in backward that start after the backward of the last layer.
        scatter_s: All reduce-scatters.
        last_reduction_s: Reduce-scatter and all-reduce of the first layer, which overlap nothing.
        all_reduce_s: The shortest reduce-scatter, followed by all all-reduces among replicas.
    """

    first_gather_s: float
    forward_s: float
    backward_s: float
    scatter_s: float
    last_reduction_s: float
    all_reduce_s: float

    def pass_times_s(self, forwards_s: Floats, backwards_s: Floats, last_s: float) -> tuple[float, float, float]:
        """Seconds of a forward, a backward that reduces gradients, and a backward that does not.

        All-gathers and reduce-scatters are serialized on one stream, all-reduces on another, and layers on a third.

        Args:
            forwards_s, backwards_s: ``(layers,)`` Compute seconds.
            last_s: See ``LayerTimes.last_forward_s``.
        """
        forward_s = max(self.first_gather_s + forwards_s.sum(), self.forward_s + last_s)
        computed_s, last_s, first_s = float(backwards_s.sum()), float(backwards_s[-1]), backwards_s[0]
        plain_s = max(computed_s, last_s + self.backward_s + first_s)
        reduced_s = max(
            plain_s,
            computed_s + self.last_reduction_s,
            last_s + self.backward_s + self.scatter_s,
            last_s + self.all_reduce_s,
        )
        return float(forward_s), float(reduced_s), float(plain_s)


class ShardingTimes:
    """Cache of FSDP collective times."""

    def __init__(self, job: Job, cost_cache: CostCache) -> None:
        self._job, self._cost_cache = job, cost_cache
        self._alone: dict[Hashable, _PassCommunications] = {}
        self._by_layer: dict[Hashable, Floats] = {}
        self._units: dict[Hashable, tuple[Unit, ...]] = {}

    def alone(self, rows: Candidates, row: int) -> _PassCommunications:
        """Collective times of a plan without a pipeline."""
        key = tuple(int(rows[name][row]) for name in (*_SHARDED, "zero_stage", "reshard_after_forward"))
        if (pass_communications := self._alone.get(key)) is None:
            pass_communications = self._alone[key] = self._of_pass(rows.plan(row))
        return pass_communications

    def stages(self, rows: Candidates, row: int, boundaries: NDArray[np.int64]) -> Floats:
        """``(2, stages)`` Seconds of all all-gathers and of all reduce-scatters, of a plan with a pipeline."""
        key = tuple(int(rows[name][row]) for name in _SHARDED)
        if (sums := self._by_layer.get(key)) is None:
            sums = self._by_layer[key] = self._of_layers(rows.plan(row))
        return np.diff(sums[:, boundaries])

    def _of_layers(self, plan: ParallelPlan) -> Floats:
        """``(2, layers + 1)`` Prefix sums over layers of all-gather and of reduce-scatter seconds."""
        units = self._units_of(plan)
        gathers_s, scatters_s, _ = self._communications_s(plan, units)
        sums = np.zeros((2, len(self._job.model.layers) + 1))
        for unit, gather_s, scatter_s in zip(units, gathers_s, scatters_s, strict=True):
            sums[:, unit.layers[0] + 1] += gather_s, scatter_s
        return sums.cumsum(axis=1)

    def _of_pass(self, plan: ParallelPlan) -> _PassCommunications:
        software, units = self._job.software, self._units_of(plan)
        gathers_s, scatters_s, all_reduces_s = self._communications_s(plan, units)
        begins = [gather_s for unit, gather_s in zip(units, gathers_s, strict=True) if unit.layers[0] == 0]
        reshards = plan.zero_stage == 3 and plan.reshard_after_forward
        again_s = 0.0
        if reshards and not software.per_rank_tensor_lists:
            # the last two all-gathers may overlap the backward of the last layer
            again_s = sum(s for unit, s in zip(units[:-2], gathers_s[:-2], strict=True) if not unit.stays)
        last_s = [
            scatter_s + reduce_s
            for unit, scatter_s, reduce_s in zip(units, scatters_s, all_reduces_s, strict=True)
            if unit.layers[0] == 0 and unit.trained
        ]
        reduced_s = [scatter_s for unit, scatter_s in zip(units, scatters_s, strict=True) if unit.trained]
        return _PassCommunications(
            min(begins, default=0.0),
            sum(gathers_s),
            again_s,
            sum(scatters_s),
            min(last_s, default=0.0),
            min(reduced_s, default=0.0) + sum(all_reduces_s),
        )

    def _units_of(self, plan: ParallelPlan) -> tuple[Unit, ...]:
        num_shards = plan.dp_shard * plan.cp
        key = plan.shard, num_shards, plan.expert_shards, plan.pp > 1
        if (units := self._units.get(key)) is None:
            layers = self._job.software.layers_of(self._job.model, plan, self._job.training)
            is_flat = self._job.software.state(self._job.training, plan).is_flat
            units = fsdp_units(
                layers,
                num_shards,
                keep_last=plan.pp == 1,
                expert_shards=plan.expert_shards,
                others_in_root=(0, len(layers) - 1) if is_flat else (),
            )
            self._units[key] = units
        return units

    def _communications_s(
        self, plan: ParallelPlan, units: tuple[Unit, ...]
    ) -> tuple[list[float], list[float], list[float]]:
        """By unit, seconds of its all-gather, its reduce-scatter, and its all-reduce among replicas."""
        state, cluster = self._job.software.state(self._job.training, plan), self._job.cluster
        replicas, collective_s = groups_of(plan, cluster, "replicate"), self._cost_cache.collective_s
        known: dict[tuple[int, int, bool], tuple[float, float, float]] = {}
        by_layer = []
        apart = plan.replicas_apart
        for unit in units:
            key = unit.gathered_bytes(state), unit.trained_padded, unit.experts
            if key not in known:
                groups = groups_of(plan, cluster, "expert_shard" if unit.experts else "shard")
                num_bytes = unit.trained_padded * state.reduced
                known[key] = (
                    collective_s(CollectiveKind.ALL_GATHER, key[0], groups),
                    collective_s(CollectiveKind.REDUCE_SCATTER, num_bytes, groups),
                    0.0 if apart else collective_s(CollectiveKind.ALL_REDUCE, num_bytes // len(groups[0]), replicas),
                )
            by_layer.append(known[key])
        gathers_s, scatters_s, all_reduces_s = (list(column_s) for column_s in zip(*by_layer, strict=True))
        return gathers_s, scatters_s, all_reduces_s
