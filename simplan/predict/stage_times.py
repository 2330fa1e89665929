"""Times and saved activations of stages, for schedules that depend on them."""

from __future__ import annotations

from simplan.cost.compute.pass_time import pass_time_s
from simplan.cost.model import CostModel
from simplan.job import Job
from simplan.model.layer import CollectiveKind
from simplan.plan.plan import StageAssignment
from simplan.program.lowering.script import Scripts
from simplan.program.lowering.stage import Stages
from simplan.program.program import Communication, HostWait, Phase
from simplan.program.schedules import PipelineShape, StageTimes, one_f_one_b
from simplan.program.tables.complete import complete_table

__all__ = ["stage_times"]


def stage_times(
    job: Job,
    assignment: StageAssignment,
    cost: CostModel,
) -> tuple[StageTimes, float]:
    """Stage times of one microbatch, and the activations that survive dgrad.

    Times include collectives inside stages. All P2P sends take the time of the longest. The second value is the largest
    fraction, over stages, of a microbatch's saved activations that are kept from dgrad (I) to wgrad (W); at most 1.

    Args:
        job: Job with one stage per rank.
        assignment: Layers of each stage.
        cost: Cost model.
    """
    plan = job.plan
    table = complete_table(one_f_one_b(PipelineShape(plan.pp, 1)))  # any: only its placement matters
    stages = Stages(job, assignment, table)
    scripts = Scripts(stages)
    groups = {"tp": stages.mapping.tp_group(0), "cp": stages.mapping.cp_group(0)}

    def seconds(stage: int, phase: Phase) -> float:
        script = scripts.merged(stage, phase)
        return pass_time_s(
            script,
            groups,
            lambda work: cost.compute(work).seconds,
            lambda communication: cost.communication(communication).seconds,
        )

    def split(stage: int) -> tuple[float, float]:
        if stage == 0:
            return 0.0, seconds(stage, Phase.BACKWARD)
        return seconds(stage, Phase.BACKWARD_INPUT), seconds(stage, Phase.BACKWARD_WEIGHT)

    backwards = [split(stage) for stage in range(plan.num_stages)]
    next_rank = stages.mapping.rank(stages.mapping.place(0)._replace(pp=1))
    largest = max(stages.boundary_bytes[:-1])
    batch_s = cost.host_wait(HostWait("batch")).seconds
    times = StageTimes(
        forward_s=tuple(
            seconds(stage, Phase.FORWARD) + (batch_s if stages.software.waits_for_batch else 0.0)
            for stage in range(plan.num_stages)
        ),
        backward_input_s=tuple(input_s for input_s, _ in backwards),
        backward_weight_s=tuple(weight_s for _, weight_s in backwards),
        send_s=cost.communication(Communication(CollectiveKind.SEND, largest, (0, next_rank))).seconds,
    )
    return times, max(_kept_for_weight(stages, stage) for stage in range(1, plan.num_stages))


def _kept_for_weight(stages: Stages, stage: int) -> float:
    """Bytes saved from dgrad (I) to wgrad (W) over bytes saved from forward to dgrad, at most 1.

    Gradients that wait for wgrad can push the ratio above 1. The cap keeps a memory limit equivalent to a limit on
    microbatches.
    """
    splits = [stages.facts(stage, position).split() for position in range(len(stages.layers[stage]))]
    between = sum(split.between_activations + split.between_logits for split in splits)
    return min(1.0, between / sum(split.activations + split.logits for split in splits))
