"""Placements: devices by rank, against a walk over the mesh; and rank files."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from simplan.errors import SpecError
from simplan.plan.placement import DEFAULT_ORDER, Placement, read_rank_file
from simplan.plan.plan import Axis, ParallelPlan, Place, RankMapping
from tests.support.problems import refuses, says

SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in DEFAULT_ORDER})
ORDERS = st.permutations(DEFAULT_ORDER)


def devices_of(plan: ParallelPlan) -> list[int]:
    placement = Placement.of(plan)
    return [*range(plan.num_devices)] if placement is None else list(placement.devices)


def walked(plan: ParallelPlan, order: list[Axis]) -> list[int]:
    """Devices by rank: the mesh is walked through with the first axis fastest, and each place takes the next device."""
    mapping = RankMapping.of(plan)
    devices = [0] * plan.num_devices
    ranges = [range(getattr(plan, axis)) for axis in reversed(order)]
    for device, place in enumerate(itertools.product(*ranges)):
        devices[mapping.rank(Place(**dict(zip(reversed(order), place, strict=True))))] = device
    return devices


@given(SIZES, ORDERS)
def test_devices_are_those_of_a_walk_over_the_mesh(sizes: dict[str, int], order: list[Axis]) -> None:
    plan = ParallelPlan.model_validate({**sizes, "placement": order})
    devices = devices_of(plan)
    assert devices == walked(plan, order)
    assert sorted(devices) == list(range(plan.num_devices))
    if placement := Placement.of(plan):
        assert [placement.rank_of(device) for device in devices] == list(range(plan.num_devices))


@given(SIZES, ORDERS)
def test_groups_of_the_innermost_axes_are_consecutive_devices(sizes: dict[str, int], order: list[Axis]) -> None:
    plan = ParallelPlan.model_validate({**sizes, "placement": order})
    devices, mapping = devices_of(plan), RankMapping.of(plan)
    ranks = np.arange(plan.num_devices).reshape(mapping.sizes)
    for number in range(1, len(order) + 1):
        for rank in range(0, plan.num_devices, 7):
            free, place = order[:number], mapping.place(rank)
            members = ranks[tuple(slice(None) if axis in free else getattr(place, axis) for axis in place._fields)]
            group = sorted(devices[member] for member in members.ravel())
            assert group == list(range(group[0], group[0] + len(group)))
            assert group[0] % len(group) == 0


@pytest.mark.parametrize(
    "placement", [None, ("tp", "dp", "pp"), "tp, cp, dp_shard, dp_replicate, pp", tuple(range(16))]
)
def test_order_of_the_mesh_is_no_placement(placement: object) -> None:
    plan = ParallelPlan.model_validate({"tp": 2, "dp_shard": 4, "pp": 2, "placement": placement})
    assert Placement.of(plan) is None


def test_words_count_the_nodes_of_every_group() -> None:
    plan = ParallelPlan(tp=2, dp_shard=4, pp=2, placement=("dp", "pp", "tp"))
    placement = Placement.of(plan)
    assert placement is not None
    words = "dp_shard-pp-tp: shard groups inside nodes, pipelines across 2 nodes, tensor-parallel groups across 2 nodes"
    assert placement.words(4) == words
    assert placement.nodes_per_group("dp_shard", 3) == (2, 2)
    assert placement.nodes_per_group("pp", 5) == (1, 2)  # device 0 with 4, and device 1 with 5


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (["tp", "dp", "tpp"], "has 'tpp', which is no axis; did you mean tp or pp?"),
        (["tp", "dp", "tp"], "names tp twice; name each axis once"),
        (["dp", "dp_shard"], "dp and dp_shard, and dp is dp_shard ... dp_replicate"),
        ([0, 1, 1, 2], "1 and 2 ... 1; give"),
        (
            [0, 1, 7, 2],
            "2 ... 7 ... 3 ... use ... 0 to 3",
        ),
        ([0, -1], "puts rank 1 on device -1; devices are numbered from 0"),
        ([0, "tp"], "0, which ... known: tp, cp, ep, dp, dp_shard, dp_replicate, pp"),
        ([], "must be a list; write axes"),
        ({"tp": 1}, "must be a list; write axes"),
        (True, "must be a list; write axes"),
        ("ranks.csv", "is a file, which only scenario files name"),
    ],
)
def test_wrong_placements_are_sentences(placement: object, said: str) -> None:
    with pytest.raises(ValidationError) as raised:
        ParallelPlan.model_validate({"placement": placement})
    assert says(str(raised.value), said)


def test_rank_file_has_the_device_of_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "ranks.csv"
    file.write_text("Node,Device,rank\n1,0,0\n0,1,1\n\n1,1,2\n0,0,3\n")
    assert read_rank_file(file, 2) == (2, 1, 3, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "column ... first"),
        ("rank,node\n0,0\n", "column device"),
        ("rank,node,device\n", "has no ranks; add a line for each rank, from 0 on"),
        ("rank,node,device\n0,0,0\n2,0,1\n", "2 ... 1; add ... 0"),
        ("rank,node,device\n0,0,0\n0,0,1\n", "line 3 has rank 0 once more; name each rank once"),
        (
            "rank,node,device\n0,1,1\n1,1,1\n",
            "0 and 1 ... 1 ... 1 ... 3); give",
        ),
        ("rank,node,device\n0,0,2\n", "line 2 has device 2, and a node has 2 devices; use 0 to 1"),
        ("rank,node,device\n0,0,-1\n", "line 2 has the device '-1'; write a whole number, from 0 on"),
        ("rank,node,device\n0\n", "line 2 has the node ''; write a whole number, from 0 on"),
        ("\x00\xff", "has no column rank"),
    ],
)
def test_wrong_rank_files_are_sentences(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "ranks.csv"
    file.write_text(text)
    with pytest.raises(SpecError) as raised:
        read_rank_file(file, 2)
    assert says(str(raised.value), said)


def test_missing_rank_file_is_a_sentence(tmp_path: Path) -> None:
    with refuses("plan.placement", rule="cannot be read: No such file", fix="name a CSV file"):
        read_rank_file(tmp_path / "none.csv", 2)
