"""Plot of predicted over measured step times as plain data, one panel per file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from simplan.accuracy.result import Accuracy
from simplan.accuracy.statistics import IntervalFigures
from simplan.report.accuracy import accuracy_head

ERRORS = {1.2: (-0.1, 0.0, 0.1), 1.5: (-0.25, 0.0, 0.25), 2.0: (-0.3, 0.0, 0.5), 3.0: (-0.5, 0.0, 1.0)}
"""Largest ratio that a panel shows, and its inverse is the least; which errors are marked at its side."""
_SHOWN = 0.95  # fraction of the runs that the panels' ratio range should contain
_MIN_RANGE = 4.0  # of the times, last over first, so that there is a round one between


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """One published run.

    Attributes:
        id: Run id.
        measured_s, predicted_s: Step time in seconds.
        in_interval: The measured step time lies in the 90 % interval; None without an interval.
    """

    id: str
    measured_s: float
    predicted_s: float
    in_interval: bool | None

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel of the plot: name, errors and runs of one file."""

    name: str
    figures: IntervalFigures
    points: tuple[PlotPoint, ...]


@dataclass(frozen=True)
class AccuracyPlot:
    """Predicted over measured step times: a summary of all runs, and at least one panel."""

    heading: str
    panels: tuple[Panel, ...]

    @cached_property
    def points(self) -> tuple[PlotPoint, ...]:
        """Points of all panels."""
        return tuple(point for panel in self.panels for point in panel.points)

    @cached_property
    def largest_ratio(self) -> float:
        """Upper limit of the panels; the lower limit is the inverse. Runs beyond are marked at the edge."""
        far = [max(point.ratio, 1 / point.ratio) for point in self.points]
        enough = (limit for limit in ERRORS if sum(ratio <= limit for ratio in far) >= _SHOWN * len(far))
        return next(enough, max(ERRORS))

    @cached_property
    def times_s(self) -> tuple[float, float]:
        """Start and end of the axis of measured times."""
        first_s = min(point.measured_s for point in self.points)
        last_s = max(point.measured_s for point in self.points)
        more = max(1.25, math.sqrt(_MIN_RANGE * first_s / last_s))
        return first_s / more, last_s * more


def accuracy_plot(result: Accuracy) -> AccuracyPlot | None:
    """Plot of published runs; None if no step time was both measured and predicted."""
    panels = []
    figures = result.by_file
    for file, name in result.names.items():
        points = tuple(
            PlotPoint(
                outcome.run.id, outcome.run.measured.step_time_s, outcome.predicted.step_time_s, outcome.in_interval
            )
            for outcome in result.of_file(file)
            if outcome.predicted is not None and outcome.run.measured.step_time_s is not None
        )
        if points:
            panels.append(Panel(name, figures[file].step_time, points))
    return AccuracyPlot(accuracy_head(result), tuple(panels)) if panels else None


def time_ticks(first_s: float, last_s: float) -> tuple[float, ...]:
    """Round times on a logarithmic axis: powers of ten, or 1, 2 and 5 times powers of ten if fewer than three fit.

    >>> time_ticks(0.2, 150)
    (1.0, 10.0, 100.0)
    >>> time_ticks(0.9, 4)
    (1.0, 2.0)
    """
    powers = range(math.floor(math.log10(first_s)), math.ceil(math.log10(last_s)) + 1)
    for factors in ((1,), (1, 2, 5)):
        ticks_s = tuple(float(f"{factor}e{power}") for power in powers for factor in factors)
        ticks_s = tuple(time_s for time_s in ticks_s if first_s <= time_s <= last_s)
        if len(ticks_s) >= 3:
            break
    return ticks_s
