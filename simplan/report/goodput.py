"""Whole runs as text: when they are done and for how much, where the time goes, and what would change that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from simplan.goodput.account import USES
from simplan.goodput.interval import IntervalCurve, IntervalPoint
from simplan.goodput.result import GoodputResult
from simplan.goodput.sensitivity import Change
from simplan.report.table import format_table_text
from simplan.report.text import suggestions
from simplan.units import (
    counted,
    format_bytes,
    format_count,
    format_in,
    format_number,
    format_percent,
    format_span,
    format_time,
    span_unit,
)

PARTS = {
    "compute": "compute",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "lost_work": "lost work",
    "detection": "detection",
    "diagnosis": "diagnosis",
    "waiting": "waiting for nodes",
    "restart": "restart",
    "membership": "groups that leave and join",
    "slow_device": "slow devices",
    "fewer_nodes": "fewer nodes",
    "maintenance": "maintenance",
}
"""Parts of the waterfall in words."""
_USES = dict(zip(USES, ("in use", "in use (spot)", "waiting", "spares"), strict=True))
_HEADLINE_DIGITS = 4
_MAX_CAUSES = 8
_MAX_POINTS = 9


def goodput_text(result: GoodputResult, next_steps: Iterable[str] = ()) -> str:
    """Full report of a whole run as text.

    Args:
        result: Simulated runs.
        next_steps: Commands to suggest at the end.
    """
    parts = [
        f"{result.name}: {headline(result.to_json())}",
        "\n".join(_summary(result)),
        _waterfall(result),
        *_interruptions(result),
        *([] if result.curve is None else [_curve(result, result.curve)]),
        *([_changes(result.changes)] if result.changes else []),
        "Assumptions\n" + "\n".join(f"  - {text}" for text in _assumptions(result)),
    ]
    return "\n\n".join([*parts, *suggestions(next_steps)])


def headline(document: Mapping[str, Any]) -> str:
    """Time to finish, cost and goodput, in one line.

    Args:
        document: JSON of ``simplan goodput``.
    """
    time = document["time_to_finish_s"]
    factor, unit = span_unit(time["mean"])
    mean, low, high = (format_in(time[key], factor, _HEADLINE_DIGITS) for key in ("mean", "p10", "p90"))
    around = "" if time["p10"] == time["p90"] else f" (P10 {low}, P90 {high})"
    cost = f", cost {format_money(document['cost'])}" if document["cost"] is not None else ""
    return f"done in {mean} {unit}{around}{cost}, goodput {format_percent(document['goodput'])}"


def format_money(amount: float) -> str:
    """Amount in the currency of the price: whole numbers from 100 on.

    >>> format_money(1_234_567.8), format_money(12.345)
    ('1,234,568', '12.35')
    """
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:z,.2f}"


def _summary(result: GoodputResult) -> Iterator[str]:
    setup, json = result.setup, result.to_json()
    if result.memory_verdict not in (None, "fits"):
        yield f"  memory         {result.memory_verdict}: see `simplan predict`"
    pauses = f"{setup.num_steps:,} steps of {format_time(setup.step_s)}"
    if setup.evaluation_every:
        pauses += f", {counted(setup.num_steps // setup.evaluation_every, 'evaluation')}"
    if setup.checkpoint_every:
        pauses += f", {counted(setup.num_steps // setup.checkpoint_every, 'checkpoint')}"
    yield f"  no failures    {format_span(setup.undisturbed_s)}: {pauses}"
    if result.step_interval_s[0] < result.step_interval_s[1]:
        both = json["time_to_finish_with_step_interval_s"]
        yield (
            f"  step interval  P10 {format_span(both['p10'])}, P90 {format_span(both['p90'])} if the step time varies "
            "over its 90 % interval, too"
        )
    stops = json["num_interruptions"]
    yield f"  interruptions  {format_number(stops['mean'])} (P10 {stops['p10']:.0f}, P90 {stops['p90']:.0f})"
    hours = json["device_hours_by_use"]
    uses = ", ".join(f"{_USES[use]} {of_use:,.0f}" for use, of_use in hours.items() if round(of_use))
    yield f"  device-hours   {json['device_hours']:,.0f}: {uses}"
    if (cost := json["cost_distribution"]) is not None and result.price is not None:
        low, high = format_money(cost["p10"]), format_money(cost["p90"])
        rates = [f"{result.price.device_hour:g} per device-hour"]
        rates += [f"spot {rate:g}"] if (rate := result.price.spot_device_hour) is not None else []
        rates += [f"spares {rate:g}"] if (rate := result.price.idle_device_hour) is not None else []
        yield f"  cost           {format_money(cost['mean'])} (P10 {low}, P90 {high}) at {', '.join(rates)}"
    if (energy := json["energy_kwh"]) is not None:
        co2 = "" if json["co2_kg"] is None else f", {format_money(json['co2_kg'] / 1000)} t of CO2"
        yield f"  energy         {format_money(energy / 1000)} MWh{co2}"
    if (size := result.checkpoint_bytes) is not None:
        load = f", load {format_span(setup.load_s)}" if setup.load_s else ""
        write = f", written {format_span(setup.write_s)} later" if setup.write_s else ""
        yield f"  checkpoint     {format_bytes(size)}: blocks {format_span(setup.blocking_s)}{write}{load}"


def _waterfall(result: GoodputResult) -> str:
    total_s = result.mean_time_s
    rows = [
        [PARTS[part], format_span(seconds), format_percent(seconds / total_s)]
        for part, seconds in result.waterfall_s.items()
        if seconds > 0
    ]
    rows.append(["time to finish", format_span(total_s), format_percent(1.0)])
    return "Time, mean of the runs\n" + format_table_text(["part", "time", "share"], rows)


def _interruptions(result: GoodputResult) -> Iterator[str]:
    causes = [*result.interruptions_by_cause.items()]
    if not causes:
        return
    total = sum(number for _, number in causes)
    rows = [[name, format_number(number), format_percent(number / total)] for name, number in causes[:_MAX_CAUSES]]
    if len(causes) > _MAX_CAUSES:
        rest = sum(number for _, number in causes[_MAX_CAUSES:])
        rows.append([f"{len(causes) - _MAX_CAUSES} others", format_number(rest), format_percent(rest / total)])
    yield "Interruptions, mean of the runs\n" + format_table_text(["cause", "number", "share"], rows)


def _curve(result: GoodputResult, curve: IntervalCurve) -> str:
    best = curve.best
    words = f"Checkpoint interval: best {format_span(best.interval_s)} by a curve through these points"
    words += f" (Young {format_span(curve.young_s)}, Daly {format_span(curve.daly_s)})"
    every = result.setup.checkpoint_every
    if every != best.every_steps:
        words += f"; this run has {format_span(every * result.setup.step_s)}"
    rows = [
        [format_span(point.interval_s), format_span(point.time_s), f"{100 * (point.time_s / best.time_s - 1):+z.2f} %"]
        for point in _shown(curve.points, best)
    ]
    return f"{words}\n" + format_table_text(["interval", "time to finish", "vs best"], rows, left=0)


def _shown(points: Sequence[IntervalPoint], best: IntervalPoint) -> Sequence[IntervalPoint]:
    """Points around the best one."""
    place = points.index(best)
    first = max(0, min(place - _MAX_POINTS // 2, len(points) - _MAX_POINTS))
    return points[first : first + _MAX_POINTS]


def _changes(changes: Sequence[Change]) -> str:
    has_cost = any(change.saved_cost is not None for change in changes)
    rows = []
    for change in changes:
        time = format_span(abs(change.saved_s))
        row = [change.words, f"{_sign(change.saved_s)}{time}", f"+/- {format_span(change.saved_s_error)}"]
        if change.saved_cost is not None and change.saved_cost_error is not None:
            cost = format_money(abs(change.saved_cost))
            row += [f"{_sign(change.saved_cost)}{cost}", f"+/- {format_money(change.saved_cost_error)}"]
        rows.append(row)
    headers = ["change", "time", "standard error", *(["cost", "standard error"] if has_cost else [])]
    return "Worth of one change, with equal failures\n" + format_table_text(headers, rows)


def _sign(saved: float) -> str:
    return "-" if saved > 0 else "+" if saved < 0 else ""


def _assumptions(result: GoodputResult) -> Iterator[str]:
    yield from result.assumptions
    yield (
        f"{result.num_runs:,} simulated runs, seed {result.seed}: failures are random, the step time is the predicted "
        "one; P10 and P90 are times that 10 % and 90 % of the runs do not exceed"
    )
    yield "goodput is the effective training time ratio: steps at the predicted step time over the mean time to finish"


def goodputs_text(results: Sequence[GoodputResult]) -> str:
    """Table of several whole runs, in their order."""
    headers = ["scenario", "time to finish", "P10", "P90", "goodput", "interruptions", "device-hours", "cost", "MWh"]
    rows = []
    for result in results:
        json = result.to_json()
        time = json["time_to_finish_s"]
        rows.append(
            [
                result.name,
                *(format_span(time[key]) for key in ("mean", "p10", "p90")),
                format_percent(result.goodput),
                format_number(json["num_interruptions"]["mean"]),
                f"{json['device_hours']:,.0f}",
                "" if json["cost"] is None else format_money(json["cost"]),
                "" if json["energy_kwh"] is None else format_money(json["energy_kwh"] / 1000),
            ]
        )
    filled = [place for place in range(len(headers)) if any(row[place] for row in rows)]
    table = format_table_text(
        [headers[place] for place in filled], [[row[place] for place in filled] for row in rows], indent=0
    )
    steps = {(result.setup.num_steps) for result in results}
    differ = "" if len(steps) == 1 else "\nThe runs have different numbers of steps."
    return f"{table}\n\n{format_count(results[0].num_runs)} simulated runs each, seed {results[0].seed}.{differ}"
