"""Logs of DeepSpeed: the throughput timer, the steps of the pipeline engine, and memory.

The timer runs from the forward of a step to the end of its update, so it leaves out the time between steps. Its samples
are those of all devices, and ``CurrSamplesPerSec`` is of one step. All GB are 1024^3 bytes, and peaks are of allocated
memory; ``Max_CA`` is of reserved memory, in whole GiB (DeepSpeed 0.19.8, utils/timer.py and runtime/utils.py). Reports
before the first step are those of the set-up, and do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from simplan.interop.logs.reading import LoggedStep, LogReading, each_once, lines_with, number, typical
from simplan.units import format_time

_TIMER = re.compile(
    r"(?:global_step=|\b\d{1,9}/)(\d{1,12}), (?:RunningAvgSamplesPerSec=(\d[\d.]*), Curr)?SamplesPerSec=(\d[\d.]*)"
)
_PIPELINE = re.compile(r"\bsteps?:\s*(\d{1,12})\b[^\n]{0,200}?\biter time \(s\): (\d[\d.]*) samples/sec: (\d[\d.]*)")
_ALLOCATED = re.compile(r"\bMaxMemAllocated=(\d[\d.]*)GB|\bMax_MA (\d[\d.]*) GB")
_RESERVED = re.compile(r"\bMax_CA (\d[\d.]*) GB")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\]")
_FEWEST = 3  # steps of which a median is better than the running mean


def read(text: str) -> LogReading | None:
    """Read the lines of both timers; None if there are none."""
    others: dict[str, Any] = {}
    pipeline, timer = _matches(text, "iter time (s)", _PIPELINE), _matches(text, "SamplesPerSec=", _TIMER)
    trains_from = min((m.start() for m in (*pipeline[:1], *timer[:1])), default=len(text))
    for name, pattern in (("peak_allocated_gib", _ALLOCATED), ("peak_reserved_gib", _RESERVED)):
        matches = pattern.finditer(text, trains_from)
        peak = max((number(next(filter(None, m.groups()), "")) for m in matches), default=0.0)
        if peak > 0:
            others[name] = (peak,)
    if steps := each_once([LoggedStep(int(m[1]), number(m[2]), m.start(), m.end()) for m in pipeline]):
        rate = typical([number(m[3]) for m in pipeline])
        others |= {} if rate is None else {"samples_per_s": (rate,)}
        return LogReading("DeepSpeed", "`iter time (s)`", "step_times_s", steps, others)
    return _timer(text, timer, others)


def _matches(text: str, literal: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Matches of a pattern in the lines that contain a text, one a line."""
    return [m for start, end in lines_with(text, literal) if (m := pattern.search(text, start, end)) is not None]


def _timer(text: str, matches: Sequence[re.Match[str]], others: dict[str, Any]) -> LogReading | None:
    steps = each_once([LoggedStep(int(m[1]), number(m[3]), m.start(), m.end()) for m in matches])
    if not steps:
        return None
    notes = ["DeepSpeed's timer runs from the forward of a step to its update: time between steps is left out"]
    last = next(m for m in reversed(matches) if int(m[1]) in {step.number for step in steps})
    if last[2] is None:
        notes.append("`SamplesPerSec` is a running mean: the last one is used")
        notes.append("old versions of DeepSpeed count every microbatch as a step where gradients are accumulated")
    if wall_s := _wall_s(text, steps):
        notes.append(f"by the times of its lines, a step took {format_time(wall_s)}")
    if last[2] is None or len(steps) < _FEWEST:
        rate = number(last[2] or last[3])
        lines = "`SamplesPerSec`" if last[2] is None else "`RunningAvgSamplesPerSec`"
        others |= {"samples_per_s": (rate,)} if rate > 0 else {}
        return LogReading("DeepSpeed", f"the last {lines}", others=others, notes=tuple(notes))
    return LogReading("DeepSpeed", "`CurrSamplesPerSec`", "samples_per_s", steps, others, tuple(notes))


def _wall_s(text: str, steps: Sequence[LoggedStep]) -> float | None:
    """Seconds per step between the first and the last line, by their time stamps; None without any."""
    first, last = steps[0], steps[-1]
    times = []
    for step in (first, last):
        line = text[text.rfind("\n", 0, step.start) + 1 : step.start]
        stamps = _STAMP.findall(line)
        if not stamps:
            return None
        try:
            times.append(datetime.strptime(stamps[-1], "%Y-%m-%d %H:%M:%S,%f"))
        except ValueError:
            return None
    seconds, number_of = (times[1] - times[0]).total_seconds(), last.number - first.number
    return seconds / number_of if number_of > 0 and seconds > 0 else None
