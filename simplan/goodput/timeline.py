"""Timeline of one simulated run, in which work is known to be lost from its beginning."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from simplan.goodput.setup import OneRun, RunSetup, Stretch

_STEPS = ("compute", "slow_device", "fewer_nodes")
_PAUSES = ("evaluation", "checkpoint")
_ROUNDING = 1e-6
"""Fraction of a step that is not told apart."""


def timeline_of(setup: RunSetup, run: OneRun) -> tuple[Stretch, ...]:
    """Stretches of a run, in order and without gaps, with the steps and pauses that it had to repeat as lost work.

    Those are steps beyond the position to which a later stop goes back, and pauses after such steps.
    """
    timeline: list[Stretch] = []
    kept = inf  # lowest position from here on
    for stretch in reversed(run.stretches):
        begin = _begin(setup, stretch)
        is_repeated = stretch.kind in (*_STEPS, *_PAUSES) and stretch.step > kept + _ROUNDING
        if not is_repeated:
            timeline.append(stretch)
        elif begin < kept - _ROUNDING:
            share = (kept - begin) / (stretch.step - begin)
            middle_s = stretch.start_s + share * (stretch.end_s - stretch.start_s)
            timeline.append(replace(stretch, kind="lost_work", start_s=middle_s, cause=""))
            timeline.append(replace(stretch, end_s=middle_s, step=kept))
        else:
            timeline.append(replace(stretch, kind="lost_work"))
        kept = min(kept, begin)
    return tuple(reversed(timeline))


def _begin(setup: RunSetup, stretch: Stretch) -> float:
    """Position at the beginning of a stretch."""
    if stretch.kind not in _STEPS:
        return stretch.step
    size = next(size for size in setup.sizes if size.num_nodes <= stretch.num_nodes)
    step_s = size.step_s * (setup.slow_factor if stretch.kind == "slow_device" else 1.0)
    return stretch.step - (stretch.end_s - stretch.start_s) / step_s * size.advance
