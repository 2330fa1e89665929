"""How nodes that are left agree on who goes on, over a store in this process; and the losses that outlive a node."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import executor.regroup
from executor.exchange import Host, RegroupError
from executor.loss_log import read_losses
from executor.regroup import Part, regroup
from executor.store_line import StoreLine
from executor.team import Team
from simplan.errors import RunError
from simplan.program.checkpoint import CheckpointHeader, Checkpointing
from simplan.program.fewer_nodes import FewerNodes, on_fewer_devices
from simplan.program.job import Job
from simplan.program.nodes import Nodes
from tests.executor.conftest import MakeJob

LOST = "node 1 (b, 10.0.0.2) cannot be reached: nothing has been heard of it for 10 s"


def parts(job: Job, folder: Path, fewer: list[int]) -> list[Part]:
    """Of four nodes, each in its own folder; those that are in ``fewer`` may go on."""
    kept = folder / "kept" / "step-00000030"
    kept.mkdir(parents=True)
    header = CheckpointHeader(
        step=30, model=job.model, training=job.training, plan=job.plan, seed=0, dtype="fp32", file_bytes={}
    )
    (kept / "checkpoint.json").write_text(header.model_dump_json())
    left = tuple(
        FewerNodes(num_nodes=n, plan=on_fewer_devices(job.plan, n), boundaries=job.boundaries, table=job.table)
        for n in fewer
    )
    checkpointing = Checkpointing(folder=str(kept.parent), max_restarts=3)
    job = job.model_copy(update={"fewer_nodes": left, "checkpointing": checkpointing})
    nodes = Nodes(num_nodes=4, min_nodes=fewer[-1], ranks_per_node=1, host="a", port=1)
    hosts = tuple(Host(name, f"10.0.0.{k}") for k, name in enumerate("abcd", 1))
    store = HashStore()
    found = []
    for k in range(4):
        own = folder / str(k)
        own.mkdir()
        team = Team(nodes, k, hosts, store, StoreLine(), "eth0", "{}", 1)
        team.exchange.lost = {1} if k == 0 else set()
        found.append(Part(job, own, team))
    return found


def regrouped(found: list[Part], left: list[int]) -> dict[int, Part | str | None]:
    """What each node that is left comes to; errors as text."""
    lost = RegroupError(LOST)
    lost.num_restarts = 1

    for k in left[1:]:  # before node 0 looks, whichever thread is first
        team = found[k].team
        assert team is not None
        team.tell(f"ready/{k}")

    def of(k: int) -> Part | str | None:
        try:
            return regroup(found[k], found[k].folder, lost if k == 0 else RegroupError("another node is lost"))
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        return dict(zip(left, pool.map(of, left), strict=True))


def test_those_that_are_left_get_new_places_and_one_story(make_job: MakeJob, tmp_path: Path) -> None:
    after = regrouped(parts(make_job(dp=4), tmp_path, [3, 2]), [0, 2, 3])
    for place, k in enumerate((0, 2, 3)):
        part = after[k]
        assert isinstance(part, Part)
        assert part.team is not None
        assert (part.team.node_rank, part.team.num_ranks, part.team.ranks) == (place, 3, range(place, place + 1))
        assert [host.name for host in part.team.hosts] == ["a", "c", "d"]
        assert (part.team.first_attempt, part.first_step) == (2, 30)
        assert (part.job.plan.dp, [fewer.num_nodes for fewer in part.job.fewer_nodes]) == (3, [2])
        assert part.folder == tmp_path / str(k) / "3-nodes"
        assert part.why == f"{LOST}; 3 nodes with 3 ranks go on after step 30; restart 2 of 3"


def test_a_node_that_is_not_needed_leaves(make_job: MakeJob, tmp_path: Path) -> None:
    after = regrouped(parts(make_job(dp=4), tmp_path, [2]), [0, 2, 3])
    first = after[0]
    assert isinstance(first, Part)
    assert first.why == f"{LOST}; 2 nodes with 2 ranks go on after step 30 without node 3 (d); restart 2 of 3"
    assert after[3] is None


def test_too_few_nodes_end_with_one_sentence(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 3 does not answer either; when it comes, it is told."""
    monkeypatch.setattr(executor.regroup, "_READY_S", 0.0)
    found = parts(make_job(dp=4), tmp_path, [3])
    after = regrouped(found, [0, 2])
    assert after[0] == after[2] == f"{LOST}; node 3 (d) did not answer either; too few nodes are left to go on"
    assert regrouped(found, [3])[3] == after[0]


def test_a_node_that_comes_too_late_ends(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.regroup, "_READY_S", 0.0)
    found = parts(make_job(dp=4), tmp_path, [2])
    after = regrouped(found, [0, 2])
    assert isinstance(after[0], Part)
    assert "; node 3 (d) did not answer either; 2 nodes with 2 ranks go on" in after[0].why
    late = regrouped(found, [3])[3]
    assert late == "node 3 (d) did not answer for too long, and the other nodes went on without it"


def test_losses_are_those_of_steps_that_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "losses"
    assert read_losses(file, 0, 3) == ()
    lines = [json.dumps({"step": step, "loss": 10.0 + step}) for step in (2, 3, 4, 5)]
    file.write_text("\n".join(lines) + "\n" + lines[0][:-3])
    assert read_losses(file, 2, 4) == (12.0, 13.0)
