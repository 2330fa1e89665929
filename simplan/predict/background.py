"""Background jobs of a cluster: each as a step of all its ranks, simulated alone."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from simplan.cluster.hardware import BackgroundJob, ClusterSpec
from simplan.errors import SpecError
from simplan.job import background_job
from simplan.plan.plan import RankMapping
from simplan.predict.build import collectives_of_layers_leave_nodes, expands_all
from simplan.predict.truncated import Extent, TruncatedStep
from simplan.program.folding import unfolded
from simplan.program.size import refuse_many_actions

if TYPE_CHECKING:
    from simplan.network.background import BackgroundStep


@lru_cache(maxsize=8)
def background_steps(cluster: ClusterSpec) -> tuple[BackgroundStep, ...]:
    """Steps of the background jobs of a cluster; their durations are estimated from datasheets."""
    return tuple(
        _step_of(cluster, background, f"cluster.background.{index}")
        for index, background in enumerate(cluster.background)
        if isinstance(background, BackgroundJob)
    )


def _step_of(cluster: ClusterSpec, background: BackgroundJob, field: str) -> BackgroundStep:
    from simplan.network.background import BackgroundStep  # predictions without a topology load no network

    job = background_job(cluster, background)
    folding, whole = unfolded(RankMapping.of(job.plan)), job.num_microbatches
    try:
        refuse_many_actions(job, len(folding.ranks), whole)
    except SpecError as error:
        raise SpecError(replace(problem, field=f"{field}.job.{problem.field}") for problem in error.problems) from None
    expand_all = collectives_of_layers_leave_nodes(job) or expands_all(job, folding, whole)
    simulated = TruncatedStep(job, Extent(whole, 0, whole), None, 2, folding, expand_all).simulated[0]
    return BackgroundStep(field, background, job, simulated.program, simulated.program_costs)
