"""Figure of the step time over bandwidth for every way to train."""

from __future__ import annotations

from app.figures.style import Figure, figure, scatter
from simplan.explain.ways_map import WaysMap, ticks_of, ways_map
from simplan.report.drawings.accuracy_svg import COLOURS
from simplan.scenario import parse_scenario
from simplan.units import format_rate, format_time


def predicted_ways(text: str) -> WaysMap:
    """Map of the ways of a scenario's job.

    Args:
        text: The scenario's YAML.

    Raises:
        SpecError: See ``ways_map``.
    """
    scenario = parse_scenario(text)
    return ways_map(scenario.job, scenario.name)


def ways_figure(found: WaysMap) -> Figure:
    """One line per way over the bandwidth; both axes are logarithmic."""
    traces = [
        scatter(
            x=list(found.bytes_per_s),
            y=list(curve.step_times_s),
            mode="lines+markers",
            name=curve.name,
            line={"color": COLOURS[number % len(COLOURS)], "width": 2},
            customdata=[
                [format_time(seconds), format_rate(rate)]
                for seconds, rate in zip(curve.step_times_s, found.bytes_per_s, strict=True)
            ],
            hovertemplate=f"{curve.name}: %{{customdata[0]}} a step at %{{customdata[1]}}<extra></extra>",
        )
        for number, curve in enumerate(found.drawn)
    ]
    ticks = ticks_of(found.bytes_per_s[0], found.bytes_per_s[-1])
    xaxis = {"type": "log", "title": f"{found.link} per device", "tickvals": ticks}
    yaxis = {"type": "log", "title": "step time, s", "dtick": "D2"}
    return figure(traces, height=440, xaxis={**xaxis, "ticktext": [format_rate(rate) for rate in ticks]}, yaxis=yaxis)
