"""What all sessions of a server share: its jobs."""

from __future__ import annotations

import atexit

import streamlit as st

from app.jobs.job import Jobs

__all__ = ["jobs"]


@st.cache_resource(show_spinner=False)
def jobs() -> Jobs:
    """The server's jobs; they end with it."""
    found = Jobs()
    atexit.register(found.close)
    return found
