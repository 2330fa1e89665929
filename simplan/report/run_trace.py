"""Timeline of one simulated run as a Chrome trace, which Perfetto opens; see ``simplan.report.trace``.

One track has the stretches of the run, a second one the causes of its stops; counters show the nodes in use and the
position in steps. Steps that the run repeats are lost work from their beginning. Times are microseconds, as in every
trace: a day is 86,400,000,000 of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from simplan.goodput.result import GoodputResult
from simplan.goodput.setup import OneRun, Stretch
from simplan.goodput.timeline import timeline_of

Event = dict[str, Any]
_MICRO = 1e6
_TRACKS = ("run", "stops")


def run_trace(result: GoodputResult, run: OneRun) -> dict[str, Any]:
    """The trace as a JSON object."""
    return {
        "traceEvents": [*_names(result.name), *_events(timeline_of(result.setup, run))],
        "displayTimeUnit": "ms",
        "otherData": {"schema_version": 1, "name": result.name, "seed": result.seed, "time_s": run.time_s},
    }


def _names(name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": name}}
    for tid, track in enumerate(_TRACKS):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": track}}


def _events(stretches: Iterable[Stretch]) -> Iterator[Event]:
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
