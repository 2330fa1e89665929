"""What plans of one job have in common, made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from simplan.cost.analytic import AnalyticCost
from simplan.cost.base import CostModel
from simplan.cost.compute import roofline
from simplan.search.candidate import Candidate
from simplan.search.layers import Layers, Way
from simplan.search.layout import Layout, layout_of, placement_of
from simplan.search.mesh import Mesh
from simplan.search.part import Part
from simplan.search.rank_numbers import RankNumbers, rank_numbers
from simplan.search.sharding import ShardedStage, sharded_stage
from simplan.search.stage_changes import UnitBytes, sharding_changes, stage_changes
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.schedules import SCHEDULE_FACTS
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Kept", "Numbers", "mesh_key", "split_key"]

_Value = TypeVar("_Value")


class Kept:
    """Results by what they depend on; those that were used last are kept.

    Args:
        most: How many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """The result for a key."""
        known = self._known
        if key in known:
            known.move_to_end(key)
            found: _Value = known[key]
            return found
        made = known[key] = make()
        if len(known) > self._most:
            known.popitem(last=False)
        return made


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
        self.bucket_bytes = bucket_bytes
        self._few, self._layouts, self._stages = Kept(2_000), Kept(20_000), Kept(50_000)

    def num_microbatches(self, c: Candidate) -> int:
        """Microbatches of a step of one data-parallel rank."""
        return self.training.global_batch_size // (c.dp * c.microbatch_size)

    def cost(self, *, shards_parameters: bool) -> CostModel:
        """Prices; element widths are others where parameters are sharded."""

        def make() -> AnalyticCost:
            state = self.software.state(self.training, Way.of_sharding(shards_parameters).plan())
            rates = roofline(self.cluster.device, self.training.precision, state, self.training.optimizer)
            return AnalyticCost(self.cluster, rates)

        return self._few.get(shards_parameters, make)

    def layers(self, c: Candidate) -> Layers:
        """Its layers."""
        way = Way.of(c)
        cost = self.cost(shards_parameters=c.shards_parameters)
        return self._few.get(way, lambda: Layers(self.model, self.training, self.software, way, cost))

    def mesh(self, c: Candidate) -> Mesh:
        """Its mesh."""
        cost = self.cost(shards_parameters=False)
        return self._few.get(mesh_key(c), lambda: Mesh(c, self.cluster, cost))

    def layout(self, c: Candidate) -> Layout:
        """Its stages; what is recomputed does not matter to the balanced split."""
        kind = SCHEDULE_FACTS[c.schedule].placement
        key = (*split_key(c), c.microbatch_size, c.shards_parameters, kind, c.pp, c.virtual_stages)

        def make() -> Layout:
            return layout_of(self.layers(c), placement_of(kind, c.pp, c.virtual_stages))

        return self._layouts.get(key, make)

    def sharded(self, c: Candidate, part: Part) -> ShardedStage | None:
        """Units of a stage under FSDP."""
        if not c.shards_parameters:
            return None
        keep_last = c.pp == 1 and self.software.keep_last_gathered

        def make() -> ShardedStage:
            replicated = c.dp_replicate > 1
            return sharded_stage(self.layers(c), part, self.mesh(c), keep_last=keep_last, replicated=replicated)

        return self._stages.get(("units", part, *split_key(c), *mesh_key(c)), make)

    def rank(self, c: Candidate, parts: tuple[Part, ...]) -> RankNumbers:
        """What a rank with these stages holds and how it ends its step."""
        key = ("rank", parts, *split_key(c), *mesh_key(c), c.shards_parameters, c.shards_optimizer_only)
        optimizer = self.training.optimizer
        return self._stages.get(key, lambda: rank_numbers(self.layers(c), self.mesh(c), parts, c, optimizer))

    def stage_changes(self, c: Candidate, part: Part, *, split: bool) -> NDArray[np.int64]:
        """What a stage's computations do to memory, ``(slots, 2)``; no matter how many shards there are."""

        def make() -> NDArray[np.int64]:
            layers, stage = self.layers(c), self.sharded(c, part)
            begins = None
            if stage is not None:
                whole, held = stage.arrays.whole.tolist(), stage.arrays.accumulated.tolist()
                firsts = [part.start + unit.layers[0] for unit in stage.units]
                begins = {i: UnitBytes(*sizes) for i, *sizes in zip(firsts, whole, held, strict=True)}
            return stage_changes(layers, part, begins, split=split, whole_in_weight=self.whole_in_weight(part))

        return self._stages.get(("changes", part, Way.of(c), split), make)

    def sharding_changes(self, c: Candidate, part: Part, *, split: bool) -> NDArray[np.int64]:
        """What gathering, resharding and reducing do."""

        def make() -> NDArray[np.int64]:
            stage, state = self.sharded(c, part), self.layers(c).state
            assert stage is not None
            return sharding_changes(
                stage,
                widens=state.gathered != state.accumulated,
                split=split,
                whole_in_weight=self.whole_in_weight(part),
                replicated=c.dp_replicate > 1,
            )

        return self._stages.get(("sharding", part, *split_key(c), *mesh_key(c), split), make)

    def whole_in_weight(self, part: Part) -> bool:
        """The first stage has no gradient to hand on, so that torch does all of its backward in W."""
        return part.start == 0 and not self.software.first_stage_splits


def mesh_key(c: Candidate) -> tuple[int, ...]:
    """The mesh."""
    return c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp


def split_key(c: Candidate) -> tuple[object, ...]:
    """How parameters are split."""
    return c.tp, c.sequence_parallel, c.cp, c.cp_comm
