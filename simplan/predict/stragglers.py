"""Ranks that compute more slowly than the others: their kernels take longer, and the others wait for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.program_costs import ProgramCosts, computing_part
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan
from simplan.program.program import LayerWork, Program


def slowdowns(cluster: ClusterSpec, plan: ParallelPlan) -> dict[int, float]:
    """Rank -> time of its kernels over that of the other ranks; ranks that are as fast as the others are left out.

    A rank that is named and is on a node that is named has both slowdowns, multiplied.
    """
    if not cluster.stragglers:
        return {}
    placement, found = Placement.of(plan), dict.fromkeys(range(plan.num_devices), 1.0)
    for straggler in cluster.stragglers:
        for rank in found:
            device = rank if placement is None else placement.device_of(rank)
            if straggler.rank == rank or straggler.node == f"node{cluster.node_of(device)}":
                found[rank] *= straggler.slowdown
    return {rank: slowdown for rank, slowdown in found.items() if slowdown > 1}


def apply_stragglers(
    program: Program, program_costs: ProgramCosts, cluster: ClusterSpec, plan: ParallelPlan | None
) -> ProgramCosts:
    """Lengthen the computing of slow ranks; communication and waits for the host take as long as before.

    Args:
        program, program_costs: Program, and its estimates.
        cluster: Cluster, with its stragglers.
        plan: Plan of the Program; needed for a cluster with stragglers.
    """
    if not cluster.stragglers:
        return program_costs
    assert plan is not None, "the plan says which rank is on which device"
    columns, of_rank = program.columns, np.ones(1 + max(program.ranks))
    for rank, slowdown in slowdowns(cluster, plan).items():
        if rank < len(of_rank):
            of_rank[rank] = slowdown
    longer = 1 + (of_rank[columns.rank] - 1) * computing_parts(program, program_costs)
    return replace(
        program_costs,
        durations_s=program_costs.durations_s * longer,
        deviations_s=program_costs.deviations_s * longer,
    )


def computing_parts(program: Program, program_costs: ProgramCosts) -> NDArray[np.float64]:
    """``(num_ops,)`` Fraction of each operation's time that kernels take; 0 for communication and waits."""
    part = np.zeros(len(program.works))
    for index, work in enumerate(program.works):
        if any(isinstance(each, LayerWork) for each in work):
            part[index] = computing_part(work, program_costs)
    return np.asarray(part[program.columns.work])
