"""SVG elements and colors of drawings."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

PAPER, DARK, SOFT, GRID, LANE = "#ffffff", "#000000", "#4a515c", "#d3d8de", "#eef0f3"

NIGHT = {
    "paper": "#0d1117",
    "ink": "#e6edf3",
    "soft": "#9da7b3",
    "grid": "#30363d",
    "band": "#ffffff",
    "node": "#232b35",
}
"""Colors on dark pages, by class; elements without a class keep their color."""
_CLASSES = {PAPER: "paper", DARK: "ink", SOFT: "soft", GRID: "grid", LANE: "node"}
"""Class of an element, by its color."""

PART_COLOURS = {
    "parameters": "#4ea5b7",  # four colors as in the Ultra-Scale Playbook
    "gradients": "#e889ab",
    "optimizer states": "#cec0fa",
    "activations": "#e38a42",
    "gathered parameters": "#2f6f86",
    "communication buffers": "#7a1f4b",
    "logits": "#f2c14e",
    "workspace": "#565f6a",
    "context": "#d9dde2",
    "allocator reserve": "#a9b0b9",
    "compute": "#3b7dd8",
    "recompute": "#9cc2f0",
    "exposed communication": "#8c7aa9",
    "wait": "#d5d9df",
    "host": "#c8a24a",
    "optimizer": "#565d66",
}
"""Colors of the parts of memory on a device, in the order of a stack, and of a step, by their words."""

Element = ElementTree.Element

_LIGHTEST = 0.5  # of the way to white, for the last shade
_LETTER_PX = 0.56  # mean width of a letter, over the size of the text


def shade(colour: str, place: int, number: int) -> str:
    """Color, lighter for later stages of a rank.

    Args:
        colour: Color of the first stage, ``#rrggbb``.
        place: Index of the stage, from 0.
        number: Number of stages.

    >>> shade("#000000", 1, 2), shade("#3b7dd8", 0, 1)
    ('#808080', '#3b7dd8')
    """
    share = _LIGHTEST * place / max(1, number - 1)
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def page(title: str, width: float, height: float, *notes: str, left: float = 16, size: int = 12) -> Element:
    """SVG of a width and height in px with a heading, and notes below it; light or dark as the reader prefers."""
    area = {"width": f"{width:g}", "height": f"{height:g}", "viewBox": f"0 0 {width:g} {height:g}"}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **area, "font-family": "sans-serif"})
    ElementTree.SubElement(root, "title").text = title
    rules = (f".{name}:not([fill=none]){{fill:{c}}}.{name}[stroke]{{stroke:{c}}}" for name, c in NIGHT.items())
    ElementTree.SubElement(root, "style").text = f"@media (prefers-color-scheme: dark) {{{''.join(rules)}}}"
    root.append(rect(0, 0, width, height, PAPER))
    root.append(text(left, 26, title, size=16, bold=True))
    root.extend(soft(left, 46 + 16 * number, note, size=size) for number, note in enumerate(notes))
    return root


def rect(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "") -> Element:
    """A filled rectangle, outlined if a stroke is given."""
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    outline = {"stroke": stroke} if stroke else {}
    return Element("rect", place | {"fill": fill} | outline | _class_of(stroke if fill == "none" else fill))


def line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> Element:
    """A straight line."""
    ends = {"x1": f"{x1:.2f}", "x2": f"{x2:.2f}", "y1": f"{y1:.2f}", "y2": f"{y2:.2f}"}
    return Element("line", ends | {"stroke": stroke} | _class_of(stroke))


def text(
    x: float, y: float, words: str, *, size: int = 12, on: str = "", anchor: str = "start", bold: bool = False,
    colour: str = DARK,
) -> Element:  # fmt: skip
    """Text whose base line starts, ends or is centered at a point.

    Args:
        x, y: The point, in px.
        words: The text.
        size: Font size in px.
        on: Color of the box around it, which is the same on light and dark pages; empty for text on the page.
        anchor: ``start``, ``middle`` or ``end``.
        bold: True for bold.
        colour: Color on the page.
    """
    look = {"fill": ink_on(on)} if on else {"fill": colour} | _class_of(colour)
    element = Element("text", {"x": f"{x:.2f}", "y": f"{y:.2f}", "font-size": str(size)} | look)
    if anchor != "start":
        element.set("text-anchor", anchor)
    if bold:
        element.set("font-weight", "bold")
    element.text = words
    return element


def written(root: Element) -> str:
    """The picture as a document."""
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def soft(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> Element:
    """Text of less weight."""
    return text(x, y, words, size=size, colour=SOFT, anchor=anchor)


def legend(
    entries: Iterable[tuple[str, str]], left: float, base: float, right: float, *, size: int = 12
) -> tuple[list[Element], float]:
    """Squares of a color with their meaning, in lines.

    Args:
        entries: Color and words.
        left, right: Ends of the lines, in px.
        base: Base line of the first line.
        size: Font size in px.

    Returns:
        For every entry its square and its words; and the base line of the last line.
    """
    parts, x = list[Element](), left
    for colour, words in entries:
        width = 18 + _LETTER_PX * size * len(words)
        if x + width > right and x > left:
            x, base = left, base + 20
        parts += [rect(x, base - 10, 12, 12, colour), text(x + 18, base, words, size=size)]
        x += width + 18
    return parts, base


def ink_on(fill: str) -> str:
    """Black or white, whichever has the larger contrast (relative luminance as in WCAG 2.2)."""
    linear = []
    for start in (1, 3, 5):
        channel = int(fill[start : start + 2], 16) / 255
        linear.append(channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return DARK if luminance > 0.179 else PAPER  # (1 + 0.05) / (x + 0.05) = (x + 0.05) / 0.05


def _class_of(colour: str) -> dict[str, str]:
    return {"class": _CLASSES[colour]} if colour in _CLASSES else {}


def shortened(name: str, most: int) -> str:
    """Name of at most so many characters, without the middle: names of switches differ at both ends.

    >>> shortened("pod1.aggregation0", 12)
    'pod1.a…tion0'
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}"
