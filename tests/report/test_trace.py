"""The trace against the rules of the Trace Event Format document, which the viewers rely on."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import Any

import pytest

from simplan.program.program import MemoryCategory
from simplan.program.timeline import Span, SpanKind, Timeline
from simplan.report.trace import trace_document
from simplan.sim.memory import MemorySample

# Required beside ph, by phase; from the Trace Event Format document.
REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "ts", "pid", "args"},
}


def compute(rank: int, name: str, action: str, start_s: float, end_s: float) -> Span:
    return Span(rank, "compute", name, action, SpanKind.COMPUTE, start_s, end_s)


def communication(rank: int, action: str, start_s: float, end_s: float, peer: int) -> Span:
    stream = action.lstrip("0123456789").rstrip("0123456789").lower()
    return Span(rank, stream, action, action, SpanKind.COMMUNICATION, start_s, end_s, 4096, peer)


@pytest.fixture
def timeline() -> Timeline:
    """One microbatch through two stages and back; a receive that was posted before its send."""
    third = 1 / 3
    spans = (
        compute(0, "embedding", "0F0", 0.0, third),
        compute(0, "block 0", "0F0", third, 2 * third),
        communication(0, "0SEND_F0", 2 * third, 0.8, 1),
        communication(1, "1RECV_F0", 0.1, 0.8, 0),
        compute(1, "1F0", "1F0", 0.8, 1.0),
        compute(1, "1B0", "1B0", 1.0, 1.5),
        communication(1, "1SEND_B0", 1.5, 1.6, 0),
        communication(0, "0RECV_B0", 1.5, 1.6, 1),
        compute(0, "0B0", "0B0", 1.6, 2.0),
        Span(1, "grad", "bucket 0", "1B0", SpanKind.COMMUNICATION, 1.2, 1.5, 1024),
        Span(1, "grad", "bucket 1", "1B0", SpanKind.COMMUNICATION, 1.4, 1.7, 1024),
    )
    return Timeline(spans, 2, 2.0)


@pytest.fixture
def memory() -> dict[int, list[MemorySample]]:
    parameters, logits = MemoryCategory.PARAMETERS, MemoryCategory.LOGITS
    return {0: [MemorySample(t, {parameters: n * 2**20, logits: 0}) for t, n in ((0.0, 3), (0.5, 5), (0.5, 4))]}


def events(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_events_have_what_the_format_requires(timeline: Timeline, memory: dict[int, list[MemorySample]]) -> None:
    document = json.loads(json.dumps(trace_document(timeline, "x", memory), allow_nan=False))
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert event.keys() >= REQUIRED[event["ph"]], event
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    assert {event["ph"] for event in document["traceEvents"]} == set(REQUIRED)


def test_times_are_microseconds(timeline: Timeline) -> None:
    (backward,) = [e for e in events(trace_document(timeline, "x"), "X") if e["name"] == "0B0"]
    assert (backward["ts"], backward["dur"]) == (1_600_000.0, 400_000.0)


def test_pid_is_the_rank_and_tid_the_stream(timeline: Timeline) -> None:
    document = trace_document(timeline, "x")
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events(document, "M")}
    assert names[1, 0, "process_name"] == {"name": "rank 1"}
    streams = {args["name"] for (pid, _, kind), args in names.items() if kind == "thread_name" and pid == 1}
    assert streams == {"compute", "grad", "grad (2)", "recv_f", "send_b"}
    assert names[0, 0, "thread_name"] == {"name": "compute"}


def test_slices_of_a_track_nest_or_follow_each_other(timeline: Timeline) -> None:
    slices = sorted(events(trace_document(timeline, "x"), "X"), key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"]))
    for _, track in groupby(slices, key=lambda e: (e["pid"], e["tid"])):
        open_until: list[float] = []
        for event in track:
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def test_an_action_encloses_its_layers(timeline: Timeline) -> None:
    slices = {e["name"]: e for e in events(trace_document(timeline, "x"), "X")}
    action, first, last = slices["0F0"], slices["embedding"], slices["block 0"]
    assert action["ts"] == first["ts"]
    assert action["ts"] + action["dur"] == pytest.approx(last["ts"] + last["dur"], abs=1e-9)
    assert "1F0" in slices, "a single span is not nested in itself"


def test_every_communication_is_an_arrow_that_points_forward(timeline: Timeline) -> None:
    document = trace_document(timeline, "x")
    starts = {e["id"]: e for e in events(document, "s")}
    finishes = {e["id"]: e for e in events(document, "f")}
    assert starts.keys() == finishes.keys()
    assert {(starts[i]["pid"], finishes[i]["pid"], starts[i]["name"]) for i in starts} == {
        (0, 1, "activation"),
        (1, 0, "gradient"),
    }
    slices = events(document, "X")
    for number, start in starts.items():
        finish = finishes[number]
        assert finish["ts"] >= start["ts"]
        for end in (start, finish):  # an arrow binds to the slice that encloses its end
            assert any(
                (s["pid"], s["tid"]) == (end["pid"], end["tid"]) and s["ts"] <= end["ts"] <= s["ts"] + s["dur"]
                for s in slices
            )


def test_a_send_without_its_receive_has_no_arrow() -> None:
    alone = Timeline((communication(0, "0SEND_F0", 0.0, 1.0, 1),), 1, 1.0)
    document = trace_document(alone, "x")
    assert events(document, "s") == []
    assert events(document, "f") == []


def test_memory_is_a_counter_in_mib(timeline: Timeline, memory: dict[int, list[MemorySample]]) -> None:
    counters = events(trace_document(timeline, "x", memory), "C")
    assert [(e["ts"], e["args"]) for e in counters] == [(0.0, {"parameters": 3.0}), (500_000.0, {"parameters": 4.0})]


def test_waiting_is_the_gap_before_an_action(timeline: Timeline) -> None:
    on_compute = [e for e in events(trace_document(timeline, "x"), "X") if e["tid"] == 0 and e["pid"] == 1]
    for before, after in pairwise(on_compute):
        assert after["args"]["waited_us"] == pytest.approx(after["ts"] - before["ts"] - before["dur"])
    assert on_compute[0]["args"]["waited_us"] == pytest.approx(800_000.0)
