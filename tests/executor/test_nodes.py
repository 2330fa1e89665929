"""One run on several hosts that only a network joins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from executor.exchange import Host as Place
from executor.failure import Failure, first_cause
from executor.host_clock import ClockReading, common_time_s
from executor.introduction import Introduction, disagreement
from executor.meeting import meet, refuse
from simplan.program.refusal import Refusal

from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from executor.run import run_job
from simplan.cost.calibrated import CalibratedCost
from simplan.cost.calibration import CalibrationRequest
from simplan.cost.store import load
from simplan.errors import SpecError
from simplan.program.nodes import Nodes
from simplan.program.run_spec import RunSpec
from simplan.spec.layer import CollectiveKind
from tests.executor.test_checkpoints import with_checkpoints
from tests.hosts import BURST_BYTES, Host, hosts

ROOT = Path(__file__).resolve().parents[2]
PORT = 29417
CLOCK_ERROR_S = 1.0  # where the clocks are a thousand seconds apart; on a loaded machine an answer may take long

MakeJob = Callable[..., RunSpec]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(host: Host | None, *args: object, python: Sequence[str] = ("-m", "executor")) -> subprocess.Popen[str]:
    """Starts the executor on a host; None for this machine itself."""
    command = [sys.executable, *python, *map(str, args)]
    return subprocess.Popen(
        command if host is None else host.command(command),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_on(made: Sequence[Host], job: RunSpec, folder: Path, **fields: Any) -> list[tuple[int, str]]:
    """Runs a job on hosts, each with a folder of its own; exit code and messages of each node."""
    ranks = job.plan.num_devices // len(made)
    (folder / "job.json").write_text(job.model_dump_json())
    started = []
    for k, host in enumerate(made):
        values = {"num_nodes": len(made), "ranks_per_node": ranks, "host": made[0].address, "port": PORT, **fields}
        (folder / f"nodes{k}.json").write_text(Nodes(**values).model_dump_json())
        if k == 0:
            process = start(host, "run", folder / "job.json", "--out", folder / "0", "--nodes", folder / "nodes0.json")
        else:
            process = start(host, "join", folder / f"nodes{k}.json", "--out", folder / str(k))
        started.append(process)
    ended = []
    for process in started:
        _, messages = process.communicate(timeout=200)
        ended.append((process.returncode, messages))
    return ended


@pytest.mark.usefixtures("_hosts_can_be_made")
def test_ddp_on_two_hosts_goes_on_as_ddp_on_one(make_job: MakeJob, tmp_path: Path) -> None:
    """The first half here, the second on hosts, from the checkpoint: nothing of it is other than on one host."""
    job = make_job(dp=2, dtype="fp64")
    here = run_job(with_checkpoints(job, tmp_path / "kept", num_steps=4), tmp_path / "here")
    shutil.rmtree(tmp_path / "kept" / "step-00000004")
    with hosts(2, own_clocks=True) as made:
        again = with_checkpoints(job, tmp_path / "kept", num_steps=4, resume=True)
        assert run_on(made, again, tmp_path) == [(0, ""), (0, "")]
    there = json.loads((tmp_path / "0" / "measurement.json").read_text())
    assert there["complete"]
    assert there["notes"][0] == "resuming after step 2"
    assert there["losses"] == pytest.approx(here.losses[2:], rel=1e-12)  # a rank may have other threads here
    assert there["environment"]["num_nodes"] == 2
    error_s = there["environment"]["clock_error_s"]
    assert error_s < CLOCK_ERROR_S
    assert not (tmp_path / "1" / "measurement.json").exists()
    reductions = [[c for c in rank["collectives"] if c["kind"] == "all_reduce"] for rank in there["ranks"]]
    assert reductions[0]
    for first, second in zip(*reductions, strict=True):
        # on clocks a thousand seconds apart: no rank can have the sum before the other has begun
        assert max(first["start_s"], second["start_s"]) < min(first["end_s"], second["end_s"]) + error_s


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts_can_be_made")
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "plan"), [("none", {"dp_replicate": 0}), ("none", {"dp_shard": 0}), ("1f1b", {"pp": 0})]
)
def test_plans_on_shaped_hosts_are_those_on_one(
    schedule: str, plan: dict[str, int], number: int, make_job: MakeJob, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    (axis,) = plan
    shape = {"pp": number} if axis == "pp" else {"plan": {axis: number}}
    job = make_job(schedule, model=make_model("llama", num_hidden_layers=4, vocab_size=96), dtype="fp64", **shape)
    batch = 8 * (1 if axis == "pp" else number)
    job = job.model_copy(update={"training": job.training.model_copy(update={"global_batch_size": batch})})
    with hosts(number, 400, own_clocks=True) as made:
        assert run_on(made, job, tmp_path) == [(0, "")] * number
    there = json.loads((tmp_path / "0" / "measurement.json").read_text())
    assert there["losses"] == pytest.approx(run_job(job, tmp_path / "here").losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts_can_be_made")
def test_collectives_are_timed_across_hosts(tmp_path: Path) -> None:
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND)
    request = CalibrationRequest(shapes=(), num_ranks=1, num_nodes=2, budget_s=0.5, communication=kinds)
    (tmp_path / "request.json").write_text(request.model_dump_json())
    bandwidth_bytes_per_s = 200e6 / 8
    with hosts(2, 200) as made:
        started = []
        for k, host in enumerate(made):
            nodes = tmp_path / f"nodes{k}.json"
            meeting = Nodes(num_nodes=2, ranks_per_node=1, host=made[0].address, port=PORT, node_rank=k)
            nodes.write_text(meeting.model_dump_json())
            command = ("calibrate", tmp_path / "request.json", "--out", tmp_path / "found.json", "--nodes", nodes)
            started.append(start(host, *command) if k == 0 else start(host, "join-calibration", nodes))
        ended = [(process.communicate(timeout=200)[1], process.returncode) for process in started]
    assert ended == [("", 0), ("", 0)]
    found = load(tmp_path / "found.json")
    assert found is not None
    assert {(t.kind, t.num_ranks, t.world_size, t.num_nodes) for t in found.communication} == {
        (kind, 2, 1, 2) for kind in kinds
    }
    largest = max((t for t in found.communication if t.kind is CollectiveKind.SEND), key=lambda t: t.num_bytes)
    # bytes cannot be faster than the link they cross, but for those that it lets through at once after a pause
    assert largest.seconds.low_s > (largest.num_bytes - BURST_BYTES) / bandwidth_bytes_per_s
    cost = CalibratedCost(found, dtype="fp32", optimizer="adamw", num_ranks=1)
    assert not cost.covers((), 1, kinds), "nothing was timed inside of a node"


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts_can_be_made")
def test_a_node_that_does_not_come(make_job: MakeJob, tmp_path: Path) -> None:
    with hosts(2) as made:
        ((code, said),) = run_on(made[:1], make_job(), tmp_path, num_nodes=2, ranks_per_node=1, join_timeout_s=1.0)
    assert code == 4
    assert said.startswith(f"node 1 of 2 did not join {made[0].address}:{PORT} within 1 s (no other node did)")


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts_can_be_made")
def test_all_nodes_tell_the_first_cause(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(dp=2, num_steps=100_000)
    with hosts(2) as made:
        killer = threading.Thread(target=kill_rank_when_it_runs, args=(tmp_path / "1", 1))
        killer.start()
        ended = run_on(made, job, tmp_path)
        killer.join()
    assert [code for code, _ in ended] == [4, 4]
    assert ended[0][1] == ended[1][1]
    assert "rank 1 was killed by signal 9" in ended[0][1]
    assert json.loads((tmp_path / "0" / "measurement.json").read_text())["step_times_s"], "what was measured is kept"


def kill_rank_when_it_runs(folder: Path, rank: int) -> None:
    file = RankFiles(folder, rank)
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if file.steps.exists() and file.steps.read_text().count("\n") >= 5:
            beat = read_beat(file.heartbeat)
            assert beat is not None
            os.kill(beat.pid, signal.SIGKILL)
            return
        time.sleep(0.1)


def test_what_node_0_refuses_the_others_hear_at_once() -> None:
    """Before any node has joined; all would have waited for five minutes."""
    nodes = Nodes(num_nodes=3, ranks_per_node=1, host="127.0.0.1", port=free_port(), node_rank=0)
    others = [nodes.model_copy(update={"node_rank": None}), nodes.model_copy(update={"node_rank": 2})]
    with ThreadPoolExecutor() as pool:
        node_0 = pool.submit(refuse, Refusal(nodes=nodes, sentence="plan.tp = 3: no", exit_code=2))
        joined = [pool.submit(meet, other, None) for other in others]
        for node in joined:
            with pytest.raises(SpecError, match=r"^plan\.tp = 3: no$"):
                node.result(timeout=60)
        node_0.result(timeout=60)  # it stays no longer than they need


@pytest.mark.slow
def test_a_job_that_node_0_refuses_ends_on_all_nodes(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(plan={"cp": 2})  # by a ring, which the executor does not have
    (tmp_path / "job.json").write_text(job.model_dump_json())
    port, started = free_port(), []
    for k in range(2):
        file = tmp_path / f"nodes{k}.json"
        file.write_text(Nodes(num_nodes=2, ranks_per_node=1, host="127.0.0.1", port=port).model_dump_json())
        first = ("run", tmp_path / "job.json", "--nodes", file) if k == 0 else ("join", file)
        started.append(start(None, *first, "--out", tmp_path / str(k)))
    ended = [(process.communicate(timeout=120)[1], process.returncode) for process in started]
    assert ended[0] == ended[1]
    assert ended[0] == ("plan.cp_comm = ring: the executor has no ring attention; use all_gather or a2a\n", 2)


def introduction(**changes: Any) -> Introduction:
    values = {"host": Place("a", "10.0.0.1"), "num_nodes": 2, "torch": "2.13", "asked": {"model": "x", "--steps": "5"}}
    return Introduction(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"num_nodes": 3}, "--nodes: 3 on node 1 (a), but 2 on node 0 (a)"),
        ({"asked": {"model": "y", "--steps": "5"}}, "model: differs between node 0 (a) and node 1 (a)"),
        ({"asked": {"model": "x", "--steps": "6"}}, "--steps: differs between node 0 (a) and node 1 (a)"),
        ({"torch": "2.12"}, "torch is 2.12 on node 1 (a), but 2.13 on node 0 (a)"),
    ],
)
def test_nodes_that_were_not_asked_the_same(changes: dict[str, Any], said: str | None) -> None:
    found = disagreement([introduction(), introduction(**changes)])
    assert found is None if said is None else (found or "").startswith(said)


def test_the_first_cause_is_no_consequence() -> None:
    lost, killed = Failure(sentence="lost its peer", consequence=True), Failure(sentence="killed")
    assert first_cause([lost, killed]) == killed
    assert first_cause([lost]) == lost
    assert first_cause([]) is None


def test_clocks_are_joined_by_two_readings() -> None:
    before = ClockReading(at_s=100.0, offset_s=-50.0, error_s=1e-5)
    after = ClockReading(at_s=200.0, offset_s=-49.0, error_s=1e-5)
    assert common_time_s([], 7.0) == 7.0
    assert common_time_s([before], 150.0) == 100.0
    assert [common_time_s([before, after], at_s) for at_s in (100.0, 150.0, 200.0)] == [50.0, 100.5, 151.0]
