"""One run on several hosts that only a network joins: torchrun restarts ranks, and goes on with other hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from executor.run import run_job
from executor.train.checkpoint_folder import newest_checkpoint
from simplan.cost.calibration.calibrated import CalibratedCost
from simplan.cost.calibration.format import CalibrationRequest
from simplan.cost.calibration.store import load
from simplan.model.layer import CollectiveKind
from simplan.runs.elastic import RendezvousOptions
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from simplan.validate.compare import issued_as_predicted, ran_as_predicted
from tests.executor.conftest import make_job, make_model
from tests.executor.distributed.test_membership import ALL, INNER_STEPS, LEFT, ElasticReplicas, elastic_job
from tests.executor.launch.node_runs import (
    PATIENCE_S,
    PORT,
    check_parts,
    cores_of,
    elastic,
    finished,
    measured,
    start,
    start_node,
    start_on,
    wait_for_step,
)
from tests.executor.train.test_asynchronous import job_with
from tests.executor.train.test_checkpoints import with_checkpoints
from tests.hosts import BURST_BYTES, hosts
from tests.support.problems import says

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("_hosts_can_be_made")]
LOST_AFTER = 13
NEVER = 1000
"""Steps between checkpoints that no run of these tests makes: there are only those that are taken because hosts go."""


def test_ddp_on_two_hosts_goes_on_as_ddp_on_one(tmp_path: Path) -> None:
    """The first half here, the second on hosts, from the checkpoint: nothing of it is other than on one host."""
    job = make_job(dp=2, dtype="fp64")
    here = run_job(with_checkpoints(job, tmp_path / "kept", num_steps=4), tmp_path / "here")
    shutil.rmtree(tmp_path / "kept" / "step-00000004")
    with hosts(2, own_clocks=True) as made:
        again = with_checkpoints(job, tmp_path / "kept", num_steps=4, resume=True)
        assert finished(start_on(made, again, tmp_path), tmp_path) == [(0, ""), (0, "")]
    there = measured(tmp_path)
    assert there.complete
    assert there.notes[0] == "resuming after step 2"
    assert there.losses == pytest.approx(here.losses[2:], rel=1e-12)  # a rank may have other threads here
    assert there.environment["num_nodes"] == 2
    assert not (tmp_path / "1" / "measurement.json").exists()
    # on clocks a thousand seconds apart, every rank's step begins at the barrier before it
    assert all(0.0 <= action.start_s < there.step_times_s[0] * 10 for rank in there.ranks for action in rank.actions)


def test_a_node_that_was_asked_something_else_is_told(tmp_path: Path) -> None:
    with hosts(2) as made:
        started = start_on(made, make_job(dp=2), tmp_path, number=1, join_timeout_s=40.0, requested={"--steps": "2"})
        other = RendezvousOptions.model_validate_json((tmp_path / "nodes1.json").read_bytes())
        (tmp_path / "nodes1.json").write_text(
            other.model_copy(update={"requested": {"--steps": "3"}}).model_dump_json()
        )
        ((code, said),) = finished([start_node(made[1], 1, tmp_path)], tmp_path / "1")
        started[0].send_signal(signal.SIGTERM)
        ((led, _),) = finished(started, tmp_path)
    assert (code, led) == (2, 143)
    assert says(said, "--steps = 3: ", made[0].address, "copy the scenario", "equal options")


@pytest.mark.parametrize(
    ("schedule", "plan", "number"),
    [("none", {"dp_replicate": 2}, 2), ("none", {"dp_shard": 4}, 4), ("1f1b", {"pp": 2}, 2), ("1f1b", {"pp": 4}, 4)],
)
def test_plans_on_shaped_hosts_are_those_on_one(
    schedule: str, plan: dict[str, int], number: int, tmp_path: Path
) -> None:
    model = make_model("llama", num_hidden_layers=4, vocab_size=96)
    job = make_job(schedule, model=model, plan=plan, dtype="fp64")
    with hosts(number, 400, own_clocks=True) as made:
        assert finished(start_on(made, job, tmp_path), tmp_path) == [(0, "")] * number
    assert measured(tmp_path).losses == pytest.approx(run_job(job, tmp_path / "here").losses, rel=1e-9)


def test_collectives_are_timed_across_hosts(tmp_path: Path) -> None:
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND)
    request = CalibrationRequest(shapes=(), num_ranks=1, num_nodes=2, budget_s=0.5, communication=kinds)
    (tmp_path / "request.json").write_text(request.model_dump_json())
    bandwidth_bytes_per_s = 200e6 / 8
    with hosts(2, 200) as made:
        started = []
        for k, host in enumerate(made):
            nodes = tmp_path / f"nodes{k}.json"
            where: dict[str, Any] = {"host": made[0].address, "port": PORT, "leads": k == 0}
            nodes.write_text(RendezvousOptions(min_nodes=2, max_nodes=2, ranks_per_node=1, **where).model_dump_json())
            out = tmp_path / f"found{k}.json"
            started.append(start(host, "calibrate", tmp_path / "request.json", "--out", out, "--nodes", nodes))
        assert finished(started, tmp_path) == [(0, ""), (0, "")]
    calibration, other = (load(tmp_path / f"found{k}.json") for k in range(2))
    assert calibration is not None
    assert other is not None
    assert calibration.communication == other.communication
    assert {(t.kind, t.num_ranks, t.world_size, t.num_nodes) for t in calibration.communication} == {
        (kind, 2, 1, 2) for kind in kinds
    }
    largest = max((t for t in calibration.communication if t.kind is CollectiveKind.SEND), key=lambda t: t.num_bytes)
    # bytes cannot be faster than the link they cross, but for those that it lets through at once after a pause
    assert largest.seconds.low_s > (largest.num_bytes - BURST_BYTES) / bandwidth_bytes_per_s
    cost = CalibratedCost(calibration, dtype="fp32", optimizer="adamw", num_ranks=1)
    assert not cost.covers((), 1, kinds), "nothing was timed inside of a node"


def test_a_node_that_does_not_come(tmp_path: Path) -> None:
    with hosts(2) as made:
        started = start_on(made, make_job(dp=2), tmp_path, number=1, join_timeout_s=2.0)
        ((code, said),) = finished(started, tmp_path)
    assert (code, said) == (4, f"2 nodes did not join {made[0].address}:{PORT} within 2 s\n")


def hit(folder: Path, rank: int, number: signal.Signals, times: int) -> None:
    """A signal to a rank, some times, each time when its process has done 20 more steps of the training."""
    known: set[int] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while len(known) < times and time.monotonic() < deadline_s:
        beat = read_beat(RankFiles(folder, rank).heartbeat)
        if beat is not None and beat.pid not in known and beat.step >= 20 * (len(known) + 1):
            os.kill(beat.pid, number)
            known.add(beat.pid)
        time.sleep(0.005)
    assert len(known) == times


STRATEGIES: dict[str, dict[str, Any]] = {"ddp": {"dp": 2}, "1f1b": {"schedule": "1f1b", "pp": 2}}


@pytest.mark.parametrize(
    ("strategy", "rank", "number", "said"),
    [
        ("ddp", 1, signal.SIGKILL, "rank 1 was killed"),
        ("1f1b", 0, signal.SIGKILL, "rank 0 was killed"),
        ("ddp", 1, signal.SIGSTOP, "made progress for 60 s"),  # in an all-reduce nobody says who waits
    ],
)
def test_all_hosts_go_on_from_the_last_checkpoint(
    strategy: str, rank: int, number: signal.Signals, said: str, tmp_path: Path
) -> None:
    """A rank is hit twice; each time the ranks of all hosts are started again, and nothing shows in the losses."""
    plain = make_job(**STRATEGIES[strategy], timeout_s=60.0, num_steps=149)
    job = with_checkpoints(plain, tmp_path / "kept", 150, every=10, max_restarts=4)
    measurements: list[Measurement] = []
    # the undisturbed run is on the same hosts: sums depend on the threads of a rank
    with hosts(2, cores=cores_of(2), own_clocks=True) as made:
        for spec, folder in ((plain, tmp_path / "whole"), (job, tmp_path / "hit")):
            started = start_on(made, spec, folder)
            if spec is job:
                hit(folder / str(rank), rank, number, 2)
            ended = finished(started, folder)
            assert [code for code, _ in ended] == [0, 0], ended
            measurements.append(measured(folder))
    whole, kept = measurements
    assert kept.complete
    assert kept.losses == whole.losses
    restarts = [note for note in kept.notes if "; restart " in note]
    assert len(restarts) >= 2
    if rank == 0:
        assert all(note.startswith(said) for note in restarts)


def test_all_nodes_tell_the_first_cause(tmp_path: Path) -> None:
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, make_job(dp=2, num_steps=100_000), tmp_path)
        hit(tmp_path / "1", 1, signal.SIGKILL, 1)
        ended = finished(started, tmp_path)
    assert [code for code, _ in ended] == [4, 4]
    assert ended[0] == ended[1]
    assert ": rank 1 was killed by signal 9" in ended[0][1]
    assert measured(tmp_path).step_times_s, "what was measured is kept"


def test_a_cut_network_ends_the_run_on_all_hosts(tmp_path: Path) -> None:
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, make_job(dp=2, num_steps=10**6, timeout_s=30.0), tmp_path)
        wait_for_step(started, tmp_path / "0", 5)
        made[1].cut()
        ended = finished(started, tmp_path)
    assert [code for code, _ in ended] == [4, 4]
    assert all("made progress for 30 s: rank " in said or "made no progress for 30 s" in said for _, said in ended)
    assert all(len(said.splitlines()) == 1 for _, said in ended)


def undisturbed(job: RunSpec, folder: Path) -> Measurement:
    return run_job(job.model_copy(update={"checkpointing": None, "fewer_nodes": ()}), folder)


def test_one_host_after_the_other_is_lost(tmp_path: Path) -> None:
    """The middle one of three is killed, so that the last one gets other ranks; then that one is killed."""
    job = elastic(make_job(plan={"dp_shard": 3}), tmp_path / "kept", 3, [2, 1])
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(3, cores=cores_of(3), own_clocks=True) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].kill_all()
        wait_for_step(started, tmp_path / "0" / "on-2-ranks", LOST_AFTER + 10)
        made[2].kill_all()
        first, *_ = finished(started, tmp_path)
    assert first == (0, "")
    measurement = check_parts(tmp_path, whole, [3, 2, 1])
    assert [note.split(" after step ")[0] for note in measurement.notes if " on after step " in note] == [
        "2 nodes with 2 ranks go on",
        "1 node with 1 rank goes on",
    ]
    assert [note.endswith(f"; restart {k} of 2") for k, note in enumerate(measurement.notes, 1) if "; restart" in note]


def test_a_host_leaves_and_comes_back(tmp_path: Path) -> None:
    """Three hosts, two, and three again: each time after the very step that was done."""
    job = elastic(make_job(plan={"dp_shard": 3}), tmp_path / "kept", 3, [2, 1], every=NEVER, num_steps=400)
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(3, cores=cores_of(3)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        started[1].send_signal(signal.SIGTERM)
        ((code, _),) = finished([started[1]], tmp_path / "1")
        wait_for_step(started, tmp_path / "0" / "on-2-ranks", LOST_AFTER + 5)
        again = start_node(made[1], 1, tmp_path, "1-again")
        first, _, last = finished(started, tmp_path / "0")
        ((came, _),) = finished([again], tmp_path)
    assert (code, came) == (143, 0)
    assert first == last == (0, "")
    measurement = check_parts(tmp_path, whole, [3, 2, 3])
    assert len(measurement.earlier) == 2


def test_the_leading_node_is_told_to_leave(tmp_path: Path) -> None:
    """The run ends on all nodes, with a checkpoint to resume from."""
    job = elastic(make_job(dp=2), tmp_path / "kept", 2, [1], every=NEVER, num_steps=10**6)
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        started[0].send_signal(signal.SIGTERM)
        (led, _), (other, said) = finished(started, tmp_path)
    assert (led, other) == (143, 4)
    assert len(said.splitlines()) == 1
    header, _ = newest_checkpoint(tmp_path / "kept")
    assert header is not None
    assert header.step >= LOST_AFTER


def test_pipelines_go_on_without_a_host_that_is_not_needed(tmp_path: Path) -> None:
    """Two pipelines of two stages, a rank on each of four hosts: three make one pipeline, and one host is idle."""
    job = elastic(make_job("1f1b", pp=2, dp=2), tmp_path / "kept", 4, [2])
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(4, cores=cores_of(4)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].kill_all()
        ended = finished(started, tmp_path)
    assert [ended[k] for k in (0, 2, 3)] == [(0, "")] * 3
    measurement = check_parts(tmp_path, whole, [4, 2])
    assert any(note.endswith("; 1 node more without work") for note in measurement.notes)


def test_a_host_that_stands_still_is_given_up_and_let_in_again(tmp_path: Path) -> None:
    job = elastic(make_job(dp=2, timeout_s=30.0), tmp_path / "kept", 2, [1], num_steps=2000, max_restarts=5)
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].signal_all(signal.SIGSTOP)
        wait_for_step(started, tmp_path / "0" / "on-1-ranks", LOST_AFTER)
        made[1].signal_all(signal.SIGCONT)
        first, _ = finished(started, tmp_path)
    assert first == (0, "")
    measurement = measured(tmp_path)
    assert measurement.complete
    assert measurement.losses[-1] == pytest.approx(whole.losses[-1], rel=1e-9)


def test_replicas_go_on_without_a_host_and_take_it_in_again(tmp_path: Path) -> None:
    """Three hosts with a replica each. One is killed and comes back, and the ranks of the others are never restarted.

    Losses are those of models that one process trains alone, and averages over the replicas that were in each round.
    """
    job = elastic_job(num_steps=10**5, timeout_s=60.0)
    with hosts(3, cores=cores_of(3)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        (gone,) = (place for place in (1, 2) if RankFiles(tmp_path / str(place), 1).heartbeat.exists())
        folders = {0: tmp_path / "0", 2: tmp_path / str(3 - gone)}
        beats = [read_beat(RankFiles(folder, rank).heartbeat) for rank, folder in folders.items()]
        made[gone].kill_all()
        started[gone].communicate()
        started[gone] = start_node(made[gone], gone, tmp_path, "again")
        wait_for_step(started, tmp_path / "again", LOST_AFTER, 1)
        first, *_ = RankFiles(tmp_path / "again", 1).steps.read_text().splitlines()
        wait_for_step(started, tmp_path / "again", json.loads(first)["step"] + 3 * INNER_STEPS, 1)
        now = [read_beat(RankFiles(folder, rank).heartbeat) for rank, folder in folders.items()]
        assert [beat and beat.pid for beat in now] == [beat and beat.pid for beat in beats]
        for node in started:
            node.send_signal(signal.SIGTERM)
        assert [code for code, _ in finished(started, tmp_path)] == [143] * 3
    measurement = measured(tmp_path)
    members = [training_round.replicas for training_round in measurement.rounds]
    left = members.index(LEFT)
    back = members.index(ALL, left)
    assert members == [ALL] * left + [LEFT] * (back - left) + [ALL] * (len(members) - back)
    expected = ElasticReplicas(job).train_rounds(members[:-1])  # of the last one, ranks may have told nothing
    assert len(expected.lost) > (back + 1) * INNER_STEPS
    told = [sum(losses[replica] for replica in LEFT) / len(LEFT) for losses in expected.own_losses]
    begin = left * INNER_STEPS  # what the replica on the lost host measured until then is lost, too
    losses = [*told[:begin], *expected.lost[begin:]]
    assert measurement.losses[: len(losses)] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(("number", "servers"), [(2, 1), (2, 2), (3, 2)])
def test_workers_of_several_hosts_share_parameter_servers(number: int, servers: int, tmp_path: Path) -> None:
    """Servers are next to the ranks of some hosts, which have processes without work then.

    Without a common step, clocks a thousand seconds apart have the common start only.
    """
    replication = {"kind": "parameter_server", "staleness": 1, "servers": servers}
    plan = {"dp_replicate": number, "replication": replication}
    training = TrainingSpec(global_batch_size=8 * number, precision="fp32", optimizer="sgd", data="markov")
    job = make_job(plan=plan, training=training, num_steps=20, num_warmup_steps=0)
    with hosts(number, own_clocks=True) as made:
        assert finished(start_on(made, job, tmp_path), tmp_path) == [(0, "")] * number
    there = measured(tmp_path)
    assert there.complete
    assert there.environment["num_nodes"] == number
    assert there.workers is not None
    assert there.workers.most_ahead <= 1
    assert 0 < there.workers.staleness_mean <= 2 * (number - 1)
    assert ran_as_predicted(there)
    assert issued_as_predicted(there)
    seconds = [point.seconds for point in there.loss_curve]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 60


def test_a_run_begins_with_the_hosts_that_are_there(tmp_path: Path) -> None:
    """Two of four, after the last call; two more come, without which four cannot go on."""
    job = elastic(make_job(plan={"dp_shard": 4}), tmp_path / "kept", 4, [2], every=NEVER, num_steps=400)
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(4, cores=cores_of(4)) as made:
        started = start_on(made, job, tmp_path, number=2, last_call_timeout_s=5.0)
        wait_for_step(started, tmp_path / "0" / "on-2-ranks", LOST_AFTER)
        came = [start_node(made[place], place, tmp_path) for place in (3, 2)]
        assert finished([*started, *came], tmp_path) == [(0, "")] * 4
    measurement = check_parts(tmp_path, whole, [2, 4])
    assert "2 nodes with 2 ranks begin" in measurement.notes
    assert json.loads((tmp_path / "0" / "measurement.json").read_text())["earlier"][0]["num_nodes"] == 2


def test_workers_go_on_without_a_host_and_take_it_in_again(tmp_path: Path) -> None:
    """Three hosts with a worker each, and the server on the first: one of the others is killed and comes back."""
    replication = {"kind": "parameter_server", "staleness": 2, "min_replicas": 2}
    job = job_with(replication, num_workers=3, num_steps=1500, num_warmup_steps=0, timeout_s=60.0)
    with hosts(3, cores=cores_of(3)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        (gone,) = (place for place in (1, 2) if RankFiles(tmp_path / str(place), 1).heartbeat.exists())
        made[gone].kill_all()
        started[gone].communicate()
        started[gone] = start_node(made[gone], gone, tmp_path, "again")
        assert finished(started, tmp_path) == [(0, "")] * 3
    measurement = measured(tmp_path)
    assert measurement.complete
    members = [training_round.replicas for training_round in measurement.rounds]
    first = members.index(ALL, LOST_AFTER)  # the files of the lost host are of its second life
    assert {*members[first:]} == {ALL}
    assert {*members[:first]} <= {LEFT, ALL}
    assert first > LOST_AFTER
    assert measurement.workers is not None
    assert ran_as_predicted(measurement)
