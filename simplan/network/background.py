"""Steps of background jobs on the same links: Programs and durations without contention, and their nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from simplan.cluster.hardware import BackgroundJob
from simplan.cost.program_costs import ProgramCosts
from simplan.errors import NotModelledError, Problem
from simplan.job import Job
from simplan.program.program import Program

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
