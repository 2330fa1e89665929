"""Breakdown of a rank's memory at its peak point."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from simplan.explain.term import ExplainedTerm
from simplan.job import Job
from simplan.model.layer import LayerSpec
from simplan.optimizers import OPTIMIZERS
from simplan.plan.plan import RankMapping
from simplan.prediction import Prediction
from simplan.program.lowering.passes import forward_passes
from simplan.program.lowering.stage import Stages
from simplan.program.memory.low_precision_footprint import persistent_weight_bytes
from simplan.program.memory.states import second_model_bytes
from simplan.program.program import LayerWork, MemoryCategory, Program
from simplan.program.tables.complete import stage_to_rank
from simplan.program.timeline import SpanKind
from simplan.sim.memory import peak_position
from simplan.units import format_bytes


def memory_parts(prediction: Prediction, program: Program) -> Iterator[ExplainedTerm]:
    """Yield terms that sum to the device memory of the peak-memory rank, given the Level 2 Program."""
    job = prediction.job
    worst = prediction.worst_memory
    rank = program.stands_for[worst.rank]
    resting = program.persistent_bytes[rank]
    for category, num_bytes in worst.by_category.items():
        if not num_bytes:
            continue
        kept, formula, note = resting.get(category, 0), format_bytes(num_bytes, digits=4), ""
        match category:
            case MemoryCategory.HOST:
                note = "offloaded to the host, whose memory is the device's own here"
            case MemoryCategory.PARAMETERS | MemoryCategory.GRADIENTS | MemoryCategory.OPTIMIZER:
                formula = _states(prediction, program, category, num_bytes)
            case MemoryCategory.ACTIVATIONS:
                formula = _activations(program, rank)
                note = "" if job.plan.recompute == "none" else f"recompute {job.plan.recomputed}"
            case MemoryCategory.BUFFERS:
                moving = num_bytes - kept
                formula = f"{format_bytes(kept, digits=4)} of receive buffers" if kept else ""
                if moving:
                    formula += (
                        f"{' + ' if kept else ''}{format_bytes(moving, digits=4)} of communication and its buffers"
                    )
            case MemoryCategory.GATHERED:
                gathered = job.software.state(job.training, job.plan).gathered
                formula = f"{num_bytes // gathered:,} parameters gathered then x {gathered} B"
            case MemoryCategory.LOGITS:
                formula = _logits(prediction, num_bytes)
                note = "log-probabilities, logits and their gradients"
            case MemoryCategory.CONTEXT:
                note = "driver context and communication library (on a CPU, the program)"
            case _:
                tables = f", {format_bytes(kept)} of it tables that stay" if kept else ""
                note = f"gradients and temporaries inside of {worst.peak_action or 'nothing'}{tables}"
        yield ExplainedTerm(str(category), str(category), num_bytes, "bytes", formula, note)
    rounding = worst.reserved_bytes - worst.allocated_bytes
    if rounding:
        share = job.software.allocator_reserve(reshards=job.plan.reshards)
        more = f", with {share:.0%} of transient memory in addition," if share else ""
        if worst.short_bytes:
            more += f" {format_bytes(worst.short_bytes)} of it more than the device has,"
        note = f"rounded up{more} to what the caching allocator reserves"
        yield ExplainedTerm("reserved", "allocator", rounding, "bytes", format_bytes(rounding, digits=4), note)


def _states(prediction: Prediction, program: Program, category: MemoryCategory, num_bytes: int) -> str:
    """Formula for parameters, gradients or optimizer states of the peak-memory rank."""
    job, rank = prediction.job, program.stands_for[prediction.worst_memory.rank]
    state, resting = job.software.state(job.training, job.plan), program.persistent_bytes[rank]
    trained = _num_trained(prediction, program, rank)
    quantized = _quantized_bytes(prediction, rank)
    packed, form = _packed_bytes(prediction, rank)
    second = _second_model_bytes(prediction, rank)
    wide = resting[MemoryCategory.PARAMETERS] - quantized - packed - second
    frozen = 0 if trained is None else (wide - trained * state.parameter) // state.frozen
    is_parameters = category is MemoryCategory.PARAMETERS
    width = {
        MemoryCategory.PARAMETERS: state.parameter,
        MemoryCategory.GRADIENTS: state.gradient + state.unaccumulated,
        MemoryCategory.OPTIMIZER: state.optimizer_bytes(job.training.optimizer),
    }[category]
    outer_bytes = _outer_bytes(job, trained or wide // state.parameter) if category is MemoryCategory.OPTIMIZER else 0
    if category is MemoryCategory.GRADIENTS and not resting.get(category):
        return f"{num_bytes // width:,} parameters x {width} B"
    kept = (wide if is_parameters else resting.get(category, 0)) - outer_bytes
    formula = f"{int(kept // max(1, width)):,} parameters x {width} B"
    facts = OPTIMIZERS[job.training.optimizer]
    if category is MemoryCategory.OPTIMIZER and facts.by_tensor:
        formula = f"{_num_updated(program, rank):,} parameters, by the shape of every tensor"
    if frozen and is_parameters:
        formula = f"{trained:,} parameters x {state.parameter} B + {frozen:,} frozen x {state.frozen} B"
    elif frozen and not (category is MemoryCategory.OPTIMIZER and facts.by_tensor):
        formula = f"{kept // width:,} parameters trained x {width} B"
    if packed and is_parameters:
        formula += f" + {format_bytes(packed, digits=4)} of frozen weights in {form}"
    if job.plan.shards_parameters:
        formula += f" (one of {job.plan.dp_shard * job.plan.cp} shards)"
    if second and is_parameters:
        formula += f" + {format_bytes(second, digits=4)} of the reference model"
    if outer_bytes:
        more = f"{format_bytes(outer_bytes, digits=4)} of outer parameters and momentum"
        return f"{formula} + {more}" if kept else more
    if is_parameters and quantized:
        more = (
            f"+ {format_bytes(quantized, digits=4)} of"
            if quantized > 0
            else f"- {format_bytes(-quantized, digits=4)} by"
        )
        formula += f" {more} quantized weights"
    elif num_bytes > kept:
        formula += f" + {format_bytes(num_bytes - kept, digits=4)} of gradients that wait to be added or reduced"
    return formula


def _outer_bytes(job: Job, num_parameters: int) -> int:
    """Bytes of the states of an outer optimizer on the device, in FP32."""
    replication = job.plan.replication
    if replication is None or replication.outer.on_host:
        return 0
    return replication.num_outer_states * 4 * num_parameters


def _num_trained(prediction: Prediction, program: Program, rank: int) -> int | None:
    """Parameters that a rank trains, if others are frozen; None if none are.

    Gradients that torch drops between steps do not rest; then states of the optimizer tell.
    """
    job, resting = prediction.job, program.persistent_bytes[rank]
    if job.model.num_trained_parameters == job.model.num_parameters:
        return None
    state = job.software.state(job.training, job.plan)
    if resting.get(MemoryCategory.GRADIENTS):
        return resting[MemoryCategory.GRADIENTS] // state.gradient
    if OPTIMIZERS[job.training.optimizer].by_tensor:
        return _num_updated(program, rank)
    return resting.get(MemoryCategory.OPTIMIZER, 0) // max(1, int(state.optimizer_bytes(job.training.optimizer)))


def _num_updated(program: Program, rank: int) -> int:
    """Parameters that a rank updates."""
    ops = (program.ops[index] for index in program.by_rank[rank])
    works = (work for op in ops if op.kind is SpanKind.OPTIMIZER for work in op.work)
    return sum(work.num_parameters for work in works if isinstance(work, LayerWork))


def _logits(prediction: Prediction, num_bytes: int) -> str:
    """Formula for copies of the output distribution, each tokens x vocabulary of one microbatch and rank."""
    head = prediction.job.padded_model.layers_of(prediction.job.plan.shard)[-1]
    sequences = prediction.job.plan_in_sequences.microbatch_size
    elements = sum(tensor.elements for tensor in head.saved if tensor.logits) * sequences
    return f"{num_bytes / (4 * elements):.4g} x {elements:,} (tokens x vocabulary) x 4 B"


def _activations(program: Program, rank: int) -> str:
    """Formula for saved activations: microbatches by stage and size."""
    alive: dict[tuple[int, int | None], int] = defaultdict(int)
    ops = [program.ops[index] for index in program.by_rank[rank]]
    worst = peak_position(program, rank)
    for position, op in enumerate(ops[: worst + 1]):
        for effect in op.memory:
            if effect.category is MemoryCategory.ACTIVATIONS:
                num_bytes = effect.during_bytes if position == worst else effect.after_bytes
                alive[op.action.stage, op.action.microbatch] += num_bytes
    sizes = Counter((stage, num_bytes) for (stage, _), num_bytes in alive.items() if num_bytes > 0)
    by_size = sorted(sizes.items(), key=lambda item: -item[0][1] * item[1])
    parts = [
        f"{count} microbatch{'es' if count > 1 else ''} (of stage {stage}) x {format_bytes(num_bytes, digits=4)}"
        for (stage, num_bytes), count in by_size[:4]
    ]
    if rest := sum(num_bytes * count for (_, num_bytes), count in by_size[4:]):
        parts.append(f"{format_bytes(rest, digits=4)} of others")
    return " + ".join(parts)


def _packed_bytes(prediction: Prediction, rank: int) -> tuple[int, str]:
    """Persistent bytes of a rank's weights of few bits with their scales, and the format of these."""
    plan, num_bytes, word = prediction.job.plan, 0, ""
    num_shards = plan.dp_shard * plan.cp if plan.shards_parameters else 1
    for layer in _layers_of_rank(prediction, rank):
        for parameter in layer.parameters:
            if parameter.stored is not None:
                num_bytes += parameter.stored.shard_bytes(parameter.shape, num_shards)
                word = parameter.stored.name
    return num_bytes, word


def _quantized_bytes(prediction: Prediction, rank: int) -> int:
    """Persistent bytes of a rank's quantized weights beyond its BF16 weights; negative if they replace those."""
    plan = prediction.job.plan
    if plan.shards_parameters:
        return 0
    state = prediction.job.software.state(prediction.job.training, plan)
    return sum(persistent_weight_bytes(layer, state) for layer in _layers_of_rank(prediction, rank))


def _second_model_bytes(prediction: Prediction, rank: int) -> int:
    """Persistent bytes of a rank's part of a second model; 0 without one."""
    job = prediction.job
    if job.reference != "second_model":
        return 0
    return second_model_bytes(Stages(job, prediction.assignment, prediction.table, forward_passes(job)[-1]), rank)


def _layers_of_rank(prediction: Prediction, rank: int) -> list[LayerSpec]:
    """Layers of the stages on a rank."""
    job = prediction.job
    layers = job.software.layers_of(job.model, job.plan, job.training)
    pp_rank = RankMapping.of(job.plan).place(rank).pp
    mine = [stage for stage, at in stage_to_rank(prediction.table).items() if at == pp_rank]
    return [layers[index] for stage in mine for index in prediction.assignment.layer_range(stage)]
