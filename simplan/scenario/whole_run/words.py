"""Refusal of a run that never finishes, with the smallest changes of its sections that let it finish."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simplan.errors import Problem, SpecError
from simplan.goodput.endless import Endless
from simplan.goodput.sections import Recovery, RunSections
from simplan.scenario.file import Scenario
from simplan.units import format_span
from simplan.wording import either


def endless_error(reason: Endless, scenario: Scenario) -> SpecError:
    """Error about a run that never finishes."""
    run = scenario.whole_run or RunSections()
    field, value = _rate(reason, run)
    restart, checkpoint, interval = map(format_span, (reason.restart_s, reason.blocking_s, reason.interval_s))
    if run.checkpoint is None:
        needs = f"without checkpoints it loses all of its {interval}"
    else:
        needs = f"a restart takes {restart}, a checkpoint {checkpoint} and the work between two {interval}"
    rule = f"the run never finishes: it stops every {format_span(reason.between_stops_s)} in the mean, and {needs}"
    fixes = [*_fixes(reason, run)]
    fix = f"write {either(fixes)}" if fixes else "change several of these"
    shown = None if value is None else f"{value:g}"
    return SpecError(Problem(field=field, value=shown, rule=rule, fix=fix), file=scenario.file)


def _rate(reason: Endless, run: RunSections) -> tuple[str, float | None]:
    """The key that says how often the run stops, and its value; the section alone if several keys do."""
    spot, reliability = run.spot, run.reliability
    if reason.by_preemptions and spot is not None:
        return ("spot", None) if spot.preemptions_per_h is None else ("spot.preemptions_per_h", spot.preemptions_per_h)
    if reliability is None:
        return "run", None
    short = ("device_mtbf_h", "node_mtbf_h", "link_mtbf_h")
    keys = [name for name in short if getattr(reliability, name) is not None]
    if len(keys) != 1 or reliability.causes:
        return "reliability", None
    return f"reliability.{keys[0]}", getattr(reliability, keys[0])


def _fixes(reason: Endless, run: RunSections) -> Iterator[str]:
    """Changes of which each alone is enough."""
    field, value = _rate(reason, run)
    recovery = run.recovery or Recovery()
    if reason.factor is not None and value is not None:
        rarer = f"{_down(value / reason.factor):g}" if reason.by_preemptions else f"{_up(value * reason.factor):g}"
        yield f"{field}: {rarer}"
    elif reason.factor is not None and run.reliability is not None:
        yield f"times between failures {_up(reason.factor):g} times as long"
    restart_s = -1.0 if reason.saved_restart_s is None else recovery.restart_s - reason.saved_restart_s
    if recovery.policy != "continue" and 0 <= restart_s < recovery.restart_s:
        yield f"recovery.restart_s: {_down(restart_s):g}"
    if reason.shorter_interval_s is not None:
        yield f"checkpoint.interval_s: {_down(reason.shorter_interval_s):g}"
    elif run.checkpoint is None and recovery.policy != "continue":
        yield "checkpoint: {interval_s: best, blocking_s: 30}"


def _up(value: float) -> float:
    """Three significant digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit


def _down(value: float) -> float:
    """Three significant digits, rounded down."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.floor(value / unit) * unit
