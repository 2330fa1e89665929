"""Contention: communications of a step, and of other jobs, slow each other down on the links that they share.

The step is simulated with its links. The durations that come out are then fixed, so that the Program is static again:
intervals, time splits and extrapolation go on as without contention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.cluster.hardware import ClusterSpec
from simplan.cost.communication.algorithm import CommAlgorithm
from simplan.cost.communication.collectives import algorithm_of
from simplan.cost.communication.route import route_of
from simplan.cost.program_costs import ProgramCosts
from simplan.model.layer import CollectiveKind
from simplan.network.background import BackgroundStep, refuse_too_many_steps
from simplan.network.build import fabric_of
from simplan.network.detours import on_detours, splits_of
from simplan.network.fabric import Fabric
from simplan.network.load import LEAST_VISIBLE, LinkLoad, LinkShare, Network, OtherJob
from simplan.network.running import Segments
from simplan.network.usage import (
    Flap,
    LinkUsage,
    LinkUse,
    Usages,
    in_sequence,
    link_use,
    loads_together,
    refuse_many_changes,
    together,
)
from simplan.plan.placement import Placement
from simplan.plan.plan import ParallelPlan, RankMapping
from simplan.program.program import STREAMS, Communication, Program, Stream, Work
from simplan.sim.compiled import compile_program, leaders_of
from simplan.sim.contended import contended_times
from simplan.sim.engine import CoreUse, RepeatedProgram, Repetitions, SimulatedTimes, simulate
from simplan.sim.links import Progress

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int32]
_Group = tuple[int, ...]
NUM_INTERVALS = 200
"""Intervals of a step in which the load of links is drawn."""
_LEAST_S = 1e-30
_MAX_DRAWN = 24
"""Links with a drawn load: so many of those that delay communications most, and of the busiest."""


@dataclass(frozen=True, eq=False)
class Contention:
    """Links of one simulated step, and the communications that crossed them.

    Attributes:
        fabric: Links of the cluster.
        usages: Different usages of links; those of other jobs last.
        names: Name of each usage.
        usage: ``(num_entries,)`` First usage of each operation, then of each constant flow of other jobs, then of each
            communication of background jobs; -1 for operations that cross no link, or follow the first of their
            meeting.
        groups: ``(num_ops,)`` Groups of ranks that the operation stands for.
        use: Links that can be full.
        start_s, end_s: ``(num_entries,)`` Start and end of each communication, in seconds.
        segments: Rates of the communications that cross links which can be full, over time.
        other_jobs: Steps of background jobs.
    """

    fabric: Fabric
    usages: Sequence[LinkUsage]
    names: Sequence[str]
    usage: NDArray[np.int64]
    groups: _Floats
    use: LinkUse
    start_s: _Floats
    end_s: _Floats
    segments: Segments
    other_jobs: tuple[OtherJob, ...] = ()

    def totals(self, names: Sequence[str], step_time_s: float) -> tuple[_Floats, _Floats, _Floats]:
        """Busy and lost seconds of each link by name of the communication, ``(num_links, num_names)``, and its bytes.

        Args:
            names: Names of communications.
            step_time_s: Seconds of the step.
        """
        num_links, numbers = len(self.fabric.links), {name: number for number, name in enumerate(names)}
        number = np.array([numbers[name] for name in self.names], np.int64)
        first, link, seconds, num_bytes = self._entries
        owner = np.repeat(np.arange(len(self.usages)), np.diff(first))
        used = self.usage >= 0
        counts = np.bincount(self.usage[used], self._fractions(step_time_s)[used], len(self.usages))[self.use.head]
        key, size = link * len(names) + number[owner], num_links * len(names)
        busy_s = np.bincount(key, seconds * counts[owner], size).astype(np.float64).reshape(num_links, len(names))
        moved = np.asarray(np.bincount(link, num_bytes * counts[owner], num_links), np.float64)
        lost_s = np.zeros((num_links, len(names)))
        for usage, late_s, full in self._delays():
            lost_s[full, number[usage]] += late_s / len(full)
        return busy_s, lost_s, moved

    def _fractions(self, step_time_s: float) -> _Floats:
        """``(num_entries,)`` Part of each communication inside the step, and the seconds of constant flows."""
        fractions, first, use = np.ones(len(self.usage)), self.use.num_entries, self.use
        op, part, start_s, end_s, rate, _ = self.segments
        fractions[self.num_ops : first] = step_time_s  # usages of constant flows are those of one second
        if len(fractions) == first:
            return fractions
        usage = self.usage[first:]
        moved = (end_s - start_s) * rate * use.transfer_s[part] / np.maximum(use.sequence_s[part], _LEAST_S)
        shared = np.bincount(op, moved, len(fractions))[first:]
        fixed_s, transfer_s = (
            np.array([usage_of_op.fixed_s for usage_of_op in self.usages])[usage],
            use.sequence_s[usage],
        )
        begin_s, end_s = self.start_s[first:] + fixed_s, self.end_s[first:]
        inside_s = np.minimum(end_s, step_time_s) - np.maximum(begin_s, 0.0)
        alone = np.clip(inside_s / np.maximum(transfer_s, _LEAST_S), 0.0, 1.0)
        fractions[first:] = np.where(np.diff(use.first)[usage] > 0, np.minimum(shared, 1.0), alone)
        return fractions

    def _delays(self) -> Iterator[tuple[int, float, _Ints]]:
        """Yield usages, the seconds by which full links delay them, and these links.

        Sharing names one link of those that are full. On a symmetric fabric, all links that a communication loads
        equally are full together, such as one per leaf switch.
        """
        use = self.use
        has_flows = bool(use.beside.any())
        is_symmetric = self.fabric.is_symmetric and not use.always and not self.other_jobs and not has_flows
        op, usage, start_s, end_s, rate, bottleneck = self.segments
        kept = (bottleneck >= 0) & (op < self.num_ops)
        op, usage, bottleneck = op[kept], usage[kept], bottleneck[kept]
        late_s = (end_s - start_s)[kept] * (1 - rate[kept] * use.transfer_s[usage]) * self.groups[op]
        if has_flows:
            late_s *= self._of_latest_flow(op, usage, late_s)
        keys, which = np.unique(usage * len(self.fabric.links) + bottleneck, return_inverse=True)
        sums_s = np.bincount(which, np.maximum(late_s, 0.0), len(keys))
        for key, sum_s in zip(keys.tolist(), sums_s.tolist(), strict=True):
            usage_index, limit = divmod(key, len(self.fabric.links))
            if not is_symmetric:
                yield usage_index, sum_s, np.array([limit], np.int32)
                continue
            part = slice(use.first[usage_index], use.first[usage_index + 1])
            links, seconds, connections = use.link[part], use.seconds[part], use.connections[part]
            at = int(np.flatnonzero(links == limit)[0])
            alike = np.isclose(seconds, seconds[at], rtol=1e-9, atol=0) & (connections == connections[at])
            yield usage_index, sum_s, links[alike]

    def _of_latest_flow(self, op: _Ints, usage: _Ints, late_s: _Floats) -> _Floats:
        """``(num_segments,)`` Delay of the latest flow over that of all flows of the same phase of a communication.

        Args:
            op, usage, late_s: ``(num_segments,)`` Operation, usage of one flow, and seconds of delay.
        """
        is_simultaneous = self.use.beside
        phase = np.maximum.accumulate(np.where(is_simultaneous, 0, np.arange(len(is_simultaneous))))
        flows, of_flow = np.unique(np.stack([op, usage]), axis=1, return_inverse=True)
        flow_s = np.bincount(of_flow.ravel(), late_s, flows.shape[1])
        phases, of_phase = np.unique(np.stack([flows[0], phase[flows[1]]]), axis=1, return_inverse=True)
        latest_s, all_s = np.zeros(phases.shape[1]), np.zeros(phases.shape[1])
        np.add.at(all_s, of_phase.ravel(), flow_s)
        np.maximum.at(latest_s, of_phase.ravel(), flow_s)
        share = np.divide(latest_s, all_s, out=np.ones_like(all_s), where=all_s > 0)
        return np.asarray(share[of_phase.ravel()[of_flow.ravel()]])

    def busy_shares(self, links: NDArray[np.int64], step_time_s: float) -> _Floats:
        """``(num_chosen, NUM_INTERVALS)`` Busy share of chosen links in equal intervals of the simulated step."""
        edges_s = np.linspace(0.0, step_time_s, NUM_INTERVALS + 1)
        first, link, seconds, _ = self._entries
        _, usage, start_s, end_s, rate, _ = self.segments
        # a communication that cannot be delayed transfers at a constant rate after its latency
        num_ops, first_other = self.num_ops, self.use.num_entries
        flows, others = self.usage[num_ops:first_other], self.usage[first_other:]
        can_be_full = np.diff(self.use.first) > 0
        is_simulated = np.concatenate([self.use.usage >= 0, np.isin(flows, self.use.always), can_be_full[others]])
        ops = np.flatnonzero((self.usage >= 0) & ~is_simulated)
        heads = self.usage[ops]
        fixed_s = np.array([usage.fixed_s for usage in self.usages])[heads]
        begin_s = np.minimum(self.start_s[ops] + fixed_s, self.end_s[ops])
        # the usages of a sequence one after the other
        num_parts = np.bincount(self.use.head, minlength=len(self.usages))[heads]
        which = np.repeat(np.arange(len(ops)), num_parts)
        parts = heads[which] + np.arange(len(which)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        until_s = np.cumsum(self.use.phase_s)
        ends = until_s - (until_s - self.use.phase_s)[self.use.head]
        until = np.divide(ends[parts], self.use.sequence_s[parts], out=np.ones(len(parts)), where=ends[parts] > 0)
        since = until - self.use.transfer_s[parts] / np.maximum(self.use.sequence_s[parts], _LEAST_S)
        whole_s = (self.end_s[ops] - begin_s)[which]
        is_flow = ((ops >= num_ops) & (ops < first_other))[which]
        length_s = np.where(is_flow, 1.0, (until - since) * whole_s)  # usages of constant flows are those of one second
        start_s = np.concatenate([start_s, begin_s[which] + since * whole_s])
        end_s = np.concatenate([end_s, begin_s[which] + until * whole_s])
        steady = np.divide(1.0, length_s, out=np.zeros_like(length_s), where=length_s > 0)
        rate, usage = np.concatenate([rate, steady]), np.concatenate([usage, parts])
        owner = np.repeat(np.arange(len(self.usages)), np.diff(first))
        shares = []
        for link_index in links.tolist():
            load = np.zeros(len(self.usages))
            mine = link == link_index
            load[owner[mine]] = seconds[mine]
            uses = load[usage] > 0
            height = load[usage[uses]] * rate[uses]
            busy_s = _integral(edges_s, start_s[uses], height) - _integral(edges_s, end_s[uses], height)
            shares.append(np.diff(busy_s) / np.diff(edges_s))
        return np.array(shares).reshape(len(links), NUM_INTERVALS)

    @property
    def num_ops(self) -> int:
        """Operations of the Program."""
        return len(self.use.usage)

    @cached_property
    def _entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64], _Floats, _Floats]:
        """Offsets of the usages, and for each of their links its index, busy seconds and bytes."""
        first = np.cumsum([0, *(len(usage.links) for usage in self.usages)])
        link, seconds, num_bytes = (
            np.concatenate([np.zeros(0), *(usage[column] for usage in self.usages)]) for column in (0, 1, 5)
        )
        return first, link.astype(np.int64), seconds, num_bytes


def _integral(at_s: _Floats, since_s: _Floats, height: _Floats) -> _Floats:
    """Integral, up to each of some times, of heights that each begin at a time and never end."""
    order = np.argsort(since_s, kind="stable")
    begun = np.searchsorted(since_s[order], at_s, side="right")
    heights, areas = (
        np.concatenate([[0.0], np.cumsum(values)]) for values in (height[order], (height * since_s)[order])
    )
    return np.asarray(at_s * heights[begun] - areas[begun])


def apply_contention(
    program: Program,
    program_costs: ProgramCosts,
    cluster: ClusterSpec,
    plan: ParallelPlan,
    server_shares: tuple[float, ...],
    sharing: CoreUse | None,
    background: Sequence[BackgroundStep] = (),
    progress: Progress | None = None,
) -> tuple[ProgramCosts, Contention]:
    """Lengthen the communications of a Program that share links with others, or cross long distances.

    Args:
        program, program_costs: Program, and its durations without contention.
        cluster: Cluster with a topology.
        plan: Plan of the Program.
        server_shares: See ``Job.server_shares``.
        sharing, progress: See ``simulate``.
        background: Steps of background jobs, on the same links.

    Returns:
        Costs with longer durations and deviations, and the load of the links.
    """
    fabric = fabric_of(cluster)
    own_usages = _ProgramUsages(
        program, program_costs, Usages(cluster, fabric), plan, server_shares, cluster.fabric_nodes
    ).of_ops()
    alone_s = own_usages.alone_s(program, program_costs)
    constant = [*flows_of_other_jobs(cluster, fabric)]
    others = [
        _ProgramUsages(
            step.program,
            step.program_costs,
            Usages(step.job.cluster, fabric),
            step.job.plan,
            step.job.server_shares,
            step.background.nodes,
        ).of_ops()
        for step in background
    ]
    programs = [program, *(step.program for step in background)]
    (own_usages, *others), flows = _routed(programs, [own_usages, *others], [flow for _, flow in constant], fabric)
    use, numbers = _link_use(programs, [own_usages, *others], flows, cluster, fabric)
    if use.flaps:
        refuse_many_changes(use.flaps, compile_program(program).times(alone_s).step_time_s)
    quiet, without_s, step_s = replace(use, always=()), None, 0.0
    realize = partial(_realize, program, alone_s, sharing)
    if cluster.background:  # first without other jobs; these communications are not counted as progress
        times, without_s = realize(quiet, None, ())
        step_s = times.step_time_s
    repeated, other_jobs_alone_s = [], []
    for step, other, usage in zip(background, others, numbers[1:], strict=True):
        seconds, crosses = other.alone_s(step.program, step.program_costs), np.diff(use.first)[usage] > 0
        links = replace(quiet, usage=np.where((usage >= 0) & crosses, usage, -1).astype(np.int32))
        other_s = simulate(step.program, seconds, None, links).step_time_s
        refuse_too_many_steps(step, other_s, step_s)
        other_jobs_alone_s.append(other_s)
        repeated.append(RepeatedProgram(step.program, seconds, usage.tolist(), step.background.offset_s % other_s))
    times, realized_s = realize(use, progress, repeated)
    given_s = program_costs.durations_s
    longer = np.divide(realized_s, given_s, out=np.ones_like(given_s), where=given_s > 0)
    costs = replace(
        program_costs,
        durations_s=realized_s,
        deviations_s=program_costs.deviations_s * longer,
        uncontended_s=alone_s,
        without_background_s=without_s,
    )
    usages, names = [*own_usages.usages], [*own_usages.names]
    for step, other in zip(background, others, strict=True):
        usages += other.usages
        names += [f"{step.background.name}: {name}" for name in other.names]
    repetitions = times.repetitions or Repetitions.none()
    num_flows, step_time_s = len(constant), times.step_time_s
    pairs = zip(background, other_jobs_alone_s, repetitions.step_times_s, strict=True)
    return costs, Contention(
        fabric=fabric,
        usages=[*usages, *flows],
        names=[*names, *(name for name, _ in constant)],
        usage=np.concatenate([own_usages.usage, len(usages) + np.arange(num_flows), repetitions.usage]),
        groups=own_usages.groups,
        use=use,
        start_s=np.concatenate([times.start_s, np.zeros(num_flows), repetitions.start_s]),
        end_s=np.concatenate([times.end_s, np.full(num_flows, step_time_s), repetitions.end_s]),
        segments=(times.segments or Segments.empty(0)),
        other_jobs=tuple(OtherJob(step.background.name, alone_s, inside) for step, alone_s, inside in pairs),
    )


def _realize(
    program: Program,
    alone_s: _Floats,
    sharing: CoreUse | None,
    use: LinkUse,
    progress: Progress | None,
    others: Sequence[RepeatedProgram],
) -> tuple[SimulatedTimes, _Floats]:
    """Times of a step on shared links, and the durations that its operations have there."""
    if sharing is not None or others:
        times = simulate(program, alone_s, sharing, use, progress, others)
    elif (use.usage >= 0).any():
        times = contended_times(program, alone_s, use, progress)
    else:
        times = SimulatedTimes(*compile_program(program).spans(alone_s))
    leaders = leaders_of(program)
    taken_s = np.maximum(alone_s, (times.end_s - times.start_s)[leaders])
    return times, np.where(use.usage[leaders] >= 0, taken_s, alone_s)


class _Together(NamedTuple):
    """Usages of Programs that run at the same time.

    Attributes:
        usages: Usages of all Programs.
        numbers: By Program, ``(num_ops,)`` index into ``usages``; -1 as in ``_OpUsages``.
        usage_of, place: ``(num_ops of all Programs,)`` See ``link_use``.
    """

    usages: list[LinkUsage]
    numbers: list[NDArray[np.int64]]
    usage_of: NDArray[np.int64]
    place: NDArray[np.int64]

    @classmethod
    def of(cls, programs: Sequence[Program], op_usages: Sequence[_OpUsages]) -> _Together:
        """Usages of the operations of some Programs."""
        usages: list[LinkUsage] = []
        numbers, places, first_place = [], [], 0
        for program, usages_of in zip(programs, op_usages, strict=True):
            numbers.append(np.where(usages_of.usage >= 0, usages_of.usage + len(usages), -1))
            usages += usages_of.usages
            place = program.columns.rank.astype(np.int64) * len(STREAMS) + program.columns.stream
            places.append(first_place + place)
            first_place += 1 + int(place.max(initial=0))
        return cls(usages, numbers, np.concatenate(numbers), np.concatenate(places))


def _routed(
    programs: Sequence[Program], op_usages: Sequence[_OpUsages], constant: Sequence[LinkUsage], fabric: Fabric
) -> tuple[list[_OpUsages], list[LinkUsage]]:
    """Usages of Programs and of constant flows, with the detours that adaptive routing takes around full links."""
    between = fabric.interconnect
    if between is None or not between.has_detours:
        return [*op_usages], [*constant]
    usages, _, usage_of, place = _Together.of(programs, op_usages)
    load = loads_together(usages, usage_of, place, len(fabric.links), constant)
    splits = splits_of(load, fabric.links, between.detours)
    routed = [
        usages_of._replace(usages=[on_detours(usage, splits) for usage in usages_of.usages]) for usages_of in op_usages
    ]
    return routed, [on_detours(usage, splits) for usage in constant]


def _link_use(
    programs: Sequence[Program],
    op_usages: Sequence[_OpUsages],
    constant: Sequence[LinkUsage],
    cluster: ClusterSpec,
    fabric: Fabric,
) -> tuple[LinkUse, list[NDArray[np.int64]]]:
    """Links that can be full, with the operations of the first Program; and the usages of all operations by Program.

    Args:
        programs, found: Programs that run at the same time, and usages of their operations.
        constant: Usages of constant flows.
        cluster, fabric: Cluster, and its links.
    """
    usages, numbers, usage_of, place = _Together.of(programs, op_usages)
    flaps = [
        Flap(fabric.link_named(slow.link), slow.bandwidth_share, slow.first_s, slow.slow_s, slow.period_s)
        for slow in cluster.slow_links
        if slow.slow_s is not None and slow.period_s is not None
    ]
    use = link_use(usages, usage_of, place, len(fabric.links), constant, flaps)
    return replace(use, usage=use.usage[: len(programs[0])]), numbers


def flows_of_other_jobs(cluster: ClusterSpec, fabric: Fabric) -> Iterator[tuple[str, LinkUsage]]:
    """Yield name and usage per second of every constant flow; all network cards of both nodes carry equal parts."""
    for flow in cluster.background_flows:
        sources, destinations = (np.flatnonzero(fabric.node_of_device == node).tolist() for node in flow.nodes)
        pairs = [*zip(sources, destinations, strict=False)]
        bytes_per_s = flow.gbit * 1e9 / 8 / len(pairs)
        parts = []
        for source, destination in pairs:
            for path, share in fabric.routes(source, destination):
                links = [link for link in path if not fabric.links[link].is_inside_node]
                ones = np.ones(len(links))
                moved = share * bytes_per_s * ones
                busy_s = moved / np.array([fabric.links[link].bytes_per_s for link in links])
                connections = share * fabric.num_connections * ones
                parts.append(LinkUsage(np.array(links, np.int32), busy_s, connections, 0.0, 1.0, moved))
        yield f"other jobs, {flow.source} to {flow.destination}", together(parts)


class _OpUsages(NamedTuple):
    """Usages of the operations of a Program.

    Attributes:
        usages, names: Different usages, and their names.
        usage: ``(num_ops,)`` Index of the first usage of each operation; -1 for operations that cross no link, or
            follow the first of their meeting.
        groups: ``(num_ops,)`` Groups of ranks that the operation stands for.
    """

    usages: list[LinkUsage]
    names: list[str]
    usage: NDArray[np.int64]
    groups: _Floats

    def alone_s(self, program: Program, program_costs: ProgramCosts) -> _Floats:
        """``(num_ops,)`` Durations without contention, with the latency of long distances."""
        distances_s = np.array([*(usage.distance_s for usage in self.usages), 0.0])  # the last for no usage
        return np.asarray(program_costs.durations_s + distances_s[self.usage][leaders_of(program)])


@dataclass(frozen=True, eq=False)
class _ProgramUsages:
    """Usages of the communications of a Program.

    A simulated group stands for all groups whose members its ranks stand for; they run at the same time.

    Attributes:
        server_shares: See ``Job.server_shares``.
        nodes: Node of the fabric of each node of the job.
    """

    program: Program
    program_costs: ProgramCosts
    usages: Usages
    plan: ParallelPlan
    server_shares: tuple[float, ...]
    nodes: tuple[int, ...]
    _ways: dict[tuple[object, ...], CommAlgorithm] = field(default_factory=dict)

    def of_ops(self) -> _OpUsages:
        """Usages of all operations."""
        program = self.program
        columns = program.columns
        moves = np.array([any(isinstance(part, Communication) for part in work) for work in program.works], np.bool_)
        leads = leaders_of(program) == np.arange(len(program))
        usage_of, groups = np.full(len(program), -1), np.zeros(len(program))
        indices = np.flatnonzero(moves[columns.work] & leads & (self.program_costs.durations_s > 0))
        keys = columns.work[indices].astype(np.int64) * len(program.stands_for) + columns.rank[indices]
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        link_usages: list[LinkUsage] = []
        names: list[str] = []
        numbers, counts = np.full(len(first), -1), np.zeros(len(first))
        for key, index in enumerate(indices[first].tolist()):
            work = program.works[columns.work[index]]
            usages, counts[key] = self._of_op(
                work,
                int(columns.rank[index]),
                meets=bool(columns.meeting[index] >= 0),
                seconds=float(self.program_costs.durations_s[index]),
            )
            if usages:
                numbers[key] = len(link_usages)
                link_usages += usages
                names += [self._name(work, STREAMS[columns.stream[index]])] * len(usages)
        usage_of[indices], groups[indices] = numbers[which], counts[which]
        return _OpUsages(link_usages, names, usage_of, groups)

    def _name(self, work: tuple[Work, ...], stream: Stream) -> str:
        """Name of the first communication, and its stream."""
        part = next(part for part in work if isinstance(part, Communication))
        name = self.program_costs.by_work[part].name
        return name if part.kind is CollectiveKind.SEND else f"{name} ({stream})"

    def _of_op(
        self, work: tuple[Work, ...], rank: int, *, meets: bool, seconds: float
    ) -> tuple[list[LinkUsage], float]:
        """Usages of an operation, and the number of groups that it stands for."""
        moved = Counter(part for part in work if isinstance(part, Communication) and len(part.ranks) > 1)
        usages, num_groups, first = list[LinkUsage](), 1.0, next(iter(moved), None)
        for part, times in moved.items():
            assert first is not None
            groups = [*self._groups(part.ranks, rank)]
            # ranks whose operations do not meet each carry their part of the group's communication
            apart = 1 if meets and part.ranks == first.ranks else len(self._members(part.ranks))
            num_groups = len(groups) / apart
            way = self._way(part)
            by_group = [self.usages.of(part._replace(ranks=group), way, self._devices(group)) for group in groups]
            phases = [together(phase).times(1 / apart) for phase in zip(*by_group, strict=True)]
            alone_s = sum(phase.fixed_s + phase.transfer_s for phase in phases)
            slowdown = self.program_costs.by_work[part].cost_estimate.seconds / alone_s if alone_s > 0 else 1.0
            used = (phase for phase in phases if phase.transfer_s > 0 and len(phase.links))
            usages += [phase.repeated(times, slowdown).windowed() for phase in used]
        if not usages:
            return [], 0.0
        free_s = seconds + sum(usage.distance_s - usage.transfer_s for usage in usages)
        sequence = in_sequence(usages, max(0.0, free_s))
        return [flow for usage in sequence for flow in usage.flows()], num_groups

    def _way(self, part: Communication) -> CommAlgorithm:
        """Algorithm of a communication; of equal ones of other ranks it is the same."""
        cluster = self.usages.cluster
        route = route_of(self._devices(part.ranks), cluster)
        key = (part.kind, part.num_bytes, part.draw, route)
        if key not in self._ways:
            self._ways[key] = algorithm_of(part, cluster, route, self.plan.collectives, self.server_shares)
        return self._ways[key]

    @cached_property
    def mapping(self) -> RankMapping:
        """Mesh of the ranks."""
        return RankMapping.of(self.plan)

    @cached_property
    def placement(self) -> Placement | None:
        """Devices of the ranks; None if they are the devices of their own numbers."""
        return Placement.of(self.plan)

    @cached_property
    def _stands_for(self) -> NDArray[np.int64]:
        return np.array(self.program.stands_for)

    def _devices(self, group: _Group) -> _Group:
        """Devices of the fabric that the ranks of a group have."""
        devices = group if self.placement is None else self.placement.devices_of(group)
        if self._fills_first_nodes:
            return devices
        per_node = self.usages.cluster.devices_per_node
        return tuple(self.nodes[device // per_node] * per_node + device % per_node for device in devices)

    @cached_property
    def _fills_first_nodes(self) -> bool:
        return self.nodes == tuple(range(len(self.nodes)))

    def _members(self, group: _Group) -> set[int]:
        """Simulated ranks of a group."""
        return set(self._stands_for[list(group)].tolist())

    def _groups(self, ranks: _Group, rank: int) -> Iterator[_Group]:
        """All groups of the same axes with a rank that ``rank`` stands for."""
        alike = np.flatnonzero(self._stands_for == rank).tolist()
        if len(alike) == 1:
            yield ranks
            return
        yield from dict.fromkeys(self.mapping.like(ranks, rank, other) for other in alike)


def network_of(
    steps: Sequence[tuple[Contention, float]],
    extrapolated: Callable[..., _Floats],
    step_time_s: float,
    uncontended_s: float,
    without_background_s: float | None,
) -> Network:
    """Load of all links in a step.

    Args:
        steps: Contention of each simulated step, the longest first, with its step time in seconds.
        extrapolated: From sums over each simulated step to those of the whole step.
        step_time_s: Seconds of the whole step.
        uncontended_s: Seconds of the whole step if communications took as long as alone.
        without_background_s: Seconds of the whole step if no other job used the links; None without other jobs.
    """
    names = tuple(dict.fromkeys(name for contention, _ in steps for name in contention.names))
    busy_s, lost_s, num_bytes = (
        extrapolated(*sums) for sums in zip(*(each.totals(names, time_s) for each, time_s in steps), strict=True)
    )
    link_busy_s, link_lost_s = busy_s.sum(axis=1), lost_s.sum(axis=1)
    loaded = np.flatnonzero(num_bytes > 0)
    visible_s = np.where(link_lost_s > LEAST_VISIBLE * step_time_s, link_lost_s, 0.0)
    order = loaded[np.lexsort((loaded, -link_busy_s[loaded].round(12), -visible_s[loaded].round(12)))]
    contention, simulated_s = steps[0]
    busiest = order[np.argsort(-link_busy_s[order], kind="stable")]
    totals = [
        f"{fabric_link.bytes_per_s} {busy:.6g}"
        for fabric_link, busy in zip(contention.fabric.links, link_busy_s, strict=True)
    ]
    drawn = np.unique([link for links in (order, busiest) for link in _varied(links.tolist(), totals)[:_MAX_DRAWN]])
    drawn = drawn.astype(np.int64)
    series = dict(zip(drawn.tolist(), contention.busy_shares(drawn, simulated_s), strict=True))
    links = contention.fabric.links

    def load(link: int) -> LinkLoad:
        parts = [
            LinkShare(name, float(busy_s[link, k]), float(lost_s[link, k]))
            for k, name in enumerate(names)
            if busy_s[link, k] > 0 or lost_s[link, k] > 0
        ]
        return LinkLoad(
            name=links[link].name,
            bytes_per_s=links[link].bytes_per_s,
            num_bytes=float(num_bytes[link]),
            busy_share=float(link_busy_s[link]) / step_time_s,
            lost_s=float(link_lost_s[link]),
            communications=tuple(sorted(parts, key=lambda part: (-part.lost_s, -part.busy_s))),
            series=tuple(series[link].tolist()) if link in series else (),
        )

    return Network(
        step_time_s=step_time_s,
        contention_s=max(0.0, step_time_s - uncontended_s),
        links=tuple(load(link) for link in order.tolist()),
        num_links=len(links),
        interval_s=simulated_s / NUM_INTERVALS,
        without_background_s=without_background_s,
        other_jobs=contention.other_jobs,
    )


def _varied(links: Sequence[int], totals: Sequence[str]) -> list[int]:
    """Links in another order: the first of all with equal totals, then the second of all, and so on."""
    seen: Counter[str] = Counter()
    rounds = {}
    for link in links:
        rounds[link] = seen[totals[link]]
        seen[totals[link]] += 1
    return sorted(links, key=rounds.__getitem__)
