"""The mesh, against torch's own DeviceMesh."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from simplan.plan.plan import Place, RankMapping

MAPPING = RankMapping(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)


def test_ranks_and_places_are_inverse() -> None:
    assert [MAPPING.rank(MAPPING.place(rank)) for rank in range(MAPPING.world_size)] == list(range(48))
    assert MAPPING.place(47) == Place(1, 1, 2, 1, 1)


@pytest.mark.parametrize("rank", [0, 17, 30, 47])
def test_groups_are_those_of_a_device_mesh(rank: int) -> None:
    """A DeviceMesh is a tensor of ranks; a group is what is left of it when all other coordinates are fixed."""
    mesh = torch.arange(48).view(MAPPING.sizes)
    pp, rep, shard, cp, tp = MAPPING.place(rank)
    assert list(MAPPING.group("tp", rank)) == mesh[pp, rep, shard, cp, :].tolist()
    assert list(MAPPING.group("cp", rank)) == mesh[pp, rep, shard, :, tp].tolist()
    assert list(MAPPING.group("shard", rank)) == mesh[pp, rep, :, :, tp].flatten().tolist()
    assert list(MAPPING.group("replicate", rank)) == mesh[pp, :, shard, cp, tp].tolist()
    assert list(MAPPING.group("dp", rank)) == mesh[pp, :, :, :, tp].flatten().tolist()
    assert list(MAPPING.group("pp", rank)) == mesh[:, rep, shard, cp, tp].tolist()


def test_data_ranks_number_the_parts_of_the_batch() -> None:
    """Ranks that split a sequence or a layer see the same samples."""
    assert [MAPPING.dp_rank(rank) for rank in range(24)] == [i for i in range(6) for _ in range(4)]


@pytest.mark.parametrize(("ep", "etp"), [(2, 3), (2, 1), (6, 1), (8, 1), (24, 1), (1, 1), (1, 3), (8, 3)])
def test_experts_have_a_mesh_of_their_own(ep: int, etp: int) -> None:
    """By the definition: a stage's ranks are a grid [edp, ep, etp], whatever they are to attention."""
    mapping = RankMapping(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=3, ep=ep, etp=etp)
    alike = mapping.ranks_per_stage // (ep * etp)
    grid = np.arange(mapping.world_size).reshape(2, alike, ep, etp)
    for rank in range(mapping.world_size):
        stage, copy, expert, part = (int(place[0]) for place in np.nonzero(grid == rank))
        assert mapping.group("expert", rank) == tuple(grid[stage, :, expert, part])
        assert mapping.group("ep", rank) == tuple(grid[stage, copy, :, part])
        assert mapping.group("etp", rank) == tuple(grid[stage, copy, expert, :])
        if etp == mapping.tp:
            assert mapping.group("etp", rank) == mapping.group("tp", rank)
