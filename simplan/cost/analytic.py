"""Cost estimates from datasheets and published measurements, for devices without a calibration."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Self

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.communication.collectives import communication_cost
from simplan.cost.communication.host_link import host_copy_cost
from simplan.cost.communication.route import Route, route_of
from simplan.cost.compute.kernels import KernelCost
from simplan.cost.model import CostEstimate, CostPart, Limit, Provenance
from simplan.model.layer import CollectiveKind, ExpertDraw
from simplan.plan.collectives import Collectives
from simplan.plan.placement import Placement
from simplan.program.program import Communication, HostCopy, HostWait, LayerWork
from simplan.software.rates import FrameworkRates
from simplan.units import format_time

_HOST_STD = 0.5
"""Relative standard deviation of host waits; one value covers all trainers and hosts."""


class AnalyticCost:
    """A ``CostModel`` with kernel times per device, and latency and bandwidth per link.

    Args:
        cluster, kernels: Cluster with the links for communication, and kernel times of its device.
        stack: Slowdown of communication in training with a framework; None for no slowdown.
        collectives: Algorithms that the plan prescribes; None for the library's choice.
        server_shares: Fraction of the gradients on each parameter server; empty for equal parts.
        between_std: Relative standard deviation of communication between nodes, in addition to its own.

    Attributes:
        placement: Devices of the ranks of communication; None if they are the devices of their own numbers.
    """

    placement: Placement | None = None

    def __init__(
        self,
        cluster: ClusterSpec,
        kernels: KernelCost,
        stack: FrameworkRates | None = None,
        collectives: Collectives | None = None,
        server_shares: tuple[float, ...] = (),
        between_std: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._kernels = kernels
        self._stack = stack or FrameworkRates()
        self._collectives, self._server_shares, self._between_std = collectives, server_shares, between_std
        self._route_of = lru_cache(maxsize=1024)(partial(route_of, cluster=cluster))
        self._compute = cache(kernels.cost_estimate)
        self._moved: dict[tuple[CollectiveKind, int, ExpertDraw | None, Route | None], CostEstimate] = {}

    def placed(self, placement: Placement | None) -> Self:
        """Returns this model for ranks on other devices; both share their cached estimates."""
        if placement is self.placement:
            return self
        other = copy(self)
        other.placement = placement
        return other

    @property
    def overlap_slowdown(self) -> float:
        """See ``CostModel``; 0 where no kernels run the communication, as on a TPU torus."""
        link = self._cluster.intra_link or self._cluster.inter_link
        by_kernels = link is not None and link.library == "nccl"
        return self._cluster.device.kernels.overlap_slowdown if by_kernels else 0.0

    def compute(self, work: LayerWork) -> CostEstimate:
        """See ``CostModel``."""
        return self._compute(work)

    @property
    def kernels(self) -> KernelCost:
        """Kernel times of the device."""
        return self._kernels

    def communication(self, communication: Communication) -> CostEstimate:
        """See ``CostModel``."""
        route = self._route(communication.ranks)
        key = communication.kind, communication.num_bytes, communication.draw, route
        estimate = self._moved.get(key)
        if estimate is None:
            prescribed = self._collectives, self._server_shares
            estimate = communication_cost(communication, self._cluster, route, *prescribed)
            if self._between_std and route is not None and route.between is not None:
                estimate = replace(estimate, relative_std=math.hypot(estimate.relative_std, self._between_std))
            estimate = self._moved[key] = estimate.times(self._slowdown(route))
        return estimate

    def _slowdown(self, route: Route | None) -> float:
        """Fitted slowdown, but never so small that a transfer is faster than its links.

        The bound is their datasheet bandwidth. TCP (gloo) gets no slowdown below 1: its ``bandwidth_share`` is what
        headers leave of the line rate, and slowdowns below 1 were fitted on networks of NCCL.
        """
        if route is None:
            return self._stack.intra_slowdown
        between = route.between
        fitted = self._stack.intra_slowdown if between is None else self._stack.inter_slowdown
        least = 1.0 if between is not None and between.link.library == "gloo" else 0.0
        tiers = (tier for tier in (route.inside, between) if tier is not None)
        return max(fitted, least, *(tier.link.bandwidth_share for tier in tiers))

    def _route(self, ranks: tuple[int, ...]) -> Route | None:
        if len(set(ranks)) == 1:
            return None
        return self._route_of(ranks if self.placement is None else self.placement.devices_of(ranks))

    def host_copy(self, copy: HostCopy) -> CostEstimate:
        """See ``CostModel``."""
        return host_copy_cost(copy, self._cluster)

    def host_wait(self, wait: HostWait) -> CostEstimate:
        """See ``CostModel``."""
        kernels = self._cluster.device.kernels
        seconds = kernels.host_step_overhead_s if wait.reason == "step" else kernels.host_batch_overhead_s
        provenance = Provenance.DATASHEET if kernels.fitted_on is None else Provenance.PUBLISHED
        part = CostPart("host", seconds, Limit.HOST, _wait_words, (seconds,))
        return CostEstimate.of(part, provenance, _HOST_STD)


def _wait_words(seconds: float) -> str:
    return f"{format_time(seconds, digits=4)} for all trainers"
