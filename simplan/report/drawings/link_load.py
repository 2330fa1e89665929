"""Load of links over a step as a heat map: one row per link, or for links of equal load."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any
from xml.etree import ElementTree

from simplan.network.load import LinkLoad, Network
from simplan.report.drawings.drawing import clean
from simplan.report.drawings.drawing_svg import time_axis
from simplan.report.drawings.svg import LANE, Element, legend, page, rect, shortened, soft, text, written
from simplan.units import counted, format_bytes, format_percent, format_rate, format_time

_MAX_ROWS = 24
_STEPS = 20  # shades of the busy share
_WIDTH, _LEFT, _RIGHT, _TOP = 1200, 300, 150, 84
_ROW_HEIGHT, _ROW_DISTANCE = 20, 24
_COOL, _HOT = (0xDC, 0xE9, 0xF5), (0xB3, 0x1B, 0x1B)
_MIDDLE = (0xF2, 0xB1, 0x34)
_MAX_NAME = 42


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One row.

    Attributes:
        link: The first link of the row.
        num_links: Links with this load.
    """

    link: LinkLoad
    num_links: int


@dataclass(frozen=True, slots=True)
class LinkLoadDrawing:
    """Heat map of the load of links.

    Attributes:
        name: Scenario name.
        step_time_s: Length of the simulated step.
        rows: Links that delay communications most first, then the busiest.
        num_hidden: Loaded links that are not drawn.
        contention: Cost of contention in words.
    """

    name: str
    step_time_s: float
    rows: tuple[LoadRow, ...]
    num_hidden: int
    contention: str

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        return {
            "schema_version": 1,
            "kind": "link_load",
            "name": self.name,
            "step_time_s": self.step_time_s,
            "contention": self.contention,
            "num_hidden_links": self.num_hidden,
            "rows": [
                {
                    "link": row.link.name,
                    "num_links": row.num_links,
                    "bytes_per_s": row.link.bytes_per_s,
                    "num_bytes": row.link.num_bytes,
                    "busy_share": row.link.busy_share,
                    "lost_s": row.link.lost_s,
                    "series": list(row.link.series),
                }
                for row in self.rows
            ],
        }


def draw_link_load(name: str, network: Network) -> LinkLoadDrawing:
    """Heat map of a prediction's links."""
    alike: dict[tuple[float, ...], list[LinkLoad]] = {}
    drawn = [link for link in network.links if link.series]
    for link in drawn:
        alike.setdefault((link.bytes_per_s, *(round(share, 6) for share in link.series)), []).append(link)
    rows = tuple(LoadRow(links[0], len(links)) for links in list(alike.values())[:_MAX_ROWS])
    shown = sum(row.num_links for row in rows)
    length_s = network.interval_s * (len(drawn[0].series) if drawn else 0)
    words = f"contention {network.contention_words()}"
    return LinkLoadDrawing(name, length_s, rows, len(network.links) - shown, words)


def link_load_text(drawing: LinkLoadDrawing) -> str:
    """The heat map as lines of text, darker for busier."""
    shades = " .:-=+*#%@"
    lines = [f"{clean(drawing.name)}: load of links, a step of {format_time(drawing.step_time_s)}"]
    for row in drawing.rows:
        cells = [max(part) for part in _chunks(row.link.series, 3)]
        bar = "".join(shades[min(9, int(10 * share))] for share in cells)
        more = f" (+{row.num_links - 1})" if row.num_links > 1 else ""
        lines.append(f"{short_link_name(row.link.name) + more:>50} |{bar}| {format_percent(row.link.busy_share)} busy")
    if drawing.num_hidden:
        lines.append(f"{counted(drawing.num_hidden, 'more link')} not drawn")
    return "\n".join([*lines, drawing.contention])


def link_load_svg(drawing: LinkLoadDrawing) -> str:
    """The heat map as an SVG document, 1200 px wide, with a background."""
    bottom = _TOP + _ROW_DISTANCE * len(drawing.rows)
    heading = f"{clean(drawing.name)}: load of links"
    root = page(heading, _WIDTH, bottom + 86, clean(drawing.contention))
    root.append(soft(_WIDTH - 84, _TOP - 10, "busy", anchor="end"))
    root.append(soft(_WIDTH - 10, _TOP - 10, "delays", anchor="end"))
    for number, row in enumerate(drawing.rows):
        root.extend(_row(row, _TOP + number * _ROW_DISTANCE))
    root.extend(time_axis(drawing.step_time_s, _LEFT, _WIDTH - _LEFT - _RIGHT, _TOP - 4, bottom))
    for number, row in enumerate(drawing.rows):
        root.extend(_cells(row, drawing, _TOP + number * _ROW_DISTANCE))
    root.extend(_legend(drawing, bottom + 40))
    return written(root)


def _row(row: LoadRow, top: float) -> list[Element]:
    middle = top + _ROW_HEIGHT / 2 + 4
    more = f" and {row.num_links - 1} more" if row.num_links > 1 else ""
    delays = format_time(row.link.lost_s) if row.link.lost_s > 0 else "none"
    return [
        rect(_LEFT, top, _WIDTH - _LEFT - _RIGHT, _ROW_HEIGHT, LANE),
        text(_LEFT - 8, middle, short_link_name(row.link.name) + more, anchor="end"),
        text(_WIDTH - 84, middle, format_percent(row.link.busy_share), anchor="end"),
        text(_WIDTH - 10, middle, delays, anchor="end"),
    ]


def _cells(row: LoadRow, drawing: LinkLoadDrawing, top: float) -> list[Element]:
    """Rectangles of equal shade; each has a tooltip."""
    link, elements, place = row.link, [], 0
    width = (_WIDTH - _LEFT - _RIGHT) / len(link.series)
    for step, cells in groupby(round(_STEPS * min(1.0, share)) for share in link.series):
        number = len(list(cells))
        if step:
            group = Element("g")
            begin_s = drawing.step_time_s * place / len(link.series)
            ElementTree.SubElement(group, "title").text = (
                f"{link.name} ({format_rate(link.bytes_per_s)}), {format_bytes(link.num_bytes)} a step: "
                f"{step / _STEPS:.0%} busy from {format_time(begin_s)}"
            )
            group.append(rect(_LEFT + width * place, top, width * number, _ROW_HEIGHT, load_color(step / _STEPS)))
            elements.append(group)
        place += number
    return elements


def _legend(drawing: LinkLoadDrawing, top: float) -> list[Element]:
    shades = [(load_color(share), f"{share:.0%} busy") for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    note = "delays: seconds of waiting per link, summed over groups of ranks, divided by the links full together"
    parts = [*legend(shades, _LEFT, top + 10, _WIDTH)[0], soft(_LEFT, top + 30, note)]
    if drawing.num_hidden:
        parts.append(soft(16, top + 10, f"{counted(drawing.num_hidden, 'more link')} not drawn"))
    return parts


def load_color(share: float) -> str:
    """Color of a busy share from 0 to 1: from pale blue over amber to dark red."""
    low, high, part = (_COOL, _MIDDLE, 2 * share) if share < 0.5 else (_MIDDLE, _HOT, 2 * share - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))


def short_link_name(name: str, max_letters: int = _MAX_NAME) -> str:
    """Name of at most ``max_letters`` characters, with both ends of the link.

    >>> short_link_name("pod0.aggregation1 -> pod0.core12", 24)
    'pod0.…ion1 -> pod0.…re12'
    """
    if len(name) <= max_letters:
        return name
    ends = name.split(" -> ")
    return " -> ".join(shortened(end, (max_letters - 4 * (len(ends) - 1)) // len(ends)) for end in ends)


def _chunks(values: tuple[float, ...], size: int) -> list[tuple[float, ...]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]
