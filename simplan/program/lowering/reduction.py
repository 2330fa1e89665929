"""REDUCE_GRAD beside data parallelism: gradients of which ranks have parts, those of experts, and the division."""

from __future__ import annotations

from simplan.model.layer import CollectiveKind
from simplan.program.action import Action
from simplan.program.lowering.stage import Stages
from simplan.program.lowering.writer import RankWriter
from simplan.program.memory.states import RankStates
from simplan.program.program import LayerWork, Message, Phase, Stream

__all__ = ["complete_gradients"]


def complete_gradients(action: Action, stages: Stages, states: RankStates, writer: RankWriter) -> None:
    """Completes the gradients of a stage and divides them by the number of microbatches, where the loss was not.

    Args:
        action: The REDUCE_GRAD.
        stages: Facts about the stages.
        states: Of the rank.
        writer: Takes the operations.
    """
    partial = states.partial_elements(action.stage)
    if partial:
        group = stages.mapping.tp_group(writer.rank)
        message = Message(CollectiveKind.ALL_REDUCE, partial * stages.state.gradient, group)
        waits = [writer.last_compute, *writer.blocking]
        writer.block_on(writer.collective(action, Stream.TENSOR, "all_reduce partial gradients", message, waits))
    _average_experts(action, stages, states, writer)
    divides = stages.num_microbatches > 1 and stages.software.runtime != "megatron"
    writer.compute(action, "{action}", states.work(action.stage, Phase.SCALE) if divides else ())


def _average_experts(action: Action, stages: Stages, states: RankStates, writer: RankWriter) -> None:
    """Gradients of experts are divided by the ranks that average gradients, and summed over those with the same ones.

    Tokens of the other expert-parallel ranks are already in them, and those of tensor-parallel ranks add up.
    """
    elements = states.expert_gradients(action.stage)
    if not elements:
        return
    own = zip(stages.layers[action.stage], stages.experts[action.stage], strict=True)
    plan = stages.plan
    work = tuple(LayerWork(layer, Phase.SCALE, plan.microbatch_size, number) for layer, number in own if number)
    divided = writer.compute(action, "divide experts", work if plan.dp * plan.cp > 1 else ())
    group = stages.mapping.expert_group(writer.rank)
    if len(group) == 1:
        return
    kind = CollectiveKind.REDUCE_SCATTER if states.shares_evenly else CollectiveKind.ALL_REDUCE
    for number in elements:
        message = Message(kind, number * stages.state.reduced, group)
        writer.block_on(writer.collective(action, Stream.EXPERT_DATA, f"{kind} experts", message, (divided,)))
