"""Everything about a job's plans that more than one of them needs, made once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from simplan.cost.analytic import AnalyticCost
from simplan.cost.base import CostModel
from simplan.cost.compute import roofline
from simplan.program.program import Phase
from simplan.search.candidate import Candidate
from simplan.search.changes import stage_changes
from simplan.search.layers import Layers, Way
from simplan.search.layout import Layout, layout_of, placement_of
from simplan.search.mesh import Mesh
from simplan.search.rank_numbers import RankNumbers, completing_s, rank_numbers
from simplan.search.replicas import reduced_backward_s
from simplan.search.sharding import ShardedStage, sharded_stage
from simplan.search.stage_numbers import Part, pass_s
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Numbers", "StageTimes"]

_Value = TypeVar("_Value")


class StageTimes(NamedTuple):
    """Seconds of one stage, as ``PipelineTimes`` wants them.

    Attributes:
        compute_s: F; B; the last B; I; W; the last W.
        reduce_copy_s, reduce_s: REDUCE_GRAD up to its first reduce-scatter, and the rest.
    """

    compute_s: tuple[float, ...]
    reduce_copy_s: float
    reduce_s: float


class Numbers:
    """Numbers of the plans of one job, by all that they depend on.

    Args:
        model, cluster, training, software: The job.
        bucket_bytes: Size of DDP's buckets, where the user gave one.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        software: SoftwareSpec,
        bucket_bytes: int | None = None,
    ) -> None:
        self.model, self.cluster, self.training, self.software = model, cluster, training, software
        self._bucket_bytes = bucket_bytes
        self._known: dict[Hashable, Any] = {}

    def num_microbatches(self, c: Candidate) -> int:
        """Microbatches of a step of one data-parallel rank."""
        return self.training.global_batch_size // (c.dp * c.microbatch_size)

    def cost(self, *, shards_parameters: bool) -> CostModel:
        """Prices; element widths are others where parameters are sharded."""
        key = ("cost", shards_parameters)
        if (found := self._known.get(key)) is None:
            way = Way(1, False, 1, "ring", 1, "none", shards_parameters)
            state = self.software.state(self.training, way.plan())
            rates = roofline(self.cluster.device, self.training.precision, state, self.training.optimizer)
            found = self._known[key] = AnalyticCost(self.cluster, rates)
        return self._as(found, AnalyticCost)

    def layers(self, c: Candidate) -> Layers:
        """Its layers."""
        way = Way.of(c)
        if (found := self._known.get(way)) is None:
            cost = self.cost(shards_parameters=c.shards_parameters)
            found = self._known[way] = Layers(self.model, self.training, self.software, way, cost)
        return self._as(found, Layers)

    def mesh(self, c: Candidate) -> Mesh:
        """Its mesh."""
        key = ("mesh", *_mesh(c))
        if (found := self._known.get(key)) is None:
            found = self._known[key] = Mesh(c, self.cost(shards_parameters=False))
        return self._as(found, Mesh)

    def layout(self, c: Candidate) -> Layout:
        """Its stages; what is recomputed does not matter to the balanced split."""
        placement = ("v" if c.schedule == "zb-v" else "loop", c.pp, c.virtual_stages)
        key = (Way.of(c)._replace(recompute="none"), placement)
        if (found := self._known.get(key)) is None:
            stages = placement_of(c.schedule, c.pp, c.virtual_stages)
            found = self._known[key] = layout_of(self.layers(c), stages)
        return self._as(found, Layout)

    def sharded(self, c: Candidate, part: Part) -> ShardedStage | None:
        """Units of a stage under FSDP."""
        if not c.shards_parameters:
            return None
        key = ("units", part, _split(c), _mesh(c))
        if (found := self._known.get(key)) is None:
            keep_last = c.pp == 1 and self.software.keep_last_gathered
            replicated = c.dp_replicate > 1
            found = sharded_stage(self.layers(c), part, self.mesh(c), keep_last=keep_last, replicated=replicated)
            self._known[key] = found
        return self._as(found, ShardedStage)

    def rank(self, c: Candidate, parts: tuple[Part, ...]) -> RankNumbers:
        """What a rank with these stages holds and how it ends its step."""
        sharding = c.shards_parameters, c.shards_optimizer_only
        key = ("rank", parts, _split(c), _mesh(c), sharding)
        if (found := self._known.get(key)) is None:
            found = rank_numbers(self.layers(c), self.mesh(c), parts, c, self.training.optimizer)
            self._known[key] = found
        return self._as(found, RankNumbers)

    def stage_times(self, c: Candidate, part: Part) -> StageTimes:
        """What a stage takes."""
        key = ("times", part, Way.of(c), _mesh(c), self._splits(c), self.num_microbatches(c) > 1)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._stage_times(c, part)
        return self._as(found, StageTimes)

    def changes(self, c: Candidate, part: Part) -> NDArray[np.int64]:
        """What happens to the memory of a stage, ``(slots, 2)``."""
        sharding = (_mesh(c), c.dp_replicate > 1) if c.shards_parameters else None
        key = ("changes", part, Way.of(c), self._splits(c), sharding)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = stage_changes(
                self.layers(c),
                part,
                self.sharded(c, part),
                split=self._splits(c),
                whole_in_weight=self._whole_in_weight(part),
                replicated=c.dp_replicate > 1,
            )
        return self._as(found, np.ndarray)

    def completing_s(self, c: Candidate, part: Part) -> float:
        """REDUCE_GRAD beside data parallelism."""
        divides = self.num_microbatches(c) > 1
        return completing_s(self.layers(c), self.mesh(c), part, c, divides=divides)

    def reduced_backward_s(self, c: Candidate, part: Part) -> float:
        """The backward in which DDP reduces."""
        data_s = self.mesh(c).data_s
        return reduced_backward_s(self.layers(c), part, Phase.BACKWARD, self.software, self._bucket_bytes, data_s)

    def _stage_times(self, c: Candidate, part: Part) -> StageTimes:
        layers, splits = self.layers(c), self._splits(c)
        input_s = weight_s = backward_s = last_s = 0.0
        if not splits or self._whole_in_weight(part):
            backward_s = last_s = weight_s = pass_s(layers, part, Phase.BACKWARD)
        else:
            input_s, weight_s = pass_s(layers, part, Phase.BACKWARD_INPUT), pass_s(layers, part, Phase.BACKWARD_WEIGHT)
        sharded = self.sharded(c, part)
        if sharded is None and c.dp * c.cp > 1 and not splits:
            last_s = self.reduced_backward_s(c, part)
        compute_s = (pass_s(layers, part, Phase.FORWARD), backward_s, last_s, input_s, weight_s, weight_s)
        completing = self.completing_s(c, part)
        if sharded is None:
            return StageTimes(compute_s, 0.0, completing)
        units = sharded.arrays
        now_s, replicate_s = float(units.scatter_s[0]), 0.0
        for u in range(len(sharded.units)):
            if u:
                now_s += float(units.reduce_copy_s[u] + units.scatter_s[u])
            replicate_s = max(replicate_s, now_s) + float(units.all_reduce_s[u])
        return StageTimes(compute_s, float(units.reduce_copy_s[0]), max(now_s, replicate_s) + completing)

    def _splits(self, c: Candidate) -> bool:
        return c.pp > 1 and SCHEDULE_FACTS[c.schedule].splits_backward

    def _whole_in_weight(self, part: Part) -> bool:
        """The first stage has no gradient to hand on, so that torch does all of its backward in W."""
        return part.start == 0 and not self.software.first_stage_splits

    @staticmethod
    def _as(found: Any, kind: type[_Value]) -> _Value:
        assert isinstance(found, kind)
        return found


def _mesh(c: Candidate) -> tuple[int, ...]:
    return c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp


def _split(c: Candidate) -> tuple[object, ...]:
    """How parameters are split."""
    return c.tp, c.sequence_parallel, c.cp, c.cp_comm
