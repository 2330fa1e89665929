"""Sensitivity of a plan: sweeps over one setting, value of 1 % more of each resource, and cost of a slow rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from app.figures.style import MUTED, PLANS, Figure, across, bar, empty, figure, labeled_bars, scatter
from app.predictions import predicted_step
from simplan.cluster.hardware import LinkSpec
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.explain.ways_map import WaysMap, ways_map
from simplan.job import Job
from simplan.predict import Resource, Simulated, marginal_values
from simplan.predict.sensitivity import MarginalValue, improved
from simplan.predict.step_summary import StepSummary, summarize_step
from simplan.predict.sweep import data_parallel_changes
from simplan.prediction import Prediction, training_run
from simplan.program.program import Stream
from simplan.report.search import RESOURCES
from simplan.report.table import format_ranks
from simplan.report.text import plan_words
from simplan.scenario import Scenario, parse_scenario
from simplan.sim.compiled import compile_program
from simplan.units import GIB, format_number

_RESOURCES = {**RESOURCES, "compute": RESOURCES["flop_per_s"]}
_MAX_BAR_WIDTH = 0.12  # fraction of the axis, for a few bars


@dataclass(frozen=True, slots=True)
class ScaleAxis:
    """Axis of a sweep: a number of the scenario, or a rate of the hardware.

    Attributes:
        label: Name of the axis.
        unit: Unit of the axis; empty for a count.
        factors: Values of the axis, as factors of the scenario's value.
        setting: Whole number of the scenario, as in ``Job.with_changes``; empty for a rate of the hardware.
        resource: Rate of the hardware; None for a number of the scenario.
        unit_size: Bytes or FLOPs per second in the unit of a rate.
    """

    label: str
    unit: str
    factors: tuple[float, ...]
    setting: str = ""
    resource: Resource | None = None
    unit_size: float = 1e9

    def words(self, scenario: Scenario) -> str:
        """Label with unit; a rate that the catalog does not know is relative."""
        relative = self.resource is not None and _rate(scenario, self.resource) is None
        return ", ".join(filter(None, (self.label, "relative" if relative else self.unit)))


def _rate(scenario: Scenario, resource: Resource) -> float | None:
    """Rate of one device in bytes or FLOPs per second; None for an unknown one."""
    cluster = scenario.job.cluster
    match resource:
        case Resource.COMPUTE:
            return cluster.device.peak_flop_per_s.get(scenario.job.training.precision)
        case Resource.MEMORY_BANDWIDTH:
            return cluster.device.memory_bandwidth_bytes_per_s
    link: LinkSpec | None = getattr(cluster, resource)
    return None if link is None else link.bytes_per_s


_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_RATES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
AXES: Mapping[str, ScaleAxis] = MappingProxyType(
    {
        "devices": ScaleAxis("devices", "", _FACTORS, "cluster.num_devices"),
        "batch": ScaleAxis("global batch size", "sequences", _FACTORS, "training.global_batch_size"),
        "sequence": ScaleAxis("sequence length", "tokens", _FACTORS, "model.seq_len"),
        "microbatch": ScaleAxis("microbatch size", "sequences", _FACTORS, "plan.microbatch_size"),
        "inter_link": ScaleAxis("bandwidth between nodes", "GB/s per device", _RATES, resource=Resource.INTER_LINK),
        "intra_link": ScaleAxis("bandwidth within nodes", "GB/s per device", _RATES, resource=Resource.INTRA_LINK),
        "compute": ScaleAxis("dense peak of a device", "TFLOP/s", _RATES, resource=Resource.COMPUTE, unit_size=1e12),
        "memory_bandwidth": ScaleAxis(
            "memory bandwidth of a device", "GB/s", _RATES, resource=Resource.MEMORY_BANDWIDTH
        ),
    }
)
"""Axes by key."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """Prediction of the plan with one setting changed.

    Attributes:
        value: Value on the axis.
        job: Job with the value; None for an impossible point.
        summary: Time and memory of its step; None for an impossible point.
        refused: Error of an impossible point; empty for a point with a prediction.
    """

    value: float
    job: Job | None = None
    summary: StepSummary | None = None
    refused: str = ""


def place_on(scenario: Scenario, axis: str) -> float:
    """Value of the scenario on an axis; 1 on the axis of an unknown rate, which is relative."""
    scale_axis = AXES[axis]
    if scale_axis.resource is not None:
        rate = _rate(scenario, scale_axis.resource)
        return 1.0 if rate is None else rate / scale_axis.unit_size
    section, key = scale_axis.setting.split(".")
    value: int = getattr(getattr(scenario.job, section), key)
    return value


def sweep(text: str, axis: str, batch_follows: bool) -> tuple[ScalePoint, ...]:
    """Predictions of a scenario's plan over one axis; every point is predicted separately.

    Args:
        text: The scenario's YAML.
        axis: Key of ``AXES``.
        batch_follows: Scale the global batch with the devices (weak scaling) instead of keeping it.
    """
    scenario, scale_axis = _own_devices(text), AXES[axis]
    job, now = scenario.job, place_on(scenario, axis)
    if scale_axis.resource is not None:
        return tuple(_with_rate(job, scale_axis.resource, factor, now * factor) for factor in scale_axis.factors)

    def changed(size: int) -> Job:
        changes = {scale_axis.setting: size}
        if axis == "devices":
            changes |= data_parallel_changes(job, changes)
            if batch_follows:
                batch = job.training.global_batch_size * size // job.cluster.num_devices
                changes["training.global_batch_size"] = max(1, batch)
        return job.with_changes(changes)

    sizes = {int(now * factor) for factor in scale_axis.factors if now * factor >= 1}
    return tuple(_point(float(size), partial(changed, size)) for size in sorted(sizes))


def _own_devices(text: str) -> Scenario:
    scenario = parse_scenario(text)
    if scenario.job.cluster.cores_per_node is not None:
        rule = "shares its cores among ranks; sensitivity of shared cores is not modeled"
        field, value = "cluster.preset", scenario.job.cluster.id
        raise NotModelledError(Problem(field=field, value=value, rule=rule, fix="choose another cluster"))
    return scenario


def _step_on_own_devices(text: str) -> tuple[Prediction, Simulated]:
    _own_devices(text)
    return predicted_step(text, 0)  # predictions for such devices use no calibration


def _with_rate(job: Job, resource: Resource, factor: float, value: float) -> ScalePoint:
    cluster = improved(job.cluster, resource, factor)
    if cluster is None:
        return ScalePoint(value, refused="the cluster has no such link, or its rate is unknown")
    return _point(value, lambda: replace(job, cluster=cluster))


def _point(value: float, changed: Callable[[], Job]) -> ScalePoint:
    try:
        job = changed()
        return ScalePoint(value, job, summarize_step(job))
    except SpecError as error:
        return ScalePoint(value, refused=error.sentences)


def worth(text: str) -> tuple[MarginalValue, ...]:
    """Change of the step time with one percent more of each hardware rate."""
    return marginal_values(*_step_on_own_devices(text))


@dataclass(frozen=True, slots=True)
class DelayedRank:
    """Effect of a rank with slower compute.

    Attributes:
        ranks: The rank and the ranks that are folded with it.
        relative_change: Relative change of the step time.
    """

    ranks: tuple[int, ...]
    relative_change: float


def slow_ranks(text: str, slower: float) -> tuple[DelayedRank, ...]:
    """Increase of the step time when one rank computes more slowly, for each set of identical ranks.

    Identical ranks are simulated as one, so all of them are slow in the simulation. They synchronize at every
    collective, so a single slow rank costs the step the same time.

    Args:
        text: The scenario's YAML.
        slower: Relative increase of compute time, e.g. 0.1 for 10 %.
    """
    _, simulated = _step_on_own_devices(text)
    program = simulated.program
    of_rank = program.columns.rank == np.array(program.ranks)[:, np.newaxis]
    slow = np.where(of_rank & program.on_stream(Stream.COMPUTE), 1 + slower, 1.0)
    after_s = compile_program(program).step_times_s(simulated.program_costs.durations_s * slow)
    folded: dict[int, list[int]] = {}
    for rank, simulated_rank in enumerate(program.stands_for):
        folded.setdefault(simulated_rank, []).append(rank)
    return tuple(
        DelayedRank(tuple(folded.get(rank, [rank])), seconds / simulated.times.step_time_s - 1)
        for rank, seconds in zip(program.ranks, after_s, strict=True)
    )


def scale_rows(
    points: Sequence[ScalePoint], budget: float | None = None, price: float | None = None
) -> list[dict[str, Any]]:
    """One row per point with a prediction.

    Args:
        points: Points from ``sweep``.
        budget: Number of tokens (or images) to train on, for the cost; None for no cost.
        price: Price per device and hour; None for no cost.
    """
    rows = []
    for point in points:
        job, summary = point.job, point.summary
        if job is None or summary is None:
            continue
        batch = job.training.global_batch_size * (1 if job.model.sample != "sequence" else job.model.seq_len)
        row = {
            "value": point.value,
            "devices": job.cluster.num_devices,
            "step_time_s": summary.step_time_s,
            "low_s": summary.step_time_interval_s[0],
            "high_s": summary.step_time_interval_s[1],
            "per_s": batch / summary.step_time_s,
            "device_gib": summary.peak_bytes["device"] / GIB,
            "fits": summary.fits,
        }
        if budget is not None and price is not None:
            run = training_run(
                budget,
                summary.step_time_s,
                None,
                tokens_per_step=batch,
                num_devices=job.cluster.num_devices,
                price_per_device_hour=price,
            )
            row["cost"] = run.cost
        rows.append(row)
    return rows


def scale_document(
    scenario: Scenario,
    axis: str,
    points: Sequence[ScalePoint],
    rows: Sequence[Mapping[str, Any]],
    worths: Sequence[MarginalValue],
    slow: tuple[float, Sequence[DelayedRank]],
) -> dict[str, Any]:
    """All numbers of the page Scale, as a JSON document that ``simplan report`` shows.

    Args:
        scenario, axis, points: The scenario, key of ``AXES``, and points from ``sweep``.
        rows: Rows from ``scale_rows``.
        worths: From ``worth``.
        slow: Relative increase of the compute time, and what it costs on each rank.
    """
    job, by_value = scenario.job, {row["value"]: row for row in rows}
    unit = "images" if job.model.sample != "sequence" else "tokens"
    shown = []
    for point in points:
        row = by_value.get(point.value)
        numbers = {key: row[key] for key in ("per_s", "device_gib", "fits", "cost") if key in row} if row else {}
        interval = [row["low_s"], row["high_s"]] if row else None
        step_time_s = row["step_time_s"] if row else None
        times = {"step_time_s": step_time_s, "step_time_interval_s": interval}
        shown.append({"value": point.value, **times, **numbers, "refused": point.refused})
    slower, ranks = slow
    return {
        "schema_version": 1,
        "kind": "sweep",
        "name": scenario.name,
        "words": f"{job.model.name} on {job.cluster.devices_in_words}, {job.software.id}: {plan_words(job.plan)}",
        "axis": AXES[axis].words(scenario),
        "rate": f"{unit} per second, all devices",
        "points": shown,
        "sensitivity": [
            {"resource": _RESOURCES[gain.resource], "step_time_change": gain.relative_change} for gain in worths
        ],
        "slow_ranks": {
            "slowdown": slower,
            "ranks": [
                {"ranks": format_ranks(delay.ranks), "step_time_change": delay.relative_change} for delay in ranks
            ],
        },
    }


def scale_figures(
    rows: Sequence[dict[str, Any]], label: str, now: float, capacity_bytes: int | None, *, unit: str = "tokens"
) -> dict[str, Figure]:
    """Figures by name: step time with interval, throughput, memory, and cost if known, over one axis.

    Args:
        rows, label: Rows from ``scale_rows``, and name of the axis.
        now: Value of the scenario on the axis.
        capacity_bytes: Memory of a device in bytes; None when unknown.
        unit: Unit of throughput, ``tokens`` or images.
    """
    if not rows:
        return {"nothing": empty("No point of this axis can be predicted.")}
    step_time = [_interval(rows), _curve(rows, "step_time_s", "step time, s", label, now)]
    figures = {"step time": _panel(step_time, rows, label, "step time, s")}
    rate = f"{unit} per second, all devices"
    throughput = [_curve(rows, "per_s", rate, label, now)]
    ideal = _ideal(rows, now) if label == "devices" else []
    if ideal:
        line = {"color": MUTED, "dash": "dot", "width": 1.5}
        x = [row["value"] for row in rows]
        throughput.append(scatter(x=x, y=ideal, mode="lines", name="linear scaling", line=line, hoverinfo="skip"))
    figures["throughput"] = _panel(throughput, rows, label, rate)
    words = "peak device memory, GiB"
    capacity = [] if capacity_bytes is None else [across(capacity_bytes / GIB, {"color": MUTED, "dash": "dash"})]
    figures["memory"] = _panel([_curve(rows, "device_gib", words, label, now)], rows, label, words, shapes=capacity)
    if "cost" in rows[0]:
        title = "cost of the budget"
        figures["cost"] = _panel([_curve(rows, "cost", title, label, now)], rows, label, title)
    return figures


def _panel(
    traces: list[dict[str, Any]], rows: Sequence[dict[str, Any]], label: str, title: str, **layout: Any
) -> Figure:
    x = [row["value"] for row in rows]
    ticks = {"tickvals": x, "ticktext": [format_number(value) for value in x], "tickangle": 0}
    xaxis = {"type": "log", "title": label, **ticks}
    above = {"x": 0.5, "xref": "paper", "xanchor": "center", "y": 1.0, "yref": "paper", "yanchor": "bottom"}
    note = {"text": title, "showarrow": False, "font": {"size": 13}, **above}
    axes = {"xaxis": xaxis, "yaxis": {"rangemode": "tozero"}}
    return figure(traces, height=310, margin={"t": 60}, legend={"y": 1.12}, annotations=[note], **axes, **layout)


def _interval(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """90 % interval of the step time."""
    x = [row["value"] for row in rows]
    return scatter(
        x=[*x, *reversed(x)],
        y=[*(row["high_s"] for row in rows), *(row["low_s"] for row in reversed(rows))],
        fill="toself",
        fillcolor="rgba(59,125,216,0.15)",
        mode="lines",  # points of its outline are no predictions
        line={"width": 0},
        hoverinfo="skip",
        name="90 % interval",
    )


def _curve(rows: Sequence[dict[str, Any]], key: str, title: str, label: str, now: float) -> dict[str, Any]:
    """A quantity over the axis: a larger point at the scenario's value, a cross for plans that do not fit."""
    fit = [row["fits"] is not False for row in rows]
    return scatter(
        x=[row["value"] for row in rows],
        y=[row[key] for row in rows],
        mode="lines+markers",
        name=title,
        showlegend=False,
        line={"color": PLANS[0], "width": 2},
        marker={
            "size": [11 if row["value"] == now else 8 for row in rows],
            "symbol": ["circle" if fits else "x" for fits in fit],
            "color": [PLANS[0] if fits else PLANS[1] for fits in fit],
        },
        customdata=[[label, "" if fits else "<br>does not fit"] for fits in fit],
        hovertemplate=f"%{{customdata[0]}} %{{x:,.4~g}}: {title} %{{y:,.4~g}}%{{customdata[1]}}<extra></extra>",
    )


def _ideal(rows: Sequence[dict[str, Any]], now: float) -> list[float]:
    """Throughput proportional to the number of devices, from the scenario's value."""
    here = next((row for row in rows if row["value"] == now), None)
    return [] if here is None else [here["per_s"] * row["value"] / now for row in rows]


def worth_figure(values: Sequence[MarginalValue]) -> Figure:
    """Step time saved by one percent more of each resource, as bars."""
    saved = {_RESOURCES[value.resource]: -100 * value.relative_change for value in values if value.relative_change < 0}
    if not saved:
        return empty("No resource changes the step time.")
    texts = [f"{percent:.3f} %" for percent in saved.values()]
    tooltips = [f"1 % more {name}: a step is {percent:.4f} % shorter" for name, percent in saved.items()]
    return labeled_bars([*saved], [*saved.values()], texts, tooltips, "step time saved by 1 % more, %")


def slow_figure(delays: Sequence[DelayedRank], slower: float) -> Figure:
    """Step time increase per slow rank, in percent; the dashed line is the delay of the rank's compute."""
    labels = [f"{format_ranks(list(delay.ranks))} " for delay in delays]
    bars = bar(
        x=labels,
        y=[100 * delay.relative_change for delay in delays],
        marker={"color": PLANS[1]},
        hovertemplate="rank %{x}: a step is %{y:.2f} % longer<extra></extra>",
    )
    return figure(
        [bars],
        height=260,
        bargap=max(0.3, 1 - _MAX_BAR_WIDTH * len(delays)),
        shapes=[across(100 * slower, {"color": MUTED, "dash": "dash"})],
        xaxis={"title": "slow rank, with identical ranks", "type": "category"},
        yaxis={"title": "step time increase, %", "rangemode": "tozero"},
    )


def predicted_ways(text: str) -> WaysMap:
    """Map of the ways of a scenario's job.

    Args:
        text: The scenario's YAML.

    Raises:
        SpecError: See ``ways_map``.
    """
    scenario = parse_scenario(text)
    return ways_map(scenario.job, scenario.name)
