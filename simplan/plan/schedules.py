"""What the schedules that come with simplan take; ``simplan.program.schedules`` has the functions that write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Literal

from simplan.errors import did_you_mean

__all__ = [
    "REFUSED_SCHEDULES",
    "SCHEDULE_FACTS",
    "SCHEDULE_GROUP",
    "Placement",
    "ScheduleFacts",
    "check_schedule_name",
    "installed_schedules",
    "is_own_schedule",
    "is_table_file",
    "splits_backward",
]

SCHEDULE_GROUP = "simplan.schedules"
"""Group of entry points by which installed packages bring schedules."""

Placement = Literal["loop", "v"]
"""Where stages are: stage s on rank s mod p, or down the ranks and back up, so that rank r has stages r and 2p-1-r."""


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """What a schedule takes.

    Attributes:
        virtual_stages: Stages of a rank; None for any number above one.
        placement: Which rank has which stages.
        splits_backward: It has I and W instead of B, for some microbatches at least.
        needs_times: It is found from the times of stages.
    """

    virtual_stages: int | None = 1
    placement: Placement = "loop"
    splits_backward: bool = False
    needs_times: bool = False


_SPLIT = ScheduleFacts(splits_backward=True)
_FOUND = ScheduleFacts(splits_backward=True, needs_times=True)
_V = ScheduleFacts(virtual_stages=2, placement="v", splits_backward=True)

SCHEDULE_FACTS: Mapping[str, ScheduleFacts] = MappingProxyType(
    {
        "naive": ScheduleFacts(),
        "gpipe": ScheduleFacts(),
        "1f1b": ScheduleFacts(),
        "interleaved_1f1b": ScheduleFacts(virtual_stages=None),
        "zb-h1": _SPLIT,
        "zb-h2": _SPLIT,
        "zb-1p": _FOUND,
        "zb-2p": _FOUND,
        "zb-v": _V,
        "dualpipe-v": _V,
    }
)
"""By name; ``none`` is no schedule."""


REFUSED_SCHEDULES = ("zb-2p-optsync",)
"""Known, but not modelled yet."""


def check_schedule_name(name: str) -> str:
    """The name of a schedule, if there is one of that name; a file need not be there yet.

    Raises:
        ValueError: There is none; names the nearest.
    """
    if name == "none" or name in SCHEDULE_FACTS or name in REFUSED_SCHEDULES or is_table_file(name):
        return name
    known = [*SCHEDULE_FACTS, *installed_schedules()]
    if name in known:
        return name
    nearest = did_you_mean(name, known) or f"use one of {', '.join(known)}, or a CSV file with a table of actions"
    raise ValueError(f"is not a known schedule; {nearest}")


def is_own_schedule(name: str) -> bool:
    """Whether it is the user's: a table in a file, or a name that an installed package brings."""
    return name != "none" and name not in SCHEDULE_FACTS


def is_table_file(name: str) -> bool:
    """Whether a schedule is given as a file with a table of actions."""
    return name.lower().endswith(".csv")


def splits_backward(name: str) -> bool:
    """Whether it is one of simplan's whose backward is in two parts, for some microbatches at least."""
    facts = SCHEDULE_FACTS.get(name)
    return facts is not None and facts.splits_backward


def installed_schedules() -> Mapping[str, EntryPoint]:
    """Schedules that installed packages bring, by name; none of them is loaded."""
    return {point.name: point for point in entry_points(group=SCHEDULE_GROUP)}
