"""Predicted against measured: runs as points around the diagonal, errors by source, both steps on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.figures.style import Figure, across, bar, empty, figure, scatter
from app.palette import ACTIONS, COMMUNICATION, MUTED, PLANS
from simplan.accuracy.outcome import RunOutcome
from simplan.program.action import Action, ActionKind
from simplan.program.timeline import Span, Timeline
from simplan.units import format_number
from simplan.validate.rows import ComparisonRow

__all__ = ["errors_figure", "runs_figure", "steps_figure", "terms_figure"]

_MOST_BARS = 4_000
_FEW_DECADES = 300


def runs_figure(outcomes: Sequence[RunOutcome]) -> Figure:
    """Step times of published runs: on the diagonal they agree; a trace for each source."""
    known = [outcome for outcome in outcomes if outcome.error is not None]
    if not known:
        return empty("No step time was both measured and predicted.")
    both = [seconds for one in known for seconds in _pair(one)]
    ends = [min(both) / 1.3, max(both) * 1.3]
    line = {"color": MUTED, "dash": "dot", "width": 1.5}
    traces = [scatter(x=ends, y=ends, mode="lines", line=line, name="equal", hoverinfo="skip")]
    for number, file in enumerate(dict.fromkeys(outcome.file for outcome in known)):
        points = [outcome for outcome in known if outcome.file == file]
        trace = scatter(
            x=[_pair(one)[0] for one in points],
            y=[_pair(one)[1] for one in points],
            mode="markers",
            name=_short(file),
            marker={
                "color": PLANS[number % len(PLANS)],
                "size": 7,
                "opacity": 0.75,
                "symbol": ["circle" if one.in_interval else "x" for one in points],
            },
            customdata=[[one.run.id, f"{one.error:+.1%}", "yes" if one.in_interval else "no"] for one in points],
            hovertemplate="%{customdata[0]}<br>measured %{x:,.4~g} s, predicted %{y:,.4~g} s: %{customdata[1]}"
            "<br>within its interval: %{customdata[2]}<extra></extra>",
        )
        traces.append(trace)
    values = _ticks(*ends)
    ticks = {"tickvals": values, "ticktext": [format_number(value) for value in values]}
    x, y = ({"type": "log", "title": f"{word} step, s", **ticks} for word in ("measured", "predicted"))
    return figure(traces, height=430, xaxis=x, yaxis=y)


def _ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or powers of ten alone if there would be many.

    >>> _ticks(24, 1100)
    [50.0, 100.0, 200.0, 500.0, 1000.0]
    >>> _ticks(0.05, 50)
    [0.1, 1.0, 10.0]
    """
    digits = (1, 2, 5) if high / low < _FEW_DECADES else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for digit in digits if low <= (value := float(f"{digit}e{power}")) <= high]


def _pair(outcome: RunOutcome) -> tuple[float, float]:
    assert outcome.predicted is not None
    assert outcome.run.measured.step_time_s is not None
    return outcome.run.measured.step_time_s, outcome.predicted.step_time_s


def _short(file: str) -> str:
    return file.rpartition("/")[2].removesuffix(".yaml")


def errors_figure(outcomes: Sequence[RunOutcome]) -> Figure:
    """Errors of the runs by source: box plots with one point per run."""
    boxes = []
    for number, file in enumerate(dict.fromkeys(outcome.file for outcome in outcomes)):
        errors = [(one.run.id, one.error) for one in outcomes if one.file == file and one.error is not None]
        if errors:
            box = {
                "type": "box",
                "y": [100 * error for _, error in errors],
                "name": _short(file),
                "text": [name for name, _ in errors],
                "boxpoints": "all",
                "jitter": 0.4,
                "pointpos": 0,
                "marker": {"color": PLANS[number % len(PLANS)], "size": 4, "opacity": 0.6},
                "hovertemplate": "%{text}: %{y:+.1f} %<extra></extra>",
            }
            boxes.append(box)
    if not boxes:
        return empty("No step time was both measured and predicted.")
    exact = across(0, {"color": MUTED, "dash": "dot"})
    up = {"title": "predicted over measured, %", "ticksuffix": " %"}
    return figure(boxes, height=430, showlegend=False, shapes=[exact], yaxis=up)


def terms_figure(rows: Sequence[ComparisonRow]) -> Figure:
    """Signed errors as bars, the spread of the repeats as whiskers around zero: within them nothing can be read off."""
    shown = [row for row in rows if row.signed_error is not None]
    if not shown:
        return empty("Nothing was measured that was predicted.")
    spreads = [100 * (row.spread or 0.0) for row in shown]
    names = [f"{row.name} " for row in shown]
    repeats = bar(
        orientation="h",
        name="repeats spread so far",
        x=[2 * spread for spread in spreads],
        base=[-spread for spread in spreads],
        y=names,
        marker={"color": "rgba(138,143,152,0.3)"},
        width=0.8,
        hoverinfo="skip",
    )
    errors = bar(
        orientation="h",
        name="predicted over measured",
        x=[100 * (row.signed_error or 0.0) for row in shown],
        y=names,
        width=0.4,
        marker={"color": [MUTED if row.within_spread else PLANS[0] for row in shown]},
        customdata=[
            [f"{format_number(row.predicted)} {row.unit}", f"{format_number(row.measured)} {row.unit}"] for row in shown
        ],
        hovertemplate="%{y}: predicted %{customdata[0]}, measured %{customdata[1]}: %{x:+.1f} %<extra></extra>",
    )
    return figure(
        [repeats, errors],
        height=90 + 26 * len(shown),
        barmode="overlay",
        xaxis={"title": "%"},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
    )


def steps_figure(predicted: Timeline, measured: Timeline) -> Figure:
    """One step of both on one axis: under each rank's prediction its measurement."""
    ranks = sorted({span.rank for span in (*predicted.spans, *measured.spans)})
    boxes: dict[str, list[tuple[str, Span]]] = {}
    for words, timeline in (("predicted", predicted), ("measured", measured)):
        for span in timeline.spans:
            boxes.setdefault(_kind(span), []).append((f"rank {span.rank} {words}", span))
    traces, left = [], _MOST_BARS
    for kind, found in boxes.items():
        shown = found[: max(0, left)]
        left -= len(shown)
        trace = bar(
            orientation="h",
            name=kind,
            base=[span.start_s * 1e3 for _, span in shown],
            x=[(span.end_s - span.start_s) * 1e3 for _, span in shown],
            y=[row for row, _ in shown],
            width=[0.25 if kind == "communication" else 0.8 for _ in shown],
            marker={"color": _colour(kind), "line": {"width": 0.4, "color": "rgba(120,128,140,0.6)"}},
            customdata=[[span.name, span.stream] for _, span in shown],
            hovertemplate="%{customdata[0]} (%{customdata[1]}): %{x:,.4~g} ms from %{base:,.4~g} ms<extra>%{y}</extra>",
        )
        traces.append(trace)
    order = [f"rank {rank} {words}" for rank in ranks for words in ("predicted", "measured")]
    return figure(
        traces,
        height=120 + 34 * len(order),
        barmode="overlay",
        xaxis={"title": "ms from the start of the step"},
        yaxis={"categoryorder": "array", "categoryarray": order[::-1], "type": "category"},
    )


def _kind(span: Span) -> str:
    if span.stream != "compute":
        return "communication"
    return Action.parse(span.action).kind.name.lower().replace("_", " ")


def _colour(kind: str) -> str:
    if kind == "communication":
        return COMMUNICATION
    return ACTIONS.get(ActionKind[kind.upper().replace(" ", "_")], MUTED)
