"""Pictures of pipelines: the record against closed forms, the text against time, the SVG as XML against the record."""

from __future__ import annotations

import json
import re
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplan import catalog
from simplan.predict import predict
from simplan.prediction import Prediction
from simplan.program.action import Action, ActionKind
from simplan.program.schedules import SCHEDULES, PipelineShape, StageTimes
from simplan.program.schedules.shape import action_ends_s
from simplan.program.timeline import Span, SpanKind, Timeline
from simplan.report.drawings.drawing import Box, DrawnRank, PipelineDrawing, draw_pipeline, draw_timeline, ticks
from simplan.report.drawings.drawing_svg import drawing_svg, fill_of, schedules_svg
from simplan.report.drawings.drawing_text import drawing_text
from simplan.report.drawings.svg import ink_on
from simplan.report.text import verdict
from simplan.units import format_percent
from tests.jobs import job_of
from tests.report.contrast import channels, contrast

SVG = "{http://www.w3.org/2000/svg}"


def compute(rank: int, action: str, start_s: float, end_s: float, kind: SpanKind = SpanKind.COMPUTE) -> Span:
    return Span(rank, "compute", "layer", action, kind, start_s, end_s)


def timeline_of(schedule: str, p: int, m: int, times: StageTimes, virtual_stages: int = 1) -> Timeline:
    """A schedule with given times: every action in two layers, all in disorder, with communications and an
    optimizer."""
    table = SCHEDULES[schedule](PipelineShape(p, m, virtual_stages, times))
    ends_s = action_ends_s(table, times)
    spans = []
    for rank, row in enumerate(table):
        for action in row:
            end_s = ends_s[action]
            start_s = end_s - times.duration_s(action)
            middle_s = (start_s + end_s) / 2
            spans += [compute(rank, str(action), start_s, middle_s), compute(rank, str(action), middle_s, end_s)]
            spans.append(Span(rank, "send_f", "send", str(action), SpanKind.COMMUNICATION, end_s, end_s + 9.0))
    last_s = max(ends_s.values())
    spans += [compute(rank, f"{rank}OPTIM", last_s, last_s + 1.0, SpanKind.OPTIMIZER) for rank in range(p)]
    Random(0).shuffle(spans)
    return Timeline(tuple(spans), p, last_s + 1.0)


def starts(row: DrawnRank) -> dict[str, float]:
    assert len({box.action for box in row.boxes}) == len(row.boxes)
    return {str(box.action): box.start_s for box in row.boxes}


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 8)])
@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (3.0, 3.0)])
def test_gpipe_starts_as_on_paper(p: int, m: int, f: float, b: float) -> None:
    """Forward k of stage s after s + k others; backwards after all forwards, from the last stage up."""
    drawing = draw_timeline("x", timeline_of("gpipe", p, m, StageTimes.equal(p, f, b / 2, b / 2)), range(p))
    turn_s = (m + p - 1) * f
    for s, row in enumerate(drawing.rows):
        expected = {f"{s}F{k}": (s + k) * f for k in range(m)}
        expected |= {f"{s}B{k}": turn_s + (p - 1 - s + k) * b for k in range(m)}
        expected[f"{s}OPTIM"] = turn_s + (m + p - 1) * b
        assert starts(row) == pytest.approx(expected)
        assert row.idle_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert [box.duration_s for box in row.boxes] == pytest.approx([f] * m + [b] * m + [1.0])


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8)])
def test_1f1b_starts_as_on_paper(p: int, m: int) -> None:
    """The last stage alternates; backward comes up a stage each b; forward k waits for backward k - (p - s)."""
    f, b = 1.0, 2.0
    drawing = draw_timeline("x", timeline_of("1f1b", p, m, StageTimes.equal(p, f, b / 2, b / 2)), range(p))
    for s, row in enumerate(drawing.rows):
        starts_s = starts(row)
        for k in range(m):
            assert starts_s[f"{s}B{k}"] == pytest.approx(p * f + k * (f + b) + (p - 1 - s) * b)
            if k < p - s:
                assert starts_s[f"{s}F{k}"] == pytest.approx((s + k) * f)
            else:
                assert starts_s[f"{s}F{k}"] == pytest.approx(starts_s[f"{s}B{k - (p - s)}"] + b)
        assert row.idle_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_recomputation_and_other_actions_in_between() -> None:
    """An action that another interrupts has two boxes; recomputation is counted, communications and nothing are not
    drawn."""
    spans = (
        compute(0, "0F0", 0.0, 2.0),
        compute(0, "0B0", 2.5, 3.0, SpanKind.RECOMPUTE),
        compute(0, "0B0", 3.0, 4.0),
        compute(0, "0F1", 4.0, 5.0),
        compute(0, "0B0", 5.0, 5.5),
        compute(0, "0REDUCE_GRAD", 5.5, 5.5),
        Span(0, "compute", "collective", "0F1", SpanKind.COMMUNICATION, 2.0, 2.5),
    )
    drawing = draw_timeline("x", Timeline(spans, 1, 6.0), [0])
    assert drawing.rows[0].boxes == (
        Box(Action.parse("0F0"), 0.0, 2.0),
        Box(Action.parse("0B0"), 2.5, 4.0, 0.5),
        Box(Action.parse("0F1"), 4.0, 5.0),
        Box(Action.parse("0B0"), 5.0, 5.5),
    )
    assert drawing.rows[0].idle_fraction == pytest.approx(0.5 / 5.5)


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    plan = {"pp": 2, "dp_shard": 4, "virtual_stages": 2}
    return predict(job_of("llama3-8b", plan, global_batch_size=16), name="small")


def test_a_prediction_is_drawn_as_its_table_says(prediction: Prediction) -> None:
    drawing = draw_pipeline(prediction)
    assert [row.rank for row in drawing.rows] == [0, 4], "pipeline ranks are outermost: 8 ranks, 4 at each place"
    assert drawing.ranks_per_row == 4
    assert drawing.num_microbatches == 4
    for row, actions in zip(drawing.rows, prediction.table, strict=True):
        drawn = [box.action for box in row.boxes if box.action.kind.is_compute]
        assert drawn == [action for action in actions if action.kind.is_compute]
        assert row.activations_in_flight == prediction.memory[row.rank].activations_in_flight
    mean = sum(row.idle_fraction for row in drawing.rows) / len(drawing.rows)
    assert mean == pytest.approx(prediction.bubble_fraction)
    document = drawing.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_drawing_says_that_its_plan_does_not_fit_and_what_is_idle() -> None:
    plan = {"pp": 4, "schedule": "1f1b"}
    for num_layers, fits in ((4, True), (32, False)):
        model = catalog.model("llama3-8b").model_copy(update={"num_hidden_layers": num_layers})
        prediction = predict(job_of(model, plan, num_microbatches=8), name="x")
        assert prediction.fits is fits
        drawing = draw_pipeline(prediction)
        for shown in (drawing_text(drawing, 200), drawing_svg(drawing)):
            assert (f"; {verdict(prediction)}" in shown) == (not fits)
            assert f"mean idle: {format_percent(prediction.bubble_fraction)}; " in shown
            assert "(p-1)/(m+p-1) = 3/11 = 27.3 %" in shown


@st.composite
def drawings(draw: st.DrawFn) -> PipelineDrawing:
    """Rows of boxes and gaps of any length; a microbatch is a box's own, so that its text can be told."""
    kinds = st.sampled_from([ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT])
    lengths = st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(1e-3, 5.0), kinds), min_size=1, max_size=12)
    rows = []
    for rank in range(draw(st.integers(1, 3))):
        boxes, now_s = [], 0.0
        for number, (gap_s, length_s, kind) in enumerate(draw(lengths)):
            start_s, now_s = now_s + gap_s, now_s + gap_s + length_s
            boxes.append(Box(Action(rank, kind, number), start_s, now_s, draw(st.sampled_from([0.0, 0.3, 1.0]))))
        rows.append(DrawnRank(rank, tuple(boxes), 0.25))
    end_s = max(row.boxes[-1].end_s for row in rows)
    return PipelineDrawing("x", end_s * draw(st.sampled_from([1.0, 1.2])), 1, tuple(rows))


@given(drawing=drawings(), width=st.integers(60, 200))
@settings(max_examples=60, deadline=None)
def test_a_row_of_text_conserves_time(drawing: PipelineDrawing, width: int) -> None:
    """Bars, boxes and gaps fill the width; each is off by at most one column, and only what is narrower is left out."""
    drawn: dict[Box, str] = {}

    def paint(text: str, box: Box) -> str:
        drawn[box] = text
        return text

    lines = drawing_text(drawing, width, paint).splitlines()[3:]
    for line, row in zip(lines, drawing.rows, strict=False):
        _, cells, figures = line.split("│")
        assert len(line) == width
        assert figures.split() == ["25.0", "%"]
        scale = len(cells) / drawing.step_time_s
        covered = 0
        for box in row.boxes:
            text = drawn.get(box, "")
            assert abs(len(text) - box.duration_s * scale) <= 1 + 1e-6
            if text:
                place = round(box.start_s * scale)
                assert cells[place : place + len(text)] == text
                assert str(box.action)[1:].startswith(text[0])
                label = re.match("[0-9A-Z]+", text)
                assert label is not None
                assert len(label[0]) < max(2, len(text)), "a label ends before the next one begins"
            covered += len(text)
        assert cells.count(" ") == len(cells) - covered


def test_labels_shrink_with_their_boxes() -> None:
    boxes = [("0F0", 0, 4), ("4F0", 4, 7), ("0F1", 7, 9), ("4B0", 9, 10), ("0I1", 10, 20), ("0W1", 20, 30)]
    row = DrawnRank(0, tuple(Box(Action.parse(text), start, end) for text, start, end in boxes), 0.0, {4: 1, 0: 2})
    text = drawing_text(PipelineDrawing("x", 40.0, 1, (row,)), 40 + 26)
    # a label needs a column behind it, and has no stage behind a letter: B0I1 would be B0 and I1
    assert text.splitlines()[3] == "rank 0 │0F0─F0─F─BI1╌╌╌╌╌╌╌╌0W1▒▒▒▒▒▒▒          │ 0.0 %        2+1"
    assert "3 of 6 boxes are too narrow for their full label" in " ".join(text.split())


def test_the_advised_width_is_enough() -> None:
    drawing = draw_timeline("x", timeline_of("interleaved_1f1b", 4, 8, StageTimes.equal(8), 2), range(4))
    text = " ".join(drawing_text(drawing, 60).split())
    width = int(text.split("--width ")[1].split()[0])
    assert "too narrow" in text
    assert "too narrow" not in drawing_text(drawing, width)
    assert "too narrow" in drawing_text(drawing, width - 10)


def test_too_many_boxes_are_said_and_the_rest_is_drawn() -> None:
    drawing = draw_timeline("x", timeline_of("1f1b", 2, 200, StageTimes.equal(2)), range(2))
    lines = drawing_text(drawing, 100).splitlines()
    assert "boxes are narrower than a column and not drawn" in lines[-2]
    assert lines[-1].endswith("-o FILE.svg shows more")
    assert set("FB─═") & set(lines[3])


def test_recomputation_shows_as_its_share() -> None:
    row = DrawnRank(0, (Box(Action.parse("0B0"), 0.0, 20.0, 5.0),), 0.0)
    line = drawing_text(PipelineDrawing("x", 20.0, 1, (row,)), 80).splitlines()[3]
    cells = line.split("│")[1]
    assert cells.count("≈") == round(len(cells) / 4)


@pytest.mark.parametrize(
    ("step_time_s", "max_ticks", "labels"),
    [
        (0.26, 6, ["0", "50", "100", "150", "200", "250 ms"]),
        (1.0, 10, [*(f"{i / 10:g}" for i in range(10)), "1 s"]),
        (12.0, 3, ["0", "5", "10 s"]),
        (4.2e-5, 5, ["0", "0.01", "0.02", "0.03", "0.04 ms"]),
        (0.999, 1, ["0 ms"]),
    ],
)
def test_ticks_are_round(step_time_s: float, max_ticks: int, labels: list[str]) -> None:
    drawn = ticks(step_time_s, max_ticks)
    assert [tick.label for tick in drawn] == labels
    assert all(tick.time_s <= step_time_s * (1 + 1e-9) for tick in drawn)


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb-h1", 1)])
def test_the_svg_has_every_box_at_its_time(schedule: str, virtual_stages: int) -> None:
    times = StageTimes.equal(4 * virtual_stages, 1.0, 1.1, 0.9)
    name = 'a <b> & "c"\x07'
    drawing = draw_timeline(name, timeline_of(schedule, 4, 8, times, virtual_stages), range(4))
    root = ElementTree.fromstring(drawing_svg(drawing))
    assert root.findtext(f"{SVG}title") == f'a <b> & "c"?: one step in {drawing.step_time_s:.3f} s, as predicted'
    groups = root.findall(f"{SVG}g[@class='box']")
    assert len(groups) == len(drawing.boxes)
    first, second = (group.find(f"{SVG}rect") for group in (groups[0], groups[-1]))
    assert first is not None
    assert second is not None
    for group, box in zip(groups, drawing.boxes, strict=True):
        title, rect = group.findtext(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert rect is not None
        assert title.startswith(f"{box.action}: ")
        assert "starts at" in title
        scale = float(second.get("width", 0)) / drawing.boxes[-1].duration_s  # px per second, from the last box
        assert float(rect.get("width", 0)) == pytest.approx(scale * box.duration_s, abs=0.15)
        left = float(rect.get("x", 0)) - float(first.get("x", 0))
        assert left == pytest.approx(scale * (box.start_s - drawing.boxes[0].start_s), abs=0.5)
        label = group.findtext(f"{SVG}text")
        assert label is None or str(box.action).endswith(label)
    assert any(group.find(f"{SVG}text") is not None for group in groups)


def test_rows_of_the_svg_are_ranks_and_lighter_boxes_later_stages() -> None:
    drawing = draw_timeline("x", timeline_of("interleaved_1f1b", 2, 4, StageTimes.equal(4), 2), range(2))
    root = ElementTree.fromstring(drawing_svg(drawing))
    elements = [group.find(f"{SVG}rect") for group in root.findall(f"{SVG}g[@class='box']")]
    of_row = [number for number, row in enumerate(drawing.rows) for _ in row.boxes]
    tops = {(number, rect.get("y")) for number, rect in zip(of_row, elements, strict=True) if rect is not None}
    assert len(tops) == 2, "a height for each rank"
    fills = {
        (box.action.kind, box.action.stage): rect.get("fill")
        for box, rect in zip(drawing.boxes, elements, strict=True)
        if rect is not None
    }
    forward = ActionKind.FORWARD
    assert fills[forward, 0] == fills[forward, 1] != fills[forward, 2] == fills[forward, 3]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("kind", [*"FBIW", "REDUCE_GRAD", "UNSHARD", "OPTIM"])
def test_labels_can_be_read_on_every_shade(kind: str, num_stages: int) -> None:
    """WCAG 2.2, success criterion 1.4.3: a contrast of 4.5 to 1."""
    for place in range(num_stages):
        fill = fill_of(ActionKind(kind), place, num_stages)
        assert contrast(channels(fill), channels(ink_on(fill))) >= 4.5


def test_schedules_below_each_other_share_a_time_axis() -> None:
    """Boxes of equal length are equally wide, and every box has the number of its microbatch where it fits."""
    times = StageTimes.equal(2, 3.0, 3.0, 3.0)
    drawings = {
        name: draw_timeline(name, timeline_of(name, 2, m, times), range(2)) for name, m in (("gpipe", 4), ("1f1b", 8))
    }
    root = ElementTree.fromstring(schedules_svg("Two schedules", drawings))
    boxes = [group for group in root.iter(f"{SVG}g") if group.get("class") == "box"]
    assert len(boxes) == sum(len(drawing.boxes) for drawing in drawings.values())
    forward = [group for group in boxes if ": forward," in (group.findtext(f"{SVG}title") or "")]
    assert len({group[1].get("width") for group in forward}) == 1
    assert {group.findtext(f"{SVG}text") for group in forward} == {str(number) for number in range(8)}
    ends = [float(group[1].get("x", "")) + float(group[1].get("width", "")) for group in boxes]
    assert 0.95 * 960 < max(ends) < 960, "the longest step ends at the right"
    assert float(root.get("height", "")) > max(float(part.get("y", "0")) for part in root.iter(f"{SVG}text"))
