"""Lower bound on the memory of the worst device: states of all pipeline ranks, and what a few of them keep."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.search.bounds.in_flight import Instants, rank_instants
from simplan.search.bounds.layer_sums import Floats, StageSums
from simplan.search.candidates import Candidates, Column
from simplan.software.software import StateBytes

__all__ = ["MemoryBound"]


class MemoryBound:
    """Bytes that the worst device of a candidate needs at least.

    Every pipeline rank holds weights, gradients and optimizer states of its stages, the buffers that it receives into,
    and, at some instant, what one of its stages keeps of a microbatch. The first one, the last one and the fullest hold
    what they keep of every microbatch that is under way at a few instants, what the backward of one layer needs
    besides, and tensors that were sent; of FSDP also weights that are gathered and gradients that add up whole. Tables
    and all else that comes and goes are left out, and the allocator's reserve for that. Of precisions below 16 bits one
    microbatch counts, since copies of weights are kept once for all of them.

    Args:
        job: What every candidate shares.
    """

    def __init__(self, job: Job) -> None:
        self._job, software = job, job.software
        self._context_bytes = int(software.context_bytes.get(job.cluster.device.kind, 0))
        if job.cluster.cores_per_node is not None:  # a calibration says how much
            self._context_bytes = 0
        self._reserve = 1 + (0.0 if job.cluster.device.kind == "cpu" else software.reserve_fraction)
        self._states: dict[tuple[bool, bool], StateBytes] = {}

    def bytes(self, rows: Candidates, stages: StageSums, ways: Column, placement: Column) -> Column:
        """``(rows,)`` At least so many.

        Args:
            rows: Plans with one pipeline: as many ranks and stages, one placement of stages, backwards split or not.
            stages: Of this pipeline.
            ways: By row, the way in which it splits layers, as of ``stages``.
            placement: By stage, its rank.
        """
        found = np.zeros(len(rows), np.int64)
        many = self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"])
        sharded, experts = rows.shards_parameters, rows["ep"] > 1
        shapes = np.stack([sharded, experts, rows["schedule"], many])
        for shape in np.unique(shapes, axis=1).T:
            here = np.flatnonzero((shapes == shape[:, None]).all(axis=0))
            part = rows.take(here)
            found[here] = self._of_shape(part, stages, ways[here], placement, int(shape[3]))
        return found

    def _of_shape(self, rows: Candidates, stages: StageSums, ways: Column, placement: Column, many: int) -> Column:
        """Of plans with one schedule and as many microbatches, which all or none shard parameters and have experts."""
        state, num_ranks = self._state(rows), int(rows["pp"][0])

        def of_ranks(of_stages: Floats) -> Floats:
            return np.stack([of_stages[:, placement == rank].sum(axis=1) for rank in range(num_ranks)], axis=1)[ways]

        trained, experts, frozen = map(of_ranks, (stages.trained, stages.experts, stages.frozen))
        held = self._state_bytes(rows, state, trained, experts, frozen)
        kept, between, during = stages.kept_bytes, stages.between_bytes, np.maximum(0, stages.backward_bytes)
        crosses = np.diff(placement) != 0
        received = np.zeros_like(kept)  # by stage, what it gets from other ranks for a microbatch, there and back
        into = np.where(crosses, stages.output_bytes[:, :-1], 0.0)
        if self._job.software.preallocated_receives:  # inputs of stages, and gradients of outputs, are in buffers
            kept = np.maximum(0, kept - stages.input_bytes)
            received[:, 1:] += into
            received[:, :-1] += into
            gradients = np.hstack([into, np.zeros((len(into), 1))])
            between = np.maximum(0, between - stages.input_bytes - gradients)
            during = np.maximum(0, during - gradients)
            held = held + many * of_ranks(received)
        largest = np.stack([kept[:, placement == rank].max(axis=1) for rank in range(num_ranks)], axis=1)[ways]
        most = (held + self._reserve * largest).max(axis=1)
        schedule = rows.values["schedule"][int(rows["schedule"][0])]
        pipeline = schedule if num_ranks > 1 else "naive"
        facts = SCHEDULE_FACTS.get(pipeline)
        if facts is not None and facts.needs_times:  # nobody knows its order here
            return np.asarray(self._context_bytes + most.astype(np.int64))
        fullest = int(np.argmax([kept[0, placement == rank].sum() for rank in range(num_ranks)]))
        ranks = tuple(sorted({0, fullest, num_ranks - 1}))
        for instants in rank_instants(pipeline, num_ranks, many, int(rows["virtual_stages"][0]), ranks):
            passing = self._passing_bytes(rows, stages, (kept, between, during), ways, into, instants, state)
            most = np.maximum(most, held[:, instants.rank] + self._reserve * passing)
        return np.asarray(self._context_bytes + most.astype(np.int64))

    def _state_bytes(
        self, rows: Candidates, state: StateBytes, trained: Floats, experts: Floats, frozen: Floats
    ) -> Floats:
        """``(rows, ranks)`` Weights, gradients and optimizer states of ranks with so many elements."""
        all_ranks = rows.dp * rows["cp"] * rows["tp"]
        expert_shards = np.where(rows["ep"] > 1, all_ranks, rows.num_shards)  # never dealt out over more than all
        sharded, shares_states = rows.shards_parameters, rows["zero_stage"] > 0

        def divided(shares: NDArray[np.bool_], divisor: Column) -> Floats:
            return np.where(shares, divisor, 1).astype(np.float64)[:, None]

        if rows.base.offload_optimizer:  # on the host, which a device that is a CPU shares: a bound all the same
            return np.zeros_like(trained)
        optimizer_bytes = state.optimizer_bytes(self._job.training.optimizer)
        weight_bytes = state.parameter + state.gradient
        held = trained * (
            weight_bytes / divided(sharded, rows.num_shards) + optimizer_bytes / divided(shares_states, rows.num_shards)
        )
        held += experts * (
            weight_bytes / divided(sharded, expert_shards) + optimizer_bytes / divided(shares_states, expert_shards)
        )
        return np.asarray(held + frozen * state.frozen / divided(sharded, rows.num_shards))

    def _passing_bytes(
        self,
        rows: Candidates,
        stages: StageSums,
        own_bytes: tuple[Floats, Floats, Floats],
        ways: Column,
        into: Floats,
        instants: Instants,
        state: StateBytes,
    ) -> Floats:
        """``(rows,)`` What comes and goes on one rank, at the worst instant."""
        own, (kept, between, during) = instants.stages, own_bytes
        if state.linear is not None:
            return np.asarray((kept[:, own] @ np.minimum(instants.in_flight, 1).T)[ways].max(axis=1))
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
        """``(rows, instants)`` Of FSDP: gradients that add up whole, and weights of stages that stay gathered."""
        software, in_pipeline = self._job.software, int(rows["pp"][0]) > 1
        reduces_every = rows.has("grad_sync", "microbatch")
        if software.reduces_each_microbatch and not in_pipeline:
            reduces_every = np.ones_like(reduces_every)
        found = np.where(reduces_every[:, None], 0, trained @ instants.adding_up.T * state.gradient)
        if software.lists_of_shards:
            return found
        all_stages = trained @ instants.used.T
        frees = (rows["zero_stage"] == 3) & (rows["reshard_after_forward"] == 1)
        window = trained @ instants.wanted.T if in_pipeline else np.zeros_like(all_stages)
        gathered = np.where(frees[:, None], window, all_stages) * state.gathered
        return np.asarray(found + gathered)

    def _state(self, rows: Candidates) -> StateBytes:
        key = bool(rows.shards_parameters[0]), bool(rows["ep"][0] > 1)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._job.software.state(self._job.training, rows.plan(0))
        return found
