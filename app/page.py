"""Runs a page: what goes wrong becomes sentences, never a stack trace."""

from __future__ import annotations

import logging
from collections.abc import Callable

import streamlit as st

from app import state
from app.components.problems import show_bug, show_problems
from app.components.progress import Following
from simplan.errors import SimplanError

__all__ = ["run_page"]

_LOG = logging.getLogger("simplan.app")


def run_page(show: Callable[[], Following | None]) -> None:
    """Shows one page, and keeps what it asks in the address.

    Streamlit stops and restarts a run by exceptions that are none of ours and pass through.

    Args:
        show: Draws the page. What it returns, if anything, is done when all is drawn, e.g. waiting for news.
    """
    then = None
    try:
        then = show()
    except SimplanError as error:
        show_problems(error)
    except Exception as error:
        _LOG.exception("a page failed")
        show_bug(error)
    if not state.write_link():
        st.caption("This scenario is too long for a link; download it as YAML to share it.")
    if then is not None:
        then()
