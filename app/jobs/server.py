"""Jobs and runs that all sessions of a server share."""

from __future__ import annotations

import atexit
import os
from functools import cache

from app.jobs.job import Jobs
from app.jobs.run import Runs

__all__ = ["WORKERS", "answering", "runs", "searches"]

WORKERS = "SIMPLAN_WORKERS"
"""Environment variable with the number of worker processes for pages; without it, pages compute themselves."""


@cache
def searches() -> Jobs:
    """Long work: it tells how far it is and can be stopped. It ends with the server."""
    found = Jobs(max(1, os.cpu_count() or 1))
    atexit.register(found.close)
    return found


@cache
def answering() -> Jobs:
    """Jobs that pages wait for, other than searches; their workers end with the server."""
    found = Jobs(int(os.environ.get(WORKERS, "0")), keep=True)
    atexit.register(found.close)
    return found


@cache
def runs() -> Runs:
    """The server's runs; a run in progress ends with the server."""
    found = Runs()
    atexit.register(found.close)
    return found
