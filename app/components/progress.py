"""Work that goes on while a page is looked at: how far it is, what stops it, and the page anew when there is news.

The page waits on the server, as ``app.work`` does, and not by a timer in the browser (``st.fragment(run_every=...)``).
Such a timer goes on until the next page answers: a tick that is sent after ``st.switch_page`` names the page that is
left, is queued behind the new one, and the browser then clears what it has just drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.components.problems import escaped
from app.work import give_way

__all__ = ["Following", "ProgressBar", "follow", "show_progress", "stage"]

_LOOK_S = 0.1

Following = Callable[[], None]
"""What a page does when all of it is drawn."""


class ProgressBar(NamedTuple):
    """How far something is.

    Attributes:
        share: Between 0 and 1.
        words: What is being done.
    """

    share: float
    words: str


def show_progress(now: ProgressBar, stop: Callable[[], None] | None = None) -> DeltaGenerator:
    """A bar, with a button beside it where something can be stopped.

    Args:
        now: What it shows at first.
        stop: What the button does.

    Returns:
        The place of the bar, for ``follow``.
    """
    place = st.empty()
    if stop is not None:
        left, right = place.columns([5, 1], vertical_alignment="center")
        right.button("Stop", icon=":material/stop:", key="stop", on_click=stop, width="stretch")
        place = left.empty()
    _draw(place, now)
    return place


def stage(name: str, names: Sequence[str]) -> DeltaGenerator:
    """The place for one of the stages that a page goes through.

    Each has a place of its own: Streamlit keeps what another run drew at a place until the next run ends, and one that
    follows something does not end for long.

    Args:
        name: The stage.
        names: All of them, in the same order in every run.
    """
    places = {other: st.empty() for other in names}
    return places[name].container()


def follow(place: DeltaGenerator, look: Callable[[], ProgressBar | None]) -> None:
    """Shows how far it is until there is something new to draw, then draws the page anew.

    Whatever the user asks meanwhile ends it.

    Args:
        place: Of the bar.
        look: How far it is; None when the page has to be drawn anew.
    """
    shown = None
    while (now := look()) is not None:
        if now != shown:
            _draw(place, now)
            shown = now
        give_way()
        time.sleep(_LOOK_S)
    st.rerun()


def _draw(place: DeltaGenerator, now: ProgressBar) -> None:
    place.progress(min(1.0, max(0.0, now.share)), text=escaped(now.words))
