"""Folding by hand, and against the definition: equal ranks stand for each other, others do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from simplan.plan.plan import GROUP_AXES, RankMapping
from simplan.program.folding import Folding, fold, unfolded


def folded(mapping: RankMapping, devices_per_node: int) -> Folding:
    return fold(mapping, [np.arange(mapping.world_size) // devices_per_node])


def test_one_node_folds_to_one_rank_a_stage() -> None:
    folding = folded(RankMapping(pp=2, dp_replicate=2, tp=2), 8)
    assert folding.ranks == (0, 4)
    assert folding.stands_for == (0, 0, 0, 0, 4, 4, 4, 4)


def test_groups_that_cross_nodes_stand_apart() -> None:
    """Tensor-parallel groups of three in nodes of four: the second one spans two nodes, then the pattern repeats."""
    folding = folded(RankMapping(dp_replicate=4, tp=3), 4)
    assert folding.stands_for == (0, 0, 0, 3, 3, 3, 3, 3, 3, 0, 0, 0)


def test_ranks_that_own_different_parts_are_not_folded() -> None:
    folding = fold(RankMapping(dp_shard=4), [np.zeros(4, int)], [np.arange(4) % 2])
    assert folding.ranks == (0, 1)
    assert folding.members((0, 1, 2, 3)) == (0, 1)


def test_meeting_a_different_rank_makes_different() -> None:
    """Rank 1 is odd; so rank 0, which splits layers with it, is not like ranks 2 and 4, nor 3 and 5 like them."""
    folding = fold(RankMapping(dp_replicate=3, tp=2), [np.zeros(6, int)], [np.arange(6) == 1])
    assert folding.stands_for == (0, 1, 2, 3, 2, 3)


axes = st.sampled_from([1, 2, 3, 4])


@given(
    st.builds(RankMapping, axes, axes, axes, axes, axes, ep=axes), st.booleans(), st.integers(1, 9), st.integers(2, 99)
)
def test_groups_of_equal_ranks_have_equal_members(
    mapping: RankMapping, split_experts: bool, devices_per_node: int, every: int
) -> None:
    """What a representative meets in a group is what every rank it stands for meets: the law that meetings rely on."""
    mapping = replace(mapping, etp=mapping.tp if split_experts else 1)
    assume(mapping.dp_shard * mapping.cp * mapping.tp % (mapping.ep * mapping.etp) == 0)
    ranks = np.arange(mapping.world_size)
    folding = fold(mapping, [ranks // devices_per_node], [ranks % every == 1])
    for rank, leader in enumerate(folding.stands_for):
        assert folding.stands_for[leader] == leader
        assert mapping.place(rank).pp == mapping.place(leader).pp
        for kind in GROUP_AXES:
            assert folding.members(mapping.group(kind, rank)) == folding.members(mapping.group(kind, leader))


def test_unfolded_writes_everyone_out() -> None:
    assert unfolded(RankMapping(pp=2, tp=2)).ranks == (0, 1, 2, 3)
