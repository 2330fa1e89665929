"""Progress of background work on a page: progress bar, stop button, and a rerun of the page at new results.

The page waits on the server, as ``awaited`` does, not by a timer in the browser (``st.fragment(run_every=...)``).
A timer would continue until the next page responds: a tick sent after ``st.switch_page`` names the old page, is queued
behind the new one, and the browser then clears the new page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.page import escaped
from app.result_cache import give_way

_LOOK_S = 0.1


class ProgressBar(NamedTuple):
    """Completed fraction of a task, 0 to 1, and description of the current work."""

    share: float
    words: str


def show_progress(now: ProgressBar, stop: Callable[[], None] | None = None) -> DeltaGenerator:
    """A progress bar, with a stop button next to it if the work can be stopped.

    Args:
        now: Initial state of the bar.
        stop: Called by the stop button; None for no button.

    Returns:
        Streamlit container of the bar, for ``follow``.
    """
    place = st.empty()
    if stop is not None:
        left, right = place.columns([5, 1], vertical_alignment="center")
        right.button("Stop", icon=":material/stop:", key="stop", on_click=stop, width="stretch")
        place = left.empty()
    _draw(place, now)
    return place


def stage(name: str, names: Sequence[str]) -> DeltaGenerator:
    """Container for one of the stages of a page.

    Each stage has a separate container: Streamlit keeps the elements of an earlier run in a container until the next
    run ends, and a run that follows a task lasts long.

    Args:
        name: Name of the stage.
        names: Names of all stages, in the same order in every run.
    """
    places = {other: st.empty() for other in names}
    return places[name].container()


def follow(place: DeltaGenerator, look: Callable[[], ProgressBar | None]) -> None:
    """Updates a progress bar until there is something new to draw, then reruns the page.

    Any action of the user ends the wait.

    Args:
        place: Container of the bar.
        look: Returns the progress, or None when the page must be rerun.
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
