"""Lower bound on the memory of the worst device: states of all pipeline ranks, activations of a few."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from simplan.job import Job
from simplan.optimizers import OPTIMIZERS, UPDATES
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.search.bounds.in_flight import Instants, rank_instants
from simplan.search.bounds.layer_sums import Floats, Pipeline, StageBytes
from simplan.search.candidates import Candidates, Column
from simplan.software.software import StateBytes


class MemoryBound:
    """Lower bound on the bytes of the worst device of a candidate.

    Every pipeline rank counts weights, gradients and optimizer states of its stages, its receive buffers, its
    optimizer's temporaries, and the saved activations of one microbatch of one stage.

    The first rank, the last rank and the rank with the most saved activations also count a few candidate peak points:
    activations of all microbatches in flight, transient bytes of one layer's backward, and sent tensors. With FSDP they
    also count unsharded weights and accumulated unsharded gradients.

    If the split of layers is unknown, a weighted mean over pipeline ranks counts, which holds for every split, and the
    last layer on its own.

    A reference model next to the one that is trained counts with its weights.

    Lookup tables, other transient memory and the allocator reserve for it are not counted.
    """

    def __init__(self, job: Job) -> None:
        self._job, software = job, job.software
        self._context_bytes = int(software.context_bytes.get(job.cluster.device.kind, 0))
        if job.cluster.cores_per_node is not None:  # known only from a calibration
            self._context_bytes = 0
        reserves = [software.allocator_reserve(reshards=reshards) for reshards in (False, True)]
        self._reserve = 1 + (0.0 if job.cluster.device.kind == "cpu" else min(reserves))

    def bytes(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> Column:
        """``(rows,)`` Lower bounds in bytes.

        Args:
            rows: Plans that share the pipeline.
            configs: ``(rows,)`` Index of the layer configuration in ``pipeline``.
        """
        if not pipeline.has_split:
            [needed] = self._by_shape(rows, configs, partial(self._of_any_split, pipeline))
            return self._context_bytes + whole_bytes(needed)
        fullest = {0, pipeline.num_ranks - 1, _fullest(pipeline)}
        held, passing = self._by_shape(rows, configs, partial(self._of_shape, pipeline, tuple(sorted(fullest))))
        return np.asarray(self._context_bytes + whole_bytes((held + self._reserve * passing).max(axis=1)))

    def of_ranks(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> tuple[Floats, Floats]:
        """``(rows, ranks)`` Lower bounds of each rank in bytes: of its tensors, and with the allocator reserve.

        Args:
            rows, configs: See ``bytes``.
            pipeline: Pipeline with a known split of layers.
        """
        held, passing = self._by_shape(
            rows, configs, partial(self._of_shape, pipeline, tuple(range(pipeline.num_ranks)))
        )
        return self._context_bytes + held + passing, self._context_bytes + held + self._reserve * passing

    def _by_shape(
        self, rows: Candidates, configs: Column, of_shape: Callable[[Candidates, Column, int], tuple[Floats, ...]]
    ) -> tuple[Floats, ...]:
        """Results of ``of_shape`` for all rows.

        It gets rows with one schedule, one number of microbatches, and the same use of FSDP and expert parallelism.
        """
        many = self._job.training.global_batch_size // (rows.dp * rows["microbatch_size"])
        shapes = np.stack([rows.shards_parameters, rows["ep"] > 1, rows["schedule"], many])
        arrays: tuple[Floats, ...] = ()
        for shape in np.unique(shapes, axis=1).T:
            here = np.flatnonzero((shapes == shape[:, None]).all(axis=0))
            parts = of_shape(rows.take(here), configs[here], int(shape[3]))
            arrays = arrays or tuple(np.zeros((len(rows), *part.shape[1:])) for part in parts)
            for whole, part in zip(arrays, parts, strict=True):
                whole[here] = part
        return arrays

    def _of_shape(
        self, pipeline: Pipeline, ranks: tuple[int, ...], rows: Candidates, configs: Column, many: int
    ) -> tuple[Floats, Floats]:
        """``(rows, ranks of the pipeline)`` Bytes held all the time, and transient ones at the worst time.

        Args:
            ranks: Ranks whose candidate peak points are looked at.
            many: Number of microbatches.
        """
        state = self._job.software.state(self._job.training, rows.plan(0))
        stages, placement, num_ranks = pipeline.stages, pipeline.placement, pipeline.num_ranks
        elements = (stages.trained, stages.experts, stages.frozen, stages.scale_bytes, stages.quantized_bytes)
        held, update = self._held_bytes(rows, state, *(pipeline.of_ranks(of)[configs] for of in elements))
        held = held + self._second_model_bytes(rows, pipeline, configs)
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
            held = held + many * pipeline.of_ranks(received)[configs]
        between = np.hstack([kept[:, :1], between[:, 1:]])  # the first stage has all of its backward in wgrad
        largest = np.stack([kept[:, placement == rank].max(axis=1) for rank in range(num_ranks)], axis=1)[configs]
        passing = np.maximum(largest, update)
        schedule = _schedule_of(rows)
        facts = SCHEDULE_FACTS.get(schedule)
        if facts is not None and facts.needs_times:  # the order of actions depends on times that are unknown here
            return held, passing
        for instants in rank_instants(schedule, num_ranks, many, int(rows["virtual_stages"][0]), ranks):
            at_worst = self._passing_bytes(rows, stages, (kept, between, during), configs, into, instants, state)
            passing[:, instants.rank] = np.maximum(passing[:, instants.rank], at_worst)
        return held, passing

    def _of_any_split(self, pipeline: Pipeline, rows: Candidates, configs: Column, many: int) -> tuple[Floats]:
        """``(rows,)`` Bytes of the worst rank, for every split of the layers into stages.

        A rank that has a layer holds its states, and its activations of as many microbatches as are in flight. The
        worst rank needs at least any weighted mean of the ranks, and so the mean in which every layer is on the rank
        where it counts least. The weights are those with which equal layers count alike on all ranks. The last stage
        has at least the last layer.
        """
        layers, state = pipeline.layers, self._job.software.state(self._job.training, rows.plan(0))
        elements = (layers.trained, layers.experts, layers.frozen, layers.scale_bytes, layers.quantized_bytes)
        held, update = self._held_bytes(rows, state, *(of[configs] for of in elements))
        kept = layers.kept_bytes
        if self._job.software.preallocated_receives:
            kept = np.maximum(0, kept - layers.input_bytes)
        kept = self._reserve * kept[configs]
        in_flight = _least_in_flight(rows, pipeline.num_ranks, many)
        weights = 1 / (held.sum(axis=1) + kept.sum(axis=1) * in_flight[:, None])  # (ranks, rows)
        counted = (held + kept * in_flight[0]) * weights[0][:, None]
        for number, of_rank in zip(in_flight[1:], weights[1:], strict=True):
            counted = np.minimum(counted, (held + kept * number) * of_rank[:, None])
        mean_bytes = np.maximum(held.sum(axis=1) / pipeline.num_ranks, counted.sum(axis=1) / weights.sum(axis=0))
        during = np.maximum(0, layers.backward_bytes[:, -1])[configs]
        last = held[:, -1] + np.maximum(kept[:, -1] + self._reserve * during, self._reserve * update[:, -1])
        return (np.maximum(mean_bytes, last),)

    def _held_bytes(
        self,
        rows: Candidates,
        state: StateBytes,
        trained: Floats,
        experts: Floats,
        frozen: Floats,
        scales: Floats,
        quantized: Floats,
    ) -> tuple[Floats, Floats]:
        """``(rows, ranks)`` Bytes held all the time, and more in the update, by rank or layer from its elements."""
        held = self._state_bytes(rows, state, trained, experts, frozen)
        if not rows.base.offload_optimizer:
            held = held + scales
        if not rows.shards_parameters[0]:
            held = held + quantized
        update = self._update_bytes(rows, state, trained, experts)
        if self._job.software.flat_updates:  # counted in addition to the peak of the passes
            return held + update, np.zeros_like(update)
        return held, update

    def _second_model_bytes(self, rows: Candidates, pipeline: Pipeline, configs: Column) -> Floats | float:
        """``(rows, 1)`` Bytes of a reference model next to the one that is trained; no pipeline has one."""
        if self._job.reference != "second_model" or pipeline.num_ranks > 1 or rows.base.offload_optimizer:
            return 0.0
        elements, width = np.array([config.ranks[0].second_model_elements for config in pipeline.configs]).T
        preference = self._job.training.preference
        if preference is not None and preference.reference_sharded is False:
            shards = np.ones(len(rows))
        else:
            experts_apart = (rows["tp"] > 1) & (self._job.model.num_experts > 0)
            max_shards = np.where(experts_apart, rows.dp * rows["cp"] * rows["tp"], rows.num_shards)  # upper bound
            shards = np.where(rows.shards_parameters, max_shards, 1)
        return np.asarray(elements[configs] * width[configs] / shards)[:, None]

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
        if OPTIMIZERS[self._job.training.optimizer].is_paged:  # states leave a device that is full
            optimizer_bytes = int(state.master)
        software = self._job.software
        weight_bytes = state.parameter + (0 if software.drops_gradients else state.gradient + state.unaccumulated)
        held = trained * (
            weight_bytes / divided(sharded, rows.num_shards) + optimizer_bytes / divided(shares_states, rows.num_shards)
        )
        if software.drops_gradients or software.ddp_copies_gradients:  # DDP's buckets
            held += trained * state.gradient * _uses_ddp(rows)[:, None]
        held += experts * (
            weight_bytes / divided(sharded, expert_shards) + optimizer_bytes / divided(shares_states, expert_shards)
        )
        return np.asarray(held + frozen * state.frozen / divided(sharded, rows.num_shards))

    def _update_bytes(self, rows: Candidates, state: StateBytes, trained: Floats, experts: Floats) -> Floats:
        """``(rows, ranks)`` Bytes of the update, from element counts.

        These are gradients that are freed after it and are not in DDP's buckets, upcast gradients, and the optimizer's
        temporaries.
        """
        if rows.base.offload_optimizer:
            return np.zeros_like(trained)
        shards = np.where(rows["zero_stage"] > 0, rows.num_shards, 1)[:, None]
        all_ranks = np.where(rows["zero_stage"] > 0, rows.dp * rows["cp"] * rows["tp"], 1)[:, None]
        dense, of_experts = trained / shards, experts / all_ranks
        if self._job.training.optimizer_in_backward:
            return np.zeros_like(trained)
        temporaries = UPDATES[self._job.training.update].num_temporaries * state.moment
        gradients: Floats | float = 0.0
        if self._job.software.drops_gradients:
            sharded = rows.shards_parameters[:, None]
            outside = ~_uses_ddp(rows)[:, None] | self._job.software.ddp_copies_gradients
            gradients = np.where(sharded, dense, trained) * outside + np.where(sharded, of_experts, experts)
            gradients = gradients * state.gradient
        widened = (dense + of_experts) * state.widened_bytes
        return np.asarray(gradients + widened + temporaries * np.maximum(dense, of_experts))

    def _passing_bytes(
        self,
        rows: Candidates,
        stages: StageBytes,
        own_bytes: tuple[Floats, Floats, Floats],
        configs: Column,
        into: Floats,
        instants: Instants,
        state: StateBytes,
    ) -> Floats:
        """``(rows,)`` Transient bytes of one rank at its worst peak point."""
        stages_of_rank, (kept, between, during) = instants.stages, own_bytes
        passing = kept[:, stages_of_rank] @ instants.in_flight.T + between[:, stages_of_rank] @ instants.between.T
        passing += during[:, stages_of_rank] @ instants.begins.T
        if self._job.software.runtime == "torch" and int(rows["pp"][0]) > 1:
            none = np.zeros((len(into), 1))
            sent, sent_back = np.hstack([into, none])[:, stages_of_rank], np.hstack([none, into])[:, stages_of_rank]
            passing += sent @ instants.forwards.T + sent_back @ instants.backwards.T
        passing = passing[configs]
        trained = stages.trained[:, stages_of_rank][configs]
        if rows.shards_parameters[0]:
            passing = passing + self._gathered_bytes(rows, trained, instants, state)
        elif self._job.training.optimizer_in_backward:
            return np.asarray(passing.max(axis=1))
        elif self._job.software.drops_gradients:  # gradients of some microbatches, outside of DDP's buckets
            outside = ~_uses_ddp(rows)
            outside |= self._job.software.ddp_copies_gradients | ~rows.reduces_every_microbatch
            passing = passing + (trained @ instants.adding_up.T) * state.gradient * outside[:, None]
        return np.asarray(passing.max(axis=1))

    def _gathered_bytes(self, rows: Candidates, trained: Floats, instants: Instants, state: StateBytes) -> Floats:
        """``(rows, instants)`` FSDP bytes: accumulated unsharded gradients, and unsharded weights."""
        software, in_pipeline = self._job.software, int(rows["pp"][0]) > 1
        accumulated = trained @ instants.adding_up.T * state.accumulated
        drops = software.drops_gradients and not rows.base.offload_optimizer
        drops = drops and not self._job.training.optimizer_in_backward
        reduced = trained / rows.num_shards[:, None] @ instants.adding_up.T * (state.gradient if drops else 0)
        largest = np.where(rows.reduces_every_microbatch[:, None], reduced, accumulated)
        if software.per_rank_tensor_lists:
            return largest
        all_stages = trained @ instants.used.T
        frees = (rows["zero_stage"] == 3) & (rows["reshard_after_forward"] == 1)
        window = trained @ instants.wanted.T if in_pipeline else np.zeros_like(all_stages)
        gathered = np.where(frees[:, None], window, all_stages) * state.gathered
        return np.asarray(largest + gathered)


def whole_bytes(num_bytes: Floats) -> Column:
    """``(rows,)`` Whole bytes; amounts that no device has, and 64 bits may not count, are all 4 EiB."""
    return np.asarray(np.minimum(num_bytes, 2.0**62).astype(np.int64))


def _uses_ddp(rows: Candidates) -> NDArray[np.bool_]:
    """``(rows,)`` True where data-parallel or context-parallel ranks reduce unsharded gradients."""
    ranks = rows.num_shards if rows.base.replicas_apart else rows.dp * rows["cp"]
    return np.asarray(~rows.shards_parameters & (ranks > 1))


def _schedule_of(rows: Candidates) -> str:
    """Schedule that all rows have; one for a single rank without a pipeline."""
    return str(rows.values["schedule"][int(rows["schedule"][0])]) if int(rows["pp"][0]) > 1 else "naive"


def _fullest(pipeline: Pipeline) -> int:
    """Rank that saves the most activations per microbatch."""
    return int(np.argmax(pipeline.of_ranks(pipeline.stages.kept_bytes[:1])[0]))


def _least_in_flight(rows: Candidates, num_ranks: int, many: int) -> NDArray[np.int64]:
    """``(ranks,)`` Microbatches of which a rank saves all activations at some time, whatever its layers are."""
    schedule = _schedule_of(rows)
    facts = SCHEDULE_FACTS.get(schedule)
    if facts is not None and facts.needs_times:
        return np.zeros(num_ranks, np.int64)
    peak_points = rank_instants(schedule, num_ranks, many, int(rows["virtual_stages"][0]), tuple(range(num_ranks)))
    return np.array([instants.in_flight.min(axis=1).max() for instants in peak_points])
