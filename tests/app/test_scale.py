"""What if: points are what predict says, and a slow rank costs at most its own delay."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from app.figures.scale import (
    AXES,
    place_on,
    scale_figures,
    scale_rows,
    slow_figure,
    slow_ranks,
    sweep,
    worth,
    worth_figure,
)
from simplan.errors import NotModelledError
from simplan.predict import predict
from simplan.scenario import parse_scenario
from tests.app.figures.drawn import checked
from tests.app.questions import text_of

ROOT = Path(__file__).resolve().parents[2]


def data_of(name: str) -> dict:
    data: dict = yaml.safe_load(text_of(name))
    return data


@pytest.mark.parametrize("axis", AXES)
def test_the_point_of_the_scenario_is_its_prediction(axis: str) -> None:
    text = text_of("pipeline-ddp")
    scenario = parse_scenario(text)
    prediction = predict(scenario.job, name=scenario.name)
    points = sweep(text, axis, False)
    now = place_on(scenario, axis)
    [here] = [point for point in points if point.value == now]
    if here.summary is not None:
        assert here.summary.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-2)
        assert here.summary.peak_bytes["device"] == prediction.worst_memory.device_bytes
    figures = scale_figures(scale_rows(points, 1e9, 2.0), AXES[axis].words(scenario), now, prediction.capacity_bytes)
    curves = {
        name: [trace.mode for trace in checked(drawn).data].count("lines+markers") for name, drawn in figures.items()
    }
    assert curves in ({"nothing": 0}, dict.fromkeys(("step time", "throughput", "memory", "cost"), 1))


def test_weak_scaling_keeps_what_each_device_does() -> None:
    data = data_of("ddp")
    text = yaml.safe_dump(data)
    scenario = parse_scenario(text)
    jobs = [point.job for point in sweep(text, "devices", True) if point.job is not None]
    assert len(jobs) > 2
    per_device = scenario.job.training.global_batch_size / scenario.job.cluster.num_devices
    assert {job.training.global_batch_size / job.cluster.num_devices for job in jobs} == {per_device}


def test_a_slow_rank_costs_something_and_at_most_its_delay() -> None:
    ranks = slow_ranks(text_of("1f1b"), 0.2)
    scenario = parse_scenario(text_of("1f1b"))
    assert sorted(rank for delay in ranks for rank in delay.ranks) == list(range(scenario.job.cluster.num_devices))
    assert all(0 < delay.relative_change <= 0.2 + 1e-9 for delay in ranks)
    assert len(checked(slow_figure(ranks, 0.2)).data[0].x) == len(ranks)


def test_the_value_of_more_is_a_saving() -> None:
    values = worth(text_of("1f1b"))
    assert values[0].relative_change < 0
    assert len(checked(worth_figure(values)).data[0].x) == sum(value.relative_change < 0 for value in values)


def test_ranks_that_share_cores_are_refused_by_name() -> None:
    data = {**data_of("ddp"), "cluster": {"preset": "this-machine", "num_devices": 2}, "plan": {"dp_replicate": 2}}
    data.pop("expect", None)
    with pytest.raises(NotModelledError, match="shares its cores"):
        sweep(yaml.safe_dump(data), "batch", False)


def test_rates_have_units_and_a_faster_link_is_the_same_cluster_with_that_link() -> None:
    text = text_of("fsdp")
    scenario = parse_scenario(text)
    assert AXES["intra_link"].words(scenario) == "bandwidth within nodes, GB/s per device"
    link = scenario.job.cluster.intra_link
    assert link is not None
    assert place_on(scenario, "intra_link") == link.bytes_per_s / 1e9
    assert place_on(scenario, "compute") == pytest.approx(989, abs=1), "H100 SXM datasheet, BF16 without sparsity"
    figure = scale_figures(scale_rows(sweep(text, "intra_link", False)), "x, GB/s", 1, None)["step time"]
    assert figure["layout"]["xaxis"]["title"] == {"text": "x, GB/s"}
    assert AXES["inter_link"].words(scenario) == "bandwidth between nodes, relative", "one node has no such link"
