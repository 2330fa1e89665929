"""How nodes that are left agree on who goes on, over a store in this process; and the losses that outlive a node."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

import executor.decision
import executor.guest
import executor.regroup
import executor.waiting_room
from executor.decision import settle
from executor.exchange import REGROUP, Host, RegroupError
from executor.failure import Failure
from executor.guest import wait_for_place
from executor.introduction import introduction
from executor.loss_log import read_losses
from executor.rank import RankFiles
from executor.regroup import Part, regroup
from executor.results import gather_parts
from executor.store_line import StoreLine
from executor.team import Team
from executor.waiting_room import WaitingRoom
from simplan.errors import RunError
from simplan.program.checkpoint import CheckpointHeader, Checkpointing, CheckpointTiming
from simplan.program.fewer_nodes import FewerNodes, on_fewer_devices
from simplan.program.nodes import Nodes
from simplan.program.run_spec import RunSpec
from tests.executor.conftest import MakeJob

PATIENCE_S = 60.0
LOST = "node 1 (b, 10.0.0.2) cannot be reached: nothing has been heard of it for 10 s"


def parts(job: RunSpec, folder: Path, fewer: list[int]) -> list[Part]:
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
        met = introduction(nodes, f"10.0.0.{k + 1}")
        room = WaitingRoom(store, met, [4, *fewer]) if k == 0 else None
        if room is not None:
            room.begin(job.model_dump_json(), 1, lets_in=True)
        team = Team(nodes, k, hosts, store, StoreLine(), "eth0", job.model_dump_json(), 1, room=room)
        team.exchange.lost = {1} if k == 0 else set()
        team.exchange.begun = {1, 2, 3}
        found.append(Part(job, own, team))
    return found


def room_of(found: list[Part]) -> tuple[Nodes, WaitingRoom, Store]:
    """What a node that comes later needs, and where node 0 sees it."""
    team = found[0].team
    assert team is not None
    assert team.room is not None
    return team._nodes, team.room, team.room._store


def lost_node() -> RegroupError:
    lost = RegroupError(LOST)
    lost.num_restarts, lost.is_restart = 1, True
    return lost


def regrouped(found: list[Part], left: list[int], cause: RegroupError | None = None) -> dict[int, Part | str | None]:
    """What each node that is left comes to; errors as text. Node 1 is lost, unless there is another cause."""
    lost = cause or lost_node()

    for k in left[1:]:  # before node 0 looks, whichever thread is first
        team = found[k].team
        assert team is not None
        team.tell(f"ready/{k}")

    def of(k: int) -> Part | str | None:
        try:
            return regroup(found[k], found[k].folder, lost if k == 0 else RegroupError("other nodes are to go on"))
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
        assert part.job.plan.dp == 3
        assert part.folder == tmp_path / str(k) / "part-2"
        assert part.why == f"{LOST}; 3 nodes with 3 ranks go on after step 30; restart 2 of 3"


def test_a_node_that_is_not_needed_leaves(make_job: MakeJob, tmp_path: Path) -> None:
    after = regrouped(parts(make_job(dp=4), tmp_path, [2]), [0, 2, 3])
    first = after[0]
    assert isinstance(first, Part)
    assert first.why == f"{LOST}; 2 nodes with 2 ranks go on after step 30 without node 3 (d); restart 2 of 3"
    assert after[3] is None


def test_a_node_that_waits_takes_the_last_place(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of the one that is lost: all go on with the plan of the beginning."""
    monkeypatch.setattr(executor.guest, "_COUNT_S", 0.01)
    found = parts(make_job(dp=4), tmp_path, [3, 2])
    nodes, room, store = room_of(found)
    with ThreadPoolExecutor() as pool:
        came = pool.submit(wait_for_place, nodes, store, introduction(nodes, "10.0.0.5"), threading.Event())
        while not room.here:
            room.look()
        after = regrouped(found, [0, 2, 3])
        told = came.result(PATIENCE_S)
    name = socket.gethostname()
    for part in after.values():
        assert isinstance(part, Part)
        assert part.team is not None
        assert [host.name for host in part.team.hosts] == ["a", "c", "d", name]
        assert (part.job.plan.dp, part.team.number) == (4, 1)
        assert part.why.startswith(f"{LOST}; {name} (10.0.0.5) joins; 4 nodes with 4 ranks go on after step 30")
    assert (told["place"], told["team"]) == (3, 1)
    team = json.loads(store.get("team/1"))
    assert team["first_attempt"] == 2
    assert [host["name"] for host in team["hosts"]] == ["a", "c", "d", name]
    assert json.loads(json.loads(store.get("run"))["job"])["plan"]["dp_replicate"] == 4


def test_a_node_that_died_while_nobody_looked_is_not_let_in(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when ranks were asked to stop, and counted once more; it would be lost again, for a restart."""
    monkeypatch.setattr(executor.waiting_room, "_ROLL_CALL_S", 0.05)
    found = parts(make_job(dp=4), tmp_path, [3, 2])
    nodes, room, store = room_of(found)
    store.add("guests", 1)
    store.set("guest/1", introduction(nodes, "10.0.0.5").to_json())
    for _ in range(2):
        store.add("here/1", 1)
        room.look()
    assert len(room.here) == 1
    store.add("here/1", 1)
    for part in regrouped(found, [0, 2, 3]).values():
        assert isinstance(part, Part)
        assert part.why == f"{LOST}; 3 nodes with 3 ranks go on after step 30; restart 2 of 3"


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[WaitingRoom]:
    """Rooms that let nobody in for a while, as they are told to."""
    rooms: list[WaitingRoom] = []
    monkeypatch.setattr(WaitingRoom, "pause", lambda room: rooms.append(room))
    return rooms


def test_ranks_that_stopped_for_nobody_are_not_stopped_again_at_once(
    make_job: MakeJob, tmp_path: Path, paused: list[WaitingRoom]
) -> None:
    found = parts(make_job(dp=4), tmp_path, [3, 2])
    first = found[0].team
    assert first is not None
    first.exchange.lost = set()
    after = regrouped(found, [0, 1, 2, 3], RegroupError("other nodes are to go on"))[0]
    assert isinstance(after, Part)
    assert after.why.startswith("a node that wanted to join has gone; 4 nodes ")
    assert paused == [first.room]


def test_a_node_that_dies_as_soon_as_it_is_let_in_costs_no_restart(
    make_job: MakeJob, tmp_path: Path, paused: list[WaitingRoom]
) -> None:
    """Nothing has been heard of its ranks; with no restart left the others go on all the same, and let none in soon."""
    found = parts(make_job(dp=4), tmp_path, [3, 2])
    first = found[0].team
    assert first is not None
    first.exchange.begun = {2, 3}
    cause = RegroupError(LOST)
    cause.num_restarts = 3
    after = regrouped(found, [0, 2, 3], cause)[0]
    assert isinstance(after, Part)
    assert after.why == f"{LOST}; 3 nodes with 3 ranks go on after step 30"
    assert paused == [first.room]


def test_a_node_that_has_finished_hears_that_others_go_on(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a failure of its own it waits for the end, as before."""
    monkeypatch.setattr(executor.decision, "ANSWER_S", 0.1)
    first, _, third, _ = (part.team for part in parts(make_job(dp=4), tmp_path, [3, 2]))
    assert first is not None
    assert third is not None
    first.tell(REGROUP)
    with pytest.raises(RegroupError):
        settle(third, None, {})
    failure = Failure(sentence="boom")
    assert settle(third, failure, {}) == (failure, [])


def test_nodes_that_leave_count_as_no_restart(make_job: MakeJob, tmp_path: Path) -> None:
    """Of four nodes, node 1 has left; node 2 leaves while the others regroup."""
    found = parts(make_job(dp=4), tmp_path, [3, 2])
    first, third = found[0].team, found[2].team
    assert first is not None
    assert third is not None
    first.exchange.lost, first.exchange.left = set(), {1}
    third.leave()
    after = regrouped(found, [0, 3], RegroupError("a node leaves"))
    for place, k in enumerate((0, 3)):
        part = after[k]
        assert isinstance(part, Part)
        assert part.team is not None
        assert (part.team.node_rank, part.team.first_attempt) == (place, 0)
        gone = "node 1 (b) was told to leave; node 2 (c) was told to leave"
        assert part.why == f"{gone}; 2 nodes with 2 ranks go on after step 30"


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


def test_checkpoints_are_those_of_all_parts(make_job: MakeJob, tmp_path: Path) -> None:
    """A line that the end of a part cut short is none, and what could not be written is told of every part."""
    found = parts(make_job(dp=4), tmp_path, [3, 2])[:2]
    first, second = ((CheckpointTiming(step=step, blocked_s=0.5, written_s=1.0)) for step in (10, 20))
    failed = CheckpointTiming(step=15, blocked_s=0.5, written_s=1.0, failure="rank 0: No space left on device")
    for part, timings in zip(found, ([first, failed], [second]), strict=True):
        lines = [timing.model_dump_json() for timing in timings]
        RankFiles(part.folder, 0).checkpoints.write_text("\n".join([lines[0], lines[0][:20], *lines[1:]]) + "\n")
    measured = gather_parts(found, None, {})
    assert measured.checkpoints == (first, failed, second)
    said = "the checkpoint of step 15 was not written (rank 0: No space left on device); training went on"
    assert measured.notes == (said,)
