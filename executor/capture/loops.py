"""Loops over samples, or over their images: operators that a batch of three samples has more often than one of two.

A loop runs the same operators for each sample, in order, so three samples have a copy of the last part of two samples.
One sample's part is counted for each sample: the second part of two samples is left out, as is the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from executor.capture.trace import Seen, Trace

Signature = tuple[str, str, int, int]


def signature(seen: Seen) -> Signature:
    """Name, module and number of results of an operator, which are alike in two batches."""
    return seen.name, seen.module, len(seen.makes), len(seen.writes)


def without_loops(two: Trace, three: Trace) -> Trace:
    """The trace of three samples with the operators of the trace of two, where both differ by loops over samples.

    Operators of the second sample in loops of ``two`` are left out, and those of the first one count for each sample.
    Traces that differ otherwise are returned as they are.
    """
    if len(two.operators) >= len(three.operators):
        return three
    aligned = _aligned([*map(signature, two.operators)], [*map(signature, three.operators)])
    if aligned is None:
        return three
    places, loops = aligned
    operators = [three.operators[place] for place in places]
    sizes = _renumbered(two, three, operators)
    for loop in loops:
        for place in loop.first:
            for storage in two.operators[place].makes:
                sizes[storage] = 3 * two.sizes[storage]
                two.sizes[storage] *= 2
        for seen in two.operators[loop.begin : loop.end]:
            seen.leave_out()
    return replace(three, operators=operators, sizes=sizes)


class _Loop(NamedTuple):
    """A loop over two samples.

    Attributes:
        first: Places of the operators of the first sample.
        begin, end: Place of the first operator of the second sample, and place after the last one.
    """

    first: list[int]
    begin: int
    end: int


def _aligned(two: Sequence[Signature], three: Sequence[Signature]) -> tuple[list[int], list[_Loop]] | None:
    """Places in ``three`` of the operators of ``two``, and the loops of two; None for other differences."""
    places, loops = list[int](), list[_Loop]()
    here = 0
    for place in range(len(two) + 1):
        wanted = two[place] if place < len(two) else None
        if (three[here] if here < len(three) else None) != wanted:
            loop = _loop(two, three, place, here)
            if loop is None:
                return None
            loops.append(loop)
            here += loop.end - loop.begin
        places.append(here)
        here += 1
    return places[:-1], loops


def _loop(two: Sequence[Signature], three: Sequence[Signature], place: int, here: int) -> _Loop | None:
    """The loop that has ended at ``place`` of two samples, and goes on at ``here`` of three; None for none."""
    wanted = two[place] if place < len(two) else None
    for length in range(1, min(place // 2, len(three) - here) + 1):
        after = three[here + length] if here + length < len(three) else None
        if after != wanted or three[here : here + length] != three[here - length : here]:
            continue
        if first := _first(two, place - length, two[place - length : place]):
            return _Loop(first, place - length, place)
    return None


def _first(two: Sequence[Signature], end: int, wanted: Sequence[Signature]) -> list[int]:
    """Places before ``end`` of the first sample's operators; empty for others.

    Autocast casts a weight once, so that the first sample may have more operators than the second.
    """
    places, place = list[int](), end - 1
    for signature_wanted in reversed(wanted):
        while place >= 0 and two[place] != signature_wanted and two[place][0] == _CAST:
            place -= 1
        if place < 0 or two[place] != signature_wanted:
            return []
        places.append(place)
        place -= 1
    return places[::-1]


_CAST = "aten._to_copy"


def _renumbered(two: Trace, three: Trace, operators: Sequence[Seen]) -> list[int]:
    """Bytes of the storages of three samples, by the numbers that they have in the trace of two."""
    sizes = [*two.sizes]
    for number in (*two.parameters, *two.buffers, *two.inputs):
        sizes[number] = three.sizes[number]
    for less, more in zip(two.operators, operators, strict=True):
        pairs = [*zip(less.makes, more.makes, strict=True)]
        if len(less.reads) == len(more.reads):
            pairs += [(a.storage, b.storage) for a, b in zip(less.reads, more.reads, strict=True)]
        for number, other in pairs:
            sizes[number] = three.sizes[other]
    return sizes
