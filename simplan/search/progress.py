"""Progress of a search: candidates done, the current phase, and the time that it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from simplan.search.result import SearchResult

_SETTLED_S = 1.0
"""Seconds of a phase before its pace is used."""


@dataclass(frozen=True, slots=True)
class SearchPhase:
    """A phase of a search.

    Attributes:
        name: Words for what it does.
        done: Parts done; they only grow.
        of: Upper bound on the parts; None while there is none.
        left_s: Upper estimate of the seconds that the phase still takes; None while it is unknown.
    """

    name: str
    done: int = 0
    of: int | None = None
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        done: Candidates rejected, pruned or timed.
        total: Candidates of the space.
        best_step_time_s: Step time of the best plan so far, in seconds; None before the first plan.
        so_far: Returns the result if the search stopped now. Valid only during the progress call.
        doing: ``searching`` until all candidates are done, then the name of the phase.
        phase: The current phase.
    """

    done: int
    total: int
    best_step_time_s: float | None
    so_far: Callable[[], SearchResult]
    doing: str
    phase: SearchPhase


class PhaseClock:
    """Time that the current phase takes per part."""

    def __init__(self) -> None:
        self._name = ""
        self._begun_s, self._begun_at = 0.0, 0

    def phase(self, name: str, done: int, of: int | None) -> SearchPhase:
        """The phase with the time that it still takes at its pace."""
        now_s = time.monotonic()
        if name != self._name:
            self._name, self._begun_s, self._begun_at = name, now_s, done
        took_s, parts = now_s - self._begun_s, done - self._begun_at
        known = of is not None and parts > 0 and took_s > _SETTLED_S
        return SearchPhase(name, done, of, (of - done) * took_s / parts if known and of is not None else None)
