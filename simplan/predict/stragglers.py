"""Ranks that compute more slowly than the others, which wait for them.

With backup workers, a step drops the gradients of the slowest replicas instead of waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.program_costs import ProgramCosts, computing_part
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.program.action import ActionKind
from simplan.program.program import BucketWork, LayerWork, Program
from simplan.program.timeline import Times

_Floats = NDArray[np.float64]


def slowdowns(cluster: ClusterSpec, plan: ParallelPlan) -> dict[int, float]:
    """Rank -> time of its kernels over that of the other ranks; ranks that are as fast as the others are left out.

    A rank that is named and is on a node that is named has both slowdowns, multiplied.
    """
    placement, factors = Placement.of(plan), dict.fromkeys(range(plan.num_devices), 1.0)
    nodes = cluster.fabric_nodes
    for straggler in cluster.stragglers:
        for rank in factors:
            device = rank if placement is None else placement.device_of(rank)
            if straggler.rank == rank or straggler.node == f"node{nodes[cluster.node_of(device)]}":
                factors[rank] *= straggler.slowdown
    return {rank: slowdown for rank, slowdown in factors.items() if slowdown > 1}


def apply_stragglers(
    program: Program, program_costs: ProgramCosts, cluster: ClusterSpec, plan: ParallelPlan
) -> ProgramCosts:
    """Lengthen the computing of slow ranks; communication and waits for the host take as long as before.

    Args:
        program, program_costs: Program, and its estimates.
        cluster, plan: Cluster with stragglers, and plan of the Program.
    """
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


@dataclass(frozen=True, eq=False)
class BackupWorkers:
    """Replicas of a Program, of which a step drops the last gradients (Chen et al. 2016, arXiv:1604.00981).

    A dropped replica leaves its step and takes the mean of the others' gradients, so that it delays none of them. In
    the simulated step, each of its operations has the duration of that of the slowest replica that is kept. The mean is
    taken after backward, when all that are kept have arrived, and costs the same as an all-reduce of all replicas.

    Attributes:
        num_dropped: Dropped gradients per step.
        ops: ``(num_replicas, num_ops)`` Operations of each replica; equal work is in equal columns.
        gradients: ``(num_ops,)`` True for kernels of forward and backward; the last one that ends completes a gradient.
        slowness: ``(num_all_ops,)`` Duration of each operation, over that in the step with fixed slow replicas dropped.
    """

    num_dropped: int
    ops: NDArray[np.int64]
    gradients: NDArray[np.bool_]
    slowness: _Floats

    @classmethod
    def of(cls, program: Program, plan: ParallelPlan, num_dropped: int) -> BackupWorkers:
        """Backup workers of a Program of all ranks; replicas may be split by tensor and pipeline parallelism."""
        mapping = RankMapping.of(plan)
        indices = program.rank_indices
        replicas = np.array(
            [
                np.concatenate([indices[rank] for rank in sorted(indices) if mapping.dp_rank(rank) == replica])
                for replica in range(plan.dp_replicate)
            ]
        )
        passes = program.of_action(*(kind for kind in ActionKind if kind.is_compute))
        gradients = passes & _has_kernels(program)[program.columns.work]
        return cls(num_dropped, replicas, gradients[replicas[0]], np.ones(len(program)))

    def sources(self, end_s: _Floats) -> NDArray[np.int64]:
        """``(num_all_ops,)`` Operation whose duration each operation has once the last replicas are dropped.

        Args:
            end_s: ``(num_all_ops,)`` Ends of all operations in a step that waits for all replicas.
        """
        arrivals_s = end_s[self.ops[:, self.gradients]].max(axis=1)
        order = np.argsort(arrivals_s, kind="stable")
        num_kept = len(order) - self.num_dropped
        sources = np.arange(len(end_s))
        sources[self.ops[order[num_kept:]]] = self.ops[order[num_kept - 1]]
        return sources


def drop_slowest(
    program: Program,
    program_costs: ProgramCosts,
    plan: ParallelPlan,
    num_dropped: int,
    times: Callable[[_Floats], Times],
) -> tuple[ProgramCosts, BackupWorkers | None]:
    """Costs of a step that drops the gradients of the slowest replicas, and its backup workers, None for none.

    Args:
        program, program_costs, plan: See ``apply_stragglers``.
        num_dropped: Dropped gradients per step.
        times: Simulates the Program with given durations.
    """
    if len(program.ranks) < len(program.stands_for):  # replicas of folded ranks are alike
        return program_costs, None
    replicas, before_s = BackupWorkers.of(program, plan, num_dropped), program_costs.durations_s
    sources = replicas.sources(times(before_s).end_s)
    after_s = before_s[sources]
    slowness = np.divide(before_s, after_s, out=np.ones_like(after_s), where=after_s > 0)
    costs = replace(
        program_costs,
        durations_s=after_s,
        deviations_s=program_costs.deviations_s[sources],
        least_s=program_costs.least_s[sources],
    )
    return costs, replace(replicas, slowness=slowness)


def computing_parts(program: Program, program_costs: ProgramCosts) -> NDArray[np.float64]:
    """``(num_ops,)`` Fraction of each operation's time that kernels take; 0 for communication and waits."""
    part = np.zeros(len(program.works))
    for index in np.flatnonzero(_has_kernels(program)).tolist():
        part[index] = computing_part(program.works[index], program_costs)
    return np.asarray(part[program.columns.work])


def _has_kernels(program: Program) -> NDArray[np.bool_]:
    """``(num_works,)`` True for works with kernels of a layer."""
    return np.array([any(isinstance(part, LayerWork | BucketWork) for part in work) for work in program.works])
