"""Building blocks of HTML reports: escaped text, tables, bars and folded parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from simplan.report.drawings.svg import PART_COLOURS
from simplan.units import format_number, format_percent, format_time


class Share(NamedTuple):
    """A part of a bar: name, value, and the value as text."""

    name: str
    value: float
    text: str


_COLOURS = (
    "#3b7dd8",
    "#e08a2e",
    "#4a9a5b",
    "#b9a6cf",
    "#c95d63",
    "#5fa8a8",
    "#8a8f98",
    "#d3b13f",
    "#7a6ab0",
    "#a0764f",
)
"""Fills of parts without a color of their own, in order; they differ in lightness too."""
_CODE, _DEVIATION = re.compile(r"`([^`]+)`"), re.compile(r"\+/- \S+(?: %)?")
_LONG = 40
"""Letters from which on a cell needs a wide column on a phone."""
_NUMBER = re.compile(r"[-+]?[0-9][0-9,.]*%?(?: [A-Za-z/%]+)?")
"""A number with its unit, as cells have it."""


def paragraph(text: str, css: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(css)}>{_marked(text)}</p>"


def listing(items: Iterable[str]) -> str:
    """A list of plain texts; empty for none."""
    entries = "".join(f"<li>{_marked(item)}</li>" for item in items)
    return f"<ul>{entries}</ul>" if entries else ""


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Named figures side by side."""
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{boxes}</dl>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table without its empty columns; columns whose cells are all numbers are aligned to the right."""
    cells = [list(row) for row in rows]
    if not cells:
        return ""
    looks = {
        place: _look([row[place] for row in cells]) for place in range(len(columns)) if any(r[place] for r in cells)
    }

    def line(tag: str, values: Sequence[str]) -> str:
        inner = (f"<{tag}{_class(look)}>{_marked(values[place])}</{tag}>" for place, look in looks.items())
        return f"<tr>{''.join(inner)}</tr>"

    head = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(line("td", row) for row in cells)
    return f'<div class="wide"><table>{head}<thead>{line("th", columns)}</thead><tbody>{body}</tbody></table></div>'


def _look(cells: Iterable[str]) -> str:
    """Class of a column: ``number``, ``long`` for sentences, or none."""
    shown = [cell for cell in cells if cell]
    if all(_NUMBER.fullmatch(cell) for cell in shown):
        return "number"
    return "long" if max(map(len, shown)) > _LONG else ""


def bar(shares: Iterable[Share], whole: float, label: str = "", *, box: float | None = None) -> str:
    """A bar whose parts are fractions of a whole, with a legend below; without parts under a tenth of a percent.

    Args:
        box: Value of the whole width, if it is more than ``whole``.
    """
    width = max(whole, box or 0.0)
    seen = (share for share in shares if share.value > 1e-3 * whole)
    kept = [(share, PART_COLOURS.get(share.name, _COLOURS[place % len(_COLOURS)])) for place, share in enumerate(seen)]
    parts = "".join(
        f'<span style="width:{100 * share.value / width:.3f}%;background:{colour}" title="{escape(share.name)}: '
        f'{escape(share.text)}"></span>'
        for share, colour in kept
    )
    legend = "".join(
        f'<li><i style="background:{colour}"></i>{escape(share.name)} {escape(share.text)} '
        f"({format_percent(share.value / whole)})</li>"
        for share, colour in kept
    )
    title = f"<figcaption>{escape(label)}</figcaption>" if label else ""
    return f'<figure class="bar">{title}<div>{parts}</div><ul>{legend}</ul></figure>'


def bars(rows: Iterable[Share], label: str) -> str:
    """Values as bars below each other, each as long as its fraction of the largest; empty for none."""
    shown = [*rows]
    if not shown:
        return ""
    most = max(row.value for row in shown) or 1.0
    lines = "".join(
        f'<tr><th>{escape(row.name)}</th><td><i style="width:{100 * row.value / most:.2f}%;background:{_COLOURS[0]}">'
        f"</i>{escape(row.text)}</td></tr>"
        for row in shown
    )
    return f'<figure class="bars"><figcaption>{escape(label)}</figcaption><table>{lines}</table></figure>'


def folded(summary: str, content: str) -> str:
    """Content that a reader unfolds; empty for no content."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""


def number_text(value: object, unit: str = "") -> str:
    """A value of a document as text; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return words(str(value))
    if unit == "s":
        return f"-{format_time(-value)}" if value < 0 else format_time(value)
    return f"{format_number(value)}{f' {unit}' if unit else ''}"


def words(name: str) -> str:
    """A key as words."""
    return name.replace("_", " ")


def changed(mapping: Mapping[str, object], usual: Mapping[str, object]) -> str:
    """Keys with other values than usual, as ``key = value, ...``."""
    words = [f"{key} = {value}" for key, value in mapping.items() if value != usual.get(key)]
    return ", ".join(words)


def _marked(text: str) -> str:
    """Escaped text; `code` is code, and a deviation stays in one line."""
    whole = _DEVIATION.sub(r'<span class="number">\g<0></span>', escape(text))
    return _CODE.sub(r"<code>\1</code>", whole)


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
