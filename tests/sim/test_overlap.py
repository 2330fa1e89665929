"""How long each operation computes beside communications of its rank: by hand, and against a sum over instants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.predict.overlap_slowdown import ComputeCommOverlap
from simplan.program.action import Action
from simplan.program.program import Op, Stream
from simplan.program.timeline import SpanKind
from tests.program.programs import program_of

Place = tuple[int, Stream, SpanKind, float, float]


def seconds(*places: Place) -> list[float]:
    """By operation, of a Program with one at each place, each of an action of its own."""
    ops = [
        Op(rank, stream, "x", Action.parse(f"0B{number}"), kind, ())
        for number, (rank, stream, kind, _, _) in enumerate(places)
    ]
    return seconds_of(ops, places)


def seconds_of(ops: Sequence[Op], places: Sequence[Place]) -> list[float]:
    """By operation."""
    program = program_of(ops, 2)
    start_s, end_s = (np.array([place[index] for place in places]) for index in (3, 4))
    return list(ComputeCommOverlap.of(program).seconds(start_s, end_s))


def in_one_action(places: Sequence[Place], begins: int | None = None) -> list[float]:
    """Each after the one before; the last is a communication that one of them begins."""
    ops = [
        Op(rank, stream, "x", Action.parse("0B0"), kind, (), (number - 1,) if number else ())
        for number, (rank, stream, kind, _, _) in enumerate(places[:-1])
    ]
    rank, stream, kind, _, _ = places[-1]
    waits = () if begins is None else (begins,)
    return seconds_of([*ops, Op(rank, stream, "x", Action.parse("1B0"), kind, (), waits)], places)


def computing(rank: int, start_s: float, end_s: float, kind: SpanKind = SpanKind.COMPUTE) -> Place:
    return rank, Stream.COMPUTE, kind, start_s, end_s


def moving(rank: int, start_s: float, end_s: float, stream: Stream = Stream.DATA) -> Place:
    return rank, stream, SpanKind.COMMUNICATION, start_s, end_s


def test_only_what_computes_beside_communications_of_its_own_rank_counts() -> None:
    overlapped_s = seconds(
        computing(0, 0.0, 2.0),
        computing(0, 2.0, 5.0, SpanKind.RECOMPUTE),
        computing(0, 5.0, 5.5, SpanKind.HOST),
        computing(0, 5.5, 6.0, SpanKind.OPTIMIZER),
        computing(1, 0.0, 6.0),
        moving(0, 1.0, 3.0),
        moving(0, 2.5, 3.5, Stream.REPLICATE),  # two at once take no more than one
        moving(0, 4.0, 6.0, Stream.SHARD),
        moving(0, 0.0, 6.0, Stream.TENSOR),
        moving(0, 0.0, 6.0, Stream.FROM_HOST),
        (0, Stream.COMPUTE, SpanKind.COMMUNICATION, 0.0, 6.0),
        moving(1, 3.0, 3.0),
    )
    assert overlapped_s == pytest.approx([1.0, 2.5, *[0.0] * 10])


def test_layers_and_exchanges_are_beside_communications_as_if_they_were_one_after_all_of_the_others() -> None:
    """Three of eight seconds, in six of which something is computed."""
    collective = moving(0, 2.0, 4.0, Stream.TENSOR)
    apart = in_one_action([computing(0, 0.0, 2.0), collective, computing(0, 4.0, 8.0), moving(0, 0.0, 3.0)])
    assert apart == pytest.approx([3 * 2 / 8, 0.0, 3 * 4 / 8, 0.0])
    later = moving(0, 6.0, 8.0, Stream.TENSOR)
    assert in_one_action([computing(0, 0.0, 6.0), later, moving(0, 0.0, 3.0)]) == pytest.approx([3 * 6 / 8, 0.0, 0.0])


def test_the_operation_that_starts_a_communication_does_not_overlap_it() -> None:
    ops = in_one_action([computing(0, 0.0, 2.0), computing(0, 2.0, 8.0), moving(0, 2.0, 5.0)], begins=0)
    assert ops == pytest.approx([0.0, 3.0, 0.0])


INSTANTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=8)


@given(INSTANTS, INSTANTS)
def test_it_is_as_many_instants_as_both_share(computes: list[tuple[int, int]], moves: list[tuple[int, int]]) -> None:
    places = [computing(0, float(at), float(at + length)) for at, length in computes]
    places += [moving(0, float(at), float(at + length)) for at, length in moves]
    busy = {instant for at, length in moves for instant in range(at, at + length)}
    expected = [len(busy.intersection(range(at, at + length))) for at, length in computes]
    assert seconds(*places) == pytest.approx([*expected, *[0] * len(moves)])
