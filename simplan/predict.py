"""One plan -> a Prediction: table, Program, prices, simulation, memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from simplan.cost.analytic import AnalyticCost
from simplan.cost.base import CostModel, Provenance
from simplan.cost.calibrated import CalibratedCost
from simplan.cost.calibration import Calibration
from simplan.cost.compute import roofline
from simplan.cost.pricing import Pricing, price_program
from simplan.errors import Problem, SpecError
from simplan.prediction import Prediction, RankMemory, Term
from simplan.program.check import check_table
from simplan.program.complete import complete_table
from simplan.program.lower import lower
from simplan.program.partition import assign_stage_layers, balanced_assignment
from simplan.program.program import LayerWork, MemoryCategory, Message, Phase, Program
from simplan.program.schedules import SCHEDULES
from simplan.program.timeline import COMPUTING, SpanKind, Timeline, split_of_rank
from simplan.sim.engine import CoreUse, simulate, timeline
from simplan.sim.memory import memory_peak
from simplan.spec.hardware import ClusterSpec
from simplan.spec.model import ModelSpec
from simplan.spec.plan import ParallelPlan, RankMapping, StageAssignment
from simplan.spec.rules import check_plan, num_microbatches
from simplan.spec.software import SoftwareSpec
from simplan.spec.training import TrainingSpec

__all__ = ["build_program", "core_use", "cost_model", "predict"]

_NINE_IN_TEN = 1.645  # standard deviations of a normal distribution that hold 90 %
_MOST_OPERATIONS = 60_000  # a larger Level 2 Program expands only what communicates; its time is the same
_BLOCK_BYTES = 2 * 1024**2  # the CUDA caching allocator reserves in blocks of 2 MiB


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
        calibration: Timings of this machine; needed when the cluster is this machine, unused otherwise.

    Raises:
        SpecError: The plan breaks rules (all of them are named), or a price cannot be had.
        NotModelledError: The plan asks for what simplan does not model.
    """
    check_plan(model, cluster, training, plan, software)
    cost = cost_model(cluster, training, plan, software, calibration)
    microbatches = num_microbatches(training, plan)
    assignment = _assignment(model, plan, cost)
    table = complete_table(SCHEDULES[plan.schedule](plan.pp, microbatches))
    check_table(table, plan.num_stages, microbatches)

    on_cpu = cluster.cores_per_node is not None
    mapping = RankMapping(plan.pp, plan.dp)
    fold_replicas = not on_cpu and _replicas_are_alike(mapping, cluster)
    written_out = 1 if fold_replicas else plan.dp
    expand_all = 2 * len(model.layers) * microbatches * written_out <= _MOST_OPERATIONS
    coarse, fine = (
        lower(
            model,
            training,
            plan,
            software,
            assignment,
            table,
            level=level,
            fold_replicas=fold_replicas,
            expand_all=expand_all,
        )
        for level in (1, 2)
    )
    coarse_pricing, fine_pricing = price_program(coarse, cost), price_program(fine, cost)
    level1_step_time_s = simulate(coarse, coarse_pricing.durations_s, core_use(coarse, cluster)).step_time_s
    times = simulate(fine, fine_pricing.durations_s, core_use(fine, cluster))
    spans = timeline(fine, times)
    step_time_s = times.step_time_s
    half_width_s = _NINE_IN_TEN * _deviation_s(fine, fine_pricing, core_use(fine, cluster), step_time_s)

    context_bytes = int(software.context_bytes.get(cluster.device.kind, 0))
    if on_cpu and calibration is not None:
        context_bytes = calibration.context_bytes
    memory = _memory(fine, mapping, cluster, context_bytes)
    splits = {rank: split_of_rank(spans.of_rank(rank), step_time_s) for rank in fine.ranks}
    capacity = cluster.device.memory_bytes
    worst_device_bytes = max(m.device_bytes for m in memory)
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
        step_time_interval_s=(max(0.0, step_time_s - half_width_s), step_time_s + half_width_s),
        level1_step_time_s=level1_step_time_s,
        bubble_fraction=_idle_fraction(spans, fine.ranks),
        capacity_bytes=capacity,
        fits=None if capacity is None else worst_device_bytes <= capacity,
        memory=memory,
        splits=tuple(splits[_written_out(fine, mapping, m.rank)] for m in memory),
        tokens_per_s_per_device=sequences_per_s * model.seq_len / cluster.num_devices,
        mfu=mfu,
        mfu_full_attention=mfu_full,
        hfu=mfu,
        terms=_terms(fine_pricing, len(fine.ranks)),
        timeline=spans,
        assumptions=_assumptions(cluster, fine_pricing),
    )


def build_program(prediction: Prediction, *, level: int, fold_replicas: bool = False) -> Program:
    """The Program behind a prediction, for drawing, comparing and running.

    Args:
        prediction: A prediction.
        level: 1 or 2.
        fold_replicas: Write out one data-parallel replica only.
    """
    return lower(
        prediction.model,
        prediction.training,
        prediction.plan,
        prediction.software,
        prediction.assignment,
        prediction.table,
        level=level,
        fold_replicas=fold_replicas,
    )


def cost_model(
    cluster: ClusterSpec,
    training: TrainingSpec,
    plan: ParallelPlan,
    software: SoftwareSpec,
    calibration: Calibration | None,
) -> CostModel:
    """Calibrated costs on this machine, datasheet costs elsewhere.

    Raises:
        SpecError: The cluster is this machine and there is no calibration, or a datasheet lacks a value.
    """
    if cluster.cores_per_node is None:
        state = software.state_bytes[training.precision]  # type: ignore[index]
        return AnalyticCost(cluster, roofline(cluster.device, training.precision, state, training.optimizer))
    if calibration is None:
        raise SpecError(
            Problem(
                field="cluster.preset",
                value=cluster.id,
                rule="needs a calibration, because nobody published this machine's speed",
                fix="run `simplan calibrate SCENARIO` first (`simplan run` does it by itself)",
            )
        )
    return CalibratedCost(
        calibration, dtype=training.precision, optimizer=training.optimizer, num_ranks=plan.num_devices
    )


def core_use(program: Program, cluster: ClusterSpec) -> CoreUse | None:
    """How the ranks of a CPU machine share its cores; None for devices of their own.

    A rank computes on ``max(1, cores // ranks)`` threads; a message keeps one core busy on each member.
    """
    cores = cluster.cores_per_node
    if cores is None:
        return None
    threads = max(1, cores // min(cluster.num_devices, cluster.devices_per_node))
    return CoreUse(
        cores,
        [cluster.node_of(op.rank) for op in program.ops],
        [1.0 if isinstance(op.work, Message) else float(threads) for op in program.ops],
    )


def _replicas_are_alike(mapping: RankMapping, cluster: ClusterSpec) -> bool:
    """Whether the messages of every replica use the same links: one of them can then stand for all."""
    pairs = [(p, (p + 1) % mapping.pp) for p in range(mapping.pp)]  # neighbours, and the ends that share an embedding
    crossings = {
        tuple(
            cluster.node_of(mapping.rank(one, replica)) != cluster.node_of(mapping.rank(other, replica))
            for one, other in pairs
        )
        for replica in range(mapping.dp)
    }
    return len(crossings) == 1


def _assignment(model: ModelSpec, plan: ParallelPlan, cost: CostModel) -> StageAssignment:
    if plan.stage_layers is not None:
        return assign_stage_layers(plan.stage_layers)
    times_s = [
        sum(
            cost.compute(LayerWork(layer, phase, plan.microbatch_size, layer.num_parameters)).seconds
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        for layer in model.layers
    ]
    return balanced_assignment(times_s, plan.num_stages)


def _deviation_s(program: Program, pricing: Pricing, cores: CoreUse | None, step_time_s: float) -> float:
    """Standard deviation of the step time: how much it moves when one kind of cost is one deviation higher.

    Costs of one kind share their source and err together; different kinds err independently.
    """
    kinds = {op.kind for op in program.ops}
    variance = 0.0
    for kind in kinds:
        moved = [
            duration_s + (deviation_s if op.kind is kind else 0.0)
            for op, duration_s, deviation_s in zip(program.ops, pricing.durations_s, pricing.deviations_s, strict=True)
        ]
        variance += (simulate(program, moved, cores).step_time_s - step_time_s) ** 2
    return float(variance**0.5)


def _written_out(program: Program, mapping: RankMapping, rank: int) -> int:
    """The rank of the Program that stands for a rank."""
    pp_rank, dp_rank = mapping.place(rank)
    return mapping.rank(pp_rank, dp_rank if program.num_replicas == 1 else 0)


def _memory(program: Program, mapping: RankMapping, cluster: ClusterSpec, context_bytes: int) -> tuple[RankMemory, ...]:
    found = {}
    for rank in program.ranks:
        peak = memory_peak(program, rank)
        allocated = peak.total_bytes
        on_cpu = cluster.device.kind == "cpu"
        reserved = allocated if on_cpu else -(-allocated // _BLOCK_BYTES) * _BLOCK_BYTES
        found[rank] = RankMemory(
            rank=rank,
            by_category=peak.by_category | {MemoryCategory.CONTEXT: context_bytes},
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=reserved + context_bytes,
            peak_action=peak.action,
            activations_in_flight=peak.activations_in_flight,
        )
    return tuple(replace(found[_written_out(program, mapping, rank)], rank=rank) for rank in range(mapping.world_size))


def _idle_fraction(spans: Timeline, ranks: tuple[int, ...]) -> float:
    """Mean over ranks of the share of time, from the first to the last computation of any rank, without computation.

    The optimizer step is left out, as in the closed forms.
    """
    busy_s: dict[int, float] = defaultdict(float)
    computing = [s for s in spans.spans if s.stream == "compute" and s.kind in COMPUTING]
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
            seconds=term.price.seconds,
            count=count,
            provenance=str(term.price.provenance),
            relative_std=term.price.relative_std,
            formula=term.price.formula,
        )
    return tuple(merged.values())


def _assumptions(cluster: ClusterSpec, pricing: Pricing) -> tuple[str, ...]:
    found = []
    provenances = {term.price.provenance for term in pricing.terms if term.price.seconds > 0}
    if Provenance.DATASHEET in provenances or Provenance.PUBLISHED in provenances:
        found.append(
            f"compute and links of {cluster.device.id} are priced from datasheets and published ceilings, "
            "not from a calibration; hence the wide interval"
        )
    if Provenance.EXTRAPOLATED in provenances:
        names = sorted({t.name for t in pricing.terms if t.price.provenance is Provenance.EXTRAPOLATED})
        found.append(f"outside of what was calibrated: {', '.join(names)}")
    if cluster.device.kind != "cpu":
        found.append("reserved memory is allocated memory in whole 2 MiB blocks; fragmentation is not modelled")
        found.append("the device never waits for the host: launch overhead counts as the least time of a kernel")
    if cluster.cores_per_node is not None:
        found.append(f"ranks share {cluster.cores_per_node} cores (processor sharing)")
    if any(term.kind is SpanKind.COMMUNICATION for term in pricing.terms) and cluster.num_nodes > 1:
        found.append("links are not shared with other jobs, and flows do not slow each other down")
    return tuple(found)
