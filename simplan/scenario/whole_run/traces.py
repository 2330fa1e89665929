"""Traces of spot nodes: a CSV file of the nodes that are available over time."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from simplan.errors import file_error
from simplan.io import read_text

_MAX_BYTES = 64 * 1024 * 1024
_COLUMNS = ["time_s", "available"]
_FIX = "write a time and a number of nodes"


def read_trace(path: Path) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Times of a trace, the first 0 and the last its end, and the nodes available from each time but the last on.

    ::

        time_s,available
        0,16
        3600,14
        7200,14

    Raises:
        SpecError: The file is no such table; the error has the line.
    """
    lines = read_text(path, _MAX_BYTES).splitlines()
    name = str(path)
    header = [word.strip() for word in lines[0].split(",")] if lines else []
    if header != _COLUMNS:
        raise file_error(name, "must begin with the columns time_s,available", "write them in the first line", 1)
    times: list[float] = []
    nodes: list[int] = []
    for number, row in enumerate(csv.reader(lines[1:]), start=2):
        if not row or row == [""]:
            raise file_error(name, "the trace has a gap: the line is empty", _FIX, number)
        time_s, available = _row(row, name, number)
        if times and time_s <= times[-1]:
            rule = f"time_s = {time_s:g} does not come after {times[-1]:g}"
            raise file_error(name, rule, "sort the lines by time", number)
        if not times and time_s:
            raise file_error(name, f"the trace begins at time_s = {time_s:g}", "begin at 0", number)
        times.append(time_s)
        nodes.append(available)
    if len(times) < 2:
        raise file_error(name, "the trace has no length", "write a line with the time of its end, too")
    return tuple(times), tuple(nodes[:-1])


def _row(row: list[str], name: str, number: int) -> tuple[float, int]:
    """Time and number of nodes of a line.

    Raises:
        SpecError: The line has no such values.
    """
    if len(row) != len(_COLUMNS) or not all(cell.strip() for cell in row):
        rule = f"the trace has a gap: the line has {sum(bool(cell.strip()) for cell in row)} of 2 values"
        raise file_error(name, rule, _FIX, number)
    try:
        time_s, available = float(row[0]), float(row[1])
    except ValueError:
        raise file_error(name, "the line has no two numbers", _FIX, number) from None
    if not math.isfinite(time_s) or time_s < 0:
        raise file_error(name, f"time_s = {row[0].strip()} must be seconds, 0 or more", "correct it", number)
    if not (math.isfinite(available) and available >= 0 and available.is_integer()):
        rule = f"available = {row[1].strip()} must be a whole number of nodes, 0 or more"
        raise file_error(name, rule, "correct it", number)
    return time_s, int(available)
