"""A Timeline, or one simulated whole run, as a Chrome trace, which Perfetto and ``chrome://tracing`` open.

Source: the Trace Event Format document of the Chromium project. pid is the rank, tid the stream; an action is one
slice with its layers nested inside; arrows go from each send to its receive; memory is a counter track. With a
topology, the links that delay communications most are one more process, with a counter track of each link's busy share.
Times are microseconds with three decimals (whole nanoseconds), so that neighbours meet exactly and nested slices never
stick out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simplan.errors import ProgramError
from simplan.goodput.result import GoodputResult
from simplan.goodput.setup import OneRun, Stretch
from simplan.goodput.timeline import timeline_of
from simplan.io import write_json
from simplan.predict import Simulated
from simplan.prediction import Prediction
from simplan.program.action import Action, ActionKind
from simplan.program.size import MAX_TRACED, refuse_many_operations
from simplan.program.timeline import Span, SpanKind, Timeline
from simplan.report.table import format_ranks
from simplan.runs.measurement import Measurement
from simplan.sim.memory import MemorySample, memory_trace
from simplan.units import MIB
from simplan.validate.measured import measured_timeline

if TYPE_CHECKING:
    from simplan.network.load import Network

_COMPUTE = "compute"

# Names from the reserved color list of chrome://tracing, which rejects others; Perfetto picks its own colors.
_ACTION_COLOURS = {
    ActionKind.FORWARD: "rail_response",
    ActionKind.BACKWARD: "rail_idle",
    ActionKind.BACKWARD_INPUT: "thread_state_running",
    ActionKind.BACKWARD_WEIGHT: "rail_load",
}
_MAX_LINKS = 16
_KIND_COLOURS = {SpanKind.COMMUNICATION: "generic_work", SpanKind.OPTIMIZER: "olive"}

Event = dict[str, Any]


class _Slice(NamedTuple):
    """A span, or an action with the spans inside of it; times in whole nanoseconds."""

    start_ns: int
    end_ns: int
    spans: tuple[Span, ...]


def trace_document(
    timeline: Timeline,
    name: str,
    memory: Mapping[int, Sequence[MemorySample]] | None = None,
    stands_for: Sequence[int] | None = None,
    network: Network | None = None,
) -> dict[str, Any]:
    """The trace as a JSON object.

    Args:
        timeline: Predicted or measured.
        name: Scenario name.
        memory: Samples by rank, in time order, for the counter tracks.
        stands_for: Per rank of the job, the simulated rank with the same work; None when all ranks are simulated.
        network: Load of links; None for none.
    """
    events: list[Event] = []
    places: dict[Span, tuple[int, int]] = {}
    others: dict[int, list[int]] = defaultdict(list)
    for other, drawn in enumerate(stands_for or ()):
        others[drawn].append(other)
    for rank, spans in sorted(timeline.by_rank().items()):
        alike = others[rank]
        title = f"rank {rank} (for ranks {format_ranks(alike)})" if len(alike) > 1 else f"rank {rank}"
        events += _rank_events(rank, title, spans, places)
    events += _flow_events(places)
    for rank, samples in (memory or {}).items():
        events += _memory_events(rank, samples)
    if network is not None:
        events += _link_events(1 + max((span.rank for span in timeline.spans), default=0), network)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schema_version": 1, "name": name, "step_time_s": timeline.step_time_s},
    }


def _rank_events(rank: int, title: str, spans: Iterable[Span], places: dict[Span, tuple[int, int]]) -> Iterator[Event]:
    """Name and slice events of one rank; adds the (pid, tid) of every span to ``places``."""
    yield _metadata(rank, 0, "process_name", {"name": title})
    yield _metadata(rank, 0, "process_sort_index", {"sort_index": rank})
    streams: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        streams[span.stream].append(span)
    tid = 0
    for stream in sorted(streams, key=lambda s: (s != _COMPUTE, s)):
        for number, lane in enumerate(_lanes(_slices(stream, streams[stream])), start=1):
            yield _metadata(rank, tid, "thread_name", {"name": stream if number == 1 else f"{stream} ({number})"})
            yield _metadata(rank, tid, "thread_sort_index", {"sort_index": tid})
            free_ns = 0
            for item in lane:
                yield from _slice_events(item, rank, tid, waited_ns=item.start_ns - free_ns)
                places |= dict.fromkeys(item.spans, (rank, tid))
                free_ns = item.end_ns
            tid += 1


def _slices(stream: str, spans: list[Span]) -> Iterator[_Slice]:
    """On the compute stream, neighbours of one action form one slice."""
    if stream != _COMPUTE:
        yield from (_Slice(_ns(s.start_s), _ns(s.end_s), (s,)) for s in spans)
        return
    for _, group in groupby(spans, key=lambda s: s.action):
        inner = tuple(group)
        yield _Slice(_ns(inner[0].start_s), max(_ns(s.end_s) for s in inner), inner)


def _lanes(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Tracks without overlaps: each slice is on the first track that is free."""
    lanes: list[list[_Slice]] = []
    for item in slices:
        free = next((lane for lane in lanes if lane[-1].end_ns <= item.start_ns), None)
        if free is None:
            lanes.append([item])
        else:
            free.append(item)
    return lanes


def _slice_events(item: _Slice, pid: int, tid: int, waited_ns: int) -> Iterator[Event]:
    first = item.spans[0]
    alone = len(item.spans) == 1
    args: dict[str, Any] = {"action": first.action, "kind": str(first.kind), "waited_us": _us(waited_ns)}
    if first.num_bytes:
        args["bytes"] = first.num_bytes
    if first.peer is not None:
        args["peer"] = first.peer
    name = first.name if alone else first.action
    yield _complete(name, first, item.start_ns, item.end_ns, pid, tid, args)
    if not alone:
        for span in item.spans:
            inner = {"action": span.action, "kind": str(span.kind)}
            yield _complete(span.name, span, _ns(span.start_s), _ns(span.end_s), pid, tid, inner)


def _complete(name: str, span: Span, start_ns: int, end_ns: int, pid: int, tid: int, args: Event) -> Event:
    event: Event = {
        "ph": "X",
        "name": name,
        "cat": str(span.kind),
        "pid": pid,
        "tid": tid,
        "ts": _us(start_ns),
        "dur": _us(end_ns - start_ns),
        "args": args,
    }
    action = _action(span)
    colour = _KIND_COLOURS.get(span.kind) or (None if action is None else _ACTION_COLOURS.get(action.kind))
    return event | {"cname": colour} if colour else event


def _flow_events(places: Mapping[Span, tuple[int, int]]) -> Iterator[Event]:
    """An arrow from each send to the receive of the same microbatch on the peer."""
    receives: dict[tuple[int | None, int | None, Action], Span] = {}
    for span in places:
        action = _action(span)
        if action is not None and action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            receives[span.peer, span.rank, action] = span
    number = 0
    for send in places:
        action = _action(send)
        if action is None or action.kind not in (ActionKind.SEND_F, ActionKind.SEND_B):
            continue
        forward = action.kind is ActionKind.SEND_F
        kind, stage = (ActionKind.RECV_F, action.stage + 1) if forward else (ActionKind.RECV_B, action.stage - 1)
        receive = receives.get((send.rank, send.peer, Action(stage, kind, action.microbatch)))
        if receive is None:
            continue
        number += 1
        common = {"name": "activation" if forward else "gradient", "cat": "communication", "id": number}
        # an arrow never points back in time, even when a receive was posted before its send
        arrival_ns = max(_ns(receive.start_s), min(_ns(send.start_s), _ns(receive.end_s)))
        for phase, span, time_ns in (("s", send, _ns(send.start_s)), ("f", receive, arrival_ns)):
            pid, tid = places[span]
            event = {"ph": phase, **common, "pid": pid, "tid": tid, "ts": _us(time_ns)}
            yield event | {"bp": "e"} if phase == "f" else event


def _memory_events(rank: int, samples: Sequence[MemorySample]) -> Iterator[Event]:
    categories = [c for c in (samples[0].by_category if samples else ()) if any(s.by_category[c] for s in samples)]
    for _, group in groupby(samples, key=lambda s: _ns(s.time_s)):
        last = list(group)[-1]  # the track shows the last of several changes at one time
        args = {str(category): round(last.by_category[category] / MIB, 3) for category in categories}
        yield {"ph": "C", "name": "memory MiB", "pid": rank, "tid": 0, "ts": _us(_ns(last.time_s)), "args": args}


def _link_events(pid: int, network: Network) -> Iterator[Event]:
    """Busy share of the links that delay communications most, as counter tracks of a process of their own."""
    links = [link for link in network.links if link.series][:_MAX_LINKS]
    if links:
        yield _metadata(pid, 0, "process_name", {"name": f"links: {len(links)} of {network.num_links:,}"})
        yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})
    for link in links:
        for place, share in enumerate((*link.series, 0.0)):
            time_us = _us(_ns(place * network.interval_s))
            args = {"busy": round(100 * share, 2)}
            yield {"ph": "C", "name": f"{link.name}, % busy", "pid": pid, "tid": 0, "ts": time_us, "args": args}


def _metadata(pid: int, tid: int, name: str, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _action(span: Span) -> Action | None:
    try:
        return Action.parse(span.action)
    except ProgramError:
        return None


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def predicted_trace(prediction: Prediction, simulated: Simulated) -> dict[str, Any]:
    """Trace of the predicted step, with memory over time; raises a SpecError if it has too many operations."""
    program, times = simulated.program, simulated.times
    num_microbatches = 1 + int(program.columns.microbatch.max(initial=0))
    spans, limit = prediction.timeline.spans, (MAX_TRACED, "in a trace")
    refuse_many_operations(prediction.job, len(spans), len(program.ranks), num_microbatches, limit)
    memory = {rank: list(memory_trace(program, rank, times)) for rank in program.ranks}
    return trace_document(prediction.timeline, prediction.name, memory, program.stands_for, prediction.network)


def write_predicted_trace(file: Path, prediction: Prediction, simulated: Simulated) -> None:
    """Writes the trace of the predicted step; raises a SpecError if the file cannot be written."""
    write_json(file, predicted_trace(prediction, simulated))


def write_measured_trace(file: Path, measurement: Measurement) -> None:
    """Writes the measured step that is nearest to the median; raises a SpecError if the file cannot be written."""
    write_json(file, trace_document(measured_timeline(measurement), measurement.job.name))


_MICRO = 1e6
_TRACKS = ("run", "stops")


def run_trace(result: GoodputResult, run: OneRun) -> dict[str, Any]:
    """One simulated whole run as a trace.

    One track has the stretches of the run, a second one the causes of its stops; counters show the nodes in use and the
    position in steps. Steps that the run repeats are lost work from their beginning.
    """
    return {
        "traceEvents": [*_run_names(result.name), *_run_events(timeline_of(result.setup, run))],
        "displayTimeUnit": "ms",
        "otherData": {"schema_version": 1, "name": result.name, "seed": result.seed, "time_s": run.time_s},
    }


def _run_names(name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": name}}
    for tid, track in enumerate(_TRACKS):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": track}}


def _run_events(stretches: Iterable[Stretch]) -> Iterator[Event]:
    for stretch in stretches:
        at = {"pid": 0, "tid": 0, "ts": _MICRO * stretch.start_s}
        duration = _MICRO * (stretch.end_s - stretch.start_s)
        name = stretch.kind.replace("_", " ")
        args = {"nodes": stretch.num_nodes, "step": stretch.step}
        yield {"ph": "X", "name": name, "cat": stretch.kind, "dur": duration, "args": args, **at}
        if stretch.cause:
            yield {"ph": "i", "s": "t", "name": stretch.cause, "cat": "stop", **at, "tid": 1}
        yield {"ph": "C", "name": "nodes in use", **at, "args": {"nodes": stretch.num_nodes}}
        yield {"ph": "C", "name": "position", **at, "ts": _MICRO * stretch.end_s, "args": {"steps": stretch.step}}
