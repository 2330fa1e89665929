"""The picture of predicted over measured step times: its data by hand, the SVG as XML against logarithms."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pytest

from simplan.accuracy.outcome import RunOutcome
from simplan.accuracy.result import Accuracy
from simplan.report.drawings.accuracy_plot import AccuracyPlot, accuracy_plot, time_ticks
from simplan.report.drawings.accuracy_svg import COLOURS, accuracy_svg
from simplan.report.drawings.svg import NIGHT
from tests.accuracy.runs import outcome, run
from tests.report.contrast import channels, contrast

SVG = "{http://www.w3.org/2000/svg}"


def of(id: str, measured_s: float | None, predicted_s: float, file: str = "a.yaml", **fields: Any) -> RunOutcome:  # noqa: A002
    return outcome(run(id, measured__step_time_s=measured_s), predicted_s, file=file, **fields)


def plot_of(*outcomes: RunOutcome) -> AccuracyPlot:
    plot = accuracy_plot(Accuracy(outcomes))
    assert plot is not None
    return plot


def marks(plot: AccuracyPlot) -> dict[str, ElementTree.Element]:
    """By the id of the run."""
    root = ElementTree.fromstring(accuracy_svg(plot))
    elements = [mark for group in root.findall(f"{SVG}g[@class='panel']") for mark in group if mark.tag != f"{SVG}text"]
    return {(mark.findtext(f"{SVG}title") or "").split(":")[0]: mark for mark in elements}


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def test_a_file_is_a_panel_of_the_runs_with_both_times() -> None:
    skipped = RunOutcome("a.yaml", run("skipped"), None, "a reason")
    plot = plot_of(of("x", 1.0, 2.0), skipped, of("oom", None, 2.0), of("y", 4.0, 3.0, "b/c.yaml"))
    assert [(panel.name, [point.id for point in panel.points]) for panel in plot.panels] == [("a", ["x"]), ("c", ["y"])]
    assert [point.ratio for point in plot.points] == [2.0, 0.75]
    assert plot.panels[0].figures.errors.mape == pytest.approx(1.0)
    assert accuracy_plot(Accuracy((skipped,))) is None


def test_names_that_two_files_share_are_whole() -> None:
    plot = plot_of(of("x", 1.0, 1.0, "one/runs.yaml"), of("y", 1.0, 1.0, "two/runs.yaml"))
    assert [panel.name for panel in plot.panels] == ["one/runs.yaml", "two/runs.yaml"]


def test_panels_reach_as_far_as_nearly_all_errors() -> None:
    near = [of(f"n{i}", 1.0, 1.1) for i in range(19)]
    assert plot_of(*near, of("far", 1.0, 9.0)).largest_ratio == 1.2
    assert plot_of(*near[:-1], of("far", 1.0, 9.0)).largest_ratio == 3.0
    assert plot_of(of("short", 1.0, 1 / 1.9)).largest_ratio == 2.0, "half the time is as far off as twice the time"


def test_marks_are_at_the_logarithms() -> None:
    drawn = marks(plot_of(of("a", 1.0, 1.0), of("b", 8.0, 8.0), of("c", 2.0, 2.6), of("d", 2.0, 2 / 1.3)))
    assert {mark.tag for mark in drawn.values()} == {f"{SVG}circle"}
    x = {name: number(mark, "cx") for name, mark in drawn.items()}
    y = {name: number(mark, "cy") for name, mark in drawn.items()}
    assert x["c"] == x["d"] == pytest.approx(x["a"] + (x["b"] - x["a"]) / 3, abs=0.2), "2 is the third root of 8"
    assert y["a"] == y["b"] == pytest.approx((y["c"] + y["d"]) / 2, abs=0.2)
    assert y["c"] < y["a"], "too long is up"


def test_the_line_of_equality_and_the_band_are_where_such_runs_would_be() -> None:
    plot = plot_of(*(of(name, 1.0, ratio) for name, ratio in (("exact", 1.0), ("more", 1.1), ("less", 0.9))))
    y = {name: number(mark, "cy") for name, mark in marks(plot).items()}
    root = ElementTree.fromstring(accuracy_svg(plot))
    [equal] = [line for line in root.findall(f"{SVG}line") if line.get("class") == "soft"]
    band = next(rect for rect in root.findall(f"{SVG}rect") if rect.get("class") == "band")
    assert number(equal, "y1") == number(equal, "y2") == pytest.approx(y["exact"], abs=0.1)
    assert number(band, "y") == pytest.approx(y["more"], abs=0.1)
    assert number(band, "y") + number(band, "height") == pytest.approx(y["less"], abs=0.1)


def test_hollow_is_outside_of_the_interval_and_a_triangle_beyond_the_panel() -> None:
    inside: dict[str, Any]
    outside: dict[str, Any]
    inside, outside = {"step_time_interval_s": (0.9, 1.2)}, {"step_time_interval_s": (0.5, 0.6)}
    near = [of(f"n{i}", 1.0, 1.1, **inside) for i in range(40)]
    plot = plot_of(*near, of("out", 1.0, 1.05, **outside), of("far", 1.0, 50.0, **inside), of("none", 1.0, 1.0))
    drawn = marks(plot)
    assert drawn["out"].get("fill") == "none"
    assert drawn["out"].get("stroke") == drawn["n0"].get("fill") == drawn["none"].get("fill") == COLOURS[0]
    assert drawn["far"].tag == f"{SVG}path"
    assert drawn["far"].findtext(f"{SVG}title") == "far: predicted 50.000 s, measured 1.000 s (+4900.0 %)"
    words = "".join(ElementTree.fromstring(accuracy_svg(plot)).itertext())
    assert "beyond the panel" in words
    assert "beyond the panel" not in "".join(ElementTree.fromstring(accuracy_svg(plot_of(*near))).itertext())


def test_everything_but_the_marks_changes_for_dark_pages_and_nothing_hangs_over() -> None:
    """Times whose labels come next to both edges, and a name that is longer than its panel."""
    long = "x" * 300 + ".yaml"
    outcomes = [of("a", 0.12, 0.1, "\x07<&>.yaml"), of("b", 900.0, 999.0, "b.yaml"), of("c", 1.0, 1.0, long)]
    root = ElementTree.fromstring(accuracy_svg(plot_of(*outcomes)))
    width = number(root, "width")
    for element in root.iter():
        colours = {element.get("fill"), element.get("stroke")} - {None, "none"}
        assert colours <= set(COLOURS) or element.get("class") in NIGHT, ElementTree.tostring(element)
        if element.tag == f"{SVG}text" and element.get("text-anchor") in (None, "middle"):
            length = 6.0 * len(element.text or "")
            right = number(element, "x") + (length / 2 if element.get("text-anchor") else length)
            assert right <= width, element.text
    style = root.findtext(f"{SVG}style") or ""
    assert style.startswith("@media (prefers-color-scheme: dark)")
    assert all(colour in style for colour in NIGHT.values())


@pytest.mark.parametrize("paper", ["#ffffff", NIGHT["paper"]])
def test_files_are_apart_from_white_and_from_black_paper(paper: str) -> None:
    """At least 3 to 1, as WCAG 2.2 (1.4.11) wants of parts of pictures; dots let 15 % of the paper through."""
    back = channels(paper)
    for colour in COLOURS:
        seen = [0.85 * v + 0.15 * b for v, b in zip(channels(colour), back, strict=True)]
        assert contrast(seen, back) >= 3.0, colour
    assert len(set(COLOURS)) == len(COLOURS)


@pytest.mark.parametrize("first_s", [1e-4, 0.03, 0.7, 1.0, 3.3, 99.0])
def test_there_is_a_round_time_on_every_axis(first_s: float) -> None:
    for factor in (4.0, 30.0, 1e5):
        times_s = time_ticks(first_s, first_s * factor)
        assert times_s
        assert all(first_s <= time_s <= first_s * factor for time_s in times_s)
        assert all(math.log10(time_s / power) == pytest.approx(0) for time_s in times_s for power in [_rounded(time_s)])
    [point] = plot_of(of("alone", first_s, 1.0)).points
    first, last = plot_of(of("alone", first_s, 1.0)).times_s
    assert first < point.measured_s < last
    assert time_ticks(first, last)


def _rounded(time_s: float) -> float:
    """The nearest of 1, 2 and 5 times powers of ten."""
    power = 10.0 ** math.floor(math.log10(time_s) + 1e-9)
    return min((power, 2 * power, 5 * power), key=lambda value: abs(value - time_s))
