"""Runs that never finish, because they fail before they get on, and the smallest changes with which they would.

Work of one checkpoint interval takes M e^(R/M) (e^((I + w)/M) - 1) seconds in the mean (Daly 2006, FGCS 22, equation
20), for stops every M seconds, a restart of R, an interval I and a checkpoint of w seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from simplan.goodput.rates import preemption_rate, scaled_failures, time_between_stops_s
from simplan.goodput.setup import RunSetup

_ENDLESS = 100.0
"""Ratio of the expected time over that without stops from which a run counts as endless."""
_MAX_EXPONENT = 500.0
_HALVINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Endless:
    """Reason why a run never finishes, and changes of which each alone lets it finish.

    Attributes:
        between_stops_s: Mean seconds between two stops of the job.
        restart_s: Seconds of a restart, with the load of a checkpoint.
        interval_s: Seconds from one checkpoint to the next; of the whole run without checkpoints.
        blocking_s: Seconds of a checkpoint.
        by_preemptions: True if most stops are preemptions.
        factor: Factor by which times between failures, or between preemptions if these are most stops, would have to
            grow; None if no factor is enough.
        saved_restart_s: Seconds by which the restart would have to be shorter; None if not even no restart is enough.
        shorter_interval_s: Longest checkpoint interval; None if none is short enough.
    """

    between_stops_s: float
    restart_s: float
    interval_s: float
    blocking_s: float
    by_preemptions: bool
    factor: float | None
    saved_restart_s: float | None
    shorter_interval_s: float | None


def endless(setup: RunSetup) -> Endless | None:
    """Reason why a run never finishes; None for one that does."""
    if _finishes(setup):
        return None
    interval_s = _interval_s(setup)

    by_preemptions = 2 * preemption_rate(setup) * time_between_stops_s(setup) > 1

    def with_rarer_stops(factor: float) -> RunSetup:
        if by_preemptions:
            return replace(setup, preemption_mtbf_s=factor * setup.preemption_mtbf_s)
        return scaled_failures(setup, factor)

    def with_interval(seconds: float) -> RunSetup:
        return replace(setup, checkpoint_every=max(1, int(seconds / setup.step_s)))

    longest_s = _largest(lambda seconds: _finishes(replace(setup, restart_s=seconds)), setup.restart_s)
    return Endless(
        between_stops_s=_between_stops_s(setup),
        restart_s=_restart_s(setup),
        interval_s=interval_s,
        blocking_s=setup.blocking_s,
        by_preemptions=by_preemptions,
        factor=_smallest(lambda factor: _finishes(with_rarer_stops(factor))),
        saved_restart_s=None if longest_s is None else setup.restart_s - longest_s,
        shorter_interval_s=_largest(lambda seconds: _finishes(with_interval(seconds)), interval_s)
        if setup.checkpoint_every
        else None,
    )


def _finishes(setup: RunSetup) -> bool:
    """True for a run that gets on between two stops, and takes less than a hundred times as long as without them."""
    between_s, restart_s, interval_s = _between_stops_s(setup), _restart_s(setup), _interval_s(setup)
    if math.isinf(between_s):
        return True
    loses_all = not (setup.checkpoint_every or setup.memory_every) and setup.policy != "continue"
    if between_s < restart_s + setup.blocking_s or (loses_all and _window_s(setup) < setup.undisturbed_s):
        return False
    exponents = restart_s / between_s, (interval_s + setup.blocking_s) / between_s
    if max(exponents) > _MAX_EXPONENT or _corrupted_work_s(setup) > math.log(_ENDLESS) * _between_corruptions_s(setup):
        return False
    expected_s = between_s * math.exp(exponents[0]) * math.expm1(exponents[1])
    return expected_s < _ENDLESS * (interval_s + setup.blocking_s)


def _between_stops_s(setup: RunSetup) -> float:
    """Mean time between stops; at most the time between two windows of maintenance."""
    return min(time_between_stops_s(setup), _window_s(setup))


def _window_s(setup: RunSetup) -> float:
    """Seconds between two windows of maintenance; infinity without."""
    return setup.maintenance_every_s - setup.maintenance_s


def _between_corruptions_s(setup: RunSetup) -> float:
    return setup.corruption_mtbf_s / (setup.num_nodes * setup.devices_per_node)


def _corrupted_work_s(setup: RunSetup) -> float:
    """Work that a silent corruption costs: since a checkpoint before it, or all if that is no longer kept."""
    interval_s = setup.checkpoint_every * setup.step_s
    is_kept = setup.checkpoint_every and (not setup.keep or setup.keep * interval_s > setup.corruption_found_s)
    return setup.corruption_found_s + interval_s if is_kept else setup.undisturbed_s


def _restart_s(setup: RunSetup) -> float:
    """Seconds until training goes on: of a whole restart, or of the groups that are left."""
    return setup.reconfigure_s if setup.policy == "continue" else setup.restart_s + _load_s(setup)


def _load_s(setup: RunSetup) -> float:
    loads = (setup.load_s, setup.checkpoint_every), (setup.memory_load_s, setup.memory_every)
    return min((load_s for load_s, every in loads if every), default=0.0)


def _interval_s(setup: RunSetup) -> float:
    """Seconds of work that a stop can lose."""
    if setup.policy == "continue":
        return setup.step_s
    every = [steps for steps in (setup.checkpoint_every, setup.memory_every) if steps]
    return min([*every, setup.num_steps]) * setup.step_s


def _smallest(holds: Callable[[float], bool]) -> float | None:
    """Smallest factor above 1 with which a condition holds, to a hundredth; None if 2**40 is not enough."""
    low, high = 1.0, 2.0
    while not holds(high):
        low, high = high, 2 * high
        if high > 2.0**40:
            return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _largest(holds: Callable[[float], bool], below: float) -> float | None:
    """Largest value below a bound with which a condition holds; None if 0 is too large."""
    if not holds(0.0):
        return None
    low, high = 0.0, below
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
