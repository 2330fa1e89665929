"""Use of links by communications: busy seconds of every link, and the arrays that the simulator shares links with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.communication.algorithm import CommAlgorithm, Pattern
from simplan.errors import NotModelledError, Problem
from simplan.network.fabric import Fabric, Route
from simplan.network.flows import Flows, flows_of, phase_shares
from simplan.network.window import window_bytes
from simplan.program.program import Communication
from simplan.units import format_count, format_time

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int32]
_FULL = 1 + 1e-9
"""Busy share of a link above which the communications that use it slow each other down."""
_MAX_CHANGES = 100_000
"""Changes of flapping links in one step."""


class LinkUsage(NamedTuple):
    """Links that one communication, or a phase of it, keeps busy.

    Attributes:
        links: ``(num_links,)`` Indices into ``Fabric.links``, each once.
        seconds: ``(num_links,)`` Busy seconds: bytes over the bandwidth that the algorithm achieves on the link.
        connections: ``(num_links,)`` Flows of the communication that cross the link.
        fixed_s: Seconds of start and latency, which are not shared.
        transfer_s: Seconds of the transfer alone, by the closed form of the algorithm.
        num_bytes: ``(num_links,)`` Bytes that cross each link.
        distance_s: Seconds of latency on long-distance links (``FabricLink.latency_s``), in addition to ``fixed_s``.
        follows: True if it begins when the usage before it in a list ends: an operation has one or several in sequence.
        window_s: Least seconds of the transfer by the bytes that connections have in flight over a distance.
        flow: ``(num_links,)`` Flow that crosses each link, which then is listed for every flow; None for one rate of
            all flows.
        beside: True if it begins with the usage before it in a list: a flow of the same communication.
    """

    links: _Ints
    seconds: _Floats
    connections: _Floats
    fixed_s: float
    transfer_s: float
    num_bytes: _Floats
    distance_s: float = 0.0
    follows: bool = False
    window_s: float = 0.0
    flow: _Ints | None = None
    beside: bool = False

    def times(self, factor: float) -> LinkUsage:
        """A part of the communication: as fast alone, with a fraction of its flows."""
        return self._replace(
            seconds=self.seconds * factor, connections=self.connections * factor, num_bytes=self.num_bytes * factor
        )

    def followed_by_alike(self, other: LinkUsage) -> LinkUsage:
        """This usage and another of the same links in sequence, as one with their mean load."""
        return self._replace(
            seconds=self.seconds + other.seconds,
            connections=np.maximum(self.connections, other.connections),
            transfer_s=self.transfer_s + other.transfer_s,
            num_bytes=self.num_bytes + other.num_bytes,
        )

    def repeated(self, times: int, slowdown: float) -> LinkUsage:
        """The communication several times in sequence, with a slower transfer."""
        return self._replace(
            seconds=self.seconds * (times * slowdown),
            transfer_s=self.transfer_s * times * slowdown,
            fixed_s=self.fixed_s * times * slowdown,
            num_bytes=self.num_bytes * times,
            distance_s=self.distance_s * times,
            window_s=self.window_s * times,
        )

    def windowed(self) -> LinkUsage:
        """The communication at the bandwidth that the bytes in flight allow; the distance costs the difference."""
        longer_s = max(0.0, self.window_s - self.transfer_s)
        return self._replace(transfer_s=self.transfer_s + longer_s, distance_s=self.distance_s + longer_s)

    def flows(self) -> list[LinkUsage]:
        """The communication flow by flow, each at most as fast as alone; as it is if all have one rate."""
        if self.flow is None:
            return [self]
        order = np.argsort(self.flow, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(self.flow[order])) + 1)
        first, *others = (
            self._replace(
                links=self.links[part],
                seconds=self.seconds[part],
                connections=self.connections[part],
                num_bytes=self.num_bytes[part],
                flow=None,
            )
            for part in parts
        )
        return [first, *(flow._replace(fixed_s=0.0, distance_s=0.0, beside=True) for flow in others)]


def together(usages: Sequence[LinkUsage]) -> LinkUsage:
    """Usage of equal communications of different groups that run at the same time, as one."""
    if len(usages) == 1:
        return usages[0]
    links, flow = np.concatenate([usage.links for usage in usages]), None
    columns = [
        np.concatenate(parts)
        for parts in zip(*((usage.seconds, usage.connections, usage.num_bytes) for usage in usages), strict=True)
    ]
    flows = [usage.flow for usage in usages if usage.flow is not None]
    if flows:
        before = np.cumsum([0, *(int(indices.max()) + 1 for indices in flows)])
        flow = np.concatenate([first + indices for first, indices in zip(before, flows, strict=False)]).astype(np.int32)
    else:
        links, where = np.unique(links, return_inverse=True)
        columns = [_sums(where, column, len(links)) for column in columns]
    seconds, connections, num_bytes = columns
    distance_s, window_s = max(usage.distance_s for usage in usages), max(usage.window_s for usage in usages)
    return usages[0]._replace(
        links=links.astype(np.int32),
        seconds=seconds,
        connections=connections,
        num_bytes=num_bytes,
        distance_s=distance_s,
        window_s=window_s,
        flow=flow,
    )


def in_sequence(usages: Sequence[LinkUsage], fixed_s: float) -> list[LinkUsage]:
    """Usages that one operation runs in sequence, those of the same links as one.

    Args:
        fixed_s: Seconds of start and latency of all, which are counted with the first.
    """
    alike: dict[bytes, LinkUsage] = {}
    for usage in usages:
        key = usage.links.tobytes() + (b"" if usage.flow is None else usage.flow.tobytes())
        before = alike.get(key)
        alike[key] = usage if before is None else before.followed_by_alike(usage)
    (first, *others), distance_s = alike.values(), sum(usage.distance_s for usage in usages)
    return [
        first._replace(fixed_s=fixed_s, distance_s=distance_s, follows=False),
        *(other._replace(fixed_s=0.0, distance_s=0.0, follows=True) for other in others),
    ]


def _sums(where: NDArray[np.integer], values: _Floats, size: int) -> _Floats:
    """``(size,)`` Sums of values by index."""
    return np.bincount(where, values, size).astype(np.float64)


_RINGS = (Pattern.RING, Pattern.GLOO_RING)
_ONE_STEP = (Pattern.HOP, Pattern.PAIRWISE, Pattern.ONCE_PER_NODE, Pattern.HIERARCHICAL_ALL_TO_ALL)
_LAST_BETWEEN_NODES = (Pattern.HALVING_DOUBLING, Pattern.HIERARCHICAL, Pattern.PARAMETER_SERVER)


def _crossings(way: CommAlgorithm) -> int:
    """Steps in which an algorithm can cross a long distance: all, without those inside nodes where steps tell them."""
    if way.pattern in (*_RINGS, *_ONE_STEP):
        return 1
    if way.pattern in _LAST_BETWEEN_NODES:
        return way.steps[-1][0]
    return sum(number for number, _ in way.steps)


class _PerByte(NamedTuple):
    """Usage of the flows of a phase per byte of the communication; fields as in ``LinkUsage``."""

    links: _Ints
    seconds: _Floats
    connections: _Floats
    shares: _Floats
    window_s: float
    flow: _Ints | None


class _Routed(NamedTuple):
    """Usages of an algorithm's flows by phase, and the latency of their paths."""

    phases: Sequence[_PerByte]
    distance_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Usages:
    """Usages of communications on a fabric; flows of equal groups and algorithms are routed once.

    Attributes:
        cluster, fabric: The cluster, and its links.
    """

    cluster: ClusterSpec
    fabric: Fabric
    _routed: dict[tuple[object, ...], _Routed] = field(default_factory=dict)

    def of(
        self, communication: Communication, way: CommAlgorithm, devices: tuple[int, ...] | None = None
    ) -> list[LinkUsage]:
        """Usages of the phases of one communication that runs alone.

        Args:
            communication: Communication of two or more ranks.
            way: Its algorithm.
            devices: Device of each of its ranks, always the same for a rank; None if ranks are devices.
        """
        devices = devices or communication.ranks
        key = (communication.kind, devices, communication.draw, way.pattern, way.inside, way.between, way.server_shares)
        if key not in self._routed:
            self._routed[key] = self._route(communication, way, devices)
        routed, num_bytes = self._routed[key], communication.num_bytes
        transfer_s = way.transfer_s(num_bytes)
        fixed_s = way.seconds(num_bytes) - transfer_s
        distance_s = _crossings(way) * routed.distance_s
        return [
            LinkUsage(
                phase.links,
                phase.seconds * num_bytes,
                phase.connections,
                0.0 if number else fixed_s,
                share * transfer_s,
                phase.shares * num_bytes,
                0.0 if number else distance_s,
                number > 0,
                phase.window_s * num_bytes,
                phase.flow,
            )
            for number, (phase, share) in enumerate(
                zip(routed.phases, phase_shares(way, len(communication.ranks)), strict=True)
            )
        ]

    def _route(self, communication: Communication, way: CommAlgorithm, devices: tuple[int, ...]) -> _Routed:
        """Routes the flows; rings cross a distant link once a lap, other algorithms up to once in every step."""
        fabric = self.fabric
        flows = flows_of(way, communication, devices, self.cluster, fabric)
        routes = [fabric.routes(flow.source, flow.destination) for flow in flows.each()]
        distance_s, window_s = self._distance(way, flows, routes) if fabric.has_distance else (0.0, None)
        shares, phase = flows.shares, flows.phases
        paths = [path_part for parts in routes for path_part in parts]
        if len(paths) > len(routes):
            counts = [len(parts) for parts in routes]
            shares, phase = np.repeat(shares, counts), np.repeat(phase, counts)
        lengths = [len(path) for path, _ in paths]
        path = np.repeat(np.arange(len(paths), dtype=np.int32), lengths)
        crossed, part = (
            np.array([link for path, _ in paths for link in path], np.int32),
            np.array([p for _, p in paths]),
        )
        phases = []
        for number in range(len(phase_shares(way, len(communication.ranks)))):
            in_phase = phase[path] == number
            least_s = 0.0 if window_s is None else float(window_s[flows.phases == number].max(initial=0.0))
            phases.append(self._per_byte(way, crossed[in_phase], path[in_phase], shares * part, part, least_s))
        return _Routed(phases, distance_s)

    def _distance(self, way: CommAlgorithm, flows: Flows, routes: Sequence[Sequence[Route]]) -> tuple[float, _Floats]:
        """Latency of long-distance links in a step of the algorithm, and seconds per byte of each flow's window."""
        links = self.fabric.links
        latencies_s = np.array(
            [max(sum(links[link].latency_s for link in path) for path, _ in parts) for parts in routes], np.float64
        )
        distance_s = float(latencies_s @ flows.shares if way.pattern in _RINGS else latencies_s.max(initial=0.0))
        return distance_s, 2 * latencies_s * flows.shares / window_bytes(way.pattern, self.cluster)

    def _per_byte(
        self, way: CommAlgorithm, crossed: _Ints, path: _Ints, shares_of: _Floats, parts_of: _Floats, window_s: float
    ) -> _PerByte:
        """Usage of links that flows cross.

        Args:
            crossed, path: Links, and the path to which each belongs.
            shares_of, parts_of: ``(num_paths,)`` Part of the communication's bytes, and of its flow's, on each path.
            window_s: See ``_PerByte``.
        """
        topology, flow = self.cluster.topology, None
        if topology is not None and topology.rate_per == "flow":
            links, where, flow = crossed, np.arange(len(crossed)), path
        else:
            links, where = np.unique(crossed, return_inverse=True)
        shares = _sums(where, shares_of[path], len(links))
        rates = [
            self.fabric.links[link].bytes_per_s
            * (way.inside if self.fabric.links[link].is_inside_node else way.between)
            for link in links.tolist()
        ]
        connections = _sums(where, parts_of[path] * self.fabric.num_connections, len(links))
        return _PerByte(links.astype(np.int32), shares / np.array(rates), connections, shares, window_s, flow)


class Flap(NamedTuple):
    """A link that is slow for a part of the time.

    Attributes:
        link: Index of the link.
        share: Fraction of its bandwidth in slow times.
        first_s: Seconds from the start of the step to the first slow time.
        slow_s: Seconds of a slow time.
        period_s: Seconds from the begin of one slow time to that of the next.
    """

    link: int
    share: float
    first_s: float
    slow_s: float
    period_s: float

    def change_s(self, number: int) -> float:
        """Time of a change, in seconds: even numbers begin a slow time, and odd ones end it."""
        return self.first_s + number // 2 * self.period_s + number % 2 * self.slow_s


def refuse_many_changes(flaps: Sequence[Flap], alone_s: float) -> None:
    """Refuses flapping links that change too often in a step to simulate.

    Args:
        flaps: Links that are slow for a part of the time.
        alone_s: Seconds of the step if communications took as long as alone; the step is no shorter.

    Raises:
        NotModelledError: They change more than ``_MAX_CHANGES`` times.
    """
    number = sum(2 * max(0.0, alone_s - flap.first_s) / flap.period_s for flap in flaps)
    if number > _MAX_CHANGES:
        rule = f"changes {format_count(number)} times or more in a step of {format_time(alone_s)} or more; at most "
        rule += f"{_MAX_CHANGES:,} changes are simulated"
        fix = "use a longer period_s, or the mean bandwidth_share without slow_s and period_s"
        raise NotModelledError(Problem(field="cluster.slow_links", rule=rule, fix=fix))


@dataclass(frozen=True, eq=False)
class LinkUse:
    """Links that the operations of a Program share.

    Attributes:
        num_links: Links of the fabric.
        usage: ``(num_ops,)`` First usage of each operation, or of the meeting that it leads; -1 for no link.
        head: ``(num_usages,)`` First usage of the sequence to which each belongs.
        beside: ``(num_usages,)`` True if it begins with the one before it.
        fixed_share: ``(num_usages,)`` Share of the time alone of a sequence that transfers nothing.
        transfer_s: ``(num_usages,)`` Seconds of the transfer alone.
        sequence_s: ``(num_usages,)`` The same of the whole sequence.
        first: ``(num_usages + 1,)`` Offsets of each usage into the arrays below.
        link: Links of each usage, each once.
        seconds: Busy seconds of these links.
        connections: Connections on these links.
        num_usages_of_ops: Usages of operations, of other jobs as well; those of constant flows follow.
        always: Usages of constant flows, such as those of other jobs, that cross a link which can be full.
        flaps: Links that are slow for a part of the time.
    """

    num_links: int
    usage: _Ints
    head: NDArray[np.int64]
    beside: NDArray[np.bool_]
    fixed_share: _Floats
    transfer_s: _Floats
    sequence_s: _Floats
    first: _Ints
    link: _Ints
    seconds: _Floats
    connections: _Floats
    num_usages_of_ops: int
    always: tuple[int, ...] = ()
    flaps: tuple[Flap, ...] = ()

    @property
    def num_entries(self) -> int:
        """Operations and constant flows, which are numbered in this order; communications of other jobs follow."""
        return len(self.usage) + len(self.transfer_s) - self.num_usages_of_ops

    @cached_property
    def phase_s(self) -> _Floats:
        """``(num_usages,)`` Seconds of the transfer alone; 0 for flows that begin with another one."""
        return np.where(self.beside, 0.0, self.transfer_s)

    @cached_property
    def num_flows(self) -> NDArray[np.int64]:
        """``(num_usages,)`` Usages that begin together with each, itself among them."""
        phase = np.cumsum(~self.beside) - 1
        return np.asarray(np.bincount(phase)[phase], np.int64)

    @cached_property
    def following(self) -> _Ints:
        """``(num_usages,)`` First usage of the next phase of the sequence; -1 for none."""
        phase = np.cumsum(~self.beside) - 1
        firsts = np.flatnonzero(~self.beside)
        head = self.head[firsts]
        goes_on = np.append(head[1:] == head[:-1], False)
        following = np.where(goes_on, np.append(firsts[1:], -1), -1)
        return np.asarray(following[phase], np.int32)


class _Entries(NamedTuple):
    """Links of several usages, one after the other: ``(num_entries,)`` each.

    Attributes:
        owner: Index of the usage.
        link, seconds, connections: As in ``LinkUsage``.
        share: Fraction of the transfer alone for which the link is busy.
    """

    owner: NDArray[np.int64]
    link: _Ints
    seconds: _Floats
    connections: _Floats
    share: _Floats

    @classmethod
    def of(cls, usages: Sequence[LinkUsage]) -> _Entries:
        """Entries of usages."""
        owner = np.repeat(np.arange(len(usages)), [len(usage.links) for usage in usages])
        link, seconds, connections = (
            np.concatenate([np.zeros(0), *(usage[field] for usage in usages)]) for field in (0, 1, 2)
        )
        transfer_s = np.array([usage.transfer_s for usage in usages], np.float64)[owner]
        share = np.divide(seconds, transfer_s, out=np.zeros_like(seconds), where=transfer_s > 0)
        return cls(owner, link.astype(np.int32), seconds, connections, share)


def loads_together(
    usages: Sequence[LinkUsage],
    usage_of: NDArray[np.integer],
    place: NDArray[np.integer],
    num_links: int,
    always: Sequence[LinkUsage] = (),
) -> _Floats:
    """``(num_links,)`` Busy share of every link if all places that use it ran their largest communication together.

    Args:
        usages, usage_of, place, num_links, always: See ``link_use``.
    """
    every = [*usages, *always]
    is_simultaneous = np.array([usage.beside for usage in every], np.bool_)
    return _busiest(usage_of, place, _Entries.of(every), _heads(usages), num_links, is_simultaneous)


def _heads(usages: Sequence[LinkUsage]) -> NDArray[np.int64]:
    """``(num_usages,)`` First usage of the sequence to which each belongs."""
    begins = np.array([not usage.follows and not usage.beside for usage in usages], np.bool_)
    return np.maximum.accumulate(np.where(begins, np.arange(len(usages)), 0)).astype(np.int64)


def _is_largest(share: _Floats, owner: NDArray[np.int64]) -> NDArray[np.bool_]:
    """``(num_entries,)`` True for the link of each usage with the largest share; the first of equal ones."""
    order = np.lexsort((np.arange(len(share)), -share, owner))
    is_largest = np.zeros(len(share), np.bool_)
    is_largest[order[np.unique(owner[order], return_index=True)[1]]] = True
    return is_largest


def link_use(
    usages: Sequence[LinkUsage],
    usage_of: NDArray[np.integer],
    place: NDArray[np.integer],
    num_links: int,
    always: Sequence[LinkUsage] = (),
    flaps: Sequence[Flap] = (),
) -> LinkUse:
    """Returns the links that can be full, with the usages that cross them; other links slow no communication down.

    Args:
        usages: Different usages; those that an operation runs in sequence stand one after the other.
        usage_of: ``(num_ops,)`` Index of each operation's first usage; -1 for an operation that transfers nothing, or
            that follows the leader of its meeting.
        place: ``(num_ops,)`` Number of each operation's stream and rank: operations of one place never run together.
        num_links: Links of the fabric.
        always: Usages of constant flows, which transfer for the whole step.
        flaps: Links that are slow for a part of the time.
    """
    every = [*usages, *always]
    entries = _Entries.of(every)
    owner, link, seconds, connections, share = entries
    transfer_s, fixed_s = (np.array([usage[field] for usage in every], np.float64) for field in (4, 3))
    head, least, is_simultaneous = (
        _heads(every),
        np.ones(num_links),
        np.array([usage.beside for usage in every], np.bool_),
    )
    for flap in flaps:
        least[flap.link] *= flap.share
    crowded = _busiest(usage_of, place, entries, head[: len(usages)], num_links, is_simultaneous) > _FULL * least
    kept = crowded[link] & (seconds > 0)
    is_simulated = np.bincount(head[owner[kept]], minlength=len(every)) > 0
    # a sequence is simulated whole: its other usages keep their busiest link, which is never full
    kept |= is_simulated[head[owner]] & ~np.isin(owner, owner[kept]) & (seconds > 0) & _is_largest(share, owner)
    counts = np.bincount(owner[kept], minlength=len(every))
    usage = np.where(np.append(is_simulated, False)[usage_of], usage_of, -1).astype(np.int32)  # -1 finds the last
    sequence_s = _sums(head, np.where(is_simultaneous, 0.0, transfer_s), len(every))[head]
    alone_s = fixed_s + sequence_s
    return LinkUse(
        num_links,
        usage,
        head,
        is_simultaneous,
        np.divide(fixed_s, alone_s, out=np.zeros_like(fixed_s), where=alone_s > 0),
        transfer_s,
        sequence_s,
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        link[kept],
        seconds[kept],
        connections[kept],
        len(usages),
        tuple(index for index in range(len(usages), len(every)) if counts[index]),
        tuple(flaps),
    )


def _busiest(
    usage_of: NDArray[np.integer],
    place: NDArray[np.integer],
    entries: _Entries,
    head: NDArray[np.int64],
    num_links: int,
    is_simultaneous: NDArray[np.bool_],
) -> _Floats:
    """See ``loads_together``; ``head`` is that of the usages, which constant flows follow."""
    num_usages = len(head)
    owner, link, share = entries.owner, entries.link.astype(np.int64), entries.share
    if is_simultaneous.any():  # flows of one phase as one
        first = np.maximum.accumulate(np.where(is_simultaneous, 0, np.arange(len(is_simultaneous))))
        keys, where = np.unique(first[owner] * num_links + link, return_inverse=True)
        owner, link, share = keys // num_links, keys % num_links, _sums(where, share, len(keys))
    if not num_usages:  # ranks that never communicate
        return _sums(link, share, num_links)
    uses = usage_of >= 0
    pairs = np.unique(np.stack([place[uses].astype(np.int64), usage_of[uses].astype(np.int64)]), axis=1)
    first = np.searchsorted(owner, np.arange(num_usages + 1))
    until = np.searchsorted(head, np.arange(num_usages), side="right")  # usages after each sequence
    counts = first[until[pairs[1]]] - first[pairs[1]]
    used = np.repeat(first[pairs[1]] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
    key = np.repeat(pairs[0], counts) * num_links + link[used]
    keys, where = np.unique(key, return_inverse=True)
    largest = np.zeros(len(keys))
    np.maximum.at(largest, where, share[used])
    constant = owner >= num_usages
    return _sums(keys % num_links, largest, num_links) + _sums(link[constant], share[constant], num_links)
