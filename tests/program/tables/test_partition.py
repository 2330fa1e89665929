"""The balanced split against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplan.program.tables.partition import assign_stage_layers, balanced_assignment


def of_ranks(times: list[int], split: tuple[int, ...], ranks: list[int]) -> tuple[int, int, int]:
    """Largest sum over the stages of a rank, then the largest stage, then the squares of both."""
    stages = [sum(times[a:b]) for a, b in pairwise(split)]
    sums = [sum(time for time, owner in zip(stages, ranks, strict=True) if owner == rank) for rank in set(ranks)]
    return max(sums), max(stages), sum(time * time for time in (*stages, *sums))


@given(st.data(), st.integers(1, 3), st.integers(2, 3), st.booleans())
def test_several_stages_per_rank_match_brute_force(
    data: st.DataObject, num_ranks: int, per_rank: int, equal: bool
) -> None:
    num_stages = num_ranks * per_rank
    num_blocks = data.draw(st.integers(num_stages, num_stages + 4))
    blocks_of_layer = st.just(data.draw(st.integers(1, 20))) if equal else st.integers(1, 20)
    blocks = data.draw(st.lists(blocks_of_layer, min_size=num_blocks, max_size=num_blocks))
    times = [data.draw(st.integers(0, 20)), *blocks, data.draw(st.integers(0, 30))]
    loop = [stage % num_ranks for stage in range(num_stages)]
    down_and_up = [*range(num_ranks), *reversed(range(num_ranks))]
    ranks = down_and_up if per_rank == 2 and data.draw(st.booleans()) else loop
    bounds = balanced_assignment([float(t) for t in times], num_stages, 1, ranks).boundaries
    splits = [(0, *cuts, len(times)) for cuts in combinations(range(2, len(times) - 1), num_stages - 1)]
    assert of_ranks(times, bounds, ranks) == min(of_ranks(times, split, ranks) for split in splits)


@pytest.mark.parametrize(("num_blocks", "num_stages", "num_ranks"), [(61, 32, 16), (46, 16, 8), (126, 64, 16)])
def test_alternating_layers_are_split_near_the_mean(num_blocks: int, num_stages: int, num_ranks: int) -> None:
    """Too many splits to compare all: the slowest rank has at most one short block more than the mean."""
    times = [1, *((10, 13)[block % 2] for block in range(num_blocks)), 17]
    ranks = [stage % num_ranks for stage in range(num_stages)]
    bounds = balanced_assignment([float(t) for t in times], num_stages, 1, ranks).boundaries
    assert of_ranks(times, bounds, ranks)[0] <= sum(times) / num_ranks + 10


def rank(times: list[int], split: tuple[int, ...]) -> tuple[int, int]:
    """What is compared: the slowest stage, then the sum of squares."""
    stages = [sum(times[a:b]) for a, b in pairwise(split)]
    return max(stages), sum(time * time for time in stages)


@given(st.lists(st.integers(1, 50), min_size=3, max_size=10), st.data())
def test_no_split_has_a_faster_slowest_stage_or_is_as_fast_and_more_even(times: list[int], data: st.DataObject) -> None:
    num_last = data.draw(st.integers(1, min(3, len(times) - 2)))
    num_blocks = len(times) - 1 - num_last
    num_stages = data.draw(st.integers(1, num_blocks))
    bounds = balanced_assignment([float(t) for t in times], num_stages, num_last).boundaries
    # brute force: cuts between blocks only, so that each end keeps at least one block
    splits = [(0, *cuts, len(times)) for cuts in combinations(range(2, len(times) - num_last), num_stages - 1)]
    assert bounds in splits
    best = min(rank(times, split) for split in splits)
    assert rank(times, bounds) == best


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
@pytest.mark.parametrize("num_stages", [16, 2000])
def test_the_largest_model_is_split(num_stages: int) -> None:
    bounds = balanced_assignment([0.5, *(1.0,) * 2000, 1.5], num_stages).boundaries
    assert len(bounds) == num_stages + 1
    assert {b - a for a, b in pairwise(bounds)} <= {2000 // num_stages + d for d in (-2, -1, 0, 1, 2)}
