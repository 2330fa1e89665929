"""Hosts that are lost for good: the others go on from the newest checkpoint with fewer data-parallel ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from executor.run import run_job
from simplan.program.action import format_table
from simplan.program.fewer_nodes import FewerNodes, on_fewer_devices
from simplan.program.measurement import Measurement
from simplan.program.nodes import Nodes
from simplan.program.run_spec import RunSpec
from simplan.program.table import plan_table
from simplan.spec.training import TrainingSpec
from tests.executor.conftest import MakeJob
from tests.executor.test_checkpoints import with_checkpoints
from tests.executor.test_faults import wait_until_gone
from tests.executor.test_nodes import start
from tests.hosts import Host, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("_hosts_can_be_made")]
PORT = 29_617
PATIENCE_S = 400.0
NUM_STEPS = 45
"""Enough that a host which is lost after some of them is lost in their midst."""
EVERY = 5
LOST_AFTER = 13
BATCH = 24
TIMEOUT_S = 180.0
"""Of jobs: a host counts as lost after half of it. Ranks may take as long to start, on a busy machine."""


def table_of(plan: Any) -> tuple[tuple[str, ...], ...]:
    number = BATCH // (plan.dp * plan.microbatch_size)
    return tuple(tuple(row) for row in format_table(plan_table(plan, number)))


def elastic(job: RunSpec, folder: Path, num_nodes: int, fewer: Sequence[int], **asked: Any) -> RunSpec:
    """The job in float64 with a common batch, that goes on with some numbers of nodes."""
    job = job.model_copy(
        update={
            "training": TrainingSpec(global_batch_size=BATCH, precision="fp32"),
            "table": table_of(job.plan),
            "dtype": "fp64",
            "timeout_s": TIMEOUT_S,
        }
    )
    per_node = job.plan.num_devices // num_nodes
    left = []
    for number in fewer:
        plan = on_fewer_devices(job.plan, number * per_node)
        left.append(FewerNodes(num_nodes=number, plan=plan, boundaries=job.boundaries, table=table_of(plan)))
    made = with_checkpoints(job, folder, **{"num_steps": NUM_STEPS, "every": EVERY, "max_restarts": 2, **asked})
    return made.model_copy(update={"fewer_nodes": tuple(left)})


def start_on(
    made: Sequence[Host], job: RunSpec, folder: Path, *, number: int | None = None, **asked: Any
) -> list[subprocess.Popen[str]]:
    """Starts a job on hosts, or on the first few of them, each with a folder of its own; ``asked`` as of ``Nodes``."""
    (folder / "job.json").write_text(job.model_dump_json())
    least = job.fewer_nodes[-1].num_nodes if job.fewer_nodes else None
    started = []
    for k, host in enumerate(made):
        mine = folder / f"nodes{k}.json"
        ranks = job.plan.num_devices // len(made)
        where: dict[str, Any] = {"host": made[0].address, "port": PORT, "node_rank": k}
        nodes = Nodes(num_nodes=len(made), min_nodes=least, ranks_per_node=ranks, **where, **asked)
        mine.write_text(nodes.model_dump_json())
        if number is not None and k >= number:
            continue
        first = ("run", folder / "job.json", "--nodes", mine) if k == 0 else ("join", mine)
        started.append(start(host, *first, "--out", folder / str(k)))
    return started


def cores_of(number: int) -> list[list[int]]:
    """One for each host; where ranks have two threads each on the same cores, a step takes many times as long."""
    cores = sorted(os.sched_getaffinity(0))
    return [[cores[k % len(cores)]] for k in range(number)]


def wait_for_step(started: Sequence[subprocess.Popen[str]], folder: Path, number: int) -> None:
    """Until rank 0 has done so many steps of the training, with its files in this folder."""
    file = folder / "rank0.steps.jsonl"
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        if lines and json.loads(lines[-1]).get("step", -1) >= number:
            return
        assert started[0].poll() is None, started[0].communicate()
        time.sleep(0.05)
    raise AssertionError(f"rank 0 has not done {number} steps")


def finished(started: Sequence[subprocess.Popen[str]], folder: Path) -> list[tuple[int, str]]:
    """Exit code and messages of every node, once all have ended."""
    ended = [process.communicate(timeout=PATIENCE_S) for process in started]
    wait_until_gone(folder)
    return [(process.returncode, messages) for process, (_, messages) in zip(started, ended, strict=True)]


def undisturbed(job: RunSpec, folder: Path) -> Measurement:
    return run_job(job.model_copy(update={"checkpointing": None, "fewer_nodes": ()}), folder)


def check(folder: Path, whole: Measurement, num_nodes: list[int], *, most: int | None = None) -> list[str]:
    """A run that went on with other nodes lost nothing; gives what was told of restarts. ``most``: nodes of the run."""
    measured = Measurement.model_validate_json((folder / "0" / "measurement.json").read_bytes())
    assert measured.complete
    assert [part.num_nodes for part in measured.earlier] == num_nodes[:-1]
    per_node = whole.job.plan.num_devices // (most or num_nodes[0])
    plans = [*(part.plan for part in measured.earlier), measured.job.plan]
    assert [plan.num_devices for plan in plans] == [number * per_node for number in num_nodes]
    assert len(measured.ranks) == num_nodes[-1] * per_node
    losses: list[float] = []
    for part in measured.earlier:
        assert part.first_step == len(losses)
        losses += part.losses
        assert part.end_step == len(losses)
    assert measured.first_step == len(losses)
    assert most is not None or len(losses) >= LOST_AFTER - EVERY
    assert [*losses, *measured.losses] == pytest.approx(whole.losses, rel=1e-9)
    return [note for note in measured.notes if "; restart " in note]


def test_one_host_after_the_other_is_lost(make_job: MakeJob, tmp_path: Path) -> None:
    """The middle one of three is killed, so that the last one gets another place; then that one is cut off."""
    job = elastic(make_job(plan={"dp_shard": 3}), tmp_path / "kept", 3, [2, 1])
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(3, cores=cores_of(3), own_clocks=True) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].kill_all()
        wait_for_step(started, tmp_path / "0" / "part-2", LOST_AFTER + 2 * EVERY)
        made[2].cut()
        first, _, last = finished(started, tmp_path)
    assert first == (0, "")
    assert (last[0], last[1].count("\n")) == (4, 1)
    assert "cannot be reached" in last[1]
    silent = "cannot be reached: nothing has been heard of it for 30 s"
    who = ["2 nodes with 2 ranks go on", "1 node with 1 rank goes on"]
    for k, (note, left) in enumerate(zip(check(tmp_path, whole, [3, 2, 1]), who, strict=True), 1):
        host = f"node 1 ({socket.gethostname()}, {made[k].address})"
        assert note.startswith(f"{host} {silent}; {left} after step ")
        assert note.endswith(f"; restart {k} of 2")


def test_pipelines_go_on_without_a_host_that_is_not_needed(make_job: MakeJob, tmp_path: Path) -> None:
    """Two pipelines of two stages, a rank on each of four hosts: three make one pipeline, and one host waits."""
    job = elastic(make_job("1f1b", pp=2, dp=2), tmp_path / "kept", 4, [2])
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(4, cores=cores_of(4)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].kill_all()
        ended = finished(started, tmp_path)
    assert [ended[k] for k in (0, 2, 3)] == [(0, "")] * 3
    (note,) = check(tmp_path, whole, [4, 2])
    assert f" without node 3 ({socket.gethostname()}); restart 1 of 2" in note


def test_a_host_that_wakes_up_too_late_harms_nobody(make_job: MakeJob, tmp_path: Path) -> None:
    """All its processes stand still for longer than the others wait, and go on while these train without it."""
    job = elastic(make_job(dp=2), tmp_path / "kept", 2, [1])
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].signal_all(signal.SIGSTOP)
        wait_for_step(started, tmp_path / "0" / "part-2", LOST_AFTER)
        made[1].signal_all(signal.SIGCONT)
        first, late = finished(started, tmp_path)
    assert first == (0, "")
    assert (late[0], late[1].count("\n")) == (4, 1)
    check(tmp_path, whole, [2, 1])
