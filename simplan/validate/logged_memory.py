"""Peak memory of a log next to the predicted peak, and the categories that could explain a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from simplan.errors import Problem, SpecError
from simplan.prediction import MemoryKind
from simplan.units import GIB
from simplan.validate.rows import ComparisonRow, compared

COLUMNS: tuple[MemoryKind, ...] = ("allocated", "reserved", "device")
"""Memory columns; each includes the previous one."""

_ROUNDED = 1.01  # figures of one log agree within their digits
_UNITS = (("GB", 1e9), ("MiB", 2**20), ("MB", 1e6), ("bytes", 1))


Peaks = Mapping[MemoryKind, tuple[float, ...]]
"""Logged peaks in GiB by column: one number for the peak-memory rank, or one per rank."""


def memory_rows(prediction: Mapping[str, Any], told: Peaks) -> Iterator[ComparisonRow]:
    """Yield peaks of the measured peak-memory rank; if only one number is logged, of the predicted one.

    Raises:
        SpecError: A peak exceeds the device memory or a column that includes it, or the ranks differ from the predicted
            ranks.
    """
    problems = [*_too_large(told, prediction["capacity_gib"]), *_contradictions(told)]
    ranks = prediction["ranks"]
    rows = []
    for column, peaks in told.items():
        predicted = {rank["rank"]: measurable_gib(rank, column) for rank in ranks}
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
    """Yield notes on the peaks."""
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
            largest = max(peaks)
            fix = next(
                (
                    f"if it is in {unit}, write {largest * size / GIB:.4g}"
                    for unit, size in _UNITS
                    if largest * size / GIB <= capacity_gib
                ),
                "write what one device held",
            )
            rule = f"is more than the {capacity_gib:.4g} GiB of a device of the predicted job"
            yield Problem(field=_field(column), value=f"{largest:g}", rule=rule, fix=fix)


def _contradictions(told: Peaks) -> Iterator[Problem]:
    for (inner, part), (outer, whole) in combinations(told.items(), 2):
        if max(part) > _ROUNDED * max(whole):
            rule = f"is more than {_field(outer)} = {max(whole):g}, of which it is a part"
            yield Problem(field=_field(inner), value=f"{max(part):g}", rule=rule, fix="see which number is which")


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """A category of the predicted peak, with the change that alone would explain the measured peak.

    Attributes:
        category: Category of the peak, e.g. ``activations``; ``allocator`` for reserved blocks without tensors.
        predicted_gib: Size at the predicted peak of the peak-memory rank, GiB.
        factor: Measured peak explained if this category alone is larger by this factor; None if no positive size would.
    """

    category: str
    predicted_gib: float
    factor: float | None


def measurable_gib(rank: Mapping[str, Any], column: str) -> float:
    """Peak that a measurement shows: the allocator does without the reserve for which the device has no memory."""
    short_gib = 0.0 if column == "allocated" else rank.get("reserve_short_gib", 0.0)
    return float(rank["peak_memory_gib"][column] - short_gib)


def predicted_peak(prediction: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Entry in ``ranks`` of the rank with the largest predicted peak in a column."""
    ranks: list[dict[str, Any]] = prediction["ranks"]
    return max(ranks, key=lambda rank: measurable_gib(rank, column))


def in_memory_interval(prediction: Mapping[str, Any], column: str, measured_gib: float) -> bool:
    """True if a measured peak is inside the predicted 90% interval, or the prediction has none."""
    interval = predicted_peak(prediction, column).get("peak_memory_interval_gib", {}).get(column)
    return interval is None or interval[0] <= measured_gib <= interval[1]


def memory_terms(prediction: Mapping[str, Any], told: Peaks) -> tuple[MemoryTerm, ...]:
    """Categories of the predicted peak, if a measured peak is outside of its interval; largest first.

    The first column that is outside counts: tensors before blocks of the allocator, and these before the device.
    """
    for column, peaks in told.items():
        measured_gib = max(peaks)
        if in_memory_interval(prediction, column, measured_gib):
            continue
        rank = predicted_peak(prediction, column)
        peak_gib = rank["peak_memory_gib"]
        sizes = {name: size for name, size in rank["memory_gib"].items() if name != "context"}
        if column != "allocated":
            sizes["allocator"] = measurable_gib(rank, "reserved") - peak_gib["allocated"]
        if column == "device":
            sizes["context"] = peak_gib["device"] - peak_gib["reserved"]
        more_gib = measured_gib - measurable_gib(rank, column)
        return tuple(
            MemoryTerm(name, size, 1 + more_gib / size if size + more_gib > 0 else None)
            for name, size in sorted(sizes.items(), key=lambda item: -item[1])
            if size > 0
        )
    return ()


def _field(column: str) -> str:
    return f"peak_{column}_gib"
