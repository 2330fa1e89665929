"""Pausing Python's cyclic garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the collector, as a context manager or as a decorator.

    The collector would traverse all objects repeatedly as their number grows, and find nothing: operations, events and
    spans form no cycles that outlive their use. Half of the time of a large simulation went into these traversals.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
