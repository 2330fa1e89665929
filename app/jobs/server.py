"""What all sessions of a server share: its jobs and its runs."""

from __future__ import annotations

import atexit

import streamlit as st

from app.jobs.job import Jobs
from app.jobs.run import Runs

__all__ = ["jobs", "runs"]


@st.cache_resource(show_spinner=False)
def jobs() -> Jobs:
    """The server's jobs; they end with it."""
    found = Jobs()
    atexit.register(found.close)
    return found


@st.cache_resource(show_spinner=False)
def runs() -> Runs:
    """The server's runs; the one that goes on ends with it."""
    found = Runs()
    atexit.register(found.close)
    return found
