"""What a rank's memory is made of at its worst instant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from simplan.explain.part import Part
from simplan.prediction import Prediction
from simplan.program.program import MemoryCategory, Program
from simplan.sim.memory import peak_position
from simplan.units import format_bytes

__all__ = ["memory_parts"]


def memory_parts(prediction: Prediction, program: Program) -> Iterator[Part]:
    """Parts that sum to the device memory of the rank that needs most.

    Args:
        prediction: The prediction.
        program: Its Level 2 Program.
    """
    worst = prediction.worst_memory
    rank = program.stands_for[worst.rank]
    state = prediction.software.state(prediction.training, prediction.plan)
    resting = program.resting_bytes[rank]
    optimizer = state.optimizer_bytes(prediction.training.optimizer)
    widths = {
        MemoryCategory.PARAMETERS: state.parameter,
        MemoryCategory.GRADIENTS: state.gradient,
        MemoryCategory.OPTIMIZER: optimizer,
    }
    for category, num_bytes in worst.by_category.items():
        if not num_bytes:
            continue
        kept = resting.get(category, 0)
        if category in widths:
            formula = f"{kept // widths[category]:,} parameters x {widths[category]} B"
            if prediction.plan.shards_parameters:
                formula += f" (one of {prediction.plan.dp_shard * prediction.plan.cp} shards)"
            if num_bytes > kept:
                formula += f" + {format_bytes(num_bytes - kept)} of gradients that wait to be added or reduced"
        elif category is MemoryCategory.ACTIVATIONS:
            formula = _activations(prediction, program, rank)
        elif category is MemoryCategory.BUFFERS:
            moving = num_bytes - kept
            formula = f"{format_bytes(kept)} of receive buffers" if kept else ""
            if moving:
                formula += f"{' + ' if kept else ''}{format_bytes(moving)} of messages that are under way"
        else:
            formula = _RULES[category]
        yield Part(str(category), str(category), num_bytes, "bytes", formula)
    rounding = worst.reserved_bytes - worst.allocated_bytes
    if rounding:
        yield Part("reserved", "allocator", rounding, "bytes", "rounded up to what the caching allocator reserves")


_RULES = {
    MemoryCategory.GATHERED: "whole parameters of the units that are gathered then",
    MemoryCategory.LOGITS: "logits, log-probabilities and gradients of these: microbatch x tokens x vocabulary, each",
    MemoryCategory.WORKSPACE: "gradients and temporaries inside the layer that runs then",
    MemoryCategory.CONTEXT: "driver context and communication library",
}


def _activations(prediction: Prediction, program: Program, rank: int) -> str:
    """Microbatches alive, by stage and size."""
    alive: dict[tuple[int, int | None], int] = defaultdict(int)
    ops = [program.ops[index] for index in program.by_rank[rank]]
    for op in ops[: peak_position(program, rank) + 1]:
        for effect in op.memory:
            if effect.category is MemoryCategory.ACTIVATIONS:
                alive[op.action.stage, op.action.microbatch] += effect.after_bytes
    sizes = Counter((stage, num_bytes) for (stage, _), num_bytes in alive.items() if num_bytes > 0)
    parts = [
        f"{count} microbatch{'es' if count > 1 else ''} of stage {stage} x {format_bytes(num_bytes)}"
        for (stage, num_bytes), count in sorted(sizes.items(), key=lambda item: -item[0][1] * item[1])[:4]
    ]
    how = "" if prediction.plan.recompute == "none" else f" (recompute {prediction.plan.recompute})"
    return (" + ".join(parts) or "of the layer that runs then") + how
