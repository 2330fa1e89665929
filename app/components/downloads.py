"""Things to take away: scenarios, tables, documents, figures."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st
from plotly.basedatatypes import BaseFigure

from app.figures.style import Figure

__all__ = ["csv_text", "download", "file_name", "show_figure"]

_TYPES = {
    "csv": "text/csv",
    "json": "application/json",
    "yaml": "text/yaml",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}


def download(label: str, name: str, kind: str, content: str | bytes | Callable[[], str], *, about: str = "") -> None:
    """A button that saves a file and changes nothing else.

    Args:
        label: Label of the button.
        name: Name to show; the file name is derived from it.
        kind: File name extension: ``csv``, ``json``, ``yaml``, ``svg`` or ``txt``.
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


def show_figure(figure: Figure, name: str, *, alt: str, key: str | None = None, zoom: bool = False) -> None:
    """A figure of full width, whose camera buttons save SVG and PNG files (``head.html``).

    Args:
        figure: Figure without colors of text and background, which the theme defines.
        name: Title of the figure, also its file name.
        alt: Alternative text for screen readers.
        key: Widget key, needed if a page shows two equal figures; None otherwise.
        zoom: Zoom with wheel and fingers instead of scrolling the page.
    """
    config = {
        "displaylogo": False,
        "scrollZoom": zoom,
        "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
        "toImageButtonOptions": {"format": "svg", "filename": file_name(name)},
    }
    st.plotly_chart(_Ready(figure), width="stretch", key=key, config=config, alt=alt)


class _Ready(BaseFigure):  # type: ignore[misc]  # plotly has no types
    """A figure that Streamlit does not validate: it lets Plotly check plain dictionaries in every rerun."""

    def __init__(self, figure: Figure) -> None:
        self._figure = figure

    def to_dict(self) -> Figure:
        """Figure as sent to the browser."""
        return self._figure


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
