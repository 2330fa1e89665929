"""Prediction of one plan: action table, Program, cost estimates, simulation and memory; packed batches included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.topology import hashed, with_seed
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import Calibration, pace_in_words
from simplan.cost.communication.collectives import bus_factor
from simplan.cost.known import ErrorShare, weakest_term
from simplan.cost.model import CostEstimate, CostModel, Provenance
from simplan.cost.program_costs import ProgramCosts
from simplan.errors import Problem, SpecError
from simplan.job import Job, numbers_left, with_replicas_left
from simplan.model.layer import Attention, Gemm, LayerSpec
from simplan.model.packing import PackStatistics
from simplan.model.recompute import recomputation, recompute_of
from simplan.plan.plan import ParallelPlan, Recompute, StageAssignment
from simplan.plan.schedules import is_custom_schedule
from simplan.predict.assumptions import assumptions, buffer_assumption, pages_assumption
from simplan.predict.background import background_steps
from simplan.predict.balance import balanced
from simplan.predict.build import MAX_DEALT_RANKS, deals_unequal_shards, expands_all, folding_of
from simplan.predict.memory import loading_of
from simplan.predict.simulated import (
    ErrorSource,
    Simulated,
    interval_s,
    moved_durations_s,
    sources_of_error,
    timeline,
)
from simplan.predict.truncated import Extent, TruncatedStep, predicted_extent
from simplan.prediction import (
    BackupStep,
    CompressionStep,
    HashedStep,
    Prediction,
    RankMemory,
    ReplicasLeft,
    ReplicationRound,
    ReplicationWorkers,
    Term,
    job_fits,
    worst_memory,
)
from simplan.program.action import Table
from simplan.program.folding import Folding
from simplan.program.program import LayerWork, Phase, Program, Stream, gc_paused
from simplan.program.size import refuse_many_actions
from simplan.program.tables.check import check_table
from simplan.program.tables.custom_schedule import locating
from simplan.program.tables.executable import check_executable
from simplan.rules import check_job
from simplan.sim.compiled import load_for_another
from simplan.units import format_flop_per_s, format_percent


def predict(job: Job, *, name: str = "scenario", calibration: Calibration | None = None) -> Prediction:
    """Predict time and memory of one optimizer step.

    Args:
        job: The job.
        name: Display name.
        calibration: Timings of the cluster's device; required if the cluster is this machine.

    Raises:
        SpecError: The plan violates rules (all are listed), a cost estimate is not available, or the step would exceed
            the device's peak.
        NotModelledError: The plan uses an option that is not modeled yet.
    """
    return predict_step(job, name=name, calibration=calibration)[0]


@gc_paused()
def predict_step(
    job: Job,
    *,
    name: str = "scenario",
    calibration: Calibration | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Prediction, Simulated]:
    """Predict a step like ``predict``, and also return the simulated step; of a truncated step, the longer one.

    Args:
        job, name, calibration: See ``predict``.
        progress: Called with the number of ended and of all communications while links are simulated.
    """
    check_job(job)
    if job.plan.microbatch_sizes == "balanced":
        job = balanced(job, calibration)
    model, cluster, training, plan = job.model, job.cluster, job.training, job.plan
    folding = folding_of(job)
    extent = predicted_extent(job, folding)
    refuse_many_actions(job, len(folding.ranks), extent.simulated)
    expand_all = expands_all(job, folding, extent.simulated)
    background = background_steps(cluster) if cluster.background else ()
    step = TruncatedStep(job, extent, calibration, 2, folding, expand_all, background, progress)
    if plan.pp > 1 and is_custom_schedule(plan.schedule):
        with locating(plan.schedule):
            for table in step.tables:
                check_table(table, plan.num_stages, 1 + max(action.microbatch or 0 for row in table for action in row))
            check_executable(step.tables[0], plan, job.software)
    load_for_another(step.programs)
    simulated, fine = step.full, step.programs[0]
    ops_of_source = sources_of_error(simulated.program)
    sources = tuple(name for name, ops in ops_of_source.items() if ops.any())
    step_time_s, *moved_s = step.seconds(partial(_vectors, sources=sources)).tolist()
    without_background_s = moved_s.pop() if simulated.program_costs.without_background_s is not None else None
    uncontended_s = moved_s.pop() if simulated.contention is not None else step_time_s
    memory = _with_first_steps(step, step.memory())
    splits = step.splits(step_time_s)
    loading = loading_of(job, step.assignment, step.tables[0], calibration)
    worst = worst_memory(memory)
    fits = job_fits(job, memory, loading)
    sequences_per_s = job.sequences_per_step / step_time_s
    available = cluster.peak_flop_per_s.get(training.precision)
    mfu, mfu_full = (
        None if available is None else job.flops_per_step(full_attention=full) / step_time_s / available
        for full in (False, True)
    )
    if available is not None and mfu is not None and mfu > 1:
        rule = f"would be exceeded: the model FLOPs of this step take {format_percent(mfu)} of it"
        fix = "check the peak, and the rates and bandwidths of the device"
        field = f"cluster.device.peak_flop_per_s.{training.precision}"
        raise SpecError(
            Problem(field=field, value=format_flop_per_s(available / cluster.num_devices), rule=rule, fix=fix)
        )
    prediction = Prediction(
        name=name,
        job=job,
        assignment=step.assignment,
        table=step.tables[0],
        step_time_s=step_time_s,
        step_time_interval_s=interval_s(step_time_s, moved_s),
        weakest_term=weakest_term(job, _error_shares(simulated, ops_of_source, step_time_s, moved_s)),
        action_level=_ActionLevel(job, extent, calibration, folding, step.assignment, step.tables),
        bubble_fraction=step.idle_fraction(),
        capacity_bytes=worst.capacity_bytes,
        fits=fits,
        memory=memory,
        splits=tuple(splits[fine.stands_for[m.rank]] for m in memory),
        tokens_per_s_per_device=sequences_per_s * model.seq_len / cluster.num_devices,
        mfu=mfu,
        mfu_full_attention=mfu_full,
        hfu=None if mfu is None else mfu * (1 + recomputed_share(job, step.assignment)),
        terms=_terms(step),
        timeline=timeline(fine, simulated.times),
        reference_s=_reference_s(step.cost, job),
        assumptions=(
            *assumptions(job, simulated.program_costs, max(m.short_bytes for m in memory) if fits else 0),
            *buffer_assumption(job, worst),
            *pages_assumption(job, memory),
            *_packing_assumptions(step, step_time_s),
            *_simulation_assumptions(job, extent, calibration),
        ),
        network=step.network(step_time_s, uncontended_s, without_background_s),
        jitter=simulated.jitter,
        backup_workers=_backup_step(job, step_time_s, calibration),
        hashing=_hashed_step(job, step_time_s, calibration),
        compression=_compression_step(job, step_time_s, calibration, fine),
        replication=_replication(step, step_time_s, calibration),
        loading=loading,
    )
    return prediction, simulated


def _error_shares(
    simulated: Simulated,
    ops_of_source: Mapping[ErrorSource, NDArray[np.bool_]],
    step_time_s: float,
    moved_s: Sequence[float],
) -> dict[str, ErrorShare]:
    """Effect of each source of error on the step.

    Args:
        simulated: The step, of the Program whose operations ``own`` has by source of error.
        ops_of_source: See ``sources_of_error``.
        step_time_s, moved_s: See ``interval_s``.
    """
    program, costs = simulated.program, simulated.program_costs
    timed_s = None
    if any(term.cost_estimate.provenance is Provenance.CALIBRATED for term in costs.by_work.values()):
        is_timed = {
            work for work, term in costs.by_work.items() if term.cost_estimate.provenance is Provenance.CALIBRATED
        }
        timed = np.array([not is_timed.isdisjoint(works) for works in program.works], dtype=bool)
        timed_s = np.where(timed[program.columns.work], costs.durations_s, 0.0)
    shares: dict[str, ErrorShare] = {}
    for (source, ops), longer_s in zip(
        ((name, ops) for name, ops in ops_of_source.items() if ops.any()), moved_s, strict=False
    ):
        seconds = float(costs.durations_s[ops].sum())
        if seconds:
            std = float(costs.deviations_s[ops].sum()) / seconds
            is_calibrated = timed_s is not None and 2 * float(timed_s[ops].sum()) > seconds
            shares[source] = ErrorShare(math.log(longer_s / step_time_s), std, is_calibrated)
    return shares


def _with_first_steps(step: TruncatedStep, memory: tuple[RankMemory, ...]) -> tuple[RankMemory, ...]:
    """Memory of every rank in the steps of rounds or, if it is more, in the first steps of post-local SGD, by DDP."""
    job, replication = step.job, step.job.plan.replication
    if replication is None or not replication.start_step:
        return memory
    whole = job.with_plan(job.plan.with_changes(replication=None))
    first = replace(step, job=whole, extent=predicted_extent(whole, step.folding or folding_of(whole)))
    return tuple(
        max(later, of_first, key=lambda memory_of: memory_of.allocated_bytes)
        for later, of_first in zip(memory, first.memory(), strict=True)
    )


@dataclass(frozen=True, eq=False)
class _ActionLevel:
    """Step time at Level 1, simulated at the first call; its inputs, unlike the Level 2 step, are small to pickle."""

    job: Job
    extent: Extent
    calibration: Calibration | None
    folding: Folding
    assignment: StageAssignment
    tables: tuple[Table, ...]

    def __call__(self) -> float:
        return self._seconds

    @cached_property
    def _seconds(self) -> float:
        step = TruncatedStep(self.job, self.extent, self.calibration, 1, self.folding)
        vars(step).update(assignment=self.assignment, tables=self.tables)  # the same at both levels
        return float(step.seconds()[0])


def _backup_step(job: Job, step_time_s: float, calibration: Calibration | None) -> BackupStep | None:
    """Effect of dropped gradients: the step is predicted once more without."""
    num_dropped = job.training.backup_workers
    if not num_dropped:
        return None
    waiting = replace(job, training=job.training.with_changes(backup_workers=0))
    without_s = predict(waiting, calibration=calibration).step_time_s
    return BackupStep(
        num_dropped=num_dropped, num_replicas=job.plan.dp_replicate, step_time_s=step_time_s, without_s=without_s
    )


def jobs_of_seeds(job: Job) -> list[Job]:
    """The job with each seed of the hash of ECMP over which its prediction has a range, without that range."""
    topology = job.cluster.topology
    if topology is None or (hashing := hashed(topology)) is None or hashing.num_seeds == 1:
        return [job]
    return [
        replace(job, cluster=job.cluster.model_copy(update={"topology": with_seed(topology, hashing.seed + number)}))
        for number in range(hashing.num_seeds)
    ]


def _hashed_step(job: Job, step_time_s: float, calibration: Calibration | None) -> HashedStep | None:
    """Range over seeds of the hash of ECMP: the step is predicted once more with each of the other seeds."""
    _, *others = jobs_of_seeds(job)
    if not others:
        return None
    seconds = [step_time_s, *(predict(other, calibration=calibration).step_time_s for other in others)]
    return HashedStep(
        num_seeds=len(seconds),
        mean_s=float(np.mean(seconds)),
        median_s=float(np.median(seconds)),
        range_s=(min(seconds), max(seconds)),
    )


def _compression_step(
    job: Job, step_time_s: float, calibration: Calibration | None, program: Program
) -> CompressionStep | None:
    """Steps with compressed and with whole gradients: the latter are predicted as well."""
    compression = job.plan.compression
    if compression is None:
        return None
    whole, step = predict_step(job.with_plan(job.plan.with_changes(compression=None)), calibration=calibration)
    return CompressionStep(
        sent_bytes=_gradient_bytes(program),
        whole_bytes=_gradient_bytes(step.program),
        step_time_s=step_time_s,
        whole_s=whole.step_time_s,
        num_warmup=compression.start_step if compression.kind == "powersgd" else 0,
        warmup_share=compression.warmup_share if compression.kind in ("one_bit", "one_bit_adam") else 0.0,
    )


def _replication(
    step: TruncatedStep, step_time_s: float, calibration: Calibration | None
) -> ReplicationRound | ReplicationWorkers | None:
    """Steps of a round of replicas that train alone, or of workers that do not wait for all others; None without."""
    replication = step.job.plan.replication
    if replication is None:
        return None
    left = tuple(_replicas_left(step.job, calibration))
    if step.asynchronous is not None:
        return replace(step.asynchronous.result(step_time_s), left=left)
    if not replication.has_rounds:
        return None
    outer_s = float(step.own_seconds())
    return ReplicationRound(
        inner_steps=replication.inner_steps,
        outer_steps=replication.outer_steps,
        steps_beside=replication.steps_beside,
        mean_step_s=step_time_s,
        inner_step_s=outer_s if step.inner is None else float(step.inner.seconds()[0]),
        outer_s=outer_s,
        sent_bytes=replication.outer_steps * _sent_bytes(step.programs[0], Stream.REPLICATE),
        left=left,
    )


def _replicas_left(job: Job, calibration: Calibration | None) -> Iterator[ReplicasLeft]:
    """Yield the step of fewer replicas, each predicted once more."""
    for number in numbers_left(job):
        fewer = with_replicas_left(job, number)
        seconds = predict(fewer, calibration=calibration).step_time_s
        yield ReplicasLeft(num_replicas=number, step_time_s=seconds, sequences_per_s=fewer.sequences_per_step / seconds)


def _gradient_bytes(program: Program) -> int:
    """Bytes that the first rank sends for its gradients, as a ring does."""
    return _sent_bytes(program, Stream.DATA)


def _sent_bytes(program: Program, stream: Stream) -> int:
    """Bytes that the first rank sends on a stream, as a ring does."""
    indices = program.rank_indices[program.ranks[0]]
    ops = (program.op(int(index)) for index in indices[program.on_stream(stream, indices=indices)])
    moved = (communication for op in ops for communication in op.communications)
    return round(
        sum(
            bus_factor(communication.kind, len(communication.ranks)) * communication.num_bytes
            for communication in moved
        )
    )


def _vectors(
    program: Program, program_costs: ProgramCosts, sources: tuple[ErrorSource, ...]
) -> list[NDArray[np.float64]]:
    """Durations with errors of each source, then those without contention, and without other jobs, if there are any."""
    others = (program_costs.uncontended_s, program_costs.without_background_s)
    return [*moved_durations_s(program, program_costs, sources), *(vector for vector in others if vector is not None)]


def _simulation_assumptions(job: Job, extent: Extent, calibration: Calibration | None) -> Iterator[str]:
    """Yield sentences on a truncated step, and on a machine whose speed has changed since its calibration."""
    if extent.period:
        yield (
            f"{extent.simulated} of {extent.whole:,} microbatches are simulated and drawn; the others add as much time "
            "and memory as those in the middle of these"
        )
    if deals_unequal_shards(job) and job.cluster.cores_per_node is None and job.plan.num_devices > MAX_DEALT_RANKS:
        yield (
            "ZeroRedundancyOptimizer assigns whole parameters to ranks; every rank is shown as the one with the most, "
            "for which the others wait"
        )
    if calibration is not None and calibration.pace is not None:
        slower = pace_in_words(calibration.pace)
        yield f"this machine computes {slower} now than when it was calibrated: timings of computing are scaled by that"


def _reference_s(cost: CostModel, job: Job) -> float | None:
    if not isinstance(cost, CalibratedCost):
        return None
    keys = {layer.key for layer in job.software.layers_of(job.model, job.plan, job.training)}
    return cost.reference_s(keys, job.plan_in_sequences.microbatch_size)


def recomputed_share(job: Job, assignment: StageAssignment) -> float:
    """Recomputed FLOPs over model FLOPs."""
    plan = job.plan
    layers = job.software.layers_of(job.model, plan, job.training)
    if plan.recompute == "none" and all(layer.loss_chunks is None for layer in layers):
        return 0.0
    again = total = 0
    flops_by_layer: dict[tuple[object, Recompute, int], tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        mode = recompute_of(layer, plan, assignment.place(number))
        key = (layer.key, mode, (number - 1) % 2)  # selective_layer has two kinds of blocks
        if key not in flops_by_layer:
            reruns = recomputation(layer, mode, number - 1, plan.recompute_modules).reruns
            recomputed = (layer.kernels[index] for rerun in reruns for index in rerun.kernels)
            flops = sum(kernel.flops for kernel in recomputed if isinstance(kernel, Gemm | Attention))
            flops_by_layer[key] = flops, layer.flops() + layer.backward_flops()
        again, total = again + flops_by_layer[key][0], total + flops_by_layer[key][1]
    trained = job.sequences_per_step * job.model.flops_per_sequence()
    return again / total * (trained / job.flops_per_step())


def _terms(step: TruncatedStep) -> tuple[Term, ...]:
    """Cost terms of a step; equal work of several ranks is one term, with the mean count per rank."""
    terms = _terms_of_program(step)
    replication = step.job.plan.replication
    if replication is None or not replication.has_rounds:
        return terms
    outer_share = replication.outer_steps / replication.inner_steps
    inner_share = 1 - outer_share * max(1, replication.steps_beside)
    weighted = [(term, outer_share) for term in terms]
    weighted += [(term, inner_share) for term in (() if step.inner is None else _terms_of_program(step.inner))]
    merged: dict[tuple[str, float], Term] = {}
    for term, share in weighted:
        key = term.name, term.seconds
        before = merged[key].count if key in merged else 0.0
        merged[key] = replace(term, count=before + share * term.count)
    return tuple(merged.values())


def _terms_of_program(step: TruncatedStep) -> tuple[Term, ...]:
    num_ranks = len(step.programs[0].stands_for)
    merged: dict[tuple[str, CostEstimate], Term] = {}
    fewer: dict[tuple[str, CostEstimate], float] = {}
    for simulated in reversed(step.simulated):  # the longer step last
        fewer = {key: term.count for key, term in merged.items()}
        merged = {}
        for term in simulated.program_costs.terms:
            key = (term.title, term.cost_estimate)
            count = term.count / num_ranks + (merged[key].count if key in merged else 0.0)
            merged[key] = Term(
                name=term.title,
                kind=term.kind,
                seconds=term.cost_estimate.seconds,
                count=count,
                provenance=str(term.cost_estimate.provenance),
                relative_std=term.cost_estimate.relative_std,
                formula=term.cost_estimate.formula,
            )
    periods = step.extent.num_periods
    return tuple(
        replace(term, count=term.count + periods * (term.count - fewer.get(key, term.count)))
        for key, term in merged.items()
    )


def _packing_assumptions(step: TruncatedStep, step_time_s: float) -> Iterator[str]:
    """Yield sentences on packed sequences; none if sequences are not packed."""
    job = step.job
    model = job.model
    if not model.document_lengths:
        return
    yield "attention of packed documents is one call of the kernel for each; padding is computed like other tokens"
    packs = model.packs
    if packs is None:
        yield "all sequences are packed alike"
        return
    yield (
        f"{packs.num_documents:,} documents were drawn (seed {packs.seed}) and packed ({packs.packing}) into "
        f"{packs.num_packs:,} sequences: {packs.documents_per_pack:.3g} documents each, which are "
        f"{format_percent(packs.document_share)} of the tokens; predicted is the pack whose attention is nearest to "
        "the mean"
    )
    if packs.cut_share:
        yield f"{format_percent(packs.cut_share)} of the documents were longer than allowed, and were cut"
    spread = f"packs differ by +/- {format_percent(packs.relative_std)} in attention"
    ranks, num_packs = _waiting(job.plan, job.num_microbatches)
    if ranks == 1:
        yield f"{spread}; one rank waits for no other"
        return
    excess = fullest_excess(packs, ranks, num_packs)
    attention_share = attention_s(job, step.assignment, step.tables[0], step.cost) / step_time_s
    yield (
        f"{spread}; waiting for the fullest one is not in the step time: at most "
        f"{format_percent(attention_share * excess)} of it, for attention is {format_percent(attention_share)} of the "
        f"step, and the fullest of {ranks:,} is expected to be at most {format_percent(excess)} above the mean"
    )


def fullest_excess(packs: PackStatistics, num_ranks: int, packs_each: int) -> float:
    """Upper bound on the expected excess of the fullest of several ranks, relative to the mean.

    The largest of n independent samples of any distribution is expected at most (n - 1) / sqrt(2 n - 1) standard
    deviations above the mean (Hartley and David 1954, Gumbel 1954). The fullest of all packs is a second bound.

    Args:
        packs: Statistics of the packs.
        num_ranks: Ranks that wait for each other.
        packs_each: Packs of each rank between two waits.
    """
    deviations = (num_ranks - 1) / (2 * num_ranks - 1) ** 0.5
    return float(min(deviations * packs.relative_std / packs_each**0.5, packs.relative_excess))


def attention_s(job: Job, assignment: StageAssignment, table: Table, cost: CostModel) -> float:
    """Seconds of attention cores in a step, on the pipeline rank with the most."""
    plan = job.plan
    layers = job.software.layers_of(job.model, plan, job.training)
    seconds_by_layer: dict[tuple[object, Recompute, int], float] = {}

    def of_layer(index: int) -> float:
        layer = layers[index]
        mode = recompute_of(layer, plan, assignment.place(index))
        key = (layer.key, mode, (index - 1) % 2)  # selective_layer has two kinds of blocks
        if key not in seconds_by_layer:
            seconds_by_layer[key] = _core_s(layer, plan, cost, mode, index - 1)
        return seconds_by_layer[key]

    by_row = [
        sum(of_layer(index) for stage in {a.stage for a in row} for index in assignment.layer_range(stage))
        for row in table
    ]
    return job.num_microbatches * max(by_row)


def _core_s(layer: LayerSpec, plan: ParallelPlan, cost: CostModel, mode: Recompute, block: int) -> float:
    """Attention-core seconds of one layer and microbatch."""
    cores = tuple(index for index, kernel in enumerate(layer.kernels) if isinstance(kernel, Attention))
    if not cores:
        return 0.0
    again = set(cores) & set(recomputation(layer, mode, block, plan.recompute_modules).kernels)
    phases = (Phase.FORWARD, Phase.BACKWARD, *([Phase.RECOMPUTE] * bool(again)))
    works = [LayerWork(layer, phase, plan.microbatch_size, layer.num_parameters, cores) for phase in phases]
    return sum(cost.compute(work).seconds for work in works)


def _waiting(plan: ParallelPlan, microbatches: int) -> tuple[int, int]:
    """Number of parts of a step that may wait for each other, and packs per part.

    Ranks that only reduce gradients wait once per step. Ranks with collectives inside layers wait in every microbatch.
    A pipeline is at most as slow as if all microbatches were as full as the fullest.
    """
    b = plan.microbatch_size
    if plan.pp > 1:
        return plan.dp * microbatches, b
    every = plan.shards_parameters or plan.reduces_every_microbatch or plan.ep > 1
    return plan.dp, b if every else b * microbatches
