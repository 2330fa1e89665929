"""Refusal of a run that never finishes, with the smallest changes of its sections that let it finish."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simplan.errors import Problem, SpecError
from simplan.goodput.endless import Endless
from simplan.goodput.sections import Recovery, Reliability, RunSections
from simplan.problems import render_value
from simplan.scenario.file import Scenario
from simplan.units import format_span
from simplan.wording import either


def endless_error(reason: Endless, scenario: Scenario) -> SpecError:
    """Error about a run that never finishes."""
    run = scenario.whole_run or RunSections()
    field, value = _rate(run)
    restart, checkpoint, interval = map(format_span, (reason.restart_s, reason.blocking_s, reason.interval_s))
    if run.checkpoint is None:
        needs = f"without checkpoints it loses all of its {interval}"
    else:
        needs = f"a restart takes {restart}, a checkpoint {checkpoint} and the work between two {interval}"
    rule = f"the run never finishes: it stops every {format_span(reason.between_stops_s)} in the mean, and {needs}"
    fixes = [*_fixes(reason, run)]
    fix = f"write {either(fixes)}" if fixes else "change several of these"
    shown = None if value is None else render_value(value)
    return SpecError(Problem(field=field, value=shown, rule=rule, fix=fix), file=scenario.file)


def _rate(run: RunSections) -> tuple[str, float | None]:
    """The key that says how often the run fails; the section if several do."""
    reliability, spot = run.reliability or Reliability(), run.spot
    keys: dict[str, float] = {
        f"reliability.{name}": getattr(reliability, name)
        for name in ("device_mtbf_h", "node_mtbf_h", "link_mtbf_h")
        if getattr(reliability, name) is not None
    }
    if spot is not None and spot.preemptions_per_h is not None:
        keys["spot.preemptions_per_h"] = spot.preemptions_per_h
    if len(keys) == 1 and not reliability.causes:
        return next(iter(keys.items()))
    return "reliability" if run.reliability is not None else "spot", None


def _fixes(reason: Endless, run: RunSections) -> Iterator[str]:
    """Changes of which each alone is enough."""
    field, value = _rate(run)
    recovery = run.recovery or Recovery()
    if reason.factor is not None and field.endswith("mtbf_h") and value is not None:
        yield f"{field}: {_up(value * reason.factor):g}"
    elif reason.factor is not None and run.reliability is not None:
        yield f"times between failures that are {_up(reason.factor):g} times as long"
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
