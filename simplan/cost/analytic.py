"""Cost estimates from datasheets and published measurements, for devices without a calibration."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.base import Price, Provenance
from simplan.cost.communication.collectives import message_price, message_s
from simplan.cost.communication.host_link import host_copy_price
from simplan.cost.communication.route import Route, route_of
from simplan.cost.compute.kernels import KernelCost
from simplan.model.layer import CollectiveKind, ExpertDraw
from simplan.program.program import HostCopy, HostWait, LayerWork, Message
from simplan.software.rates import StackRates
from simplan.units import format_time

__all__ = ["AnalyticCost"]

_HOST_STD = 0.5
"""Relative standard deviation of host waits; one value covers all trainers and hosts."""


class AnalyticCost:
    """A ``CostModel`` with kernel times per device, and latency and bandwidth per link.

    Args:
        cluster: Cluster with the links for communication.
        kernels: Kernel times of the device.
        stack: Slowdown of communication in training with a framework; None for no slowdown.
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
        self._route_of = lru_cache(maxsize=1024)(partial(route_of, cluster=cluster))
        self._computed: dict[LayerWork, Price] = {}
        self._moved: dict[tuple[CollectiveKind, int, ExpertDraw | None, Route | None], Price] = {}

    @property
    def taken_share(self) -> float:
        """See ``CostModel``; 0 where no kernels run the communication, as on a TPU torus."""
        link = self._cluster.intra_link or self._cluster.inter_link
        by_kernels = link is not None and link.library == "nccl"
        return self._cluster.device.kernels.taken_share if by_kernels else 0.0

    def compute(self, work: LayerWork) -> Price:
        """See ``CostModel``."""
        found = self._computed.get(work)
        if found is None:
            found = self._computed[work] = self._kernels.price(work)
        return found

    def compute_s(self, work: LayerWork) -> float:
        """Returns the seconds of ``compute`` without a formula."""
        return self._kernels.seconds(work)

    def message(self, message: Message) -> Price:
        """See ``CostModel``."""
        route = self._route(message.ranks)
        key = message.kind, message.num_bytes, message.draw, route
        found = self._moved.get(key)
        if found is None:
            found, slowdown = message_price(message, self._cluster, route), self._slowdown(route)
            if slowdown != 1.0:
                formula = f"{slowdown:.2f} x ({found.formula})"
                found = replace(found, seconds=slowdown * found.seconds, formula=formula)
            self._moved[key] = found
        return found

    def message_s(self, message: Message) -> float:
        """Returns the seconds of ``message`` without a formula."""
        route = self._route(message.ranks)
        return self._slowdown(route) * message_s(message, self._cluster, route)

    def _slowdown(self, route: Route | None) -> float:
        inside = route is None or route.between is None
        return self._stack.intra_slowdown if inside else self._stack.inter_slowdown

    def _route(self, ranks: tuple[int, ...]) -> Route | None:
        return self._route_of(ranks) if len(ranks) > 1 else None

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
