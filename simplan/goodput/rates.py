"""Rates at which a job is stopped, from the rates of its parts."""

from __future__ import annotations

import math
from dataclasses import replace

from simplan.goodput.setup import CauseSetup, RunSetup


def mtbf_s(setup: RunSetup) -> float:
    """Mean time between unplanned stops of the whole job in which work is lost; infinity for none."""
    rate = sum(_rate(setup, cause) for cause in setup.causes if not cause.planned)
    rate += setup.num_nodes * setup.devices_per_node / setup.corruption_mtbf_s
    if not _writes_within_notice(setup):
        rate += preemption_rate(setup)
    return 1 / rate if rate else math.inf


def time_between_stops_s(setup: RunSetup) -> float:
    """Mean time between stops of the whole job, planned ones except maintenance included; infinity for none."""
    rate = sum(_rate(setup, cause) for cause in setup.causes) + preemption_rate(setup)
    rate += setup.num_nodes * setup.devices_per_node * (1 / setup.corruption_mtbf_s + 1 / setup.slow_mtbf_s)
    return 1 / rate if rate else math.inf


def _rate(setup: RunSetup, cause: CauseSetup) -> float:
    """Failures of a cause per second of the job, in the mean over a run without stops."""
    units = setup.num_nodes * cause.units_per_node or 1
    end_s, length_s = cause.age_s + setup.undisturbed_s, setup.undisturbed_s
    expected = (end_s / cause.mtbf_s) ** cause.shape - (cause.age_s / cause.mtbf_s) ** cause.shape
    return float(units * expected / length_s)


def preemption_rate(setup: RunSetup) -> float:
    """Losses of spot nodes per second, by rate or by trace."""
    falls = sum(after < before for before, after in zip(setup.trace_nodes, setup.trace_nodes[1:], strict=False))
    by_trace = falls / setup.trace_s[-1] if setup.trace_s else 0.0
    return setup.num_nodes / setup.preemption_mtbf_s + by_trace


def _writes_within_notice(setup: RunSetup) -> bool:
    """True if the notice of a preemption is long enough for a checkpoint."""
    return bool(setup.checkpoint_every) and setup.notice_s >= setup.blocking_s + setup.write_s


def scaled_failures(setup: RunSetup, factor: float) -> RunSetup:
    """The run with times between unplanned failures that are longer by a factor."""
    causes = tuple(cause if cause.planned else replace(cause, mtbf_s=factor * cause.mtbf_s) for cause in setup.causes)
    return replace(
        setup,
        causes=causes,
        corruption_mtbf_s=factor * setup.corruption_mtbf_s,
        slow_mtbf_s=factor * setup.slow_mtbf_s,
    )
