"""Network of a scenario: its fabric, the load of its links, and the step time with a slow link or another placement.

Functions that take the text of a scenario run in worker processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any

from app.figures.style import (
    CATEGORIES,
    GRID,
    MUTED,
    PLANS,
    Figure,
    bar,
    empty,
    figure,
    labeled_bars,
    upright,
)
from app.fitting import document_text
from app.predictions import predicted
from simplan import catalog
from simplan.cluster.hardware import ClusterSpec, SlowLink
from simplan.document import parse_yaml
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.explain.rank_order import FasterOrder, faster_order
from simplan.job import Job
from simplan.network.load import LinkLoad, Network
from simplan.plan.hostfile import nodes_of
from simplan.plan.placement import DEFAULT_ORDER, axes_of
from simplan.plan.plan import ParallelPlan
from simplan.predict.step_summary import summarize_step
from simplan.report.drawings.drawing import time_unit
from simplan.report.drawings.fabric_drawing import FabricDrawing, draw_fabric, kind_of
from simplan.report.drawings.fabric_svg import fabric_svg
from simplan.report.drawings.link_load import LoadRow, draw_link_load, load_color, short_link_name
from simplan.scenario import parse_scenario
from simplan.units import format_bytes, format_percent, format_rate, format_time


@dataclass(frozen=True, slots=True)
class NetworkResult:
    """Fabric of a cluster and its load in a step.

    Attributes:
        drawing: Fabric; of a cluster without a topology, as if one switch joined its nodes.
        svg: Drawing as an SVG document; cables have the color of their mean load.
        step_time_s: Predicted step time.
        alone_s: Step time without a topology; equal to ``step_time_s`` for a cluster without one.
        network: Load of the links; None for a cluster without a topology.
        rows: Links of equal load together: those that delay communications most first, then the busiest.
        num_hidden: Loaded links without a row.
        length_s: Length of the simulated step, over which the load of the rows is given.
        nodes: Nodes in the order of the first rank on each.
        faster: Order of nodes with which the step is shorter; None for none.
    """

    drawing: FabricDrawing
    svg: str
    step_time_s: float
    alone_s: float
    network: Network | None
    rows: tuple[LoadRow, ...] = ()
    num_hidden: int = 0
    length_s: float = 0.0
    nodes: tuple[int, ...] = ()
    faster: FasterOrder | None = None


def network_result(text: str, calibrated_at: int) -> NetworkResult:
    """Predicts a scenario, and draws its fabric.

    Args:
        text: The scenario's YAML.
        calibrated_at: Modification time of this machine's calibration, a cache key.

    Raises:
        NotModelledError: Processes that share the cores of a machine have no links.
    """
    prediction = predicted(text, calibrated_at)
    job, network = prediction.job, prediction.network
    if job.cluster.cores_per_node is not None:
        rule = "runs processes on shared cores; links between them are not modeled"
        raise NotModelledError(
            Problem(field="cluster.preset", value=job.cluster.id, rule=rule, fix="choose another cluster")
        )
    drawing = draw_fabric(job.cluster)
    if network is None:
        return NetworkResult(drawing, fabric_svg(drawing), prediction.step_time_s, prediction.step_time_s, None)
    load = draw_link_load(prediction.name, network)
    unshared = job.cluster.model_copy(update={"topology": None, "background": (), "slow_links": ()})
    return NetworkResult(
        drawing=drawing,
        svg=fabric_svg(drawing, {link.name: link.busy_share for link in network.links}),
        step_time_s=prediction.step_time_s,
        alone_s=summarize_step(replace(job, cluster=unshared)).step_time_s,
        network=network,
        rows=load.rows,
        num_hidden=load.num_hidden,
        length_s=load.step_time_s,
        nodes=_nodes(job),
        faster=faster_order(prediction),
    )


@dataclass(frozen=True, slots=True)
class Alternative:
    """Step time with one setting changed.

    Attributes:
        name: Value of the setting.
        words: Its description; empty for none.
        step_time_s: Step time; None for a value that cannot be.
        is_current: True for the value of the scenario.
        refused: Error of a value that cannot be; empty for one with a prediction.
    """

    name: str
    words: str
    step_time_s: float | None
    is_current: bool = False
    refused: str = ""


def topologies(text: str) -> tuple[Alternative, ...]:
    """Step time of a scenario with each topology of the catalog, the shortest first; those that cannot be are last."""
    data = parse_yaml(text, "scenario").data
    alternatives = []
    for name in catalog.names("topologies"):
        changed = {**data, "cluster": {**data["cluster"], "topology": name}}
        alternatives.append(_alternative(name, catalog.topology(name).words(), changed))
    return _in_order(alternatives)


def placements(text: str) -> tuple[Alternative, ...]:
    """Step time of a scenario with each order of its axes of several ranks, the shortest first.

    For a cluster with a topology, the order of nodes that follows the network is one more, if it is another one.
    """
    from simplan.network.order import nodes_by_network

    job, data = parse_scenario(text).job, parse_yaml(text, "scenario").data
    plan = job.plan
    axes = [axis for axis in DEFAULT_ORDER if getattr(plan, axis) > 1]
    now = _order(plan)
    alternatives = []
    for order in permutations(axes):
        changed = {**data, "plan": {**data["plan"], "placement": list(order)}}
        alternative = _alternative(", ".join(order), "", changed)
        alternatives.append(replace(alternative, is_current=order == now))
    if job.cluster.topology is not None and _nodes(job) != nodes_by_network(job.cluster):
        alternatives.append(_alternative("network", "", {**data, "plan": {**data["plan"], "placement": "network"}}))
    return _in_order(alternatives)


def _nodes(job: Job) -> tuple[int, ...]:
    """Nodes in the order of the first rank on each, which rings and trees follow."""
    devices = range(job.plan.num_devices) if job.placement is None else job.placement.devices
    return nodes_of(devices, job.cluster.devices_per_node)


def _order(plan: ParallelPlan) -> tuple[str, ...] | None:
    """Axes of several ranks as a plan places them; None for a list of devices."""
    placement = plan.placement or DEFAULT_ORDER
    if any(isinstance(place, int) for place in placement):
        return None
    named = axes_of(map(str, placement))
    order = (*named, *(axis for axis in DEFAULT_ORDER if axis not in named))
    return tuple(axis for axis in order if getattr(plan, axis) > 1)


def _alternative(name: str, words: str, data: Mapping[str, Any]) -> Alternative:
    try:
        job = parse_scenario(document_text(dict(data))).job
        return Alternative(name, words, summarize_step(job).step_time_s)
    except SpecError as error:
        return Alternative(name, words, None, refused=error.sentences)


def _in_order(alternatives: list[Alternative]) -> tuple[Alternative, ...]:
    return tuple(
        sorted(
            alternatives,
            key=lambda alternative: float("inf") if alternative.step_time_s is None else alternative.step_time_s,
        )
    )


def slow_link_step_time_s(text: str, link: str, bandwidth_share: float) -> float:
    """Step time if one link has a part of its bandwidth.

    Args:
        text: The scenario's YAML; its cluster has a topology.
        link: Name of a link, such as ``leaf0 -> spine``.
        bandwidth_share: Fraction of the bandwidth that is left.

    Raises:
        SpecError: The topology has no such link.
    """
    return _slowed_s(parse_scenario(text).job, link, bandwidth_share)


@lru_cache(maxsize=256)
def _slowed_s(job: Job, link: str, bandwidth_share: float) -> float:
    return summarize_step(replace(job, cluster=_slowed(job.cluster, link, bandwidth_share))).step_time_s


def _slowed(cluster: ClusterSpec, link: str, bandwidth_share: float) -> ClusterSpec:
    """The cluster with one link slower than it is; a link that is slow already becomes slower."""
    before = {slow.link: slow.bandwidth_share for slow in cluster.slow_links}
    slow = before | {link: before.get(link, 1.0) * bandwidth_share}
    links = tuple(SlowLink(link=name, bandwidth_share=share) for name, share in slow.items())
    return cluster.model_copy(update={"slow_links": links})


@dataclass(frozen=True, slots=True)
class SlowLinkCost:
    """Cost of a slow link among links of one kind.

    Attributes:
        kind: Kinds of both ends, such as ``leaf -> spine``.
        num_links: Links of the kind.
        link: The one that delays communications most, else the busiest; the slow one.
        bytes_per_s: Its bandwidth.
        busy_share: Its mean busy share in the step without a slow link.
        step_time_s: Step time with it.
    """

    kind: str
    num_links: int
    link: str
    bytes_per_s: float
    busy_share: float
    step_time_s: float


def slow_link_costs(text: str, calibrated_at: int, bandwidth_share: float) -> tuple[SlowLinkCost, ...]:
    """Step time with one slow link of each kind, the longest first.

    Args:
        text, calibrated_at: See ``network_result``; the cluster has a topology.
        bandwidth_share: Fraction of the link's bandwidth that is left.
    """
    prediction = predicted(text, calibrated_at)
    assert prediction.network is not None, "the cluster has a topology"
    costs = _costs(prediction.job, prediction.network, prediction.step_time_s, bandwidth_share)
    return tuple(sorted(costs, key=lambda cost: -cost.step_time_s))


def _costs(job: Job, network: Network, step_time_s: float, bandwidth_share: float) -> Iterator[SlowLinkCost]:
    from simplan.network.build import fabric_of

    fabric = fabric_of(job.cluster)
    loads: dict[str, LinkLoad] = {load.name: load for load in network.links}
    rank = {name: number for number, name in enumerate(loads)}
    kinds = defaultdict(list)
    for link in fabric.links:
        kinds[f"{kind_of(fabric, link.source)} -> {kind_of(fabric, link.destination)}"].append(link)
    for kind, links in kinds.items():
        first = min(links, key=lambda link: rank.get(link.name, len(rank)))
        load = loads.get(first.name)
        # a link without traffic costs nothing
        slowed_s = step_time_s if load is None else _slowed_s(job, first.name, bandwidth_share)
        busy_share = 0.0 if load is None else load.busy_share
        yield SlowLinkCost(kind, len(links), first.name, first.bytes_per_s, busy_share, slowed_s)


_SHADES = [
    [0.0, GRID],
    *([share, f"{load_color(share)}{opacity}"] for share, opacity in ((0.02, "60"), (0.25, "b0"))),
    *([share, load_color(share)] for share in (0.5, 0.75, 1.0)),
]
"""Colors of busy shares; light ones let the paper through, so that on dark paper the busiest link is the brightest."""
_COLORBAR = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1,
    "yanchor": "bottom",
    "len": 0.4,
    "thickness": 10,
    "tickformat": ".0%",
    "tickvals": [0, 0.5, 1],
    "outlinewidth": 0,
}
_MAX_NAME = 34
_MAX_NAMED = 3


def load_figure(rows: Sequence[LoadRow], length_s: float, chosen: str) -> Figure:
    """Busy share of links over a step as a heat map, and its mean as bars.

    Args:
        rows: Links, one row for those of equal load.
        length_s: Length of the simulated step in seconds.
        chosen: Name of the chosen link.
    """
    if not rows:
        return empty("No link has traffic.")
    unit, unit_s = time_unit(length_s)
    num = len(rows[0].link.series)
    starts = [length_s * (place + 0.5) / num / unit_s for place in range(num)]
    names = [_row_name(row) for row in rows]
    hovers = [_hover(row.link) for row in rows]
    cells = {
        "type": "heatmap",
        "x": starts,
        "y": names,
        "z": [[min(1.0, share) for share in row.link.series] for row in rows],
        "customdata": [[hover] * num for hover in hovers],
        "hovertemplate": f"%{{z:.0%}} busy at %{{x:,.4~g}} {unit}<br>%{{customdata}}<extra></extra>",
        "zmin": 0,
        "zmax": 1,
        "colorscale": _SHADES,
        "ygap": 2,
        "colorbar": _COLORBAR,
    }
    means = bar(
        orientation="h",
        xaxis="x2",
        x=[row.link.busy_share for row in rows],
        y=names,
        marker={"color": [PLANS[1] if row.link.name == chosen else PLANS[0] for row in rows]},
        customdata=[[hover, row.link.name] for hover, row in zip(hovers, rows, strict=True)],
        hovertemplate="mean %{x:.1%} busy<br>%{customdata[0]}<extra></extra>",
        showlegend=False,
    )
    ends = [0, max(row.link.busy_share for row in rows)]
    # Titles begin with an empty line: the theme puts the first one beside the labels of axes with a color bar.
    return figure(
        [cells, means],
        height=140 + 24 * len(rows),
        bargap=0.25,
        xaxis={"title": f"<br>time in the step, {unit}", "domain": [0, 0.78], "showgrid": False},
        xaxis2={"title": "<br>mean", "domain": [0.82, 1], "anchor": "y", "tickformat": ".0%", "tickvals": ends},
        yaxis=CATEGORIES,
    )


def _row_name(row: LoadRow) -> str:
    name = short_link_name(row.link.name, _MAX_NAME)
    return f"{name} +{row.num_links - 1} " if row.num_links > 1 else f"{name} "


def _hover(link: LinkLoad) -> str:
    """Name, bandwidth, bytes, delays, and the communications that keep the link busy longest."""
    busiest = sorted(link.communications, key=lambda part: -part.busy_s)
    lines = [
        f"{link.name}, {format_rate(link.bytes_per_s)}",
        f"{format_bytes(link.num_bytes)} a step, {format_percent(link.busy_share)} busy in the mean",
        *(f"{format_time(part.busy_s)}: {part.name}" for part in busiest[:_MAX_NAMED]),
    ]
    if len(busiest) > _MAX_NAMED:
        lines.append(f"and {len(busiest) - _MAX_NAMED} more")
    if link.lost_s > 0:
        lines.append(f"delays communications by {format_time(link.lost_s)}, all groups of ranks together")
    return "<br>".join(lines)


def alternatives_figure(alternatives: Sequence[Alternative], current_s: float) -> Figure:
    """Step time with each value of a setting, and its change; a line at the step time of the scenario."""
    timed = [
        (alternative, alternative.step_time_s) for alternative in alternatives if alternative.step_time_s is not None
    ]
    if not timed:
        return empty("No value of this setting can be predicted.")
    unit, unit_s = time_unit(current_s)
    return labeled_bars(
        [alternative.name for alternative, _ in timed],
        [time_s / unit_s for _, time_s in timed],
        [_change(time_s, current_s) for _, time_s in timed],
        [f"{alternative.name}: {format_time(time_s)} {alternative.words}" for alternative, time_s in timed],
        f"step time, {unit}",
        color=[PLANS[1] if alternative.is_current else PLANS[0] for alternative, _ in timed],
        room=1.3,
        shapes=[upright(current_s / unit_s, {"color": MUTED, "dash": "dash"})],
    )


def _change(time_s: float, current_s: float) -> str:
    change = time_s / current_s - 1
    return f"{change:+.1%}" if abs(change) >= 5e-4 else format_time(time_s)
