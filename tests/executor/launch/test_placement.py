"""Placements on real processes: every rank is on the host that the plan says, and computes what it computed before."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.run import run_job
from simplan.plan.placement import Placement
from tests.executor.conftest import make_job
from tests.executor.launch.node_runs import cores_of, finished, measured, start_on
from tests.hosts import hosts

PLACEMENTS: dict[str, tuple[tuple[str, ...] | tuple[int, ...], list[list[int]]]] = {
    "pipelines inside": (("pp", "dp"), [[0, 2], [1, 3]]),
    "rank 0 on the second host": ((3, 0, 1, 2), [[1, 2], [0, 3]]),
}
"""Placement of two data-parallel pipelines of two stages, and the ranks on each of two hosts."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("_hosts_can_be_made")
def test_ranks_are_on_the_hosts_of_the_plan(tmp_path: Path) -> None:
    job = make_job("1f1b", plan={"pp": 2, "dp_replicate": 2}, dtype="fp64")
    assert job.plan.placement is None
    losses = run_job(job, tmp_path / "here").losses
    for name, (placement, wanted) in PLACEMENTS.items():
        placed = job.model_copy(update={"plan": job.plan.model_copy(update={"placement": placement})})
        with hosts(2, cores=cores_of(2)) as made:
            assert finished(start_on(made, placed, tmp_path / name), tmp_path / name) == [(0, "")] * 2
        measurement = measured(tmp_path / name)
        for host, ranks in zip(made, wanted, strict=True):
            assert [rank.rank for rank in measurement.ranks if rank.node.endswith(host.address)] == ranks
        # a host has the files of its own ranks alone
        files = [{path.name for path in (tmp_path / name / str(node)).glob("rank*.heartbeat")} for node in range(2)]
        assert files == [{f"rank{rank}.heartbeat" for rank in ranks} for ranks in wanted]
        assert measurement.losses == pytest.approx(losses, rel=1e-9)


def test_first_process_keeps_the_store_of_other_ranks(tmp_path: Path) -> None:
    """On one machine; rank 0 is the last process there."""
    job = make_job(plan={"dp_replicate": 2}, dtype="fp64")
    plan = job.plan.model_copy(update={"placement": (1, 0)})
    placement = Placement.of(plan)
    assert placement is not None
    assert [placement.rank_of(process) for process in range(3)] == [1, 0, 2]  # the last one is idle
    placed = run_job(job.model_copy(update={"plan": plan}), tmp_path / "placed")
    assert [rank.rank for rank in placed.ranks] == [0, 1]
    assert placed.losses == pytest.approx(run_job(job, tmp_path / "plain").losses, rel=1e-9)
