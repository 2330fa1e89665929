"""Comparisons of plans, clusters and sizes as plain data: stacked bars, a map of degrees, and curves.

A chart is the data of a figure; ``simplan.report.drawings.charts_svg`` draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from simplan.errors import SpecError
from simplan.explain.ways_map import WaysMap
from simplan.job import Job
from simplan.predict import predict
from simplan.predict.sensitivity import Resource, improved
from simplan.predict.step_summary import summarize_step
from simplan.predict.sweep import data_parallel_changes
from simplan.prediction import Prediction
from simplan.program.program import MemoryCategory
from simplan.program.timeline import Split
from simplan.training import TrainingBudget
from simplan.units import format_rate, format_span

Changes = Mapping[str, Any]
"""Values by setting, as for ``Job.with_changes``."""

MEMORY_PARTS = (*(str(one).replace("_", " ") for one in MemoryCategory), "allocator reserve")
STEP_PARTS = tuple(one.name.removesuffix("_s").replace("_", " ") for one in fields(Split))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its label, and the sizes of its parts by name."""

    label: str
    parts: Mapping[str, float]

    @property
    def size(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars with one scale.

    Attributes:
        title: Heading.
        unit: Unit of the sizes: ``bytes`` or ``s``.
        names: Parts that a bar may have, in the order of their colors.
        bars: From top to bottom.
        limit: Size to mark, and its name; None for none.
    """

    title: str
    unit: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a map: its fraction, or words for a plan without one."""

    fraction: float | None
    words: str


@dataclass(frozen=True, slots=True)
class DegreeMap:
    """A fraction for every pair of two degrees.

    Attributes:
        title: Heading.
        row_name, column_name: Settings of the rows and the columns.
        rows, columns: Their values.
        cells: By row and column.
    """

    title: str
    row_name: str
    column_name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    cells: Mapping[tuple[int, int], Cell]


@dataclass(frozen=True, slots=True)
class CurveAxis:
    """Axis of curves.

    Attributes:
        name: Quantity, for the reader.
        unit: ``s``, ``span`` for seconds up to days, ``bytes``, ``bytes/s``, ``percent`` for fractions; empty for plain
            numbers.
        is_log: Logarithmic.
        is_near: A linear y axis that begins near its smallest value, not at 0.
        ticks: Values to label; empty for round ones.
    """

    name: str
    unit: str = ""
    is_log: bool = False
    is_near: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points, x before y, with a label at each point, or none."""

    name: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over one x axis: a heading and a note below it, the axes, and the lines."""

    title: str
    note: str
    x: CurveAxis
    y: CurveAxis
    curves: tuple[Curve, ...]


def memory_by_plan(job: Job, plans: Mapping[str, Changes], title: str = "") -> Bars:
    """Peak memory of the worst rank by category, for changes of a job by their name; the memory of a device is marked.

    Raises:
        SpecError: As for ``predict``.
    """
    predictions = {name: predict(job.with_changes(changes)) for name, changes in plans.items()}
    bars = tuple(Bar(name, memory_parts(prediction)) for name, prediction in predictions.items())
    capacity = min(
        (
            prediction_of_plan.capacity_bytes
            for prediction_of_plan in predictions.values()
            if prediction_of_plan.capacity_bytes
        ),
        default=None,
    )
    limit = None if capacity is None else (float(capacity), "device memory")
    return Bars(title or f"{job.model.name}: peak memory of a device", "bytes", MEMORY_PARTS, bars, limit)


def memory_parts(prediction: Prediction) -> dict[str, float]:
    """Bytes of the worst rank at its peak by the names of ``MEMORY_PARTS``; they sum to its device bytes."""
    worst = prediction.worst_memory
    parts = {str(name).replace("_", " "): float(size) for name, size in worst.by_category.items()}
    return parts | {"allocator reserve": float(worst.reserved_bytes - worst.allocated_bytes)}


def step_by_plan(job: Job, plans: Mapping[str, Changes], title: str = "") -> Bars:
    """Split of the step, mean over ranks, for changes of a job by their name.

    Raises:
        SpecError: As for ``predict``.
    """
    bars = tuple(Bar(name, step_parts(predict(job.with_changes(changes)))) for name, changes in plans.items())
    return Bars(title or f"{job.model.name}: one step, mean over ranks", "s", STEP_PARTS, bars)


def step_parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by the names of ``STEP_PARTS``, mean over ranks; they sum to the step."""
    number = len(prediction.splits)
    return {
        name: sum(getattr(split, field.name) for split in prediction.splits) / number
        for name, field in zip(STEP_PARTS, fields(Split), strict=True)
    }


def mfu_map(job: Job, rows: Sequence[int], columns: Sequence[int], axes: tuple[str, str] = ("pp", "tp")) -> DegreeMap:
    """MFU for pairs of degrees; data-parallel ranks take all other devices.

    Args:
        job: The job.
        rows, columns: Degrees.
        axes: Settings of the rows and the columns.
    """
    cells = {}
    for row in rows:
        for column in columns:
            changes = {f"plan.{axes[0]}": row, f"plan.{axes[1]}": column}
            try:
                prediction = predict(job.with_changes(changes | data_parallel_changes(job, changes)))
            except SpecError:
                cells[row, column] = Cell(None, "not valid")
                continue
            fits = prediction.fits is not False
            cells[row, column] = Cell(prediction.mfu if fits else None, "" if fits else "no memory")
    title = f"{job.model.name} on {job.cluster.num_devices:,} devices: MFU by degree"
    return DegreeMap(title, *axes, tuple(rows), tuple(columns), cells)


def step_over_bandwidth(
    job: Job, plans: Mapping[str, Changes], factors: Sequence[float], resource: Resource = Resource.INTER_LINK
) -> Curves:
    """Step time over the bandwidth of a link, for changes of a job by their name.

    Args:
        job: The job.
        plans: Changes by name.
        factors: Bandwidths, ascending, as factors of that of the cluster.
        resource: The link: between nodes, or within them.

    Raises:
        SpecError: As for ``predict``.
    """
    link = getattr(job.cluster, resource)
    assert link is not None, "the cluster has the link"
    curves = []
    for name, changes in plans.items():
        changed = job.with_changes(changes)
        points = []
        for factor in factors:
            cluster = improved(changed.cluster, resource, factor)
            assert cluster is not None, "the cluster has the link"
            step = summarize_step(replace(changed, cluster=cluster))
            points.append((link.bytes_per_s * factor, step.step_time_s))
        curves.append(Curve(name, tuple(points)))
    where = "between nodes" if resource is Resource.INTER_LINK else "within a node"
    return Curves(
        f"{job.model.name}: step time over bandwidth",
        f"today {format_rate(link.bytes_per_s)} {where}, per device",
        CurveAxis(f"bandwidth {where} per device", "bytes/s", is_log=True),
        CurveAxis("step time", "s", is_log=True),
        tuple(curves),
    )


def cost_over_days(job: Job, budget: TrainingBudget, plans: Mapping[str, Changes], devices: Sequence[int]) -> Curves:
    """Cost of a whole training without failures over its days, a point per number of devices.

    Args:
        job: The job; data-parallel ranks take all devices.
        budget: Tokens and price of the training.
        plans: Changes by name.
        devices: Numbers of devices.

    Raises:
        SpecError: As for ``predict``.
    """
    curves = []
    for name, changes in plans.items():
        points, labels = [], []
        for number in devices:
            changed, size = job.with_changes(changes), {"cluster.num_devices": number}
            prediction = predict(changed.with_changes(size | data_parallel_changes(changed, size)))
            run = prediction.with_budget(budget).training_run
            assert run is not None
            assert run.cost is not None, "the budget has a price"
            points.append((run.days, run.cost))
            labels.append(f"{number:,}")
        curves.append(Curve(name, tuple(points), tuple(labels)))
    note = "each point is a number of devices, without failures"
    return Curves(
        f"{job.model.name}: cost over days", note, CurveAxis("days", is_log=True), CurveAxis("cost"), tuple(curves)
    )


def goodput_over_interval(document: Mapping[str, Any]) -> Curves:
    """Goodput over the checkpoint interval, with the best interval, Young's and Daly's where they are in the range.

    Args:
        document: JSON of ``simplan goodput`` with ``checkpoint.interval_s: best``.
    """
    useful_s = document["num_steps"] * document["step_time_s"]
    points = tuple((point["interval_s"], useful_s / point["time_s"]) for point in document["interval_curve"])
    ends = [function(goodput for _, goodput in points) for function in (min, max)]
    marks = {"best": "best_interval_s", "Young": "young_s", "Daly": "daly_s"}
    curves = [Curve("goodput", points)]
    for name, key in marks.items():
        interval_s = document[key]
        if interval_s and points[0][0] <= interval_s <= points[-1][0]:
            curves.append(Curve(f"{name}, {format_span(interval_s)}", tuple((interval_s, end) for end in ends)))
    x = CurveAxis("training between two checkpoints", "span", is_log=True, ticks=_INTERVALS_S)
    y = CurveAxis("goodput", "percent", is_near=True)
    return Curves(f"{document['name']}: goodput over the checkpoint interval", "", x, y, tuple(curves))


_INTERVALS_S = (1, 5, 15, 60, 300, 600, 1200, 2400, 3600, 2 * 3600, 4 * 3600, 8 * 3600, 86_400, 7 * 86_400)


def ways_curves(ways: WaysMap) -> Curves:
    """Curves of a map of ways to train, the slowest at the lowest bandwidth first."""
    drawn = sorted(ways.drawn, key=lambda curve: -curve.step_times_s[0])
    return Curves(
        f"{ways.name}: step time of ways to train",
        "a step of one way may be worth fewer samples than that of another",
        CurveAxis(f"{ways.link} per device", "bytes/s", is_log=True),
        CurveAxis("step time", "s", is_log=True),
        tuple(Curve(way.name, tuple(zip(ways.bytes_per_s, way.step_times_s, strict=True))) for way in drawn),
    )
