"""Plans with a pipeline: numbers of their stages, put side by side for the plans that share a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.program.program import Phase
from simplan.search.candidate import Candidate
from simplan.search.changes import stage_changes
from simplan.search.layers import Layers
from simplan.search.layout import Layout
from simplan.search.mesh import Mesh
from simplan.search.rank_numbers import RankNumbers, completing_s, rank_numbers
from simplan.search.replicas import reduced_backward_s
from simplan.search.sharding import ShardedStage, sharded_stage
from simplan.search.stage_numbers import Part, pass_s
from simplan.sim.pipeline.table import PipelineTable
from simplan.sim.pipeline.times import PipelineTimes, pipeline_times
from simplan.spec.layer import CollectiveKind
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec

__all__ = ["Pipelined", "step_times_s"]

_F, _B, _I, _W = Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT


class StageTimes(NamedTuple):
    """Seconds of one stage: rows of ``PipelineTimes``."""

    compute_s: tuple[float, ...]
    reduce_copy_s: float
    reduce_s: float


class Pipelined:
    """Numbers of one plan's stages and ranks.

    Args:
        layers, mesh, layout, candidate: The plan.
        software: The framework.
        optimizer: Its name.
        num_microbatches: Of a step.
        bucket_bytes: Size of DDP's buckets, where the user gave one.
    """

    def __init__(
        self,
        layers: Layers,
        mesh: Mesh,
        layout: Layout,
        candidate: Candidate,
        software: SoftwareSpec,
        optimizer: str,
        num_microbatches: int,
        bucket_bytes: int | None,
    ) -> None:
        self._layers, self._mesh, self.layout, self.candidate = layers, mesh, layout, candidate
        self._software, self._bucket_bytes, self._m = software, bucket_bytes, num_microbatches
        self._splits = SCHEDULE_FACTS[candidate.schedule].splits_backward
        self.sharded: list[ShardedStage | None] = [None] * len(layout.parts)
        if candidate.shards_parameters:
            replicated = candidate.dp_replicate > 1
            self.sharded = [
                sharded_stage(layers, part, mesh, keep_last=False, replicated=replicated) for part in layout.parts
            ]
        kinds = {
            stages: rank_numbers(layers, mesh, [layout.parts[i] for i in stages], candidate, optimizer)
            for stages in set(layout.of_rank)
        }
        self.ranks: list[RankNumbers] = [kinds[stages] for stages in layout.of_rank]

    def write_times(self, times: PipelineTimes, k: int) -> None:
        """Fills in the plan's column."""
        layers, layout, mesh = self._layers, self.layout, self._mesh
        stages = [self._stage_times(part, sharded) for part, sharded in zip(layout.parts, self.sharded, strict=True)]
        index = layout.index
        times.compute_s[:, :, k] = np.array([stage.compute_s for stage in stages]).T[:, index]
        times.reduce_copy_s[:, k] = np.array([stage.reduce_copy_s for stage in stages])[index]
        times.reduce_s[:, k] = np.array([stage.reduce_s for stage in stages])[index]
        for stage, crossings in enumerate(layout.crossings):
            if crossings.sizes:
                ends = layout.placement[stage], layout.placement[stage + 1]
                send = CollectiveKind.SEND
                times.send_forward_s[stage, k] = sum(mesh.between_s(send, size, *ends) for size in crossings.sizes)
                times.send_backward_s[stage, k] = sum(mesh.between_s(send, size, *ends[::-1]) for size in crossings.sizes)
        if self.sharded[0] is not None:
            for number, sharded in enumerate(self.sharded):
                assert sharded is not None
                units, places = len(sharded.units), np.flatnonzero(index == number)
                times.gather_s[places, :units, k] = sharded.arrays.gather_s
                times.copy_s[places, :units, k] = sharded.arrays.copy_s
        ends = layout.placement[0], layout.placement[-1]
        if layers.tied_bytes and ends[0] != ends[1]:
            times.tied_s[k] = mesh.between_s(CollectiveKind.ALL_REDUCE, layers.tied_bytes, *ends)
        times.update_s[:, k] = [rank.update_s for rank in self.ranks]
        times.after_s[:, k] = [rank.after_s for rank in self.ranks]

    @property
    def num_units(self) -> int:
        """Most units of a stage."""
        return max(len(sharded.units) if sharded else 0 for sharded in self.sharded)

    def _stage_times(self, part: Part, sharded: ShardedStage | None) -> StageTimes:
        layers, candidate = self._layers, self.candidate
        forward_s = pass_s(layers, part, _F)
        whole_in_weight = part.start == 0 and not self._software.first_stage_splits
        input_s = weight_s = backward_s = last_s = 0.0
        if not self._splits or whole_in_weight:
            backward_s = last_s = weight_s = pass_s(layers, part, _B)
        else:
            input_s, weight_s = pass_s(layers, part, _I), pass_s(layers, part, _W)
        if sharded is None and candidate.dp * candidate.cp > 1:
            last_s = reduced_backward_s(layers, part, _B, self._software, self._bucket_bytes, self._mesh.data_s)
        completed_s = completing_s(layers, self._mesh, part, candidate, divides=self._m > 1)
        compute_s = (forward_s, backward_s, last_s, input_s, weight_s, weight_s)
        if sharded is None:
            return StageTimes(compute_s, 0.0, completed_s)
        units = sharded.arrays
        now_s, replicate_s = float(units.scatter_s[0]), 0.0
        for u in range(len(sharded.units)):
            if u:
                now_s += float(units.reduce_copy_s[u] + units.scatter_s[u])
            replicate_s = max(replicate_s, now_s) + float(units.all_reduce_s[u])
        return StageTimes(compute_s, float(units.reduce_copy_s[0]), max(now_s, replicate_s) + completed_s)

    def changes(self) -> NDArray[np.int64]:
        """Changes of memory, ``(slots, 2, stages)``."""
        found = [
            stage_changes(
                self._layers,
                part,
                sharded,
                split=self._splits,
                whole_in_weight=part.start == 0 and not self._software.first_stage_splits,
                replicated=self.candidate.dp_replicate > 1,
            )
            for part, sharded in zip(self.layout.parts, self.sharded, strict=True)
        ]
        return np.stack(found, axis=-1)[:, :, self.layout.index]


def step_times_s(table: PipelineTable, plans: Sequence[Pipelined]) -> list[float]:
    """Step times of plans that share a table."""
    units = max(plan.num_units for plan in plans)
    times = PipelineTimes.zeros(table.num_stages, table.num_ranks, len(plans), units)
    for k, plan in enumerate(plans):
        plan.write_times(times, k)
    return [float(seconds) for seconds in pipeline_times(table, times)]
