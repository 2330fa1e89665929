"""What plans of one job have in common, made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from simplan.cost.analytic import AnalyticCost
from simplan.cost.kernel_cost import kernel_cost
from simplan.job import Job
from simplan.program.units import Unit
from simplan.search.candidate import Candidate
from simplan.search.layers import Layers, Way
from simplan.search.layout import Layout, Parts, layout_of, placement_of
from simplan.search.mesh import Mesh
from simplan.search.part import Part
from simplan.search.part_states import PartStates, part_states
from simplan.search.prices import Prices
from simplan.search.replicas import Bucketed, Dealt, bucketed, dealt_update
from simplan.search.sharded_pass import LayerArrays
from simplan.search.sharding import ShardedStage, layer_arrays, sharded_stage
from simplan.search.split import balanced_boundaries
from simplan.search.stage_changes import sharding_changes, stage_changes
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.schedules import SCHEDULE_FACTS, Placement
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["Kept", "Numbers", "mesh_key", "split_key"]

_Value = TypeVar("_Value")


class Kept:
    """Results by what they depend on. Those used last are kept: of two generations the elder is let go of as a whole.

    Args:
        most: How many a generation has.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[Hashable, Any] = {}
        self._old: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """The result for a key; not None."""
        found: _Value | None = self._young.get(key)
        if found is None:
            found = self._old.pop(key, None)
            if found is None:
                found = make()
            if len(self._young) >= self._most:
                self._young, self._old = {}, self._young
            self._young[key] = found
        return found


class Numbers:
    """Numbers of the plans of one job, by all that they depend on.

    Args:
        model, cluster, training, software: The job.
        bucket_bytes: Size of DDP's buckets, where the user gave one.

    Attributes:
        whole: All layers as one stage.
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
        self.whole = Part(0, len(model.layers), tied=model.tied_embeddings)
        self._few, self._splits, self._stages = Kept(1_000), Kept(2_500), Kept(50_000)
        self._layouts: dict[tuple[object, ...], Layout] = {}  # all, since what is made for one is known by it
        self._parts: dict[tuple[int, ...], Parts] = {}

    def num_microbatches(self, c: Candidate) -> int:
        """Microbatches of a step of one data-parallel rank."""
        return self.training.global_batch_size // (c.dp * c.microbatch_size)

    @property
    def host_step_s(self) -> float:
        """What the host of a trainer does once a step."""
        return self.cluster.device.kernels.step_s if self.software.trainer else 0.0

    @property
    def taken_share(self) -> float:
        """Part of a device that messages take from what is computed beside them."""
        return self.prices(shards_parameters=False).taken_share

    def prices(self, *, shards_parameters: bool) -> Prices:
        """Prices; element widths are others where parameters are sharded."""

        def make() -> Prices:
            state = self.software.state(self.training, Way.of_sharding(shards_parameters).plan())
            training = self.training
            kernels = kernel_cost(
                self.cluster.device,
                training.precision,
                state,
                training.update,
                self.software,
                num_devices=self.cluster.num_devices,
                shards_parameters=shards_parameters,
            )
            return Prices(AnalyticCost(self.cluster, kernels, self.software.rates))

        return self._few.get(shards_parameters, make)

    def layers(self, c: Candidate) -> Layers:
        """Its layers."""

        def make() -> Layers:
            prices = self.prices(shards_parameters=c.shards_parameters)
            way = Way.of(c)
            return Layers(Job(self.model, self.cluster, self.training, way.plan(), self.software), way, prices)

        again = c.recompute, c.recompute_modules
        return self._few.get((*split_key(c), c.microbatch_size, *again, c.shards_parameters), make)

    def mesh(self, c: Candidate) -> Mesh:
        """Its mesh."""
        return self._few.get(
            mesh_key(c),
            lambda: Mesh(c, self.cluster, self.prices(shards_parameters=False)),
        )

    def layout(self, c: Candidate, layers: Layers) -> Layout:
        """Its stages, the same object for equal ones; what is recomputed does not matter to the balanced split.

        Args:
            c: The plan.
            layers: Its layers.
        """
        kind = SCHEDULE_FACTS[c.schedule].placement
        split = (*split_key(c), c.microbatch_size, c.shards_parameters, layers.pattern)
        return self._splits.get((split, kind, c.pp, c.virtual_stages), lambda: self._found_layout(c, layers, kind))

    def _found_layout(self, c: Candidate, layers: Layers, kind: Placement) -> Layout:
        boundaries = balanced_boundaries(layers.block_times_s, c.num_stages)
        same = (boundaries, layers.pattern, kind, c.pp)
        found = self._layouts.get(same)
        if found is None:
            placement = placement_of(kind, c.pp, c.virtual_stages)
            parts = self._parts.setdefault(layers.pattern, Parts(layers.pattern))
            found = self._layouts[same] = layout_of(len(self._layouts), boundaries, parts, placement)
        return found

    def sharded(self, c: Candidate, parts: Iterable[Part]) -> list[ShardedStage]:
        """Units of stages under FSDP; none without it."""
        if not c.shards_parameters:
            return []
        mesh = self.mesh(c)
        return [self._stages.get(("units", part, mesh), lambda: self._sharded(c, part, mesh)) for part in parts]  # noqa: B023 - called at once

    def _sharded(self, c: Candidate, part: Part, mesh: Mesh) -> ShardedStage:
        keep_last = c.pp == 1 and self.software.keep_last_gathered
        return sharded_stage(self.layers(c), part, mesh, keep_last=keep_last, replicated=c.dp_replicate > 1)

    def whole_model(self, c: Candidate, units: tuple[Unit, ...]) -> LayerArrays:
        """Layers of a model that is not cut into stages, between the hooks of FSDP's units."""
        return self._few.get(("model", Way.of(c)), lambda: layer_arrays(self.layers(c), self.whole, units))

    def states(self, c: Candidate, parts: Iterable[Part]) -> list[PartStates]:
        """What a rank of each stage holds of its parameters."""
        mesh, layers, sharded = self.mesh(c), self.layers(c), c.shards_parameters
        way = (mesh, c.sequence_parallel, c.cp_comm, sharded)
        return [
            self._stages.get(("states", part, way), lambda: part_states(layers, part, mesh, sharded=sharded))  # noqa: B023 - called at once
            for part in parts
        ]

    def dealt(self, c: Candidate, parts: tuple[Part, ...]) -> Dealt:
        """ZeRO-1 on a pipeline rank with these stages."""
        mesh = self.mesh(c)
        key = ("dealt", parts, mesh)
        return self._stages.get(key, lambda: dealt_update(self.layers(c), parts, mesh.num_shards, mesh.shard_s))

    def buckets(self, c: Candidate, part: Part) -> Bucketed:
        """DDP's buckets of a stage."""
        mesh = self.mesh(c)

        def make() -> Bucketed:
            return bucketed(self.layers(c), part, self.software, self.bucket_bytes, mesh.data_s)

        return self._stages.get(("buckets", part, mesh), make)

    def stage_changes(self, c: Candidate, layers: Layers, part: Part, *, split: bool) -> NDArray[np.int64]:
        """What a stage's computations do to memory, ``(slots, 2)``; no matter how many shards there are."""
        found = layers.stage_changes.get((part, split))
        if found is None:
            units = next((stage.unit_bytes(part) for stage in self.sharded(c, [part])), None)
            whole_in_weight = self.whole_in_weight(part)
            found = stage_changes(layers, part, units, split=split, whole_in_weight=whole_in_weight)
            layers.stage_changes[part, split] = found
        return found

    def sharding_changes(self, c: Candidate, part: Part, *, split: bool) -> NDArray[np.int64]:
        """What gathering, resharding and reducing do."""

        def make() -> NDArray[np.int64]:
            [stage], state = self.sharded(c, [part]), self.layers(c).state
            return sharding_changes(
                stage,
                widens=state.gathered != state.accumulated,
                split=split,
                whole_in_weight=self.whole_in_weight(part),
                replicated=c.dp_replicate > 1,
            )

        return self._stages.get(("sharding", part, self.mesh(c), split), make)

    def whole_in_weight(self, part: Part) -> bool:
        """The first stage has no gradient to hand on, so that torch does all of its backward in W."""
        return part.start == 0 and not self.software.first_stage_splits


def mesh_key(c: Candidate) -> tuple[int, ...]:
    """The mesh, which says which parameters a rank has; exchanges of tokens do not matter to these."""
    return c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp


def split_key(c: Candidate) -> tuple[object, ...]:
    """How parameters are split."""
    return c.tp, c.sequence_parallel, c.cp, c.cp_comm
