"""Map of ways to train over bandwidth."""

from __future__ import annotations

from typing import get_args
from xml.etree import ElementTree

import pytest

from simplan.explain.charts import ways_curves
from simplan.explain.ways_map import WAYS, WaysMap, ways_lines, ways_map
from simplan.plan.compression import CompressionKind
from simplan.plan.replication import ReplicationKind
from simplan.predict import predict
from simplan.report.drawings.charts_svg import curves_svg
from tests.predict.ways.test_replication import job_with
from tests.search.jobs import small_job
from tests.support.problems import refuses

JOB = job_with({}, None, replicas=4)


@pytest.fixture(scope="module")
def drawn_map() -> WaysMap:
    return ways_map(JOB, "small")


def test_every_point_is_a_prediction(drawn_map: WaysMap) -> None:
    assert JOB.cluster.inter_link is not None
    for curve in drawn_map.drawn:
        for place in (0, -1):
            link = JOB.cluster.inter_link.model_copy(update={"bytes_per_s": drawn_map.bytes_per_s[place]})
            job = JOB.with_changes({"cluster.inter_link": link}).with_plan(curve.plan)
            assert curve.step_times_s[place] == pytest.approx(predict(job).step_time_s, rel=1e-3)


def test_no_way_gets_slower_with_bandwidth(drawn_map: WaysMap) -> None:
    for curve in drawn_map.drawn:
        assert all(a >= b * (1 - 1e-9) for a, b in zip(curve.step_times_s, curve.step_times_s[1:], strict=False))


def test_on_a_slow_link_ways_that_send_less_are_faster(drawn_map: WaysMap) -> None:
    first = {curve.name: curve.step_times_s[0] for curve in drawn_map.drawn}
    assert first["fp16 gradients"] < first["whole gradients"]
    assert first["whole gradients"] < 1.001 * first["parameter servers"]  # as fast with a server on every node
    assert first["DiLoCo, 100 steps"] < first["Local SGD, 8 steps"] < first["whole gradients"]
    assert first["DiLoCo, 100 steps, int4"] < first["DiLoCo, 100 steps"]


def test_ways_have_all_kinds_that_exist() -> None:
    """Kinds without a line are variants of others: bf16, random-k, int4 and 1-bit Adam; Hogwild has no link."""
    every = {*get_args(CompressionKind), *get_args(ReplicationKind)}
    fields = [value for way in WAYS.values() for value in way.values()]
    assert every - {value if isinstance(value, str) else value["kind"] for value in fields} == {
        "bf16", "random_k", "int4", "one_bit_adam", "hogwild",
    }  # fmt: skip


def test_the_timeline_is_drawn_and_told(drawn_map: WaysMap) -> None:
    root = ElementTree.fromstring(curves_svg(ways_curves(drawn_map)))
    drawn = [element for element in root.iter() if element.get("class") == "curve"]
    assert len(drawn) == len(drawn_map.drawn)
    text = "\n".join(ways_lines(drawn_map))
    assert all(curve.name in text for curve in drawn_map.curves)
    assert drawn_map.to_json()["ways"][0]["step_times_s"]


def test_one_device_has_no_map() -> None:
    with refuses("plan", rule="has no replicas with a link"):
        ways_map(small_job("llama", 1, batch=8), "one")
