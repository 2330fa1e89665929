"""Logs of Megatron-LM and of programs with its iteration lines: Megatron Bridge, Megatron-DeepSpeed, GPT-NeoX, Primus.

``training_log`` prints the mean time of the iterations since the previous line, and ``report_memory`` allocated and
reserved bytes in units of 1024 x 1024, which it calls MB (NVIDIA/Megatron-LM, megatron/training/training.py and
utils.py). Megatron Bridge adds a line ``Step Time``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from simplan.interop.logs.reading import LoggedStep, LogReading, each_once, lines_with, number, typical
from simplan.units import counted

_ITERATION = re.compile(
    r"iteration\s{0,20}=?\s{0,20}(\d{1,12})\s{0,20}/\s{0,20}\d{1,12}\s{0,20}\|(?:(?!\biteration[\s=])[^\x00]){0,300}?"
    r"elapsed[\s_]{1,20}time[\s_]{1,20}per[\s_]{1,20}iteration[\s_]{0,20}\(?(ms|s)\)?\s{0,20}[:=]\s{0,20}(\d[\d.]{0,40})"
)
_STEP_TIME = re.compile(r"Step Time\s{0,9}:\s{0,9}(\d[\d.]{0,40})\s{0,9}s\s{1,9}GPU utilization")
_MEMORY = re.compile(
    r"\[Rank (\d{1,7})\][^\n|]{0,80}memory \((MB|GB)\)[^\n]{0,80}?\bmax allocated: (\d[\d.]*)"
    r"(?:[^\n]{0,80}?\bmax (?:reserved|cached): (\d[\d.]*))?"
)
_REST = {
    "global_batch_size": re.compile(r"global[\s_]{1,20}batch[\s_]{1,20}size\s{0,20}[:=]\s{0,20}(\d{1,9})"),
    "seq_len": re.compile(r"actual\s{1,20}seqlen\s{0,20}:\s{0,20}(\d{1,9})"),
    "samples_per_s": re.compile(r"samples\s{1,20}per\s{1,20}second\s{0,20}:\s{0,20}(\d[\d.]*)"),
    "tokens_per_s_per_device": re.compile(
        r"(?:tokens per gpu per second \(tgs\)|tokens/sec/GPU|\(Tok/s/GPU\)|\(tokens/s/GPU\))\s*:\s*(\d[\d.]*)", re.I
    ),
}
_WORD = re.compile(r"\biteration[\s=]")
_MAX_LINE = 800  # characters of a line up to the time, with white space
_MAX_REST = 800  # characters of a line after the time
_MIB_PER_GIB = 1024.0


def read(text: str) -> LogReading | None:
    """Read iteration lines and memory reports; None if there are none."""
    found = (_ITERATION.match(text, at.start(), at.start() + _MAX_LINE) for at in _WORD.finditer(text))
    matches = [match for match in found if match is not None]
    steps = each_once(
        [LoggedStep(int(m[1]), number(m[3]) * (1e-3 if m[2] == "ms" else 1.0), m.start(), m.end()) for m in matches]
    )
    is_bridge = _STEP_TIME.search(text) is not None
    lines = "`elapsed time per iteration`"
    notes: tuple[str, ...] = ()
    if not steps and is_bridge:
        printed = enumerate(_STEP_TIME.finditer(text), 1)
        steps = each_once([LoggedStep(place, number(m[1]), m.start(), m.end()) for place, m in printed])
        lines, notes = "`Step Time`", ("the log has step times to 10 ms only",)
    peaks = _peaks(text)
    if not steps and not peaks:
        return None
    if not steps:
        lines = "memory reports"
    title = "Megatron Bridge" if is_bridge else "Megatron-LM"
    rows = [_rest(text, step, following) for step, following in _following(text, steps)]
    batch = next((row["global_batch_size"] for row in reversed(rows) if "global_batch_size" in row), None)
    kept = [index for index, row in enumerate(rows) if row.get("global_batch_size", batch) == batch]
    if len(kept) < len(steps):
        notes += (f"{counted(len(steps) - len(kept), 'line')} with a smaller batch left out: the batch ramps up",)
    others = _common([rows[index] for index in kept])
    return LogReading(title, lines, "step_times_s", [steps[index] for index in kept], {**peaks, **others}, notes)


def _following(text: str, steps: Sequence[LoggedStep]) -> Iterator[tuple[LoggedStep, int]]:
    """Steps, with the start of the next one."""
    yield from zip(steps, [*(step.start for step in steps[1:]), len(text)], strict=True)


def _rest(text: str, step: LoggedStep, following: int) -> dict[str, float]:
    """Batch, sequence length and throughput in the line of a step."""
    rest = text[step.end : min(following, step.end + _MAX_REST)]
    return {name: number(found[1]) for name, pattern in _REST.items() if (found := pattern.search(rest))}


def _common(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Sizes that all lines have, and typical throughputs."""
    found: dict[str, Any] = {}
    for name in _REST:
        values = [row[name] for row in rows if row.get(name, 0.0) > 0]
        if not values:
            continue
        if name in ("global_batch_size", "seq_len"):
            found |= {name: int(values[0])} if len({*values}) == 1 else {}
        elif (rate := typical(values)) is not None:
            found[name] = (rate,)
    return found


def _peaks(text: str) -> dict[str, Any]:
    """Peaks in GiB of the rank that needs most, over all reports."""
    allocated_gib, reserved_gib = [], []
    bounds = lines_with(text, " max allocated: ")
    for m in (m for start, end in bounds for m in _MEMORY.finditer(text, start, end)):
        scale = _MIB_PER_GIB if m[2] == "MB" else 1.0
        allocated_gib.append(number(m[3]) / scale)
        if m[4] is not None:
            reserved_gib.append(number(m[4]) / scale)
    peaks = {"peak_allocated_gib": max(allocated_gib, default=0.0), "peak_reserved_gib": max(reserved_gib, default=0.0)}
    return {name: (peak,) for name, peak in peaks.items() if peak > 0}
