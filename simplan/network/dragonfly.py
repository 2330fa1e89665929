"""Dragonfly: groups of routers with a link between all pairs of routers of a group, and between all pairs of groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simplan.network.fabric import GraphBuilder, Interconnect, Level


class DragonflyInterconnect(Interconnect):
    """Network cards on the routers of a dragonfly. Minimal paths have at most one link between two groups.

    The link of group g to group d leaves from router ((d - g - 1) mod G) // h of g, with G groups and h links of a
    router to other groups.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        router_of_card: NDArray[np.int64],
        *,
        routers_per_group: int,
        card_bytes_per_s: float,
        local_bytes_per_s: float,
        global_bytes_per_s: float,
        adaptive: bool,
    ) -> None:
        """Adds routers and links; the last vertices are the network cards.

        Args:
            adaptive: True for routers that take detours if a minimal path is full.
        """
        self.has_detours = adaptive
        self._router_of_card = router_of_card
        self._first_card = len(builder.vertices) - len(router_of_card)
        self._per_group = routers_per_group
        self._groups = int(router_of_card.max()) // routers_per_group + 1
        self._ports = -(-(self._groups - 1) // routers_per_group) or 1
        self._first_router = len(builder.vertices)
        for group in range(self._groups):
            for router in range(routers_per_group):
                builder.add_vertex(f"group{group}.router{router}")
        self._first_link = len(builder.links)
        for card, router in enumerate(router_of_card.tolist()):
            builder.add_cable(self._first_card + card, self._first_router + router, card_bytes_per_s)
        self._first_local = len(builder.links)
        for group in range(self._groups):
            for source in range(routers_per_group):
                for destination in range(routers_per_group):
                    if source != destination:
                        first = self._first_router + group * routers_per_group
                        builder.add_link(first + source, first + destination, local_bytes_per_s)
        self._first_global = len(builder.links)
        for group in range(self._groups):
            for other in range(self._groups):
                if group != other:
                    source, destination = self._gateway(group, other), self._gateway(other, group)
                    first = self._first_router
                    builder.add_link(first + source, first + destination, global_bytes_per_s)

    def path(self, source: int, destination: int, connection: int = 0) -> tuple[int, ...]:
        """Links of the minimal route between two network cards or routers."""
        (up, first), (down, last) = self._locate(source), self._locate(destination)
        links = [] if up is None else [up]
        group, to_group = first // self._per_group, last // self._per_group
        if group != to_group:
            leave, arrive = self._gateway(group, to_group), self._gateway(to_group, group)
            links += self._local(first, leave)
            links.append(self._global(group, to_group))
            first = arrive
        links += self._local(first, last)
        return tuple(links) if down is None else (*links, down + 1)

    def detours(self, link: int) -> Sequence[tuple[int, ...]]:
        """Paths over one other router of the group, or for a link between groups over one other group.

        Local hops at both ends of a detour over another group are those of the minimal path.
        """
        if self._first_local <= link < self._first_global:
            router, place = divmod(link - self._first_local, self._per_group - 1)
            first = router - router % self._per_group
            last = first + place + (place >= router - first)
            others = (other for other in range(first, first + self._per_group) if other not in (router, last))
            return [(*self._local(router, other), *self._local(other, last)) for other in others]
        if link >= self._first_global:
            group, place = divmod(link - self._first_global, self._groups - 1)
            to_group = place + (place >= group)
            others = (other for other in range(self._groups) if other not in (group, to_group))
            return [
                (
                    self._global(group, other),
                    *self._local(self._gateway(other, group), self._gateway(other, to_group)),
                    self._global(other, to_group),
                )
                for other in others
            ]
        return ()

    def switch_of(self, cards: Sequence[int]) -> int | None:
        """Router of all of some network cards; None if they are on several."""
        routers = {int(self._router_of_card[card - self._first_card]) for card in cards}
        return self._first_router + routers.pop() if len(routers) == 1 else None

    def levels(self, card_of: NDArray[np.int32]) -> tuple[Level, ...]:
        """Routers and groups, without those that hold all devices."""
        routers = self._router_of_card[card_of - self._first_card].astype(np.int32)
        levels = (("switch", routers), ("group", (routers // self._per_group).astype(np.int32)))
        return tuple((name, domain) for name, domain in levels if (domain != domain[0]).any())

    def _gateway(self, group: int, other: int) -> int:
        """Router of a group that has the link to another group."""
        return group * self._per_group + ((other - group - 1) % self._groups) // self._ports

    def _global(self, group: int, to_group: int) -> int:
        """Link from a group to another."""
        return self._first_global + group * (self._groups - 1) + to_group - (to_group > group)

    def _local(self, source: int, destination: int) -> list[int]:
        """Link between two routers of one group; none from a router to itself."""
        if source == destination:
            return []
        group, first = divmod(source, self._per_group)
        last, row = destination % self._per_group, self._per_group - 1
        return [self._first_local + (group * self._per_group + first) * row + last - (last > first)]

    def _locate(self, vertex: int) -> tuple[int | None, int]:
        """Link of a network card to its router, None for a router; and the router."""
        if vertex >= self._first_router:
            return None, vertex - self._first_router
        card = vertex - self._first_card
        return self._first_link + 2 * card, int(self._router_of_card[card])
