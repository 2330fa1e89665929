"""Lower bound on the memory of the worst device: states of all pipeline ranks, activations of a few."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.search.bounds.in_flight import Instants, rank_instants
from simplan.search.bounds.layer_sums import Floats, Pipeline, StageBytes
from simplan.search.candidates import Candidates, Column
from simplan.software.software import StateBytes
from simplan.training import UPDATES


class MemoryBound:
    """Lower bound on the bytes of the worst device of a candidate.

    Every pipeline rank counts weights, gradients and optimizer states of its stages, its receive buffers, its
    optimizer's temporaries, and the saved activations of one microbatch of one stage.

    The first rank, the last rank and the rank with the most saved activations also count a few candidate peak points:
    activations of all microbatches in flight, transient bytes of one layer's backward, and sent tensors. With FSDP they
    also count unsharded weights and accumulated unsharded gradients.

    If the split of layers is unknown, the mean of the states over pipeline ranks counts.

    Lookup tables, other transient memory and the allocator reserve for it are not counted.
    """

    def __init__(self, job: Job) -> None:
        self._job, software = job, job.software
        self._context_bytes = int(software.context_bytes.get(job.cluster.device.kind, 0))
        if job.cluster.cores_per_node is not None:  # known only from a calibration
            self._context_bytes = 0
        self._reserve = 1 + (0.0 if job.cluster.device.kind == "cpu" else software.allocator_reserve)

    def bytes(self, rows: Candidates, pipeline: Pipeline, ways: Column) -> Column:
        """``(rows,)`` Lower bounds in bytes.

        Args:
            rows: Plans that share the pipeline.
            ways: ``(rows,)`` Index of the layer configuration in ``pipeline``.
        """
        found = np.zeros(len(rows), np.int64)
        many = self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"])
        sharded, experts = rows.shards_parameters, rows["ep"] > 1
        shapes = np.stack([sharded, experts, rows["schedule"], many])
        for shape in np.unique(shapes, axis=1).T:
            here = np.flatnonzero((shapes == shape[:, None]).all(axis=0))
            part = rows.take(here)
            found[here] = self._of_shape(part, pipeline, ways[here], int(shape[3]))
        return found

    def _of_shape(self, rows: Candidates, pipeline: Pipeline, ways: Column, many: int) -> Column:
        """Bounds of plans with one schedule, ``many`` microbatches, and the same use of FSDP and expert parallelism."""
        stages, placement, num_ranks = pipeline.stages, pipeline.placement, pipeline.num_ranks
        state = self._job.software.state(self._job.training, rows.plan(0))
        elements = (stages.trained, stages.experts, stages.frozen, stages.quantized_bytes)
        trained, experts, frozen, quantized = (pipeline.of_ranks(of)[ways] for of in elements)
        held = self._state_bytes(rows, state, trained, experts, frozen)
        if not rows.shards_parameters[0]:
            held = held + quantized
        update = self._update_bytes(rows, state, trained, experts)
        if self._job.software.flat_updates:  # counted in addition to the peak of the passes
            held, update = held + update, np.zeros_like(update)
        if not pipeline.has_split:  # ranks share the states of all layers
            return np.asarray(self._context_bytes + (held.mean(axis=1) / num_ranks).astype(np.int64))
        kept, between, during = stages.kept_bytes, stages.between_bytes, np.maximum(0, stages.backward_bytes)
        crosses = np.diff(placement) != 0
        received = np.zeros_like(kept)  # by stage, bytes received per microbatch in forward and backward
        into = np.where(crosses, stages.output_bytes[:, :-1], 0.0)
        if self._job.software.preallocated_receives:  # inputs of stages, and gradients of outputs, are in buffers
            kept = np.maximum(0, kept - stages.input_bytes)
            received[:, 1:] += into
            received[:, :-1] += into
            gradients = np.hstack([into, np.zeros((len(into), 1))])
            between = np.maximum(0, between - stages.input_bytes - gradients)
            during = np.maximum(0, during - gradients)
            held = held + many * pipeline.of_ranks(received)[ways]
        largest = np.stack([kept[:, placement == rank].max(axis=1) for rank in range(num_ranks)], axis=1)[ways]
        most = (held + self._reserve * np.maximum(largest, update)).max(axis=1)
        schedule = rows.values["schedule"][int(rows["schedule"][0])] if num_ranks > 1 else "naive"
        facts = SCHEDULE_FACTS.get(schedule)
        if facts is not None and facts.needs_times:  # the order of actions depends on times that are unknown here
            return np.asarray(self._context_bytes + most.astype(np.int64))
        fullest = int(np.argmax([kept[0, placement == rank].sum() for rank in range(num_ranks)]))
        ranks = tuple(sorted({0, fullest, num_ranks - 1}))
        for instants in rank_instants(schedule, num_ranks, many, int(rows["virtual_stages"][0]), ranks):
            passing = self._passing_bytes(rows, stages, (kept, between, during), ways, into, instants, state)
            most = np.maximum(most, held[:, instants.rank] + self._reserve * passing)
        return np.asarray(self._context_bytes + most.astype(np.int64))

    def _state_bytes(
        self, rows: Candidates, state: StateBytes, trained: Floats, experts: Floats, frozen: Floats
    ) -> Floats:
        """``(rows, ranks)`` Bytes of weights, gradients and optimizer states, from element counts."""
        all_ranks = rows.dp * rows["cp"] * rows["tp"]
        apart = (rows["ep"] > 1) | (rows["tp"] > 1)  # experts may be split over fewer tensor-parallel ranks than others
        expert_shards = np.where(apart, all_ranks, rows.num_shards)  # upper bound on the shards
        sharded, shares_states = rows.shards_parameters, rows["zero_stage"] > 0

        def divided(shares: NDArray[np.bool_], divisor: Column) -> Floats:
            return np.where(shares, divisor, 1).astype(np.float64)[:, None]

        if rows.base.offload_optimizer:  # in host memory; still a lower bound where a CPU device shares that memory
            return np.zeros_like(trained)
        optimizer_bytes = state.optimizer_bytes(self._job.training.optimizer)
        weight_bytes = state.parameter + state.gradient + state.unaccumulated
        held = trained * (
            weight_bytes / divided(sharded, rows.num_shards) + optimizer_bytes / divided(shares_states, rows.num_shards)
        )
        held += experts * (
            weight_bytes / divided(sharded, expert_shards) + optimizer_bytes / divided(shares_states, expert_shards)
        )
        return np.asarray(held + frozen * state.frozen / divided(sharded, rows.num_shards))

    def _update_bytes(self, rows: Candidates, state: StateBytes, trained: Floats, experts: Floats) -> Floats:
        """``(rows, ranks)`` Bytes of upcast gradients and of the optimizer's temporaries, from element counts."""
        if rows.base.offload_optimizer:
            return np.zeros_like(trained)
        shards = np.where(rows["zero_stage"] > 0, rows.num_shards, 1)[:, None]
        all_ranks = np.where(rows["zero_stage"] > 0, rows.dp * rows["cp"] * rows["tp"], 1)[:, None]
        dense, of_experts = trained / shards, experts / all_ranks
        temporaries = UPDATES[self._job.training.update].num_temporaries * state.moment
        return np.asarray((dense + of_experts) * state.widened_bytes + temporaries * np.maximum(dense, of_experts))

    def _passing_bytes(
        self,
        rows: Candidates,
        stages: StageBytes,
        own_bytes: tuple[Floats, Floats, Floats],
        ways: Column,
        into: Floats,
        instants: Instants,
        state: StateBytes,
    ) -> Floats:
        """``(rows,)`` Transient bytes of one rank at its worst peak point."""
        own, (kept, between, during) = instants.stages, own_bytes
        passing = kept[:, own] @ instants.in_flight.T + between[:, own] @ instants.between.T
        passing += during[:, own] @ instants.begins.T
        if self._job.software.runtime == "torch" and int(rows["pp"][0]) > 1:
            none = np.zeros((len(into), 1))
            sent, sent_back = np.hstack([into, none])[:, own], np.hstack([none, into])[:, own]
            passing += sent @ instants.forwards.T + sent_back @ instants.backwards.T
        passing = passing[ways]
        if rows.shards_parameters[0]:
            passing = passing + self._gathered_bytes(rows, stages.trained[:, own][ways], instants, state)
        return np.asarray(passing.max(axis=1))

    def _gathered_bytes(self, rows: Candidates, trained: Floats, instants: Instants, state: StateBytes) -> Floats:
        """``(rows, instants)`` FSDP bytes: accumulated unsharded gradients, and unsharded weights."""
        software, in_pipeline = self._job.software, int(rows["pp"][0]) > 1
        accumulated = trained @ instants.adding_up.T * state.accumulated
        found = np.where(rows.reduces_every_microbatch[:, None], 0, accumulated)
        if software.per_rank_tensor_lists:
            return found
        all_stages = trained @ instants.used.T
        frees = (rows["zero_stage"] == 3) & (rows["reshard_after_forward"] == 1)
        window = trained @ instants.wanted.T if in_pipeline else np.zeros_like(all_stages)
        gathered = np.where(frees[:, None], window, all_stages) * state.gathered
        return np.asarray(found + gathered)
