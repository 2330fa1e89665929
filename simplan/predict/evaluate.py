"""One plan -> a Prediction: table, Program, prices, simulation, memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from simplan.cost.base import CostModel
from simplan.cost.calibrated import CalibratedCost
from simplan.cost.calibration import Calibration
from simplan.cost.pricing import Pricing
from simplan.job import Job
from simplan.predict.assumptions import assumptions
from simplan.predict.build import cost_model, expands_all, folding_of, stages_and_table
from simplan.predict.packing import attention_s, packing_assumptions
from simplan.predict.simulated import Simulated, interval_s, moved_durations_s, simulate_program
from simplan.prediction import Prediction, RankMemory, Term
from simplan.program.check import check_table
from simplan.program.executable import check_executable
from simplan.program.lower import Lowering, lower
from simplan.program.program import MemoryCategory, Program, Stream
from simplan.program.timeline import COMPUTING, Timeline, split_of_rank
from simplan.program.uncollected import uncollected
from simplan.sim.engine import timeline
from simplan.sim.memory import coming_and_going_bytes, host_peak_bytes, memory_peak, resting_bytes, whole_blocks
from simplan.spec.layer import Attention, Gemm
from simplan.spec.plan import StageAssignment
from simplan.spec.recompute import recomputation, recompute_of
from simplan.spec.rules import check_plan
from simplan.spec.schedules import is_own_schedule
from simplan.spec.software import SoftwareSpec

__all__ = ["predict", "predict_step", "rank_memory", "recomputed_share", "within_device"]


def predict(job: Job, *, name: str = "scenario", calibration: Calibration | None = None) -> Prediction:
    """Predicts time and memory of one optimizer step.

    Args:
        job: What is asked.
        name: For people.
        calibration: Timings of the cluster's device; needed when the cluster is this machine.

    Raises:
        SpecError: The plan breaks rules (all of them are named), or a price cannot be had.
        NotModelledError: The plan asks for what simplan does not model.
    """
    return predict_step(job, name=name, calibration=calibration)[0]


@uncollected()
def predict_step(
    job: Job, *, name: str = "scenario", calibration: Calibration | None = None
) -> tuple[Prediction, Simulated]:
    """A prediction, and the simulated step it was read off, which is large: as ``simulate_again`` makes it.

    Args:
        job, name, calibration: As of ``predict``.

    Raises:
        SpecError, NotModelledError: As of ``predict``.
    """
    check_plan(job)
    model, cluster, training = job.model, job.cluster, job.training
    cost = cost_model(job, calibration)
    assignment, table = stages_and_table(job, cost)
    check_table(table, job.plan.num_stages, job.num_microbatches)
    if is_own_schedule(job.plan.schedule):
        check_executable(table, job.plan, job.software)

    folding = folding_of(job)
    expand_all, host_waits = expands_all(job, folding), cluster.device.kind == "cpu"
    coarse, fine = (
        lower(job, assignment, table, Lowering(level, folding, expand_all, host_waits=host_waits)) for level in (1, 2)
    )
    level1_step_time_s = simulate_program(coarse, cost, cluster).times.step_time_s
    simulated = simulate_program(fine, cost, cluster)
    spans = timeline(fine, simulated.times)
    step_time_s = simulated.times.step_time_s
    moved_s = simulated.engine.step_times_s([moved.tolist() for moved in moved_durations_s(fine, simulated.pricing)])

    memory = rank_memory(fine, job, calibration)
    of_rank = spans.by_rank()
    splits = {rank: split_of_rank(of_rank[rank], step_time_s) for rank in fine.ranks}
    capacity = cluster.device.memory_bytes
    fits = None if capacity is None else max(m.device_bytes for m in memory) <= capacity
    sequences_per_s = training.global_batch_size / step_time_s
    peak = cluster.device.peak_flop_per_s.get(training.precision)
    available = None if peak is None else peak * cluster.num_devices
    mfu, mfu_full = (
        None if available is None else sequences_per_s * model.flops_per_sequence(full_attention=full) / available
        for full in (False, True)
    )
    prediction = Prediction(
        name=name,
        job=job,
        assignment=assignment,
        table=table,
        step_time_s=step_time_s,
        step_time_interval_s=interval_s(step_time_s, moved_s),
        level1_step_time_s=level1_step_time_s,
        bubble_fraction=_idle_fraction(spans, fine.ranks),
        capacity_bytes=capacity,
        fits=fits,
        memory=memory,
        splits=tuple(splits[fine.stands_for[m.rank]] for m in memory),
        tokens_per_s_per_device=sequences_per_s * model.seq_len / cluster.num_devices,
        mfu=mfu,
        mfu_full_attention=mfu_full,
        hfu=None if mfu is None else mfu * (1 + recomputed_share(job, assignment)),
        terms=_terms(simulated.pricing, len(fine.ranks)),
        timeline=spans,
        reference_s=_reference_s(cost, job),
        assumptions=(
            *assumptions(job, simulated.pricing, max(m.short_bytes for m in memory) if fits else 0),
            *packing_assumptions(job, attention_s(job, assignment, table, cost) / step_time_s),
        ),
    )
    return prediction, simulated


def _reference_s(cost: CostModel, job: Job) -> float | None:
    if not isinstance(cost, CalibratedCost):
        return None
    keys = {layer.key for layer in job.software.layers_of(job.model, job.plan)}
    return cost.reference_s(keys, job.plan.microbatch_size)


def recomputed_share(job: Job, assignment: StageAssignment) -> float:
    """FLOPs that are computed again over those of forward and backward."""
    plan = job.plan
    again = total = 0
    for number, layer in enumerate(job.software.layers_of(job.model, plan)):
        mode = recompute_of(layer, plan, assignment.place(number))
        kernels = recomputation(layer, mode, number - 1, plan.recompute_modules).kernels
        again += sum(kernel.flops for index in kernels if isinstance(kernel := layer.kernels[index], Gemm | Attention))
        total += layer.flops() + layer.backward_flops()
    return again / total


def rank_memory(program: Program, job: Job, calibration: Calibration | None) -> tuple[RankMemory, ...]:
    """Memory of every rank at its worst instant.

    A caching allocator that the driver has nothing left for gives its free blocks back and asks again, and fails only
    then (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, ``malloc``: ``release_cached_blocks``, then ``alloc_block``).
    So what it would keep beyond the tensors is needed by nobody, and the reserve ends where the device does. Free parts
    of blocks that are in use cannot be given back; how many those are nobody published, and none are counted.

    Args:
        program: Of Level 2.
        job, calibration: As in ``predict``.
    """
    cluster, software = job.cluster, job.software
    context_bytes = int(software.context_bytes.get(cluster.device.kind, 0))
    if calibration is not None:
        context_bytes = calibration.context_bytes or context_bytes
    found = {}
    for rank in program.ranks:
        peak = memory_peak(program, rank)
        allocated = peak.total_bytes
        on_cpu = cluster.device.kind == "cpu"
        reserved = allocated if on_cpu else _reserved_bytes(program, rank, allocated, software)
        memory = RankMemory(
            rank=rank,
            by_category=peak.by_category | {MemoryCategory.CONTEXT: context_bytes},
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=reserved + context_bytes,
            peak_action=peak.action,
            activations_in_flight=peak.activations_in_flight,
            host_bytes=host_peak_bytes(program, rank),
        )
        found[rank] = memory if on_cpu else within_device(memory, cluster.device.memory_bytes)
    return tuple(replace(found[other], rank=rank) for rank, other in enumerate(program.stands_for))


def within_device(memory: RankMemory, capacity_bytes: int | None) -> RankMemory:
    """What the allocator has of a device that is smaller than it would like; no less than tensors take.

    Args:
        memory: Of a rank.
        capacity_bytes: Of its device; None when that is unknown.
    """
    if capacity_bytes is None:
        return memory
    given_back = memory.reserved_bytes - whole_blocks(memory.allocated_bytes)
    short = min(max(0, memory.device_bytes - capacity_bytes), given_back)
    return replace(
        memory,
        reserved_bytes=memory.reserved_bytes - short,
        device_bytes=memory.device_bytes - short,
        short_bytes=memory.short_bytes + short,
    )


def _reserved_bytes(program: Program, rank: int, allocated_bytes: int, software: SoftwareSpec) -> int:
    """What the caching allocator has of the device: whole blocks, and more than is in use, as it cannot move them."""
    passing, updating = coming_and_going_bytes(program, rank)
    resting = resting_bytes(program, rank)
    reserved = allocated_bytes + software.reserve_fraction * max(0, allocated_bytes - resting)
    if software.flat_updates:
        reserved = max(allocated_bytes, resting + (1 + software.reserve_fraction) * passing + updating)
    return whole_blocks(int(reserved))


def _idle_fraction(spans: Timeline, ranks: tuple[int, ...]) -> float:
    """Mean over ranks of the share of time, from the first to the last computation of any rank, without computation.

    The optimizer step is left out, as in the closed forms.
    """
    busy_s: dict[int, float] = defaultdict(float)
    computing = [s for s in spans.spans if s.stream == Stream.COMPUTE and s.kind in COMPUTING]
    for span in computing:
        busy_s[span.rank] += span.end_s - span.start_s
    total_s = max(s.end_s for s in computing) - min(s.start_s for s in computing)
    return 1.0 - sum(busy_s[rank] for rank in ranks) / len(ranks) / total_s


def _terms(pricing: Pricing, num_ranks: int) -> tuple[Term, ...]:
    """What was priced; equal work of different ranks is one term, its count a mean over ranks."""
    merged: dict[tuple[str, str], Term] = {}
    for term in pricing.terms:
        key = (term.name, term.price.formula)
        count = term.count / num_ranks + (merged[key].count if key in merged else 0.0)
        merged[key] = Term(
            name=term.name,
            kind=term.kind,
            seconds=term.price.seconds,
            count=count,
            provenance=str(term.price.provenance),
            relative_std=term.price.relative_std,
            formula=term.price.formula,
        )
    return tuple(merged.values())
