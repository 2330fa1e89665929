"""Steps of background jobs: Programs and durations without contention, and their nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from simplan.cluster.background import BackgroundJob
from simplan.cluster.hardware import ClusterSpec
from simplan.cost.program_costs import ProgramCosts
from simplan.job import Job, background_job
from simplan.plan.plan import RankMapping
from simplan.predict.build import collectives_of_layers_leave_nodes, expands_all
from simplan.predict.truncated import Extent, TruncatedStep
from simplan.program.folding import unfolded
from simplan.program.program import Program


@dataclass(frozen=True, eq=False)
class BackgroundStep:
    """One step of a background job, of all its ranks.

    Attributes:
        background: Its entry in ``ClusterSpec.background``.
        job: The job, on a cluster of its own nodes.
        program, program_costs: Its Program, with durations on links that nothing else uses.
    """

    background: BackgroundJob
    job: Job
    program: Program
    program_costs: ProgramCosts


@lru_cache(maxsize=8)
def background_steps(cluster: ClusterSpec) -> tuple[BackgroundStep, ...]:
    """Steps of the background jobs of a cluster; their durations are estimated from datasheets."""
    return tuple(_step_of(cluster, background) for background in cluster.background_jobs)


def _step_of(cluster: ClusterSpec, background: BackgroundJob) -> BackgroundStep:
    job = background_job(cluster, background)
    folding, whole = unfolded(RankMapping.of(job.plan)), job.num_microbatches
    expand_all = collectives_of_layers_leave_nodes(job) or expands_all(job, folding, whole)
    simulated = TruncatedStep(job, Extent(whole, 0, whole), None, 2, folding, expand_all).simulated[0]
    return BackgroundStep(background, job, simulated.program, simulated.program_costs)
