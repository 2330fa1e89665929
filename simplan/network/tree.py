"""Multistage trees of switches: leaf and spine, rails, fat trees, sites.

A tier groups what is below it: network cards into leaves, leaves into pods, pods below the core. With adaptive routing
the switches of a group are one vertex, and the cables to the group above are one link. With ECMP a group of tier t has
P(t) = planes(1) x ... x planes(t) switches; a flow ascends to the lowest group that holds both ends, and a hash of the
flow picks one of planes(t) switches per tier. The way down then has no choice. These are extended generalized fat
trees.

Source: Oehring, Ibel, Das, Kumar, "On generalized fat trees" (IPPS 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.network.fabric import GraphBuilder, Interconnect, Level, hash_of_flow


class SwitchTier(NamedTuple):
    """One tier of switches.

    Attributes:
        name: Kind of a group, e.g. ``leaf``.
        group_of: ``(num_groups of the tier below,)`` group of each group below; for the first tier, of each network
            card.
        uplink_bytes_per_s: ``(num_groups of the tier below,)`` bandwidth of a group below to its group in this tier, in
            one direction, all switches together.
        names: Name of each group.
        planes: Switches of this tier per switch of the tier below, among which a hash picks.
        latency_s: Latency of an uplink.
        merges: True for one switch per group, which all switches of a group below have a link to, each of the whole
            bandwidth: ``planes`` counts from 1 again.
    """

    name: str
    group_of: NDArray[np.int64]
    uplink_bytes_per_s: NDArray[np.float64]
    names: tuple[str, ...]
    planes: int = 1
    latency_s: float = 0.0
    merges: bool = False


class _Stage(NamedTuple):
    """Vertices and links of a built tier.

    Attributes:
        first_vertex: Vertex of plane 0 of group 0; planes of a group follow each other.
        planes: Switches of a group.
        choices: Uplinks of a vertex below.
        first_link: First uplink of vertex 0 below; a link down follows each link up.
    """

    first_vertex: int
    planes: int
    choices: int
    first_link: int
    num_groups: int


class TreeInterconnect(Interconnect):
    """Network cards below tiers of switches."""

    def __init__(
        self, builder: GraphBuilder, num_cards: int, tiers: Sequence[SwitchTier], connections: int = 1, seed: int = 0
    ) -> None:
        """Adds switches and links; the last ``num_cards`` vertices are the network cards.

        Args:
            connections: Connections between two cards, of which a hash picks the switches of each.
            seed: Seed of the hash.
        """
        self.num_connections, self._seed = connections, seed
        self.has_routes = any(tier.planes > 1 for tier in tiers)
        self._first_card = len(builder.vertices) - num_cards
        self._stages = [_Stage(self._first_card, 1, 0, 0, num_cards)]
        self._names = [tier.name for tier in tiers]
        self._groups = [np.arange(num_cards)]  # of each card, by tier
        self._parents = [tier.group_of.tolist() for tier in tiers]
        for tier in tiers:
            self._add(builder, tier)

    def path(self, source: int, destination: int, connection: int = 0) -> tuple[int, ...]:
        """Links up to the lowest group that holds both ends, and down."""
        (tier, group, plane), (to_tier, to_group, to_plane) = self._locate(source), self._locate(destination)
        if tier == to_tier == 0:
            return self._path_of_flow(group, to_group, connection)
        return self._path_of_switches((tier, group, plane), (to_tier, to_group, to_plane))

    def switch_of(self, cards: Sequence[int]) -> int | None:
        """Lowest switch above all of some network cards, in plane 0."""
        places = np.asarray(cards) - self._first_card
        for stage, groups in zip(self._stages[1:], self._groups[1:], strict=True):
            above = groups[places]
            if (above == above[0]).all():
                return stage.first_vertex + int(above[0]) * stage.planes
        return None

    def levels(self, card_of: NDArray[np.int32]) -> tuple[Level, ...]:
        """Domains of the tiers, innermost first, without those that hold all devices."""
        cards = card_of - self._first_card
        domains = [groups[cards].astype(np.int32) for groups in self._groups[1:]]
        named = zip(self._names, domains, strict=True)
        return tuple((name, domain) for name, domain in named if (domain != domain[0]).any())

    def _add(self, builder: GraphBuilder, tier: SwitchTier) -> None:
        below, first_vertex = self._stages[-1], len(builder.vertices)
        choices = 1 if tier.merges else tier.planes
        planes = 1 if tier.merges else below.planes * tier.planes
        for name in tier.names:
            for plane in range(planes):
                builder.add_vertex(f"{name}{plane}" if planes > 1 else name)
        first_link, parts = len(builder.links), 1 if tier.merges else planes
        rates = tier.uplink_bytes_per_s.tolist()
        for group, above in enumerate(tier.group_of.tolist()):
            rate = rates[group] / parts
            for plane in range(below.planes):
                lower, upper = below.first_vertex + group * below.planes + plane, first_vertex + above * planes
                for choice in range(choices):
                    at = 0 if tier.merges else plane * choices + choice
                    builder.add_cable(lower, upper + at, rate, latency_s=tier.latency_s)
        self._stages.append(_Stage(first_vertex, planes, choices, first_link, len(tier.names)))
        self._groups.append(tier.group_of[self._groups[-1]])

    def _locate(self, vertex: int) -> tuple[int, int, int]:
        """SwitchTier, group and plane of a vertex; tier 0 for a network card."""
        for tier in range(len(self._stages) - 1, -1, -1):
            stage = self._stages[tier]
            if vertex >= stage.first_vertex:
                group, plane = divmod(vertex - stage.first_vertex, stage.planes)
                assert group < stage.num_groups, "a path ends at a card or a switch"
                return tier, group, plane
        raise AssertionError("a path ends at a card or a switch")

    def _uplink(self, tier: int, group: int, plane: int, choice: int) -> tuple[int, int]:
        """Link from a switch of a tier to the next tier, and the plane at which it ends."""
        below, above = self._stages[tier], self._stages[tier + 1]
        link = above.first_link + 2 * ((group * below.planes + plane) * above.choices + choice)
        return link, plane * above.choices + choice if above.planes > 1 else 0

    def _path_of_flow(self, source: int, destination: int, connection: int) -> tuple[int, ...]:
        """Path between two network cards."""
        rest = hash_of_flow(source, destination, connection, self._seed)
        up, down, plane = [], [], 0
        for tier in range(len(self._stages) - 1):
            if source == destination:
                break
            rest, choice = divmod(rest, self._stages[tier + 1].choices)
            link, next_plane = self._uplink(tier, source, plane, choice)
            up.append(link)
            down.append(self._uplink(tier, destination, plane, choice)[0] + 1)
            source, destination, plane = self._parents[tier][source], self._parents[tier][destination], next_plane
        return (*up, *reversed(down))

    def _path_of_switches(self, source: tuple[int, int, int], destination: tuple[int, int, int]) -> tuple[int, ...]:
        """Path of which one end at least is a switch: in the planes of the higher end."""
        planes = self._planes_below(max(source, destination))
        up, down = [], []
        lower, upper = source[:2], destination[:2]
        while lower != upper:
            if lower[0] <= upper[0]:
                up.append(self._climb(lower, planes))
                lower = lower[0] + 1, self._parents[lower[0]][lower[1]]
            else:
                down.append(self._climb(upper, planes) + 1)
                upper = upper[0] + 1, self._parents[upper[0]][upper[1]]
        return (*up, *reversed(down))

    def _climb(self, place: tuple[int, int], planes: Sequence[int]) -> int:
        """Link from a switch to the tier above, between the planes of both tiers."""
        tier, group = place
        above = self._stages[tier + 1]
        return self._uplink(tier, group, planes[tier], planes[tier + 1] % above.choices)[0]

    def _planes_below(self, place: tuple[int, int, int]) -> list[int]:
        """Plane by tier of a reduction tree that contains a switch; plane 0 above it."""
        tier, _, plane = place
        planes = [0] * len(self._stages)
        while tier > 0:
            planes[tier] = plane
            stage = self._stages[tier]
            plane = plane // stage.choices if stage.planes > 1 else 0
            tier -= 1
        for above in range(place[0] + 1, len(self._stages)):
            planes[above] = planes[above - 1] * self._stages[above].choices if self._stages[above].planes > 1 else 0
        return planes
