"""Plans on the devices that are left when nodes are lost."""

from __future__ import annotations

from typing import Any

import pytest

from simplan.plan.plan import ParallelPlan
from simplan.runs.elastic import on_fewer_devices
from tests.support.problems import refuses


@pytest.mark.parametrize(
    ("plan", "num_devices", "replicate", "shard"),
    [
        ({"dp_replicate": 4}, 3, 3, 1),
        ({"dp_shard": 8}, 6, 1, 6),
        ({"dp_shard": 2}, 1, 1, 1),
        ({"dp_replicate": 4, "dp_shard": 2}, 6, 3, 2),
        ({"dp_replicate": 2, "dp_shard": 4}, 6, 1, 6),  # half a replica's shards are gone with the others
        ({"dp_replicate": 4, "tp": 2, "pp": 2}, 12, 3, 1),
    ],
)
def test_data_parallel_ranks_are_fewer_and_nothing_else(
    plan: dict[str, Any], num_devices: int, replicate: int, shard: int
) -> None:
    before = ParallelPlan(**plan)
    after = on_fewer_devices(before, num_devices)
    assert after == before.model_copy(update={"dp_replicate": replicate, "dp_shard": shard})
    assert after.num_devices == num_devices


def test_a_replica_is_not_cut() -> None:
    with refuses("plan", rule="a replica of the model takes"):
        on_fewer_devices(ParallelPlan(tp=2, pp=3, dp_replicate=2), 8)
