"""Peaks of memory as a log tells them, beside the predicted ones; those that cannot be are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.units import GIB
from simplan.validate.rows import ComparisonRow, compared

__all__ = ["COLUMNS", "Peaks", "memory_notes", "memory_rows"]

COLUMNS = ("allocated", "reserved", "device")
"""Each contains the one before."""

_ROUNDED = 1.01  # figures of one log agree within their digits
_UNITS = (("GB", 1e9), ("MiB", 2**20), ("MB", 1e6), ("bytes", 1))


Peaks = Mapping[str, tuple[float, ...]]
"""By column, as far as a log has them, GiB: one number for the rank that needs most, or one for each rank."""


def memory_rows(prediction: Mapping[str, Any], told: Peaks) -> Iterator[ComparisonRow]:
    """Peaks of the rank that was measured to need most; where one number is known, of the rank predicted to.

    Raises:
        SpecError: A peak is more than a device has or than what it is a part of, or there are peaks of other ranks than
            the predicted ones.
    """
    problems = [*_too_large(told, prediction["capacity_gib"]), *_contradictions(told)]
    ranks = prediction["ranks"]
    rows = []
    for column, peaks in told.items():
        predicted = {rank["rank"]: rank["peak_memory_gib"][column] for rank in ranks}
        if len(peaks) == 1:
            rows.append(compared(f"peak memory, {column}", max(predicted.values()), peaks[0], "GiB", None))
        elif len(peaks) == len(predicted):
            measured_gib, rank = max((value, -rank) for rank, value in enumerate(peaks))
            rows.append(compared(f"peak memory, {column}, rank {-rank}", predicted[-rank], measured_gib, "GiB", None))
        else:
            rule = f"has {len(peaks)} numbers, and the predicted job has {len(predicted)} ranks"
            fix = "give one number, of the rank that needs most, or one for each rank"
            problems.append(Problem(field=_field(column), rule=rule, fix=fix))
    if problems:
        raise SpecError(problems)
    yield from rows


def memory_notes(prediction: Mapping[str, Any], told: Peaks) -> Iterator[str]:
    """What to know of the peaks."""
    if not told:
        yield "peak memory is not compared: peak_allocated_gib, peak_reserved_gib or peak_device_gib would tell it"
    least_gib = min(rank["memory_gib"].get("parameters", 0.0) for rank in prediction["ranks"])
    for column, peaks in told.items():
        if max(peaks) < least_gib:
            yield (
                f"{_field(column)} = {max(peaks):g} is less than the {least_gib:.3g} GiB of parameters alone of any "
                "predicted rank: another job was run, or the number is in another unit"
            )


def _too_large(told: Peaks, capacity_gib: float | None) -> Iterator[Problem]:
    for column, peaks in told.items():
        if capacity_gib is not None and max(peaks) > capacity_gib:
            given = max(peaks)
            fix = next(
                (
                    f"if it is in {unit}, write {given * size / GIB:.4g}"
                    for unit, size in _UNITS
                    if given * size / GIB <= capacity_gib
                ),
                "write what one device held",
            )
            rule = f"is more than the {capacity_gib:.4g} GiB of a device of the predicted job"
            yield Problem(field=_field(column), value=f"{given:g}", rule=rule, fix=fix)


def _contradictions(told: Peaks) -> Iterator[Problem]:
    for (inner, part), (outer, whole) in combinations(told.items(), 2):
        if max(part) > _ROUNDED * max(whole):
            rule = f"is more than {_field(outer)} = {max(whole):g}, of which it is a part"
            yield Problem(field=_field(inner), value=f"{max(part):g}", rule=rule, fix="see which number is which")


def _field(column: str) -> str:
    return f"peak_{column}_gib"
