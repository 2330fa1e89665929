"""The mesh, against torch's own DeviceMesh."""

from __future__ import annotations

import pytest
import torch

from simplan.spec.plan import Place, RankMapping

MAPPING = RankMapping(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)


def test_ranks_and_places_are_inverse() -> None:
    assert [MAPPING.rank(MAPPING.place(rank)) for rank in range(MAPPING.world_size)] == list(range(48))
    assert MAPPING.place(47) == Place(1, 1, 2, 1, 1)


@pytest.mark.parametrize("rank", [0, 17, 30, 47])
def test_groups_are_those_of_a_device_mesh(rank: int) -> None:
    """A DeviceMesh is a tensor of ranks; a group is what is left of it when all other coordinates are fixed."""
    mesh = torch.arange(48).view(MAPPING.sizes)
    pp, rep, shard, cp, tp = MAPPING.place(rank)
    assert list(MAPPING.tp_group(rank)) == mesh[pp, rep, shard, cp, :].tolist()
    assert list(MAPPING.cp_group(rank)) == mesh[pp, rep, shard, :, tp].tolist()
    assert list(MAPPING.shard_group(rank)) == mesh[pp, rep, :, :, tp].flatten().tolist()
    assert list(MAPPING.replicate_group(rank)) == mesh[pp, :, shard, cp, tp].tolist()
    assert list(MAPPING.dp_group(rank)) == mesh[pp, :, :, :, tp].flatten().tolist()
    assert list(MAPPING.pp_group(rank)) == mesh[:, rep, shard, cp, tp].tolist()


def test_data_ranks_number_the_parts_of_the_batch() -> None:
    """Ranks that split a sequence or a layer see the same samples."""
    assert [MAPPING.data_rank(rank) for rank in range(24)] == [i for i in range(6) for _ in range(4)]
