"""The balanced split against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.program.tables.partition import assign_stage_layers, balanced_assignment


def rank(times: list[int], split: tuple[int, ...]) -> tuple[int, int]:
    """What is compared: the slowest stage, then the sum of squares."""
    stages = [sum(times[a:b]) for a, b in pairwise(split)]
    return max(stages), sum(time * time for time in stages)


@given(st.lists(st.integers(1, 50), min_size=3, max_size=10), st.data())
def test_no_split_has_a_faster_slowest_stage_or_is_as_fast_and_more_even(times: list[int], data: st.DataObject) -> None:
    num_last = data.draw(st.integers(1, min(3, len(times) - 2)))
    num_blocks = len(times) - 1 - num_last
    num_stages = data.draw(st.integers(1, num_blocks))
    found = balanced_assignment([float(t) for t in times], num_stages, num_last).boundaries
    # brute force: cuts between blocks only, so that each end keeps at least one block
    splits = [(0, *cuts, len(times)) for cuts in combinations(range(2, len(times) - num_last), num_stages - 1)]
    assert found in splits
    best = min(rank(times, split) for split in splits)
    assert rank(times, found) == best


def test_a_heavy_head_gets_fewer_blocks() -> None:
    assert balanced_assignment([0.1, 1, 1, 1, 1, 1, 1, 2.0], 2).boundaries == (0, 5, 8)


@pytest.mark.parametrize(
    ("stage_layers", "boundaries"), [((8,), (0, 10)), ((3, 5), (0, 4, 10)), ((2, 3, 3), (0, 3, 6, 10))]
)
def test_own_split_puts_embedding_first_and_head_last(
    stage_layers: tuple[int, ...], boundaries: tuple[int, ...]
) -> None:
    assert assign_stage_layers(stage_layers).boundaries == boundaries


def test_the_slowest_stage_counts_before_evenness() -> None:
    """(0, 3, 6, 8) has the least sum of squares, 13^2 + 9^2 + 10^2 = 350, but a stage of 13; here the slowest is 12."""
    assert balanced_assignment([6, 2, 5, 3, 4, 2, 3, 7], 3).boundaries == (0, 2, 5, 8)


def test_the_rounding_of_sums_does_not_choose_the_split() -> None:
    """In floats, three blocks of 0.1 s take more or less by where they are; the stages come out even all the same."""
    boundaries = balanced_assignment([0.0, *(0.1,) * 21, 0.0], 7).boundaries
    assert [b - a for a, b in pairwise(boundaries)] == [4, 3, 3, 3, 3, 3, 4]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_stages", [16, 700, 2000])
def test_the_largest_model_is_split(num_stages: int) -> None:
    found = balanced_assignment([0.5, *(1.0,) * 2000, 1.5], num_stages).boundaries
    assert len(found) == num_stages + 1
    assert {b - a for a, b in pairwise(found)} <= {2000 // num_stages + d for d in (-2, -1, 0, 1, 2)}
