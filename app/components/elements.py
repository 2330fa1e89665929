"""Elements that pages share: metrics, tables, figures, and buttons that save files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pandas as pd
import streamlit as st
from plotly.basedatatypes import BaseFigure

import simplan
from app.figures.style import Figure
from simplan.cli.terminal.definitions import definitions
from simplan.report.html import html_report

_TYPES = {
    "csv": "text/csv",
    "json": "application/json",
    "yaml": "text/yaml",
    "svg": "image/svg+xml",
    "html": "text/html",
}
_SAME = 0.0005
_SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)"')
_FRAME = (
    "<!doctype html><meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    "<style>body { margin: 0 } svg { display: block; width: 100%; height: auto }</style>"
)
"""Head of a frame with a drawing. Its policy lets no script run, whatever a name in the drawing contains."""


@cache
def _definitions() -> dict[str, str]:
    return {row["name"]: row["definition"] + (f" ({row['unit']})" if row["unit"] else "") for row in definitions()}


def meaning(name: str) -> str:
    """Definition of a metric or of a term in reports, as ``simplan show metrics`` prints it.

    >>> meaning("allocated")
    'memory held by tensors'
    """
    return _definitions()[name]


def show_metrics(cells: Sequence[tuple[str, str, str]]) -> None:
    """A row of metrics: label, value and help."""
    for column, (label, value, about) in zip(st.columns(len(cells)), cells, strict=True):
        column.metric(label, value, help=about)


def show_table(rows: Sequence[Mapping[str, Any]], *, digits: int | None = None, **more: Any) -> None:
    """A table of rows of one shape.

    Args:
        rows: Cells by column name.
        digits: Decimals of numbers; None for all.
        more: Further arguments of ``st.dataframe``.
    """
    frame = pd.DataFrame(rows)
    st.dataframe(frame if digits is None else frame.round(digits), hide_index=True, placeholder="", **more)


@contextmanager
def details(label: str, key: str) -> Iterator[bool]:
    """An expander whose content the server makes only while it is open; yields if it is open."""
    expander = st.expander(label, key=f"details {key}", on_change="rerun")
    with expander:
        yield bool(expander.open)


def download(label: str, name: str, kind: str, content: str | bytes | Callable[[], str], *, about: str = "") -> None:
    """A button that saves a file and changes nothing else.

    Args:
        label: Label of the button.
        name: Name to show; the file name is derived from it.
        kind: File name extension: ``csv``, ``json``, ``yaml``, ``svg`` or ``html``.
        content: Content of the file; a function is called when the button is pressed.
        about: Tooltip; empty for none.
    """
    st.download_button(
        label,
        content if callable(content) else lambda: content,  # no file that a later run of the page takes away
        file_name=f"{file_name(name)}.{kind}",
        mime=_TYPES[kind],
        on_click="ignore",
        help=about or None,
        icon=":material/download:",
    )


def download_report(name: str, documents: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
    """A button that saves one HTML page which opens anywhere, of JSON documents as ``simplan report`` reads them.

    Args:
        name: Name to show; the file name is derived from it.
        documents: Makes the documents when the button is pressed.
    """

    def page() -> str:
        written = f"written by simplan {simplan.__version__} on {datetime.now(UTC):%Y-%m-%d}"
        return html_report(((name, document) for document in documents()), written=written)

    download("Report", f"{name} report", "html", page, about="One HTML page with numbers and pictures, to pass on")


def show_figure(
    figure: Figure,
    name: str,
    *,
    alt: str,
    key: str | None = None,
    on_select: Callable[[], None] | None = None,
) -> None:
    """A figure of full width, whose camera buttons save SVG and PNG files (``head.html``).

    Args:
        figure: Figure in Plotly's format.
        name: Title of the figure, also its file name.
        alt: Alternative text for screen readers.
        key: Widget key, needed if a page shows two equal figures; None otherwise.
        on_select: Called after a click on a point; None for a figure without selection. Needs ``key``.
    """
    config = {
        "displaylogo": False,
        "scrollZoom": False,  # wheel and fingers scroll the page
        "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
        "toImageButtonOptions": {"format": "svg", "filename": file_name(name)},
    }
    selection: dict[str, Any] = {} if on_select is None else {"on_select": on_select, "selection_mode": "points"}
    st.plotly_chart(_Ready(figure), width="stretch", key=key, config=config, alt=alt, **selection)


def show_drawing(name: str, svg: str, *, alt: str) -> None:
    """A drawing of simplan's reports with its tooltips, in its size: a phone scrolls it.

    An ``img`` has no tooltips, and ``st.html`` removes drawings; a frame does not take their size.

    Args:
        name: Name of the drawing, unique on the page.
        svg: The drawing.
        alt: Alternative text for screen readers.
    """
    width, height = _SIZE.search(svg).groups()  # type: ignore[union-attr]  # every drawing has a size
    key = f"drawing-{name}"
    frame = f".st-key-{key} iframe {{ max-width: {width}px; aspect-ratio: {width} / {height}; }}"
    st.html(f"<style>{frame}</style>")
    with st.container(key=key):
        st.iframe(f"{_FRAME}{svg}", height=int(float(height)), tab_index=-1, alt=alt)


def point_value(key: str) -> Any:
    """Second value of ``customdata`` of the clicked point of a figure; None without one.

    Args:
        key: Widget key of the figure.
    """
    for point in st.session_state[key].selection.points:
        data: Any = point.get("customdata")
        if data:
            return data[1] if isinstance(data, list | tuple) and len(data) > 1 else dict(data).get("1")
    return None


class _Ready(BaseFigure):  # type: ignore[misc]  # plotly has no types
    """A figure that Streamlit does not validate: it lets Plotly check plain dictionaries in every rerun."""

    def __init__(self, figure: Figure) -> None:
        self._figure = figure

    def to_dict(self) -> Figure:
        """Figure as sent to the browser."""
        return self._figure


def is_same_time(one_s: float, other_s: float) -> bool:
    """True for two times whose difference is 0.0 % in words."""
    return abs(one_s / other_s - 1) < _SAME


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of one shape as CSV, a header first; empty for no rows."""
    if not rows:
        return ""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def file_name(name: str) -> str:
    """A name made safe for every file system.

    >>> file_name("memory by rank / llama")
    'memory-by-rank-llama'
    """
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip(".-")[:80] or "simplan"
