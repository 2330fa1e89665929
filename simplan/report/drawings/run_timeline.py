"""Timeline of one run of a whole-run simulation: a row for each minute, hour, day or week of it, and its text.

A row is divided into columns, of which each has one kind of time. Stops come first, as they are short: a column in
which the run is stopped shows that. Pauses are shown in the same way while they are some columns apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simplan.goodput.engines.simulate import one_run
from simplan.goodput.result import GoodputResult
from simplan.goodput.setup import WATERFALL, Stretch
from simplan.goodput.timeline import timeline_of
from simplan.report.drawings.drawing import clean
from simplan.report.goodput import PARTS, headline
from simplan.units import counted, format_percent, format_span

_SCHEMA_VERSION = 1
_MAX_ROWS = 60
_STEPS, _PAUSES = ("compute", "slow_device", "fewer_nodes"), ("evaluation", "checkpoint")
_APART = 3
"""Columns from one pause to the next from which on pauses are drawn that are shorter than a column."""


class RowLength(NamedTuple):
    """Length of a row.

    Attributes:
        name: Name of one.
        length_s: Its seconds.
        unit, unit_s: Unit of its axis, and that in seconds.
        tick: Units between two ticks.
    """

    name: str
    length_s: float
    unit: str
    unit_s: float
    tick: int

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Seconds from the start of a row with their labels, of which the last has the unit."""
        last = round(self.length_s / self.unit_s)
        values = range(0, last + 1, self.tick)
        return tuple((value * self.unit_s, f"{value} {self.unit}" if value == last else str(value)) for value in values)


_LENGTHS = (
    RowLength("minute", 60.0, "s", 1.0, 15),
    RowLength("hour", 3600.0, "min", 60.0, 15),
    RowLength("day", 86_400.0, "h", 3600.0, 6),
    RowLength("week", 7 * 86_400.0, "days", 86_400.0, 1),
    RowLength("year", 364 * 86_400.0, "weeks", 7 * 86_400.0, 13),
)


class TimelineSegment(NamedTuple):
    """Neighboring columns of one kind.

    Attributes:
        row: Index of the row.
        start_s, end_s: Seconds from the start of the row, at borders of columns.
        kind: A part of ``WATERFALL``.
        seconds: Seconds of that kind in them.
    """

    row: int
    start_s: float
    end_s: float
    kind: str
    seconds: float


def kinds_of(segments: Iterable[TimelineSegment]) -> tuple[str, ...]:
    """Kinds of time that are drawn, in the order of ``WATERFALL``."""
    drawn = {segment.kind for segment in segments}
    return tuple(kind for kind in WATERFALL if kind in drawn)


class Stop(NamedTuple):
    """A stop of the run: seconds from its start, the cause, and the position in steps from which it goes on."""

    at_s: float
    cause: str
    step: float


@dataclass(frozen=True)
class RunTimeline:
    """One simulated run.

    Attributes:
        name: Scenario name.
        seed: Seed of the simulated runs.
        number: Number of the run among them, from 0.
        num_runs: Simulated runs.
        shorter: Fraction of them that are shorter.
        is_median: True for the run with the median time.
        num_steps: Steps of the run.
        goodput: Steps on all nodes at the predicted step time, over the time of the run.
        stretches: See ``timeline_of``.
    """

    name: str
    seed: int
    number: int
    num_runs: int
    shorter: float
    is_median: bool
    num_steps: int
    goodput: float
    stretches: tuple[Stretch, ...]

    @property
    def time_s(self) -> float:
        """Seconds of the run."""
        return self.stretches[-1].end_s

    @cached_property
    def row_length(self) -> RowLength:
        """Length of a row: the shortest of which at most 60 make the run."""
        return next((length for length in _LENGTHS if self.time_s <= _MAX_ROWS * length.length_s), _LENGTHS[-1])

    @property
    def num_rows(self) -> int:
        """Rows, of which the last one may end early."""
        return max(1, -int(-self.time_s // self.row_length.length_s))

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Stops by time; one that begins with steps has taken no time."""
        return tuple(Stop(stretch.start_s, stretch.cause, stretch.step) for stretch in self.stretches if stretch.cause)

    def done(self, at_s: float) -> float:
        """Fraction of the steps that are done at a time."""
        ends_s, steps = zip(*((stretch.end_s, stretch.step) for stretch in self.stretches), strict=True)
        return float(np.interp(at_s, [0.0, *ends_s], [0.0, *steps])) / self.num_steps

    def segments(self, columns: int) -> tuple[TimelineSegment, ...]:
        """Rows of a number of columns, each as segments in the order of time."""
        length_s = self.row_length.length_s
        seconds = self._seconds(columns)
        segments = []
        for row, kinds in enumerate(self._chosen(seconds).reshape(self.num_rows, columns)):
            place = 0
            for kind, cells in groupby(int(kind_index) for kind_index in kinds):
                first, place = place, place + len(list(cells))
                if kind >= 0:
                    own_s = float(seconds[kind, row * columns + first : row * columns + place].sum())
                    end_s = min(place / columns * length_s, self.time_s - row * length_s)
                    segments.append(TimelineSegment(row, first / columns * length_s, end_s, WATERFALL[kind], own_s))
        return tuple(segments)

    def draws_pauses(self, columns: int) -> bool:
        """False if pauses that are shorter than a column are left out, because there would be little else."""
        num_pauses = sum(stretch.kind in _PAUSES for stretch in self.stretches)
        return _APART * num_pauses <= columns * self.time_s / self.row_length.length_s

    def _seconds(self, columns: int) -> NDArray[np.float64]:
        """(kinds, rows x columns) Seconds of each kind in each column."""
        edges_s = np.arange(self.num_rows * columns + 1) * (self.row_length.length_s / columns)
        lengths_s = np.array([stretch.end_s - stretch.start_s for stretch in self.stretches])
        kinds = np.array([WATERFALL.index(stretch.kind) for stretch in self.stretches])
        ends_s = np.array([0.0, *(stretch.end_s for stretch in self.stretches)])
        until_s = [np.append(0.0, np.cumsum(np.where(kinds == kind, lengths_s, 0.0))) for kind in range(len(WATERFALL))]
        return np.diff([np.interp(edges_s, ends_s, stretch) for stretch in until_s])

    def _chosen(self, seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """(rows x columns) Index of the kind of each column; -1 after the end of the run."""
        chosen = np.where(seconds.sum(axis=0) > 0, seconds.argmax(axis=0), -1)
        stopped = tuple(kind for kind in WATERFALL if kind not in (*_STEPS, *_PAUSES))
        layers = [_PAUSES, stopped] if self.draws_pauses(seconds.shape[1] // self.num_rows) else [stopped]
        for layer in layers:
            of_layer = np.where(np.isin(WATERFALL, layer)[:, None], seconds, 0.0)
            chosen = np.where(of_layer.sum(axis=0) > 0, of_layer.argmax(axis=0), chosen)
        return chosen

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "kind": "run_timeline",
            "name": self.name,
            "seed": self.seed,
            "trial": self.number,
            "trials": self.num_runs,
            "shorter": self.shorter,
            "time_s": self.time_s,
            "goodput": self.goodput,
            "num_steps": self.num_steps,
            "stretches": [
                {
                    "kind": stretch.kind,
                    "start_s": stretch.start_s,
                    "end_s": stretch.end_s,
                    "num_nodes": stretch.num_nodes,
                    "step": stretch.step,
                    "cause": stretch.cause or None,
                }
                for stretch in self.stretches
            ],
        }


def run_timeline(result: GoodputResult, number: int | None = None) -> RunTimeline:
    """Timeline of a simulated run.

    Args:
        result: Simulated runs.
        number: Number of the run, from 0; None for the one with the median time.

    Raises:
        SpecError: The run does not finish.
    """
    chosen = result.median_run if number is None else number
    setup = result.setup
    run = one_run(setup, seed=result.seed, number=chosen)
    return RunTimeline(
        name=result.name,
        seed=result.seed,
        number=chosen,
        num_runs=result.num_runs,
        shorter=float((result.runs.time_s < run.time_s).mean()),
        is_median=chosen == result.median_run,
        num_steps=setup.num_steps,
        goodput=setup.num_steps * setup.step_s / run.time_s,
        stretches=timeline_of(setup, run),
    )


def heading(timeline: RunTimeline) -> str:
    """Scenario and time of the run."""
    return f"{clean(timeline.name)}: one run, {format_span(timeline.time_s)}"


def subheading(timeline: RunTimeline) -> str:
    """Place of the run among the others, its goodput and its stops."""
    shorter = format_percent(timeline.shorter)
    place = f"the median of {timeline.num_runs:,}" if timeline.is_median else f"{shorter} of the runs are shorter"
    which = f"run {timeline.number} of seed {timeline.seed} ({place})"
    return f"{which}, goodput {format_percent(timeline.goodput)}, {counted(len(timeline.stops), 'stop')}"


def row_figures(timeline: RunTimeline) -> Iterator[tuple[str, int, float]]:
    """Yields the name of each row, its number of stops, and the fraction of the steps that is done at its end."""
    length = timeline.row_length
    stops = np.bincount([int(stop.at_s // length.length_s) for stop in timeline.stops], minlength=timeline.num_rows)
    for row in range(timeline.num_rows):
        yield f"{length.name} {row + 1}", int(stops[row]), timeline.done((row + 1) * length.length_s)


def notes(timeline: RunTimeline, columns: int) -> list[str]:
    """Sentences for the legend of a timeline with a number of columns."""
    column = format_span(timeline.row_length.length_s / columns)
    if timeline.draws_pauses(columns):
        return [f"stops, evaluations and checkpoints below {column} are drawn with that length"]
    return [
        f"stops below {column} are drawn with that length",
        "evaluations and checkpoints are too close to each other to be drawn at this width",
    ]


_LETTERS = dict(zip(WATERFALL, "─ecxdDwrgsfm", strict=True))
_FIGURES_WIDTH = 16


def whole_run_text(result: GoodputResult, timeline: RunTimeline, width: int) -> str:
    """The timeline of one run, and the waterfall and the goodput over the checkpoint interval of all, as text.

    Args:
        width: Columns of a line, at least 60.
    """
    document = result.to_json()
    parts = [run_timeline_text(timeline, width)]
    parts.append(f"{clean(result.name)}: all {result.num_runs:,} runs\n{headline(document)}")
    parts.append("\n".join(_waterfall_lines(result, width)))
    if result.curve is not None:
        parts.append("\n".join(_curve_lines(document, width)))
    return "\n\n".join(parts)


def run_timeline_text(timeline: RunTimeline, width: int) -> str:
    """The timeline as lines of text, a letter for each kind of time.

    Args:
        width: See ``whole_run_text``.
    """
    rows = list(row_figures(timeline))
    left = max(len(name) for name, _, _ in rows)
    columns = width - left - 3 - _FIGURES_WIDTH
    cells = [[" "] * columns for _ in rows]
    segments = timeline.segments(columns)
    for segment in segments:
        first, last = (round(edge_s / timeline.row_length.length_s * columns) for edge_s in segment[1:3])
        cells[segment.row][first:last] = _LETTERS[segment.kind] * (last - first)
    lines = [heading(timeline), subheading(timeline), "", " " * (left + columns + 3) + f"{'stops':>7}{'done':>9}"]
    for (name, stops, done), row in zip(rows, cells, strict=True):
        lines.append(f"{name:{left}} │{''.join(row)}│{stops or '':>7}{format_percent(done):>9}")
    axis = ""
    for at_s, label in timeline.row_length.ticks:
        axis = f"{axis:{min(round(at_s / timeline.row_length.length_s * columns), columns + 1)}}|{label}"
    legend = "   ".join(f"{_LETTERS[kind]} {PARTS[kind]}" for kind in kinds_of(segments))
    return "\n".join([*lines, " " * (left + 2) + axis, "", legend, *notes(timeline, columns)])


def _waterfall_lines(result: GoodputResult, width: int) -> Iterator[str]:
    """Mean seconds of each part as a bar; all but the first part have a scale of their own."""
    (name, first_s), *others = [(PARTS[part], each_s) for part, each_s in result.waterfall_s.items() if each_s > 0]
    total_s, rest_s = result.mean_time_s, sum(each_s for _, each_s in others)
    left = max(len(label) for label, _ in [(name, first_s), *others])
    columns = width - left - 3 - _FIGURES_WIDTH - 6

    def line(name: str, start: float, seconds: float, scale_s: float) -> str:
        begin, end = round(start / scale_s * columns), round((start + seconds) / scale_s * columns)
        bar = f"{' ' * begin}{'═' * (end - begin) or '│'}"
        return f"{name:{left}} │{bar} {format_span(seconds)}, {format_percent(seconds / total_s)}"

    yield line(name, 0.0, first_s, total_s)
    if others:
        yield f"the other {format_span(rest_s)} to a larger scale:"
    start_s = 0.0
    for name, seconds in others:
        yield line(name, start_s, seconds, rest_s)
        start_s += seconds


def _curve_lines(document: Mapping[str, Any], width: int) -> Iterator[str]:
    """Goodput over the checkpoint interval, an interval a line."""
    marks = ", ".join(
        f"{name} {format_span(document[key])}"
        for name, key in (("best", "best_interval_s"), ("Young", "young_s"), ("Daly", "daly_s"))
    )
    yield f"goodput over the checkpoint interval: {marks}"
    useful_s = document["num_steps"] * document["step_time_s"]
    points = [(format_span(point["interval_s"]), useful_s / point["time_s"]) for point in document["interval_curve"]]
    lowest, highest = (function(goodput for _, goodput in points) for function in (min, max))
    left = max(len(name) for name, _ in points)
    columns = width - left - 3 - _FIGURES_WIDTH
    for name, goodput in points:
        place = round((goodput - lowest) / (highest - lowest or 1.0) * columns)
        yield f"{name:>{left}} │{'·' * place}o {format_percent(goodput)}"
