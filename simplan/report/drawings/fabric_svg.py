"""Fabric drawing as SVG: a sample of the nodes at the bottom, layers of switches above them; a torus as a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from xml.etree import ElementTree

from simplan.report.drawings.drawing import clean
from simplan.report.drawings.fabric_drawing import DrawnLink, DrawnNode, FabricDrawing, rate_words
from simplan.report.drawings.link_load import load_color
from simplan.report.drawings.svg import LANE, Element, line, page, rect, shortened, soft, text, written
from simplan.units import counted, format_percent, format_rate

_SWITCH, _CARD, _DEVICE, _WIRE = "#1d5fa8", "#2e7d32", "#b9a6cf", "#8a8f98"
_LEFT, _RIGHT, _TOP, _BOTTOM = 116, 190, 76, 30
_LAYER, _NODE_HEIGHT, _NODE_WIDTH, _BOX, _GAP, _BETWEEN = (
    96,
    84,
    100,
    80,
    8,
    84,
)  # px; a gap between nodes tells of those left out
_LETTER_PX = 6.2  # of a name of 11 px, a mean
_MAX_LINE_PX, _MIN_LINE_PX = 4.0, 1.0
_MAX_AXIS, _STEP = 8, 46  # of a torus: devices drawn along an axis, and their distance in px


def fabric_svg(drawing: FabricDrawing, busy_shares: Mapping[str, float] | None = None, *, has_all: bool = True) -> str:
    """The drawing as an SVG document with a background, for light and dark pages.

    Args:
        drawing: The drawing.
        busy_shares: Mean busy share of each loaded link by name, as the color of its cable (a torus has no colors);
            None for cables of one color.
        has_all: False if other links may have a load as well; their cables have no color.
    """
    if drawing.shape:
        return _torus(drawing)
    nodes_at = _node_places(drawing.nodes)
    content = nodes_at[-1] + _node_width(drawing.nodes[-1])
    widest = max((len(layer.switches) for layer in drawing.layers), default=0)
    content = max(content, widest * (_BOX + _GAP) - _GAP, 360)
    shift = _LEFT + (content - nodes_at[-1] - _node_width(drawing.nodes[-1])) / 2
    nodes_at = [place + shift for place in nodes_at]
    bottom = _TOP + _LAYER * len(drawing.layers)
    width, height = _LEFT + content + _RIGHT, bottom + _NODE_HEIGHT + _BOTTOM
    root = _page(drawing, width, height)
    places = _places(drawing, nodes_at, content, bottom)
    root.extend(_cables(drawing.links, places, busy_shares, has_all=has_all))
    for number, layer in enumerate(drawing.layers):
        y = bottom - _LAYER * (number + 1)
        for switch in layer.switches:
            root.append(_box(places[switch.vertex][0], y, clean(switch.name)))
        shown = "" if len(layer.switches) == layer.num else f", {len(layer.switches)} drawn"
        root.append(soft(12, y + 12, layer.kinds))
        root.append(soft(12, y + 27, f"{layer.num:,}{shown}"))
    for node, x in zip(drawing.nodes, nodes_at, strict=True):
        root.extend(_node(drawing, node, x, bottom))
    for (left, right), x in zip(pairwise(drawing.nodes), nodes_at, strict=False):
        if right.node > left.node + 1:
            middle = x + _node_width(left) + _BETWEEN / 2
            root.append(soft(middle, bottom + 40, f"{right.node - left.node - 1:,} more", anchor="middle"))
    drawn = "" if len(drawing.nodes) == drawing.num_nodes else f", {len(drawing.nodes)} drawn"
    root.append(soft(12, bottom + 22, "node"))
    root.append(soft(12, bottom + 37, f"{drawing.num_nodes:,}{drawn}"))
    root.extend(_rates(drawing, _LEFT + content + 16, bottom))
    return written(root)


def _page(drawing: FabricDrawing, width: float, height: float) -> Element:
    root = page(clean(drawing.title), width, height, drawing.words, left=12)
    root[0].text = f"{drawing.title}; {drawing.words}"
    return root


def _node_width(node: DrawnNode) -> float:
    return max(_NODE_WIDTH, 18.0 * max(len(node.cards), min(node.num_devices, 8)) + 10)


def _node_places(nodes: Sequence[DrawnNode]) -> list[float]:
    """Left edge of each node, from 0; wider gaps where nodes are left out."""
    places = [0.0]
    for left, right in pairwise(nodes):
        places.append(places[-1] + _node_width(left) + (_BETWEEN if right.node > left.node + 1 else _GAP))
    return places


def _places(
    drawing: FabricDrawing, nodes_at: Sequence[float], content: float, bottom: float
) -> dict[int, tuple[float, float]]:
    """Center of each drawn vertex: switches near the middle of what is below them, without overlap."""
    places: dict[int, tuple[float, float]] = {}
    for node, left in zip(drawing.nodes, nodes_at, strict=True):
        width = _node_width(node)
        for number, card in enumerate(node.cards):
            places[card] = left + width * (number + 0.5) / len(node.cards), bottom + 7
    below: dict[int, list[int]] = {}
    for link in drawing.links:
        below.setdefault(link.upper, []).append(link.lower)
    for number, layer in enumerate(drawing.layers):
        wanted = {}
        for switch in layer.switches:
            xs = [places[lower][0] for lower in below.get(switch.vertex, ()) if lower in places]
            wanted[switch.vertex] = sum(xs) / len(xs) if xs else _LEFT + content / 2
        order = sorted(wanted, key=lambda vertex: (wanted[vertex], vertex))
        xs = _apart([wanted[vertex] for vertex in order], _BOX + _GAP, _LEFT + _BOX / 2, _LEFT + content - _BOX / 2)
        y = bottom - _LAYER * (number + 1) + 13
        places |= {vertex: (x, y) for vertex, x in zip(order, xs, strict=True)}
    return places


def _apart(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Ascending places nearest to wanted ones (least squares) with a distance between neighbors, within limits.

    >>> _apart([5.0, 5.0, 5.0], 2.0, 0.0, 10.0)
    [3.0, 5.0, 7.0]
    """
    blocks: list[tuple[float, int]] = []  # mean of (wanted - index x distance), number
    for index, place in enumerate(wanted):
        mean, number = place - index * distance, 1
        while blocks and blocks[-1][0] > mean:
            other, count = blocks.pop()
            mean, number = (mean * number + other * count) / (number + count), number + count
        blocks.append((mean, number))
    flat = [mean for mean, number in blocks for _ in range(number)]
    last_place = high - (len(wanted) - 1) * distance
    return [min(max(place, low), last_place) + index * distance for index, place in enumerate(flat)]


def _cables(
    links: Sequence[DrawnLink],
    places: Mapping[int, tuple[float, float]],
    busy_shares: Mapping[str, float] | None,
    *,
    has_all: bool,
) -> Iterator[Element]:
    """Links as lines; those within a layer as arcs above it."""
    rates = [link.bytes_per_s for link in links]
    for link in links:
        (x1, y1), (x2, y2) = places[link.lower], places[link.upper]
        color, words = _WIRE, ""
        if busy_shares is not None:
            lower, _, upper = link.name.partition(" -> ")
            known = [busy_shares[name] for name in (link.name, f"{upper} -> {lower}") if name in busy_shares]
            if known or has_all:
                busy = max(known, default=0.0)
                color, words = load_color(min(1.0, busy)), f", {format_percent(busy)} busy"
        if y1 == y2:
            lift = 26 + min(34.0, abs(x2 - x1) / 12)
            path = f"M{x1:.1f} {y1 - 13:.1f}Q{(x1 + x2) / 2:.1f} {y1 - 13 - lift:.1f} {x2:.1f} {y2 - 13:.1f}"
            cable = Element("path", {"d": path, "fill": "none", "stroke": color})
        else:
            cable = line(x1, y1, x2, y2, color)
        cable.set("stroke-width", f"{_line_px(link.bytes_per_s, min(rates), max(rates)):.1f}")
        ElementTree.SubElement(cable, "title").text = f"{link.name}: {format_rate(link.bytes_per_s)} each way{words}"
        yield cable


def _line_px(rate: float, slowest: float, fastest: float) -> float:
    """Width of a line: logarithmic in the bandwidth."""
    if fastest <= slowest:
        return 1.5
    share = math.log(rate / slowest) / math.log(fastest / slowest)
    return _MIN_LINE_PX + (_MAX_LINE_PX - _MIN_LINE_PX) * share


def _box(middle: float, top: float, name: str) -> Element:
    group = Element("g")
    ElementTree.SubElement(group, "title").text = name
    group.append(rect(middle - _BOX / 2, top, _BOX, 26, _SWITCH))
    max_letters = int(_BOX / _LETTER_PX)
    group.append(text(middle, top + 17, shortened(name, max_letters), size=11, on=_SWITCH, anchor="middle"))
    return group


def _node(drawing: FabricDrawing, node: DrawnNode, left: float, top: float) -> Iterator[Element]:
    """A node: network cards, wiring and devices."""
    width = _node_width(node)
    yield rect(left, top, width, _NODE_HEIGHT, LANE, stroke=_WIRE)
    for number in range(len(node.cards)):
        yield rect(left + width * (number + 0.5) / len(node.cards) - 6, top + 2, 12, 10, _CARD)
    shown = min(node.num_devices, 8)
    for number in range(shown):
        yield rect(left + width * (number + 0.5) / shown - 6, top + 50, 12, 12, _DEVICE)
        if drawing.wiring:
            middle = left + width * (number + 0.5) / shown
            yield line(middle, top + 40, middle, top + 50, _WIRE)
    if drawing.wiring:
        yield rect(left + 6, top + 24, width - 12, 16, _WIRE)
        yield text(left + width / 2, top + 36, drawing.wiring, size=11, on=_WIRE, anchor="middle")
    words = f"node{node.node}: {counted(node.num_devices, drawing.device_kind)}"
    yield text(left + width / 2, top + _NODE_HEIGHT - 7, words, size=11, anchor="middle")


def _rates(drawing: FabricDrawing, left: float, bottom: float) -> Iterator[Element]:
    """Number and bandwidth of links, at the right of the layers, from the devices up."""
    y = bottom + 62.0
    for group in drawing.groups:
        yield soft(left, y - 14, f"{group.lower} - {group.upper}")
        yield text(left, y, rate_words(group))
        y -= 40


def _torus(drawing: FabricDrawing) -> str:
    """The first plane of a torus: its last two axes."""
    rows, columns = (drawing.shape if len(drawing.shape) > 1 else (1, *drawing.shape))[-2:]
    closes = (drawing.closes if len(drawing.closes) > 1 else (False, *drawing.closes))[-2:]
    across, down = min(columns, _MAX_AXIS), min(rows, _MAX_AXIS)
    left, top = 70, _TOP + 20
    notes = list(_torus_notes(drawing, across, down))
    width = max(520, left + across * _STEP + 60)
    root = _page(drawing, width, top + down * _STEP + 24 + 18 * len(notes))
    for row in range(down):
        y = top + row * _STEP
        root.extend(_axis(left, y, across, columns, is_ring=closes[1], is_row=True))
    for column in range(across):
        root.extend(_axis(left + column * _STEP, top, down, rows, is_ring=closes[0], is_row=False))
    for row in range(down):
        for column in range(across):
            x, y = left + column * _STEP, top + row * _STEP
            root.append(rect(x - 9, y - 9, 18, 18, _DEVICE))
            root.append(text(x, y + 4, str(row * columns + column), size=10, on=_DEVICE, anchor="middle"))
    for number, note in enumerate(notes):
        root.append(soft(left - 20, top + down * _STEP + 8 + 18 * number, note))
    return written(root)


def _axis(x: float, y: float, shown: int, length: int, *, is_ring: bool, is_row: bool) -> Iterator[Element]:
    """Links along one row or column; an open end is dashed where devices are left out or the ring closes."""
    dx, dy = (_STEP, 0) if is_row else (0, _STEP)
    ends = x + dx * (shown - 1), y + dy * (shown - 1)
    yield line(x, y, *ends, _WIRE)
    stubs = []
    if is_ring:
        stubs.append((x - dx * 0.6, y - dy * 0.6, x, y))
    if is_ring or shown < length:
        stubs.append((*ends, ends[0] + dx * 0.6, ends[1] + dy * 0.6))
    for stub in stubs:
        dashed = line(*stub, _WIRE)
        dashed.set("stroke-dasharray", "4 3")
        yield dashed


def _torus_notes(drawing: FabricDrawing, across: int, down: int) -> Iterator[str]:
    rows, columns = (drawing.shape if len(drawing.shape) > 1 else (1, *drawing.shape))[-2:]
    if across < columns or down < rows:
        yield f"drawn: {down} x {across} of {rows} x {columns} devices; dashed lines lead on"
    if len(drawing.shape) > 2:
        yield f"{drawing.shape[0]} such planes, each device linked to its neighbors in the planes next to it"
    axes = ", ".join(
        f"{length} ({'ring' if ring else 'line'})" for length, ring in zip(drawing.shape, drawing.closes, strict=True)
    )
    yield f"axes: {axes}"
    for group in drawing.groups:
        yield f"{group.lower} - {group.upper}: {rate_words(group)}"
    if drawing.num_nodes > 1:
        yield f"{drawing.num_nodes} slices"
