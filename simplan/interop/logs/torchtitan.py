"""Logs of torchtitan: throughput of one device since the previous line, and the peak of reserved memory.

torchtitan divides tokens by the size of the non-data-parallel mesh, so ``tps`` (``wps`` before November 2024) is per
device. ``memory`` is ``reserved_bytes.all.peak``, which is reset at every line (torchtitan 0.3, components/metrics.py).
"""

from __future__ import annotations

import re
from typing import Any

from simplan.interop.logs.reading import LoggedStep, LogReading, each_once, lines_with, number

_STEP = re.compile(
    r"(?<!validate )\bstep:\s{0,20}(\d{1,12})\b[^\n]{0,300}?"
    r"(?:\bm?memory:\s{0,20}(\d[\d.]{0,20})\s{0,9}GiB[^\n]{0,80}?)?\b(?:tps|wps):\s{0,20}(\d[\d,.]*)"
)
_SIZES = {
    "global_batch_size": re.compile(r"\bglobal batch size (\d{1,9})\b"),
    "seq_len": re.compile(r"\bsequence length (\d{1,9})\b"),
}


def read(text: str) -> LogReading | None:
    """Read the lines of steps; None if there are none."""
    bounds = sorted({*lines_with(text, "tps:"), *lines_with(text, "wps:")})
    matches = [m for start, end in bounds if (m := _STEP.search(text, start, end)) is not None]
    steps = each_once([LoggedStep(int(m[1]), number(m[3]), m.start(), m.end()) for m in matches])
    if not steps:
        return None
    others: dict[str, Any] = {}
    peak_gib = max((number(m[2]) for m in matches if m[2]), default=0.0)
    if peak_gib > 0:
        others["peak_reserved_gib"] = (peak_gib,)
    for name, pattern in _SIZES.items():
        if size := pattern.search(text):
            others[name] = max(1, int(size[1]))
    return LogReading("torchtitan", "`tps`", "tokens_per_s_per_device", steps, others)
