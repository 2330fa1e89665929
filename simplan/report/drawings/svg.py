"""SVG elements and colors of drawings."""

from __future__ import annotations

from xml.etree import ElementTree

PAPER, DARK, SOFT = "#ffffff", "#000000", "#4a515c"

NIGHT = {
    "paper": "#0d1117",
    "ink": "#e6edf3",
    "soft": "#9da7b3",
    "grid": "#30363d",
    "band": "#ffffff",
    "node": "#232b35",
}
"""Colors on dark pages, by class; elements without a class keep their color."""

Element = ElementTree.Element

_LIGHTEST = 0.5  # of the way to white, for the last shade


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


def picture(title: str, width: float, height: float) -> Element:
    """Empty SVG of a width and height in px."""
    size = {"width": f"{width:g}", "height": f"{height:g}", "viewBox": f"0 0 {width:g} {height:g}"}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **size, "font-family": "sans-serif"})
    ElementTree.SubElement(root, "title").text = title
    return root


def night_style() -> Element:
    """Style sheet of a picture whose classes follow the reader's light or dark preference (``NIGHT``)."""
    style = Element("style")
    rules = (f".{name}:not([fill=none]){{fill:{c}}}.{name}[stroke]{{stroke:{c}}}" for name, c in NIGHT.items())
    style.text = "@media (prefers-color-scheme: dark) {" + "".join(rules) + "}"
    return style


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str | None = None,
    css: str | None = None,
) -> Element:
    """A filled rectangle, outlined if a stroke is given; ``css`` is its class, as in the functions below."""
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    return Element("rect", place | {"fill": fill} | _given(stroke=stroke, css=css))


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, css: str | None = None) -> Element:
    """A straight line."""
    ends = {"x1": f"{x1:.2f}", "x2": f"{x2:.2f}", "y1": f"{y1:.2f}", "y2": f"{y2:.2f}"}
    return Element("line", ends | {"stroke": stroke} | _given(css=css))


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int,
    colour: str = DARK,
    anchor: str = "start",
    bold: bool = False,
    css: str | None = None,
) -> Element:
    """Text whose base line starts, ends or is centered at a point."""
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "font-size": str(size), "fill": colour}
    element = Element("text", place | _given(css=css))
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


def _given(**attributes: str | None) -> dict[str, str]:
    """Attributes that have a value."""
    return {"class" if name == "css" else name: value for name, value in attributes.items() if value is not None}


def shortened(name: str, most: int) -> str:
    """Name of at most so many characters, without the middle: names of switches differ at both ends.

    >>> shortened("pod1.aggregation0", 12)
    'pod1.a…tion0'
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}"
