"""Steps of background jobs: Programs and durations without contention, and their nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from simplan.cluster.background import BackgroundJob
from simplan.cluster.hardware import ClusterSpec
from simplan.cost.program_costs import ProgramCosts
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.job import Job, background_job
from simplan.plan.plan import RankMapping
from simplan.predict.build import collectives_of_layers_leave_nodes, expands_all
from simplan.predict.truncated import Extent, TruncatedStep
from simplan.program.folding import unfolded
from simplan.program.program import Program
from simplan.program.size import refuse_many_actions

_MAX_OPERATIONS = 2_000_000
"""Operations of background jobs that are simulated in one step."""


@dataclass(frozen=True, eq=False)
class BackgroundStep:
    """One step of a background job, of all its ranks.

    Attributes:
        field: Field of the scenario, e.g. ``cluster.background.0``.
        background: Its entry in ``ClusterSpec.background``.
        job: The job, on a cluster of its own nodes.
        program, program_costs: Its Program, with durations on links that nothing else uses.
    """

    field: str
    background: BackgroundJob
    job: Job
    program: Program
    program_costs: ProgramCosts


@lru_cache(maxsize=8)
def background_steps(cluster: ClusterSpec) -> tuple[BackgroundStep, ...]:
    """Steps of the background jobs of a cluster; their durations are estimated from datasheets."""
    return tuple(
        _step_of(cluster, background, f"cluster.background.{index}")
        for index, background in enumerate(cluster.background)
        if isinstance(background, BackgroundJob)
    )


def _step_of(cluster: ClusterSpec, background: BackgroundJob, field: str) -> BackgroundStep:
    job = background_job(cluster, background)
    folding, whole = unfolded(RankMapping.of(job.plan)), job.num_microbatches
    try:
        refuse_many_actions(job, len(folding.ranks), whole)
    except SpecError as error:
        raise SpecError(replace(each, field=f"{field}.job.{each.field}") for each in error.problems) from None
    expand_all = collectives_of_layers_leave_nodes(job) or expands_all(job, folding, whole)
    simulated = TruncatedStep(job, Extent(whole, 0, whole), None, 2, folding, expand_all).simulated[0]
    return BackgroundStep(field, background, job, simulated.program, simulated.program_costs)


def refuse_too_many_steps(step: BackgroundStep, alone_s: float, predicted_s: float) -> None:
    """Refuses a background job whose steps would take too long to simulate.

    Args:
        alone_s: Seconds of its step alone.
        predicted_s: Seconds of the predicted step without other jobs.

    Raises:
        NotModelledError: Its steps have too many operations.
    """
    number = math.ceil((predicted_s + step.background.offset_s % alone_s) / alone_s)
    if number > 1 and number * len(step.program) > _MAX_OPERATIONS:
        rule = f"has {number:,} steps of {len(step.program):,} operations in one step of this job; at most "
        rule += f"{_MAX_OPERATIONS:,} operations are simulated"
        fix = "use constant traffic with its mean rate: {from: node0, to: node1, gbit: 100}"
        raise NotModelledError(Problem(field=step.field, rule=rule, fix=fix))
