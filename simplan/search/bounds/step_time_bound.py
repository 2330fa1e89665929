"""Lower bound on the step time: compute, communication, waits and optimizer of the busiest pipeline rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import GroupKind, ParallelPlan
from simplan.search.bounds.device_groups import Groups, groups_of
from simplan.search.bounds.layer_sums import CostCache, Floats, Pipeline
from simplan.search.bounds.sharding_times import ShardingTimes
from simplan.search.candidates import Candidates, Column

_HOST = "host_step_overhead_s", "host_batch_overhead_s"


class _Tail(NamedTuple):
    """Seconds of each rank after its last backward, ``(rows, ranks)``.

    Attributes:
        reduce_s: Exposed gradient reductions of all stages except the rank's first stage.
        first_reduce_s: Exposed gradient reductions of the rank's first stage, the last to finish if backward is not
            split.
        update_s: Optimizer, and the parameter all-gathers after it.
    """

    reduce_s: Floats
    first_reduce_s: Floats
    update_s: Floats


class StepTimeBound:
    """Lower bound on the seconds of a step.

    A pipeline rank starts when the first microbatch has passed the first stages of the previous ranks. It computes all
    microbatches sequentially with the collectives inside layers, and waits for P2P sends where the software does.
    Unless backward is split, the last backward then passes back through those stages. Nor is a step shorter than the
    way of one microbatch forward and backward through all stages, with a send wherever the rank changes.

    Exposed gradient reductions, the optimizer and the all-gather of updated parameters follow. FSDP's all-gathers and
    reduce-scatters are serialized on one stream.

    Args:
        cost_cache: Cache of communication times, which all plans share.
    """

    def __init__(self, job: Job, cost_cache: CostCache) -> None:
        self._job, self._cost_cache = job, cost_cache
        cluster, software = job.cluster, job.software
        self._shares_evenly = software.optimizer_shards == "elements"
        kernels = [of.device.kernels for of in cluster.node_groups] or [cluster.device.kernels]
        least_s, each_s = (min(getattr(of, name) for of in kernels) for name in _HOST)
        self._host_s = least_s if software.trainer and cost_cache.sends else 0.0
        self._batch_s = each_s if software.waits_for_batch and cost_cache.sends else 0.0
        self._node_groups = np.array([cluster.group_of(device) for device in range(cluster.num_devices)])
        self._sharding = ShardingTimes(job, cost_cache)

    def seconds(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> Floats:
        """``(rows,)`` Lower bounds in seconds.

        Args:
            rows: Plans that share the pipeline.
            configs: ``(rows,)`` Index of the layer configuration in ``pipeline``.
        """
        if not pipeline.has_split:
            return self._of_any_split_s(rows, pipeline, configs) + self._host_s
        total_s, sharded = np.zeros(len(rows)), rows.shards_parameters
        alone = sharded & (rows["pp"] == 1) & self._cost_cache.sends
        for part in (alone, sharded & ~alone, ~sharded & ~alone):
            here = np.flatnonzero(part)
            if len(here):
                make = self._alone_s if alone[here[0]] else self._pipelined_s
                total_s[here] = make(rows.take(here), pipeline, configs[here])
        return total_s + self._host_s

    def _pipelined_s(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> Floats:
        """``(rows,)`` Bounds with a pipeline, or without sharded parameters."""
        times, num_ranks = pipeline.times, pipeline.num_ranks
        many = self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"])
        forward_s = times.forward_s + self._batch_s
        hops_s = self._hops_s(rows, pipeline, configs)
        none = np.zeros((len(forward_s), 1))
        first = slice(0, num_ranks)
        before_s = np.hstack([none, (forward_s[:, first] + hops_s)[:, :-1].cumsum(axis=1)])[configs]
        back_s = np.hstack([none, (times.backward_s[:, first] + hops_s)[:, :-1].cumsum(axis=1)])[configs]
        work_s = pipeline.of_ranks(forward_s + times.backward_s)[configs]
        done_s = before_s + many[:, None] * work_s + self._sends_s(rows, hops_s[configs], many)
        scatters_s = None
        if rows.shards_parameters[0] and self._cost_cache.sends:
            places = enumerate(configs.tolist())
            units = np.stack(
                [self._sharding.stages(rows, row, pipeline.configs[config].boundaries) for row, config in places]
            )
            gathers_s, scatters_s = units[:, 0], units[:, 1]
            # the first stage of the first rank is unsharded before any compute
            done_s = done_s + np.maximum(0.0, gathers_s[:, :1] - self._batch_s)
        tail = self._tail(rows, pipeline, configs, scatters_s)
        ends_s = done_s + tail.reduce_s + tail.first_reduce_s + tail.update_s
        if pipeline.splits:
            return np.asarray(ends_s.max(axis=1))
        last_s = np.maximum((done_s + tail.reduce_s + back_s).max(axis=1), self._path_s(pipeline, hops_s)[configs])
        last_s = last_s + tail.first_reduce_s[:, 0] + tail.update_s[:, 0]
        return np.asarray(np.maximum(ends_s.max(axis=1), last_s))

    def _of_any_split_s(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> Floats:
        """``(rows,)`` Bounds for every split of layers over the ranks, one stage each with all layers.

        For m microbatches, rank r needs m w(r) + w(0) + ... + w(r-1), where w(r) is the time of its layers: the time of
        all layers times the share that it has. Shares sum to 1. The least possible maximum is a linear program. Any
        multipliers of its constraints give a bound; these are exact for ranks of similar speed.
        """
        many = self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"])
        fills = not pipeline.splits and int(rows["virtual_stages"][0]) == 1
        speeds = 1 / (pipeline.times.forward_s + pipeline.times.backward_s)
        total = np.zeros(len(rows))
        for speed in speeds[configs].T[::-1]:
            total += np.maximum(0.0, speed - fills * total) / many
        return np.asarray(1 / total)

    def _path_s(self, pipeline: Pipeline, hops_s: Floats) -> Floats:
        """``(configs,)`` Seconds in which one microbatch passes forward and backward through all stages.

        With many stages and few microbatches, latencies of sends are most of what a plan takes beyond its compute.
        """
        times = pipeline.times
        num_sends = np.count_nonzero(np.diff(pipeline.placement))
        return np.asarray((times.forward_s + times.backward_s).sum(axis=1) + 2 * num_sends * hops_s.min(axis=1))

    def _hops_s(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> Floats:
        """``(configs, ranks)`` Seconds of a microbatch's P2P send from the first stage of a rank to the next rank."""
        num_ranks, sizes = pipeline.num_ranks, pipeline.stages.output_bytes
        by_rank = np.zeros((len(sizes), num_ranks))
        if num_ranks == 1 or not self._cost_cache.sends:
            return by_rank
        splits = self._job.software.scatter_gather_p2p
        parts = np.ones(len(sizes))
        parts[configs] = np.where(rows["sequence_parallel"] == 1, 1, rows["tp"]) if splits else 1
        sent = -(-sizes[:, :num_ranks] // parts[:, None])
        sources = np.array([config.devices for config in pipeline.configs])
        targets = np.roll(sources, -1, axis=1)
        per_node = self._job.cluster.devices_per_node
        inside = sources // per_node == targets // per_node
        # sends inside nodes of a group all cost the same, and so do sends between nodes of two groups
        kinds = np.stack([inside, self._node_groups[sources], self._node_groups[targets]])
        for kind in np.unique(kinds.reshape(len(kinds), -1), axis=1).T:
            here = (kinds == kind[:, None, None]).all(axis=0)
            pair = int(sources[here][0]), int(targets[here][0])
            values, place = np.unique(sent[here], return_inverse=True)
            seconds = [self._cost_cache.collective_s(CollectiveKind.SEND, size, (pair,)) for size in values]
            by_rank[here] = np.array(seconds)[place.reshape(-1)]
        return by_rank

    def _sends_s(self, rows: Candidates, hops_s: Floats, many: Column) -> Floats:
        """``(rows, ranks)`` Seconds that ranks of synchronous schedules wait for P2P sends."""
        num_ranks = hops_s.shape[1]
        sends_s = np.zeros_like(hops_s)
        waits = np.zeros(len(rows), np.bool_)
        for schedule in self._job.software.blocking_p2p_schedules:
            waits |= rows.has("schedule", schedule) if schedule in rows.values["schedule"] else False
        if num_ranks == 1 or not waits.any():
            return sends_s
        sends_s[:, :-1] += many[:, None] * hops_s[:, :-1]  # the next computation waits for each send
        sends_s[:, 1:] += many[:, None] * hops_s[:, :-1]
        sends_s = np.maximum(0, sends_s - hops_s.max(axis=1)[:, None])
        return np.where(waits[:, None], sends_s, 0.0)

    def _tail(self, rows: Candidates, pipeline: Pipeline, configs: Column, scatters_s: Floats | None) -> _Tail:
        first = slice(0, pipeline.num_ranks)
        trained, experts = (pipeline.of_ranks(of)[configs] for of in (pipeline.stages.trained, pipeline.stages.experts))
        update_s = self._update_s(rows, pipeline, configs, trained, experts)
        if not self._cost_cache.sends:
            return _Tail(np.zeros_like(update_s), np.zeros_like(update_s), update_s)
        if scatters_s is not None:
            of_first = scatters_s[:, first]
            return _Tail(pipeline.of_ranks(scatters_s) - of_first, of_first, update_s)
        reduce_s, first_reduce_s = (np.zeros_like(update_s) for _ in range(2))
        software = self._job.software
        state = software.state(self._job.training, rows.plan(0))
        of_first, of_first_experts = (
            of[:, first][configs] for of in (pipeline.stages.trained, pipeline.stages.experts)
        )
        overlapped_s = (pipeline.times.backward_s - pipeline.times.last_backward_s)[:, first][configs]
        for here, plan in self._meshes(rows):
            shares = plan.shards_optimizer_only
            evenly = shares and self._shares_evenly
            if shares and not (evenly and software.overlap_param_gather):
                kind = CollectiveKind.ALL_GATHER if evenly else CollectiveKind.BROADCAST
                update_s[here] += self._communications_s(
                    kind, trained[here] * state.parameter, self._groups(plan, "shard")
                )
            if of_first_experts.any():
                kind = CollectiveKind.REDUCE_SCATTER if evenly else CollectiveKind.ALL_REDUCE
                num_bytes = of_first_experts[here] * state.reduced
                first_reduce_s[here] += self._communications_s(kind, num_bytes, self._groups(plan, "expert"))
            own_s = self._reduced_s(of_first[here] * state.reduced, plan, evenly=evenly)
            if not software.grad_overlap and software.waits_for_gradients == "step":
                first_reduce_s[here] += own_s
                all_s = self._reduced_s(trained[here] * state.reduced, plan, evenly=evenly)
                reduce_s[here] += np.maximum(0, all_s - own_s)
            elif not pipeline.splits:  # on a separate stream, starting with the first gradients
                first_reduce_s[here] += np.maximum(0, own_s - overlapped_s[here])
        return _Tail(reduce_s, first_reduce_s, update_s)

    def _reduced_s(self, num_bytes: Floats, plan: ParallelPlan, *, evenly: bool) -> Floats:
        """Seconds to reduce gradients in one collective, a lower bound for several buckets."""
        if not evenly:
            return self._communications_s(CollectiveKind.ALL_REDUCE, num_bytes, self._groups(plan, plan.gradient_group))
        groups = self._groups(plan, "shard")
        scattered_s = self._communications_s(CollectiveKind.REDUCE_SCATTER, num_bytes, groups)
        if plan.replicas_apart:
            return scattered_s
        return scattered_s + self._communications_s(
            CollectiveKind.ALL_REDUCE, num_bytes / len(groups[0]), self._groups(plan, "replicate")
        )

    def _groups(self, plan: ParallelPlan, kind: GroupKind) -> Groups:
        return groups_of(plan, self._job.cluster, kind)

    def _update_s(
        self, rows: Candidates, pipeline: Pipeline, configs: Column, trained: Floats, experts: Floats
    ) -> Floats:
        """``(rows, ranks)`` Optimizer seconds for the parameters that a rank updates."""
        shards = np.where(rows["zero_stage"] > 0, rows.num_shards, 1)[:, None]
        all_ranks = np.where(rows["zero_stage"] > 0, rows.dp * rows["cp"] * rows["tp"], 1)[:, None]
        update_s = pipeline.times.update_s[:, : trained.shape[1]][configs]
        return np.asarray(update_s * (trained / shards + experts / all_ranks))

    def _alone_s(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> Floats:
        """``(rows,)`` Bounds of FSDP without a pipeline."""
        stages = pipeline.stages
        update_s = self._update_s(rows, pipeline, configs, stages.trained[configs], stages.experts[configs])[:, 0]
        many = self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"])
        every = rows.reduces_every_microbatch
        batch_s = self._batch_s
        alone_s = np.zeros(len(rows))
        for row, config in enumerate(configs.tolist()):
            units = self._sharding.alone(rows, row)
            times = pipeline.configs[config].ranks[0].times
            forwards_s, backwards_s = np.diff(times.summed)
            forward_s, reduced_s, plain_s = units.pass_times_s(forwards_s, backwards_s, times.last_forward_s)
            num_reduced = int(many[row]) if every[row] else 1
            passes_s = many[row] * (forward_s + batch_s) + num_reduced * reduced_s
            alone_s[row] = passes_s + (many[row] - num_reduced) * plain_s
        return alone_s + update_s

    def _meshes(self, rows: Candidates) -> list[tuple[NDArray[np.int64], ParallelPlan]]:
        """Groups of rows with equal parallel degrees and ZeRO stage, each with one of its plans."""
        names = "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero_stage", "placement"
        table = np.stack([rows[name] for name in names])
        _, first, place = np.unique(table, axis=1, return_index=True, return_inverse=True)
        place = place.reshape(-1)
        return [(np.flatnonzero(place == number), rows.plan(row)) for number, row in enumerate(first.tolist())]

    def _communications_s(self, kind: CollectiveKind, num_bytes: Floats, groups: Groups) -> Floats:
        """Seconds of one collective in the fastest of some groups, for many sizes."""
        if len(groups[0]) == 1:
            return np.zeros_like(num_bytes)
        sizes, place = np.unique(num_bytes.astype(np.int64), return_inverse=True)
        of_sizes_s = np.array([self._cost_cache.collective_s(kind, size, groups) for size in sizes.tolist()])
        return np.asarray(of_sizes_s[place].reshape(num_bytes.shape))
