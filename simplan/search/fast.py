"""Numbers of many plans at once: layers priced once, stages put together from them, whole pipelines in machine code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from simplan.cost.analytic import AnalyticCost
from simplan.cost.base import CostModel
from simplan.cost.compute import roofline
from simplan.program.partition import balanced_assignment
from simplan.program.program import Phase
from simplan.search.candidate import Candidate
from simplan.search.layers import Layers, Way
from simplan.search.mesh import Mesh, is_even
from simplan.search.replicas import Dealt, dealt_update, reduced_backward_s
from simplan.search.sharded_pass import sharded_pass_s, sharded_peak
from simplan.search.sharding import layer_arrays, sharded_stage
from simplan.search.stage_numbers import Part, Walk, pass_bytes, pass_s, table_bytes
from simplan.spec.hardware import ClusterSpec
from simplan.spec.layer import CollectiveKind
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["FastEvaluator"]

_BLOCK_BYTES = 2 * 1024**2


class FastEvaluator:
    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        software: SoftwareSpec,
        base: ParallelPlan | None = None,
    ) -> None:
        self._model, self._cluster, self._training, self._software = model, cluster, training, software
        self._base = base or ParallelPlan()
        self._costs: dict[bool, CostModel] = {}
        self._layers: dict[Way, Layers] = {}
        self._meshes: dict[tuple[int, ...], Mesh] = {}

    def layers(self, candidate: Candidate) -> Layers:
        way = Way.of(candidate)
        found = self._layers.get(way)
        if found is None:
            cost = self._cost(way)
            found = self._layers[way] = Layers(self._model, self._training, self._software, way, cost)
        return found

    def _cost(self, way: Way) -> CostModel:
        found = self._costs.get(way.shards_parameters)
        if found is None:
            state = self._software.state(self._training, way.plan())
            rates = roofline(self._cluster.device, self._training.precision, state, self._training.optimizer)
            found = self._costs[way.shards_parameters] = AnalyticCost(self._cluster, rates)
        return found

    def mesh(self, c: Candidate) -> Mesh:
        key = (c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp)
        found = self._meshes.get(key)
        if found is None:
            found = self._meshes[key] = Mesh(c, self._cost(Way.of(c)))
        return found

    def num_microbatches(self, c: Candidate) -> int:
        return self._training.global_batch_size // (c.dp * c.microbatch_size)

    def single(self, c: Candidate) -> tuple[float, int]:
        layers, mesh, m = self.layers(c), self.mesh(c), self.num_microbatches(c)
        n = len(layers.specs)
        part = Part(0, n, tied=self._model.tied_embeddings)
        software = self._software
        num_shards = mesh.num_shards if c.shards_parameters else 1
        held = sum(layers.held(i, num_shards, tied=part.tied) for i in part.layers)
        trained = held
        after_s = 0.0
        if c.shards_optimizer_only:
            dealt = dealt_update(layers, [part], mesh.num_shards, mesh.shard_s)
            trained, update_s, after_s = dealt
        else:
            update_s = sum(layers.seconds(i, Phase.OPTIMIZER, layers.held(i, num_shards, tied=part.tied)) for i in part.layers)
        complete_s = 0.0
        partial = sum(layers.partial_elements) // num_shards
        if partial and c.tp > 1:
            complete_s += mesh.tensor_s(CollectiveKind.ALL_REDUCE, partial * layers.state.gradient)
        if m > 1:
            complete_s += sum(layers.seconds(i, Phase.SCALE, layers.held(i, num_shards, tied=part.tied)) for i in part.layers)
        state = layers.state
        base = (
            held * (state.parameter + state.gradient)
            + trained * state.optimizer_bytes(self._training.optimizer)
            + table_bytes(layers, part)
            + layers.batch_bytes * m
        )
        if c.shards_parameters:
            replicated = c.dp_replicate > 1
            stage = sharded_stage(layers, part, mesh, keep_last=software.keep_last_gathered, replicated=replicated)
            arrays = layer_arrays(layers, part, stage.units)
            reshards = c.zero_stage == 3 and c.reshard_after_forward
            prefetch = software.backward_prefetch
            each_s = sharded_pass_s(arrays, stage.arrays, reshards, prefetch, False) if m > 1 else 0.0
            last_s = sharded_pass_s(arrays, stage.arrays, reshards, prefetch, True)
            peak = base + sharded_peak(arrays, stage.arrays, reshards, prefetch, m, replicated)
        else:
            forward_s, backward_s = (pass_s(layers, part, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
            each_s = last_s = forward_s + backward_s
            rebuild = 0
            if c.dp * c.cp > 1:
                last_s = forward_s + reduced_backward_s(
                    layers, part, Phase.BACKWARD, software, self._base.bucket_bytes, mesh.data_s
                )
                rebuild = held * state.gradient
            walk = Walk()
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                walk.add(*pass_bytes(layers, part, phase))
            peak = base + max(rebuild, walk.change.during)
        return (m - 1) * each_s + last_s + complete_s + update_s + after_s, peak
