"""Drawing and report of a whole run: the numbers of the document, and a color for every part."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from simplan.goodput.engines.simulate import simulate
from simplan.goodput.result import GoodputResult
from simplan.goodput.setup import WATERFALL, CauseSetup, RunSetup, Size
from simplan.report.drawings.goodput_svg import COLOURS, goodput_svg
from simplan.report.goodput import PARTS, headline
from simplan.report.html import html_report
from simplan.units import format_percent, format_span
from tests.report.contrast import channels, contrast

PAPERS = ("#ffffff", "#0d1117")
SVG = "{http://www.w3.org/2000/svg}"


def document(step_s: float = 10.0) -> dict[str, Any]:
    setup = RunSetup(
        num_steps=1000,
        sizes=(Size(num_nodes=4, step_s=step_s),),
        devices_per_node=8,
        evaluation_every=100,
        evaluation_s=60.0,
        checkpoint_every=50,
        blocking_s=10.0,
        causes=(CauseSetup(name="<b>", units_per_node=8, mtbf_s=500_000.0),),
        detection_s=30.0,
        restart_s=300.0,
    )
    runs = simulate(setup, num_runs=20)
    return GoodputResult(name="a <b> run", setup=setup, runs=runs, seed=0, step_interval_s=(step_s, step_s)).to_json()


def test_every_part_has_a_colour_and_words() -> None:
    assert [*COLOURS] == [*PARTS] == [*WATERFALL]
    assert len({*COLOURS.values()}) == len(COLOURS)
    for colour_of_part, other in combinations(COLOURS.values(), 2):
        assert sum(abs(a - b) for a, b in zip(channels(colour_of_part), channels(other), strict=True)) > 40, (
            colour_of_part,
            other,
        )
    for colour in COLOURS.values():
        assert min(contrast(channels(colour), channels(paper)) for paper in PAPERS) > 1.4, colour


def test_curve_has_the_goodput_of_each_interval() -> None:
    answer = document()
    times_s = {600.0: 13_000.0, 1200.0: 12_000.0, 2400.0: 12_500.0}
    answer["interval_curve"] = [{"interval_s": every_s, "time_s": time_s} for every_s, time_s in times_s.items()]
    dots = [dot.findtext(f"{SVG}title") for dot in ElementTree.fromstring(goodput_svg(answer)).iter(f"{SVG}circle")]
    assert dots[:3] == [
        f"goodput: training between two checkpoints {format_span(every_s)}, goodput {format_percent(1e4 / time_s)}"
        for every_s, time_s in times_s.items()
    ]


@pytest.mark.parametrize("step_s", [10.0, 0.01], ids=["mostly compute", "mostly lost"])
def test_bars_have_the_numbers_of_the_waterfall(step_s: float) -> None:
    answer = document(step_s)
    root = ElementTree.fromstring(goodput_svg(answer))
    parts = {name: seconds for name, seconds in answer["waterfall_s"].items() if seconds > 0}
    assert len(parts) >= 5
    total_s = answer["time_to_finish_s"]["mean"]
    groups = root.findall(f"{SVG}g[@class='part']")
    titles = [group.findtext(f"{SVG}title") for group in groups]
    assert titles == [
        f"{PARTS[name]}: {format_span(seconds)}, {format_percent(seconds / total_s)}" for name, seconds in parts.items()
    ]
    boxes = [group.find(f"{SVG}rect") for group in groups]
    drawn = [(float(box.get("x", 0)), float(box.get("width", 0))) for box in boxes if box is not None]
    has_own_scale = parts["compute"] >= total_s / 2
    seconds, drawn = [*parts.values()][has_own_scale:], drawn[has_own_scale:]
    scale = sum(width for _, width in drawn) / sum(seconds)
    for (left, width), each_s in zip(drawn, seconds, strict=True):
        assert width == pytest.approx(max(1.5, each_s * scale), rel=0.02, abs=0.2), left
    assert all(second[0] == pytest.approx(first[0] + first[1], abs=1.6) for first, second in pairwise(drawn))
    height = float(root.get("height", 0))
    assert max(float(label.get("y", 0)) for label in root.iter(f"{SVG}text")) < height - 6


def test_a_report_takes_it() -> None:
    answer = document()
    page = html_report([("goodput.json", answer)], written="today")
    assert headline(answer) in page
    assert "<b>" not in page
    for name, seconds in answer["waterfall_s"].items():
        assert (f"<td>{PARTS[name]}</td>" in page) is (seconds > 0)
