"""Runs a page; errors become messages, never a stack trace."""

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
    """Shows one page, and writes its state into the address.

    Streamlit's exceptions that stop or rerun a page pass through.

    Args:
        show: Draws the page. May return a function that is called after everything is drawn, e.g. to wait for results.
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
