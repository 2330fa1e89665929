"""Charts: their data are those of single predictions, and the drawings show all of them."""

from __future__ import annotations

from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from simplan.explain.charts import (
    Bar,
    Bars,
    Curve,
    CurveAxis,
    Curves,
    cost_over_days,
    goodput_over_interval,
    memory_by_plan,
    mfu_map,
    step_by_plan,
    step_over_bandwidth,
)
from simplan.job import Job
from simplan.predict import predict
from simplan.report.drawings.accuracy_svg import COLOURS
from simplan.report.drawings.charts_svg import bars_svg, curves_svg, degree_map_svg
from simplan.scenario import make_job
from simplan.training import TrainingBudget
from simplan.units import format_bytes, format_percent

SVG = "{http://www.w3.org/2000/svg}"
PLANS: dict[str, dict[str, Any]] = {"FSDP": {}, "HSDP": {"dp_shard": 8, "dp_replicate": 2}}


@pytest.fixture(scope="module")
def job() -> Job:
    keys = {"num_devices": 16, "dp_shard": 16, "global_batch_size": 16, "seq_len": 1024}
    return make_job("llama3-8b", keys)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_bars_of_memory_sum_to_the_device_bytes_of_each_plan(job: Job) -> None:
    chart = memory_by_plan(job, PLANS)
    needed = [predict(job.with_changes(changes)).worst_memory.device_bytes for changes in PLANS.values()]
    assert [bar.size for bar in chart.bars] == pytest.approx(needed)
    assert chart.limit == (job.cluster.device.memory_bytes, "device memory")
    svg = bars_svg(chart)
    assert {format_bytes(size) for size in needed} <= set(texts(svg))
    parts = [element for element in ElementTree.fromstring(svg).iter() if element.get("class") == "part"]
    assert len(parts) == sum(size > 0 for bar in chart.bars for size in bar.parts.values())


def test_bars_of_a_step_sum_to_the_step_time(job: Job) -> None:
    chart = step_by_plan(job, PLANS)
    assert [bar.size for bar in chart.bars] == pytest.approx(
        [predict(job.with_changes(changes)).step_time_s for changes in PLANS.values()]
    )


def test_a_map_has_the_mfu_of_each_plan_that_fits(job: Job) -> None:
    """A plan that cannot be has words, as one that does not fit."""
    degrees = mfu_map(job, rows=(1, 2), columns=(1, 3))
    whole = predict(job.with_changes(tp=1, pp=2, dp_shard=8))
    assert degrees.cells[2, 1].fraction == whole.mfu
    assert degrees.cells[1, 3].words == "not valid"
    large = mfu_map(job.with_changes(global_batch_size=4096, microbatch_size=256), rows=(1,), columns=(1,))
    assert large.cells[1, 1].words == "no memory"
    assert {format_percent(whole.mfu or 0), "not valid", "pp 2", "tp 3"} <= set(texts(degree_map_svg(degrees)))


def test_a_curve_over_bandwidth_has_the_step_of_each_cluster(job: Job) -> None:
    chart = step_over_bandwidth(job, PLANS, (0.1, 1.0))
    assert job.cluster.inter_link is not None
    slow = job.cluster.inter_link.model_copy(update={"bytes_per_s": job.cluster.inter_link.bytes_per_s / 10})
    changed = job.with_changes({"cluster.inter_link": slow} | PLANS["HSDP"])
    assert chart.curves[1].points[0][1] == pytest.approx(predict(changed).step_time_s, rel=1e-3)
    assert (
        len(
            [element for element in ElementTree.fromstring(curves_svg(chart)).iter() if element.get("class") == "curve"]
        )
        == 2
    )


def test_cost_is_device_hours_times_the_price(job: Job) -> None:
    chart = cost_over_days(job, TrainingBudget(num_tokens=1e9, price_per_device_hour=3.0), {"FSDP": {}}, (8, 16))
    for (days, cost), number in zip(chart.curves[0].points, (8, 16), strict=True):
        assert cost == pytest.approx(days * 24 * number * 3.0)
    assert {"8", "16"} <= set(texts(curves_svg(chart)))


def test_goodput_over_the_interval_is_useful_time_over_all() -> None:
    document = {
        "name": "a run",
        "num_steps": 100,
        "step_time_s": 10.0,
        "interval_curve": [{"interval_s": 600.0, "time_s": 1250.0}, {"interval_s": 2400.0, "time_s": 1111.1}],
        "best_interval_s": 2400.0,
        "young_s": 1000.0,
        "daly_s": 9000.0,
    }
    chart = goodput_over_interval(document)
    assert [curve.name for curve in chart.curves] == ["goodput", "best, 40.0 min", "Young, 16.7 min"]
    assert dict(chart.curves[0].points) == pytest.approx({600.0: 0.8, 2400.0: 0.9}, rel=1e-3)


@pytest.mark.parametrize(("is_near", "lowest"), [(False, 0.0), (True, 0.9)])
def test_a_linear_axis_begins_at_zero_unless_it_is_near(is_near: bool, lowest: float) -> None:
    """Heights on the picture are linear in the values."""
    points = ((1.0, 0.9), (2.0, 0.95), (3.0, 1.0))
    chart = Curves("a", "", CurveAxis("x"), CurveAxis("y", "percent", is_near=is_near), (Curve("b", points),))
    dots = list(ElementTree.fromstring(curves_svg(chart)).iter(f"{SVG}circle"))
    heights = [float(dot.get("cy", "")) for dot in dots]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    labels = [float(text.removesuffix(" %")) / 100 for text in texts(curves_svg(chart)) if text.endswith(" %")]
    assert min(labels) == lowest


def test_labels_of_near_points_do_not_cover_each_other() -> None:
    """Two curves that cross, with points next to each other: no two boxes of text meet, seven px for a letter."""
    first = Curve("a", ((0.0, 10.0), (50.0, 10.1), (100.0, 10.0)), ("80", "64", "40"))
    second = Curve("b", ((0.0, 14.0), (51.0, 10.3), (100.0, 6.0)), ("8", "2", "1"))
    root = ElementTree.fromstring(curves_svg(Curves("c", "", CurveAxis("x"), CurveAxis("y"), (first, second))))
    labels = [text for text in root.iter(f"{SVG}text") if text.get("fill", "") in COLOURS]
    places = [(float(text.get("x", "")), float(text.get("y", "")), 7 * len(text.text or "")) for text in labels]
    assert len(places) == 6
    for (x, y, width), (other_x, other_y, other_width) in combinations(places, 2):
        assert x + width <= other_x or other_x + other_width <= x or abs(y - other_y) >= 13


def test_ticks_of_near_fractions_differ() -> None:
    points = ((1.0, 0.9931), (2.0, 0.9978))
    chart = Curves("a", "", CurveAxis("x"), CurveAxis("y", "percent", is_near=True), (Curve("b", points),))
    labels = [words for words in texts(curves_svg(chart)) if words.endswith(" %")]
    assert len(labels) == len({*labels}) > 2


def test_a_size_next_to_the_limit_is_written_behind_it() -> None:
    """The mark of the limit crosses no number."""
    bars = (Bar("over", {"activations": 200.0 * 2**30}), Bar("under", {"activations": 70.0 * 2**30}))
    root = ElementTree.fromstring(bars_svg(Bars("a", "bytes", ("activations",), bars, (80.0 * 2**30, "device"))))
    [mark] = [line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray")]
    [size] = [text for text in root.iter(f"{SVG}text") if text.text == "70.00 GiB"]
    assert float(size.get("x", "")) > float(mark.get("x1", ""))
