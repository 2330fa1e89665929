"""Cost estimates for a cluster whose nodes differ: each group of equal nodes has a cost model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.analytic import AnalyticCost
from simplan.cost.model import CostEstimate
from simplan.plan.placement import Placement
from simplan.program.program import Communication, HostCopy, HostWait, LayerWork


class MixedCost:
    """A ``CostModel`` for several node groups.

    Work is estimated for the node group that it names. Work without a group is estimated for the fastest one, which is
    a lower bound for all groups. Communication inside a group uses its links. Communication between groups uses the
    slowest links of these groups, at whose rate a ring or tree over all of them moves.

    Args:
        cluster: Cluster with node groups.
        cost_of: Cost model of a cluster of equal nodes.
        placement: Devices of the ranks; None if they are the devices of their own numbers.

    Attributes:
        devices: Names of the devices of the groups.
    """

    def __init__(
        self, cluster: ClusterSpec, cost_of: Callable[[ClusterSpec], AnalyticCost], placement: Placement | None
    ) -> None:
        self._placement = placement
        self._group_of = [cluster.group_of(device) for device in range(cluster.num_devices)]
        self.devices = tuple(group.device.id for group in cluster.node_groups)
        self._groups = [cost_of(cluster.as_group(group)) for group in range(len(cluster.node_groups))]

        @cache
        def across(groups: tuple[int, ...]) -> AnalyticCost:
            found = self._groups[groups[0]] if len(groups) == 1 else cost_of(cluster.as_group(*groups))
            return found.placed(placement)

        self._across = across

    @property
    def overlap_slowdown(self) -> float:
        """Largest overlap slowdown of the groups."""
        return max(cost.overlap_slowdown for cost in self._groups)

    def compute(self, work: LayerWork) -> CostEstimate:
        """See ``CostModel``."""
        if work.group is None:
            return min((cost.compute(work) for cost in self._groups), key=lambda estimate: estimate.seconds)
        return self._groups[work.group].compute(work._replace(group=None))

    def communication(self, communication: Communication) -> CostEstimate:
        """See ``CostModel``."""
        ranks = communication.ranks
        devices = ranks if self._placement is None else self._placement.devices_of(ranks)
        return self._across(tuple(sorted({self._group_of[device] for device in devices}))).communication(communication)

    def host_copy(self, copy: HostCopy) -> CostEstimate:
        """See ``CostModel``."""
        if copy.group is None:
            return min((cost.host_copy(copy) for cost in self._groups), key=lambda estimate: estimate.seconds)
        return self._groups[copy.group].host_copy(copy)

    def host_wait(self, wait: HostWait) -> CostEstimate:
        """See ``CostModel``."""
        if wait.group is None:
            return min((cost.host_wait(wait) for cost in self._groups), key=lambda estimate: estimate.seconds)
        return self._groups[wait.group].host_wait(wait)
