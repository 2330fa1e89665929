"""The Timeline: its boxes are the step's, nothing overlaps, and what is waited for has just ended."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from app.figures import timeline
from app.figures.gantt import gantt_figure
from app.figures.style import COMMUNICATION
from app.figures.timeline import timeline_result
from app.predictions import trace_text
from simplan.program.action import ActionKind
from simplan.program.program import MemoryCategory
from simplan.report.drawings.drawing import draw_pipeline
from simplan.report.drawings.drawing_svg import COLOURS
from tests.app.figures.drawn import checked
from tests.app.questions import predicted, text_of

PIPELINES = ["zb-h1", "interleaved", "pipeline-hsdp"]


@pytest.mark.parametrize("name", PIPELINES)
def test_boxes_are_those_of_the_drawing(name: str) -> None:
    """``simplan draw`` takes them from the spans of the timeline, this from the operations."""
    result = timeline_result(text_of(name), 0)
    drawing = draw_pipeline(predicted(name))
    assert [lane.rank for lane in result.lanes] == [row.rank for row in drawing.rows]
    for lane, row in zip(result.lanes, drawing.rows, strict=True):
        assert [(box.action, box.label) for box in lane.compute] == [(box.action, str(box.action)) for box in row.boxes]
        assert [box.start_s for box in lane.compute] == pytest.approx([box.start_s for box in row.boxes])
        assert [box.recompute_s for box in lane.compute] == pytest.approx([box.recompute_s for box in row.boxes])


@pytest.mark.parametrize("name", ["zb-h1", "tensor-fsdp"])
@pytest.mark.parametrize("layers", [False, True])
def test_waits_fill_the_gaps(name: str, layers: bool) -> None:
    result = timeline_result(text_of(name), 0, layers=layers)
    for lane in result.lanes:
        free_s = 0.0
        for box in lane.compute:
            assert box.start_s >= free_s - 1e-12
            assert box.waited_s == pytest.approx(box.start_s - free_s, abs=1e-8 * result.step_time_s)
            assert bool(box.waited_for) is (box.waited_s > 0)
            free_s = box.end_s
            if box.waited_for not in ("", "other ranks"):
                ended = [m.end_s for m in lane.communications if m.label == box.waited_for]
                assert min(abs(end_s - box.start_s) for end_s in ended) <= 3e-9 * result.step_time_s


@pytest.mark.parametrize("name", ["zb-h1", "fsdp", "offload-activations"])
def test_memory_peaks_at_what_was_predicted(name: str) -> None:
    result, prediction = timeline_result(text_of(name), 0), predicted(name)
    allocated = {memory.rank: memory.allocated_bytes for memory in prediction.memory}
    for curve in result.memory:
        assert max(curve.total_bytes) == allocated[curve.rank]
        assert list(curve.times_s) == sorted(curve.times_s)


def test_a_window_holds_what_runs_in_it() -> None:
    whole = timeline_result(text_of("zb-h1"), 0)
    half = timeline_result(text_of("zb-h1"), 0, start=0.5)
    assert half.num_boxes < whole.num_boxes
    assert sum(len(lane.compute) for lane in half.lanes) < sum(len(lane.compute) for lane in whole.lanes)
    assert all(box.end_s >= 0.5 * whole.step_time_s for lane in half.lanes for box in lane.compute)


@pytest.mark.parametrize("layers", [False, True])
def test_many_boxes_are_merged_into_the_whole_step(layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    every = timeline_result(text_of("zb-h1"), 0, layers=layers)
    max_boxes = sum(len(lane.compute) + len(lane.communications) for lane in every.lanes) // 3
    monkeypatch.setattr(timeline, "MAX_BOXES", max_boxes)
    few = timeline_result(text_of("zb-h1"), 0, layers=layers)
    assert few.num_boxes == every.num_boxes == 3 * max_boxes + every.num_boxes % 3
    assert sum(len(lane.compute) + len(lane.communications) for lane in few.lanes) <= max_boxes
    assert few.window_s == every.window_s == (0.0, every.step_time_s)
    for lane, unmerged in zip(few.lanes, every.lanes, strict=True):
        for boxes, others in ((lane.compute, unmerged.compute), (lane.communications, unmerged.communications)):
            assert sum(box.num_merged for box in boxes) == len(others)
            assert (boxes[0].start_s, max(box.end_s for box in boxes)) == (
                others[0].start_s,
                max(box.end_s for box in others),
            )
            assert sum(box.busy_s for box in boxes) == pytest.approx(sum(box.end_s - box.start_s for box in others))
            assert sum(box.num_bytes for box in boxes) == sum(box.num_bytes for box in others)


def test_a_peak_without_duration_is_drawn() -> None:
    result = timeline_result(text_of("zb-h1"), 0)
    curve = result.memory[0]
    categories: dict[MemoryCategory, tuple[int, ...]] = dict.fromkeys(curve.by_category, (0, 5 * 2**30, 1 * 2**30))
    brief = replace(curve, times_s=(0.0, 0.01, 0.01), by_category=categories)
    figure = checked(gantt_figure([replace(result, memory=(brief,))]))
    areas = [trace for trace in figure.data if trace.type == "scatter" and trace.stackgroup]
    assert all(list(trace.x) == sorted(set(trace.x)) for trace in areas), "Plotly stacks each time once"
    [mark] = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "markers"]
    assert mark.y[0] == max(map(sum, zip(*(trace.y for trace in areas), strict=True))) == 5 * len(categories)
    assert "on the device" in mark.hovertemplate


def test_the_figure_is_to_scale_with_rank_0_on_top() -> None:
    result = timeline_result(text_of("zb-h1"), 0)
    figure = checked(gantt_figure([result]))
    bars = [trace for trace in figure.data if trace.type == "bar"]
    colours = {trace.name: trace.marker.color for trace in bars}
    assert colours["forward"] == COLOURS[ActionKind.FORWARD]
    assert colours["backward of inputs"] == COLOURS[ActionKind.BACKWARD_INPUT]
    assert colours["communication"] == COMMUNICATION
    drawn_s = sum(sum(trace.x) for trace in bars if trace.name != "communication") * 1e-3
    assert drawn_s == pytest.approx(sum(box.end_s - box.start_s for lane in result.lanes for box in lane.compute))
    low, high = figure.layout.yaxis.range
    assert low > high
    assert figure.layout.yaxis.ticktext[0] == "rank 0"
    assert len(bars) <= 8, "a trace for each kind, never one for each action"


def test_several_schedules_share_one_axis() -> None:
    results = [timeline_result(text_of(name), 0) for name in ("zb-h1", "interleaved")]
    figure = checked(gantt_figure(results))
    assert {trace.xaxis for trace in figure.data} == {None}, "all on one axis of time"
    assert figure.layout.xaxis.range[1] * 1e-3 >= max(result.step_time_s for result in results)
    lines = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "lines"]
    assert [len(trace.x) > 2 for trace in lines] == [True, True]


def test_line_of_the_device_says_which_plan_does_not_fit() -> None:
    results = [timeline_result(text_of(name), 0) for name in ("zb-h1", "interleaved")]
    first, second = (max(curve.needed_bytes for curve in result.memory) for result in results)
    cases = {max(first, second): [], min(first, second): [results[first < second]], 2**20: results}
    for capacity, too_large in cases.items():
        results = [replace(result, capacity_bytes=capacity) for result in results]
        [text] = [n.text for n in checked(gantt_figure(results)).layout.annotations if "of the device" in n.text]
        assert ("not fit" in text) is bool(too_large)
        assert [result.name for result in results if result.name in text] == [result.name for result in too_large]
    alone = replace(results[0], capacity_bytes=first // 2)
    assert any("<b>does not fit" in note.text for note in checked(gantt_figure([alone])).layout.annotations)


def test_results_travel_and_the_trace_is_whole() -> None:
    result = timeline_result(text_of("zb-h1"), 0)
    assert pickle.loads(pickle.dumps(result)) == result
    events = json.loads(trace_text(text_of("zb-h1"), 0))["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {lane.rank for lane in result.lanes}


def test_hover_says_what_was_waited_for_the_bytes_and_the_formula() -> None:
    result = timeline_result(text_of("zb-h1"), 0)
    hover = [str(text) for trace in checked(gantt_figure([result])).data for text in _flat(trace.customdata)]
    boxes = [box for lane in result.lanes for box in (*lane.compute, *lane.communications)]
    for box in boxes:
        [*_, said] = [text for text in hover if text.startswith(f"<b>{box.label}</b>")]
        assert box.formula in said
    assert sum("waited" in text for text in hover) == sum(bool(box.waited_s) for box in boxes)
    assert sum("moves" in text for text in hover) == sum(bool(box.num_bytes) for box in boxes)


def _flat(customdata: Any) -> list[Any]:
    return [] if customdata is None else [item[0] if isinstance(item, list | tuple) else item for item in customdata]
