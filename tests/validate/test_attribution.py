"""Terms that make a step differ: against steps that were timed by hand, and their sums."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.plan.plan import ParallelPlan
from simplan.predict import run_spec_of
from simplan.prediction import Prediction
from simplan.program.timeline import COMPUTING, SpanKind, Timeline
from simplan.report.drawings.comparison_drawing import draw_comparison
from simplan.report.drawings.comparison_svg import comparison_html, comparison_svg
from simplan.runs.measurement import MeasuredCollective, MeasuredSpan, Measurement, PeakMemory, RankMeasurement
from simplan.validate.activity import Activity, ActivityShare, Busy, Transfer, busy_span, pieces_of
from simplan.validate.attribution import attribute, critical_pieces
from simplan.validate.compare import ran_as_predicted
from simplan.validate.measured_activity import measured_activity
from tests.validate.measuring import predicted

NAMED: dict[str, Any] = {"name": "<two & two>", "vocab_size": 50304}
SPLIT = ("compute", "recompute", "exposed_communication", "wait", "host", "optimizer")


def measured(
    prediction: Prediction,
    actions: dict[int, list[MeasuredSpan]],
    moved: dict[int, list[MeasuredCollective]],
    step_s: float,
    reruns: tuple[MeasuredSpan, ...] | None = (),
) -> Measurement:
    ranks = tuple(
        RankMeasurement(
            rank=rank,
            peak_memory=PeakMemory(),
            actions=tuple(actions[rank]),
            collectives=tuple(moved[rank]),
            reruns=reruns,
        )
        for rank in actions
    )
    return Measurement(
        job=run_spec_of(prediction), step_times_s=(step_s,), ranks=ranks, environment={"backend": "gloo"}
    )


def action(text: str, start_s: float, end_s: float) -> MeasuredSpan:
    kind = SpanKind.OPTIMIZER if "OPTIM" in text else SpanKind.COMPUTE
    return MeasuredSpan(action=text, kind=kind, start_s=start_s, end_s=end_s)


def communication(text: str, ranks: tuple[int, int], start_s: float, end_s: float) -> MeasuredCollective:
    kind = "send" if "SEND" in text else "recv"
    return MeasuredCollective(kind=kind, action=text, ranks=ranks, num_bytes=8, start_s=start_s, end_s=end_s)  # type: ignore[arg-type]


def test_pieces_by_hand() -> None:
    """Computing hides the first half of a transfer; the rank then waits for nobody knows what."""
    activity = Activity(
        busy=[Busy(1.0, 3.0, ActivityShare.COMPUTE, "forward"), Busy(6.0, 7.0, ActivityShare.COMPUTE, "backward")],
        transfers=[Transfer(2.0, 4.0, "bytes")],
        waiting=[(0.5, 1.0), (4.0, 5.0)],
        idle=ActivityShare.UNEXPLAINED,
    )
    pieces = [(p.start_s, p.end_s, p.share) for p in pieces_of(activity, 8.0)]
    assert pieces == [
        (0.0, 0.5, ActivityShare.UNEXPLAINED),
        (0.5, 1.0, ActivityShare.WAIT),
        (1.0, 3.0, ActivityShare.COMPUTE),
        (3.0, 4.0, ActivityShare.EXPOSED_COMMUNICATION),
        (4.0, 5.0, ActivityShare.WAIT),
        (5.0, 6.0, ActivityShare.UNEXPLAINED),
        (6.0, 7.0, ActivityShare.COMPUTE),
        (7.0, 8.0, ActivityShare.UNEXPLAINED),
    ]


def test_the_path_goes_where_the_late_one_is() -> None:
    """Rank 0 computes for 2 s and sends for 1 s; rank 1, done after 1 s, waits, receives and computes for 3 s."""
    sent = Transfer(2.0, 3.0, "communication", last_rank=0)
    rows = {
        0: pieces_of(Activity([Busy(0.0, 2.0, ActivityShare.COMPUTE, "first")], [sent]), 6.0),
        1: pieces_of(
            Activity(
                [Busy(0.0, 1.0, ActivityShare.COMPUTE, "second"), Busy(3.0, 6.0, ActivityShare.COMPUTE, "third")],
                [sent],
            ),
            6.0,
        ),
    }
    path = [(p.part, p.duration_s) for p in critical_pieces(rows, 6.0)]
    assert path == [("third", 3.0), ("communication", 1.0), ("first", 2.0)]


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(pp=2),
        ParallelPlan(pp=2, virtual_stages=2),
        ParallelPlan(dp_replicate=2),
        ParallelPlan(dp_shard=2, recompute="full"),
        ParallelPlan(tp=2),
    ],
)
def test_shares_of_a_prediction_are_those_it_was_split_into(plan: ParallelPlan) -> None:
    """``split_of_rank`` is another way to the same; and every critical path is as long as the step."""
    prediction = predicted(plan, **NAMED)
    run = {rank: [action("0OPTIM", 0.0, 1.0)] for rank in range(2)}
    terms, splits = attribute(prediction.timeline, measured(prediction, run, {0: [], 1: []}, 1.0))
    written = {rank["rank"]: rank["split"] for rank in prediction.to_json()["ranks"]}
    assert len(splits) > 0
    for split in splits:
        for share in SPLIT:
            assert split.predicted_s[ActivityShare(share)] == pytest.approx(written[split.rank][share], abs=1e-9)
    assert sum(term.predicted_s for term in terms) == pytest.approx(prediction.step_time_s, rel=1e-9)


def test_a_measured_pipeline_by_hand() -> None:
    """Rank 1 waits for rank 0, 0.5 s of bytes, computes 2 s; 0.25 s nobody knows about; rank 0 goes on."""
    prediction = predicted(ParallelPlan(pp=2), **NAMED)
    actions = {
        0: [action("0F0", 0.0, 1.0), action("0B0", 5.0, 6.0), action("0OPTIM", 6.0, 6.5)],
        1: [action("1F0", 1.5, 2.5), action("1B0", 2.75, 4.0), action("1OPTIM", 4.0, 4.5)],
    }
    moved = {
        0: [communication("0SEND_F0", (0, 1), 1.0, 6.0), communication("0RECV_B0", (1, 0), 1.0, 5.0)],
        1: [communication("1RECV_F0", (0, 1), 0.0, 1.5), communication("1SEND_B0", (1, 0), 4.5, 4.5)],
    }
    run = measured(prediction, actions, moved, 7.0)
    terms, splits = attribute(prediction.timeline, run)
    on_path = {term.part: term.measured_s for term in terms if term.measured_s}
    assert on_path == pytest.approx(
        {
            "forward": 2.0,
            "backward": 2.25,
            "optimizer": 1.0,
            "P2P between stages": 1.0,
            "unexplained": 0.25,
            "median step compared with the recorded step": 0.5,
        }
    )
    of_rank_1 = {share: seconds for share, seconds in splits[1].measured_s.items() if seconds}
    # it hands its communication over at 4.5 and has nothing to do but to see it go until 5
    assert of_rank_1 == pytest.approx(
        {"wait": 1.0 + 1.5, "exposed_communication": 1.0, "compute": 2.25, "optimizer": 0.5, "unexplained": 0.25}
    )


def test_a_dropped_rank_waits_and_is_not_on_the_path() -> None:
    """The step has ended with the kept rank, whatever the other one has done until then."""
    prediction = predicted(ParallelPlan(dp_replicate=2), **NAMED)
    row = [str(action) for action in prediction.table[0]]
    kept = [action(text, float(number), number + 0.9) for number, text in enumerate(row)]
    cut = [action(row[0], 0.0, 2.0), action(row[-1], 2.5, kept[-1].end_s)]
    measurement = measured(prediction, {0: kept, 1: cut}, {0: [], 1: []}, kept[-1].end_s)
    first, second = measurement.ranks
    measurement = measurement.model_copy(update={"ranks": (first, second.model_copy(update={"is_dropped": True}))})
    terms, _ = attribute(prediction.timeline, measurement)
    on_path_s = {term.part: term.measured_s for term in terms}
    assert (on_path_s["forward"], on_path_s["backward"]) == pytest.approx((1.8, 1.8))  # of two microbatches
    assert measured_activity(measurement)[1].idle is ActivityShare.WAIT
    assert ran_as_predicted(measurement)
    assert not ran_as_predicted(measurement.model_copy(update={"ranks": (first, second)}))


def test_recomputation_is_a_share_of_its_own_where_the_run_timed_it() -> None:
    """Two blocks run again in a backward of 4 s, for 0.5 s and for 1 s."""
    prediction = predicted(ParallelPlan(dp_replicate=2, recompute="full"), **NAMED)
    actions = {rank: [action("0F0", 0.0, 2.0), action("0B0", 2.0, 6.0)] for rank in range(2)}
    again = tuple(
        MeasuredSpan(action="0B0", kind=SpanKind.RECOMPUTE, start_s=start_s, end_s=end_s)
        for start_s, end_s in ((2.25, 2.75), (4.0, 5.0))
    )
    _, splits = attribute(prediction.timeline, measured(prediction, actions, {0: [], 1: []}, 6.0, again))
    assert {k: v for k, v in splits[0].measured_s.items() if v} == pytest.approx({"compute": 4.5, "recompute": 1.5})
    assert splits[0].predicted_s[ActivityShare.RECOMPUTE] > 0


def test_recomputation_that_was_not_timed_is_a_part_of_computing_on_both_sides() -> None:
    prediction = predicted(ParallelPlan(dp_replicate=2, recompute="full"), **NAMED)
    actions = {rank: [action("0F0", 0.0, 2.0), action("0B0", 2.0, 6.0)] for rank in range(2)}
    terms, splits = attribute(prediction.timeline, measured(prediction, actions, {0: [], 1: []}, 6.0, None))
    assert {k: v for k, v in splits[0].measured_s.items() if v} == pytest.approx({"compute": 6.0})
    split = prediction.splits[0]
    assert splits[0].predicted_s[ActivityShare.RECOMPUTE] == 0
    assert splits[0].predicted_s[ActivityShare.COMPUTE] == pytest.approx(split.compute_s + split.recompute_s)
    assert not any(term.share is ActivityShare.RECOMPUTE for term in terms)


def test_a_bucket_that_ends_after_the_last_gradient_is_exposed_and_waited_for() -> None:
    """The other rank issues its bucket half a second later."""
    prediction = predicted(ParallelPlan(dp_replicate=2), **NAMED)

    def bucket(start_s: float) -> MeasuredCollective:
        return MeasuredCollective(
            kind="all_reduce", action="0B0", ranks=(0, 1), num_bytes=8, start_s=start_s, end_s=3.0
        )

    actions = {rank: [action("0B0", 0.0, 3.25), action("0OPTIM", 3.25, 4.0)] for rank in range(2)}
    run = measured(prediction, actions, {0: [bucket(1.5)], 1: [bucket(2.0)]}, 4.0)
    _, splits = attribute(prediction.timeline, run)
    expected = {"compute": 1.75, "wait": 0.5, "exposed_communication": 1.0, "optimizer": 0.75}
    assert {k: v for k, v in splits[0].measured_s.items() if v} == pytest.approx(expected)


@given(
    st.lists(st.floats(0.01, 2.0), min_size=8, max_size=8),
    st.lists(st.floats(0.0, 0.5), min_size=8, max_size=8),
    st.floats(0.5, 20.0),
)
def test_terms_sum_to_the_difference_whatever_was_measured(busy: list[float], idle: list[float], step_s: float) -> None:
    prediction = PIPELINE
    actions: dict[int, list[MeasuredSpan]] = {}
    for rank, texts in enumerate((["0F0", "0B0", "0REDUCE_GRAD", "0OPTIM"], ["1F0", "1B0", "1REDUCE_GRAD", "1OPTIM"])):
        now_s = 0.0
        actions[rank] = []
        for index, text in enumerate(texts):
            now_s += idle[4 * rank + index]
            actions[rank].append(action(text, now_s, now_s + busy[4 * rank + index]))
            now_s += busy[4 * rank + index]
    first, second = actions[1][0].start_s, actions[0][1].start_s
    moved = {
        0: [
            communication("0SEND_F0", (0, 1), actions[0][0].end_s, second),
            communication("0RECV_B0", (1, 0), 0.0, second),
        ],
        1: [
            communication("1RECV_F0", (0, 1), 0.0, first),
            communication("1SEND_B0", (1, 0), actions[1][1].end_s, second),
        ],
    }
    terms, splits = attribute(prediction.timeline, measured(prediction, actions, moved, step_s))
    assert sum(term.difference_s for term in terms) == pytest.approx(prediction.step_time_s - step_s, abs=1e-9)
    end_s = max(actions[rank][-1].end_s for rank in range(2))
    for split in splits:
        assert sum(split.measured_s.values()) == pytest.approx(end_s)
        assert sum(split.predicted_s.values()) == pytest.approx(prediction.step_time_s)


PIPELINE = predicted(ParallelPlan(pp=2), **NAMED)


def test_both_steps_are_drawn_on_one_axis() -> None:
    actions = {
        0: [action("0F0", 0.0, 1.0), action("0B0", 5.0, 6.0), action("0OPTIM", 6.0, 6.5)],
        1: [action("1F0", 1.5, 2.5), action("1B0", 2.75, 4.0), action("1OPTIM", 4.0, 4.5)],
    }
    drawing = draw_comparison(PIPELINE.to_json(), measured(PIPELINE, actions, {0: [], 1: []}, 6.5))
    assert [(row.rank, row.source) for row in drawing.rows] == [
        (rank, source) for rank in range(2) for source in ("predicted", "measured")
    ]
    assert drawing.axis_s == 6.5
    root = ElementTree.fromstring(comparison_svg(drawing))
    boxes = root.findall(".//{*}g[@class='box']")
    assert len(boxes) == 6 + sum(len(row.boxes) for row in drawing.rows if row.source == "predicted")
    widths = [float(box.findall("{*}rect")[0].attrib["width"]) for box in boxes if "measured" in (box[0].text or "")]
    durations = [span.end_s - span.start_s for rank in range(2) for span in actions[rank]]
    assert [width / widths[0] for width in widths] == pytest.approx([d / durations[0] for d in durations], rel=0.01)
    page = comparison_html(drawing)
    assert re.search(r"<title>&lt;two &amp; two&gt;</title>", page)
    assert ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6]) is not None


def test_without_a_recorded_step_there_are_no_terms() -> None:
    assert attribute(Timeline((), 0, 1.0), measured(PIPELINE, {}, {}, 1.0)) == ((), ())


def test_part_of_a_step_belongs_to_one_share() -> None:
    """Rows of a comparison have the name of a part: no two have the same."""
    shares: dict[str, set[ActivityShare]] = {}
    for action in ("0F1", "0B1", "0I1", "0W1", "0UNSHARD", "0REDUCE_GRAD", "0OPTIM"):
        kinds = {*COMPUTING, SpanKind.HOST} | ({SpanKind.OPTIMIZER} if action == "0OPTIM" else set())
        for kind in kinds:
            busy = busy_span(action, kind, 0.0, 1.0)
            shares.setdefault(busy.part, set()).add(busy.share)
    assert [part for part, of_part in shares.items() if len(of_part) > 1] == []
