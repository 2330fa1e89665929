"""One plan -> a Prediction: table, Program, prices, simulation, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simplan.cost.base import CostModel
from simplan.cost.calibrated import CalibratedCost
from simplan.cost.calibration import Calibration
from simplan.cost.pricing import Pricing
from simplan.predict.assumptions import assumptions
from simplan.predict.build import cost_model, expands_all, folding_of, stages_and_table
from simplan.predict.packing import attention_s, packing_assumptions
from simplan.predict.simulated import interval_s, moved_durations_s, simulate_program
from simplan.prediction import Prediction, RankMemory, Term
from simplan.program.check import check_table
from simplan.program.executable import check_executable
from simplan.program.lower import Lowering, lower
from simplan.program.program import MemoryCategory, Program, Stream
from simplan.program.timeline import COMPUTING, Split, split_of_times
from simplan.program.uncollected import uncollected
from simplan.sim.engine import Times, timeline
from simplan.sim.memory import host_peak_bytes, memory_peak, resting_bytes, step_peaks, whole_blocks
from simplan.spec.hardware import ClusterSpec
from simplan.spec.layer import Attention, Gemm, LayerSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan, StageAssignment
from simplan.spec.recompute import recomputation, recompute_of
from simplan.spec.rules import check_plan, num_microbatches
from simplan.spec.schedules import is_own_schedule
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["predict", "rank_memory", "recomputed_share", "within_device"]


@uncollected()
def predict(
    name: str,
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    plan: ParallelPlan,
    software: SoftwareSpec,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predicts time and memory of one optimizer step.

    Args:
        name: For people.
        model, cluster, training, plan, software: What is asked.
        calibration: Timings of the cluster's device; needed when the cluster is this machine.

    Raises:
        SpecError: The plan breaks rules (all of them are named), or a price cannot be had.
        NotModelledError: The plan asks for what simplan does not model.
    """
    check_plan(model, cluster, training, plan, software)
    cost = cost_model(cluster, training, plan, software, calibration)
    microbatches = num_microbatches(training, plan)
    assignment, table = stages_and_table(model, training, plan, software, cost)
    check_table(table, plan.num_stages, microbatches)
    if is_own_schedule(plan.schedule):
        check_executable(table, plan, software)

    folding = folding_of(model, plan, cluster, software)
    expand_all = expands_all(model, plan, microbatches, folding)
    coarse, fine = (
        lower(
            model,
            training,
            plan,
            software,
            assignment,
            table,
            Lowering(level, folding, expand_all, host_waits=cluster.device.kind == "cpu"),
        )
        for level in (1, 2)
    )
    level1_step_time_s = simulate_program(coarse, cost, cluster).times.step_time_s
    simulated = simulate_program(fine, cost, cluster)
    spans = timeline(fine, simulated.times)
    step_time_s = simulated.times.step_time_s
    moved_s = simulated.engine.step_times_s(moved_durations_s(fine, simulated.pricing))

    memory = rank_memory(fine, cluster, software, calibration)
    splits = splits_of_ranks(fine, simulated.times)
    capacity = cluster.device.memory_bytes
    fits = None if capacity is None else max(m.device_bytes for m in memory) <= capacity
    sequences_per_s = training.global_batch_size / step_time_s
    peak = cluster.device.peak_flop_per_s.get(training.precision)
    available = None if peak is None else peak * cluster.num_devices
    mfu, mfu_full = (
        None if available is None else sequences_per_s * model.flops_per_sequence(full_attention=full) / available
        for full in (False, True)
    )
    return Prediction(
        name=name,
        model=model,
        cluster=cluster,
        training=training,
        plan=plan,
        software=software,
        assignment=assignment,
        table=table,
        num_microbatches=microbatches,
        step_time_s=step_time_s,
        step_time_interval_s=interval_s(step_time_s, moved_s),
        level1_step_time_s=level1_step_time_s,
        bubble_fraction=_idle_fraction(fine, simulated.times),
        capacity_bytes=capacity,
        fits=fits,
        memory=memory,
        splits=tuple(splits[fine.stands_for[m.rank]] for m in memory),
        tokens_per_s_per_device=sequences_per_s * model.seq_len / cluster.num_devices,
        mfu=mfu,
        mfu_full_attention=mfu_full,
        hfu=None if mfu is None else mfu * (1 + recomputed_share(model, plan, software, assignment)),
        terms=_terms(simulated.pricing, len(fine.ranks)),
        timeline=spans,
        reference_s=_reference_s(cost, software.layers_of(model, plan), plan),
        assumptions=(
            *assumptions(
                model,
                cluster,
                training,
                plan,
                software,
                simulated.pricing,
                max(m.short_bytes for m in memory) if fits else 0,
            ),
            *packing_assumptions(
                model,
                plan,
                microbatches,
                attention_s(software.layers_of(model, plan), plan, assignment, table, microbatches, cost) / step_time_s,
            ),
        ),
    )


def _reference_s(cost: CostModel, layers: Sequence[LayerSpec], plan: ParallelPlan) -> float | None:
    if not isinstance(cost, CalibratedCost):
        return None
    return cost.reference_s({layer.key for layer in layers}, plan.microbatch_size)


def recomputed_share(
    model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec, assignment: StageAssignment
) -> float:
    """FLOPs that are computed again over those of forward and backward."""
    again = total = 0
    for number, layer in enumerate(software.layers_of(model, plan)):
        mode = recompute_of(layer, plan, assignment.place(number))
        kernels = recomputation(layer, mode, number - 1, plan.recompute_modules).kernels
        again += sum(kernel.flops for index in kernels if isinstance(kernel := layer.kernels[index], Gemm | Attention))
        total += layer.flops() + layer.backward_flops()
    return again / total


def rank_memory(
    program: Program, cluster: ClusterSpec, software: SoftwareSpec, calibration: Calibration | None
) -> tuple[RankMemory, ...]:
    """Memory of every rank at its worst instant.

    A caching allocator that the driver has nothing left for gives its free blocks back and asks again, and fails only
    then (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, ``malloc``: ``release_cached_blocks``, then ``alloc_block``).
    So what it would keep beyond the tensors is needed by nobody, and the reserve ends where the device does. Free parts
    of blocks that are in use cannot be given back; how many those are nobody published, and none are counted.

    Args:
        program: Of Level 2.
        cluster, software, calibration: As in ``predict``.
    """
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
    passing, updating = step_peaks(program, rank)
    resting = resting_bytes(program, rank)
    reserved = allocated_bytes + software.reserve_fraction * max(0, allocated_bytes - resting)
    if software.flat_updates:
        reserved = max(allocated_bytes, resting + (1 + software.reserve_fraction) * passing + updating)
    return whole_blocks(int(reserved))


def splits_of_ranks(program: Program, times: Times) -> dict[int, Split]:
    """Where the step of every rank that is written out went."""
    on_compute, ran = program.on_stream(Stream.COMPUTE), times.end_s > times.start_s
    found = {}
    for rank, indices in program.rank_indices.items():
        own = indices[ran[indices]]
        found[rank] = split_of_times(
            program.columns.kind[own], on_compute[own], times.start_s[own], times.end_s[own], times.step_time_s
        )
    return found


def _idle_fraction(program: Program, times: Times) -> float:
    """Mean over ranks of the share of time, from the first to the last computation of any rank, without computation.

    The optimizer step is left out, as in the closed forms.
    """
    computes = program.on_stream(Stream.COMPUTE) & program.of_kind(*COMPUTING) & (times.end_s > times.start_s)
    start_s, end_s = times.start_s[computes], times.end_s[computes]
    return 1.0 - float((end_s - start_s).sum()) / len(program.ranks) / float(end_s.max() - start_s.min())


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
