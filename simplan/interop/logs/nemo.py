"""Logs of NeMo: ``train_step_timing in s`` in progress bars (NeMo 1) or in lines (NeMo 2), in seconds.

``max_memory_allocated`` and ``max_memory_reserved`` are bytes. ``peak_memory_usage`` does not say which of both it is.
"""

from __future__ import annotations

import re
from typing import Any

from simplan.interop.logs.reading import LoggedStep, LogReading, each_once, lines_with, number, typical
from simplan.units import GIB

_TIMING = re.compile(r"train_step_timing in s\s*[:=]\s*(\d[\d.]*(?:e[+-]?\d{1,3})?)")
_NUMBERS = (
    re.compile(r"\biteration\s+(\d{1,12})\s*/"),
    re.compile(r"\|\s*(\d{1,12})/(?:\d{1,12}|\?)\s*\["),
    re.compile(r"global_step\s*[:=]\s*(\d[\d.]*(?:e[+-]?\d{1,2})?)"),
)
_PEAKS = {
    "peak_allocated_gib": re.compile(r"max_memory_allocated\s*[:=]\s*(\d[\d.]*)"),
    "peak_reserved_gib": re.compile(r"max_memory_reserved\s*[:=]\s*(\d[\d.]*)"),
}
_BATCH = re.compile(r"global_batch_size\s*[:=]\s*(\d{1,9})\b")
_TOKENS = re.compile(r"tokens_per_sec_per_gpu\s*[:=]\s*(\d[\d.]*(?:e[+-]?\d{1,2})?)")
_UNSAID = "peak_memory_usage"


def read(text: str) -> LogReading | None:
    """Read the lines with step timings; None if there are none."""
    steps: list[LoggedStep] = []
    others: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    tokens = []
    for start, end in lines_with(text, "train_step_timing in s"):
        line = text[start:end]
        if timing := _TIMING.search(line):
            place = next((found for pattern in _NUMBERS if (found := pattern.search(line))), None)
            step = len(steps) + 1 if place is None else int(number(place[1]))
            steps.append(LoggedStep(step, number(timing[1]), start, end))
            for field, pattern in _PEAKS.items():
                if found := pattern.search(line):
                    peaks[field] = max(peaks.get(field, 0.0), number(found[1]) / GIB)
            if found := _BATCH.search(line):
                others["global_batch_size"] = max(1, int(found[1]))
            if found := _TOKENS.search(line):
                tokens.append(number(found[1]))
    kept = each_once(steps)
    if not kept:
        return None
    if (rate := typical(tokens)) is not None:
        others["tokens_per_s_per_device"] = (rate,)
    others |= {field: (peak,) for field, peak in peaks.items() if peak > 0}
    notes: tuple[str, ...] = ()
    if _UNSAID in text:
        notes = (f"{_UNSAID} is left out: the log does not say if it is of tensors or of the allocator",)
    return LogReading("NeMo", "`train_step_timing in s`", "step_times_s", kept, others, notes)
