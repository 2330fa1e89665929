"""Requirements of simplan's pipeline schedules; ``simplan.program.schedules`` generates their action tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Literal

from simplan.documentation import documentation
from simplan.errors import did_you_mean

SCHEDULE_GROUP = "simplan.schedules"
"""Entry point group through which installed packages add schedules."""

Placement = Literal["loop", "v"]
"""Stages of the p ranks. ``loop``: stage s is on rank s mod p. ``v``: stages go down the ranks and back up, so that
rank r has stages r and 2p-1-r."""


@dataclass(frozen=True, slots=True)
class BubbleForm:
    """Bubble fraction of equal stages with zero-cost communication, in closed form.

    Attributes:
        formula: The formula, for p ranks, m microbatches and v stages per rank.
        parts: Returns numerator and denominator for p, m and v.
    """

    formula: str
    parts: Callable[[int, int, int], tuple[int, int]]


_ONE_PASS = BubbleForm("(p-1)/(m+p-1)", lambda p, m, _: (p - 1, m + p - 1))
_INTERLEAVED = BubbleForm("(p-1)/(v m+p-1)", lambda p, m, v: (p - 1, v * m + p - 1))
_NAIVE = BubbleForm("(p-1)/p", lambda p, *_: (p - 1, p))


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """Requirements of a schedule.

    Attributes:
        virtual_stages: Stages per rank; None for any number above one.
        placement: Assignment of stages to ranks.
        splits_backward: Some microbatches have a split backward: input gradient (I) and weight gradient (W) instead of
            B.
        needs_times: The schedule is computed from the times of stages.
        bubble: Bubble fraction in closed form, of an interleaved schedule for m a multiple of p; None without one.
    """

    virtual_stages: int | None = 1
    placement: Placement = "loop"
    splits_backward: bool = False
    needs_times: bool = False
    bubble: BubbleForm | None = None


_SPLIT = ScheduleFacts(splits_backward=True)
_FOUND = ScheduleFacts(splits_backward=True, needs_times=True)
_V = ScheduleFacts(virtual_stages=2, placement="v", splits_backward=True)

SCHEDULE_FACTS: Mapping[str, ScheduleFacts] = MappingProxyType(
    {
        "naive": ScheduleFacts(bubble=_NAIVE),
        "gpipe": ScheduleFacts(bubble=_ONE_PASS),
        "1f1b": ScheduleFacts(bubble=_ONE_PASS),
        "interleaved_1f1b": ScheduleFacts(virtual_stages=None, bubble=_INTERLEAVED),
        "zb-h1": _SPLIT,
        "zb-h2": _SPLIT,
        "zb-1p": _FOUND,
        "zb-2p": _FOUND,
        "zb-v": _V,
        "dualpipe-v": _V,
    }
)
"""Requirements by schedule name; ``none`` is no schedule."""


REFUSED_SCHEDULES = ("zb-2p-optsync",)
"""Known schedules that are not modeled yet."""


def check_schedule_name(name: str) -> str:
    """Return the name of a known schedule or of a CSV file, which need not exist yet.

    Raises:
        ValueError: The schedule is unknown; the communication names the nearest.
    """
    if name == "none" or name in SCHEDULE_FACTS or name in REFUSED_SCHEDULES or is_table_file(name):
        return name
    known = [*SCHEDULE_FACTS, *installed_schedules()]
    if name in known:
        return name
    nearest = did_you_mean(name, known) or f"known: {', '.join(known)}"
    custom = f"a CSV file and an entry point can be given, too: {documentation('how-to/custom-schedule')}"
    raise ValueError(f"is not a known schedule; {nearest}{' ' if nearest.endswith('?') else '; '}{custom}")


def stage_ranks(name: str, num_ranks: int, num_stages: int) -> tuple[int, ...] | None:
    """``(num_stages,)`` Pipeline rank of every stage; None for a custom schedule, whose table assigns them.

    >>> stage_ranks("interleaved_1f1b", 2, 4), stage_ranks("zb-v", 2, 4)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    if is_custom_schedule(name):
        return None
    in_v = name in SCHEDULE_FACTS and SCHEDULE_FACTS[name].placement == "v"
    return tuple(min(stage, num_stages - 1 - stage) if in_v else stage % num_ranks for stage in range(num_stages))


def is_custom_schedule(name: str) -> bool:
    """True for a custom schedule: an action table in a file, or a schedule from an installed package."""
    return name != "none" and name not in SCHEDULE_FACTS


def is_table_file(name: str) -> bool:
    """True if a schedule is given as a CSV file with an action table."""
    return name.lower().endswith(".csv")


def splits_backward(name: str) -> bool:
    """True for a schedule of simplan with a split backward, for some microbatches at least."""
    facts = SCHEDULE_FACTS.get(name)
    return facts is not None and facts.splits_backward


def installed_schedules() -> Mapping[str, EntryPoint]:
    """Schedules of installed packages by name, not loaded."""
    return {point.name: point for point in entry_points(group=SCHEDULE_GROUP)}
