"""Costs from datasheets and published ceilings, for devices that nobody calibrated."""

from __future__ import annotations

from dataclasses import replace

from simplan.cost.base import Price, Provenance
from simplan.cost.collectives import message_price, message_s
from simplan.cost.compute import KernelCost
from simplan.cost.host_link import host_copy_price
from simplan.cost.route import Route, route_of
from simplan.program.program import HostCopy, HostWait, LayerWork, Message
from simplan.spec.hardware import ClusterSpec
from simplan.spec.rates import StackRates
from simplan.units import format_time

__all__ = ["AnalyticCost"]

_HOST_STD = 0.5
"""Trainers and their hosts differ; one number stands for all."""


class AnalyticCost:
    """A ``CostModel`` of kernels per device and latency and bandwidth per link.

    Args:
        cluster: Where messages go.
        kernels: What they take on a device.
        stack: How messages fare in training with a framework; by default as where they were timed alone.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        kernels: KernelCost,
        stack: StackRates | None = None,
    ) -> None:
        self._cluster = cluster
        self._kernels = kernels
        self._stack = stack or StackRates()
        self._routes: dict[tuple[int, ...], Route] = {}

    @property
    def taken_share(self) -> float:
        """See ``CostModel``: nothing where no kernels move them, as on a torus of TPUs."""
        link = self._cluster.intra_link or self._cluster.inter_link
        by_kernels = link is not None and link.library == "nccl"
        return self._cluster.device.kernels.taken_share if by_kernels else 0.0

    def compute(self, work: LayerWork) -> Price:
        """See ``CostModel``."""
        return self._kernels.price(work)

    def compute_s(self, work: LayerWork) -> float:
        """Seconds of ``compute``, without what it says."""
        return self._kernels.seconds(work)

    def message(self, message: Message) -> Price:
        """See ``CostModel``."""
        route = self._route(message.ranks)
        alone, slowdown = message_price(message, self._cluster, route), self._slowdown(route)
        if slowdown == 1.0:
            return alone
        formula = f"{slowdown:.2f} x ({alone.formula})"
        return replace(alone, seconds=slowdown * alone.seconds, formula=formula)

    def message_s(self, message: Message) -> float:
        """Seconds of ``message``, without what it says."""
        route = self._route(message.ranks)
        return self._slowdown(route) * message_s(message, self._cluster, route)

    def _slowdown(self, route: Route | None) -> float:
        inside = route is None or route.between is None
        return self._stack.intra_slowdown if inside else self._stack.inter_slowdown

    def _route(self, ranks: tuple[int, ...]) -> Route | None:
        found = self._routes.get(ranks)
        if found is None and len(ranks) > 1:
            found = self._routes[ranks] = route_of(ranks, self._cluster)
        return found

    def host_copy(self, copy: HostCopy) -> Price:
        """See ``CostModel``."""
        return host_copy_price(copy, self._cluster)

    def host_wait(self, wait: HostWait) -> Price:
        """See ``CostModel``."""
        kernels = self._cluster.device.kernels
        seconds = kernels.step_s if wait.reason == "step" else kernels.batch_s
        provenance = Provenance.DATASHEET if kernels.fitted_on is None else Provenance.PUBLISHED
        formula = f"{format_time(seconds)}, whatever the trainer"
        return Price(seconds, provenance, _HOST_STD, formula)
