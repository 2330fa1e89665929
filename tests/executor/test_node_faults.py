"""Faults of runs on several hosts: a network that is cut, and ranks that are started again on all of them."""

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

from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from simplan.program.nodes import Nodes
from simplan.program.run_spec import RunSpec
from tests.executor.conftest import MakeJob
from tests.executor.test_checkpoints import with_checkpoints
from tests.executor.test_faults import wait_until_gone
from tests.executor.test_nodes import start
from tests.hosts import Host, hosts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_hosts_can_be_made")]
PORT = 29_517
PATIENCE_S = 120.0
TIMEOUT_S = 60.0
"""Of jobs: ranks may take so long to start, on a busy machine."""


def start_on(made: Sequence[Host], job: RunSpec, folder: Path) -> list[subprocess.Popen[str]]:
    """Starts a job on hosts, one rank on each, each with a folder of its own."""
    (folder / "job.json").write_text(job.model_dump_json())
    nodes = Nodes(num_nodes=len(made), ranks_per_node=1, host=made[0].address, port=PORT)
    started = []
    for k, host in enumerate(made):
        mine = folder / f"nodes{k}.json"
        mine.write_text(nodes.model_copy(update={"node_rank": k}).model_dump_json())
        first = ("run", folder / "job.json", "--nodes", mine) if k == 0 else ("join", mine)
        started.append(start(host, *first, "--out", folder / str(k)))
    return started


def one_core_each() -> list[list[int]]:
    """For two hosts; where two ranks have two threads each on the same cores, a step takes many times as long."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[:1], cores[-1:]]


def wait_for_steps(folder: Path, rank: int, number: int) -> None:
    file = RankFiles(folder / str(rank), rank).steps
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if file.exists() and file.read_text().count("\n") >= number:
            return
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} has not done {number} steps")


def test_a_cut_network_ends_the_run_on_all_hosts(make_job: MakeJob, tmp_path: Path) -> None:
    """The last of three hosts is cut off in the middle of a step; the two that are left agree on what they say."""
    with hosts(3) as made:
        started = start_on(made, make_job(dp=3, num_steps=10**6, timeout_s=TIMEOUT_S), tmp_path)
        wait_for_steps(tmp_path, 0, 5)
        made[2].cut()
        cut_s = time.monotonic()
        ended = [process.communicate(timeout=4 * PATIENCE_S) for process in started]
        took_s = time.monotonic() - cut_s
        wait_until_gone(tmp_path)
    assert [process.returncode for process in started] == [4, 4, 4]
    said = [messages.strip() for _, messages in ended]
    assert f"node 2 ({socket.gethostname()}, {made[2].address}) cannot be reached" in said[0]
    assert said[1] == said[0]
    assert f", {made[0].address}) cannot be reached: nothing has been heard of it for 30 s" in said[2]
    assert all(len(sentence.splitlines()) == 1 for sentence in said)
    assert took_s < TIMEOUT_S
    assert json.loads((tmp_path / "0" / "measurement.json").read_text())["failure"] == said[0]


NUM_STEPS = 150
"""Enough that a rank which is hit after some of them has not finished."""


def hit_in_attempt(folder: Path, rank: int, attempt: int, number: signal.Signals) -> None:
    """A signal to a rank, when it has done 40 more steps than before."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        beat = read_beat(RankFiles(folder / str(rank), rank).heartbeat)
        if beat is not None and beat.attempt == attempt and beat.step >= 40 * (attempt + 1):
            os.kill(beat.pid, number)
            return
        time.sleep(0.005)
    raise AssertionError(f"rank {rank} has not come so far in attempt {attempt}")


STRATEGIES: dict[str, dict[str, Any]] = {"ddp": {"dp": 2}, "1f1b": {"schedule": "1f1b", "pp": 2}}


@pytest.mark.parametrize(
    ("strategy", "rank", "number", "said"),
    [
        ("ddp", 1, signal.SIGKILL, ": rank 1 was killed by signal 9"),
        ("1f1b", 0, signal.SIGKILL, ": rank 0 was killed by signal 9"),
        ("ddp", 1, signal.SIGSTOP, "progress for 60 s"),  # in an all-reduce nobody says who waits
    ],
)
def test_all_hosts_go_on_from_the_last_checkpoint(
    strategy: str, rank: int, number: signal.Signals, said: str, make_job: MakeJob, tmp_path: Path
) -> None:
    """A rank is hit twice; each time the ranks of all hosts are started again, and nothing shows in the losses."""
    plain = make_job(**STRATEGIES[strategy], timeout_s=TIMEOUT_S, num_steps=NUM_STEPS - 1)
    job = with_checkpoints(plain, tmp_path / "kept", NUM_STEPS, every=10, max_restarts=2)
    found = []
    # the undisturbed run is on the same hosts: sums depend on the threads of a rank
    with hosts(2, cores=one_core_each(), own_clocks=True) as made:
        for asked, folder in ((plain, tmp_path / "whole"), (job, tmp_path / "hit")):
            folder.mkdir()
            started = start_on(made, asked, folder)
            for attempt in range(0 if asked is plain else 2):
                hit_in_attempt(folder, rank, attempt, number)
            ended = [process.communicate(timeout=4 * PATIENCE_S) for process in started]
            wait_until_gone(folder)
            assert [process.returncode for process in started] == [0, 0], ended
            found.append(json.loads((folder / "0" / "measurement.json").read_text()))
    whole, kept = found
    assert kept["complete"]
    assert kept["losses"] == whole["losses"]
    notes = [note for note in kept["notes"] if "; restart " in note]
    assert [note.startswith("node ") and said in note for note in notes] == [True, True], notes
    assert [note.endswith(f"; restart {k} of 2") for k, note in enumerate(notes, 1)] == [True, True]


def test_when_no_restart_is_left_all_hosts_end(make_job: MakeJob, tmp_path: Path) -> None:
    job = with_checkpoints(make_job(dp=2), tmp_path / "kept", 10**6, every=10, max_restarts=1)
    with hosts(2, cores=one_core_each()) as made:
        started = start_on(made, job, tmp_path)
        for attempt in range(2):
            hit_in_attempt(tmp_path, 1, attempt, signal.SIGKILL)
        ended = [process.communicate(timeout=4 * PATIENCE_S) for process in started]
        wait_until_gone(tmp_path)
    assert [process.returncode for process in started] == [4, 4]
    assert [messages.startswith(f"node 1 ({socket.gethostname()}): rank 1 was killed") for _, messages in ended]
    left = json.loads((tmp_path / "0" / "measurement.json").read_text())
    assert len([note for note in left["notes"] if "; restart " in note]) == 1
    assert len(left["losses"]) >= 70


def test_a_host_that_disappears_ends_the_run_though_restarts_are_left(make_job: MakeJob, tmp_path: Path) -> None:
    """All its processes are killed at once: its ranks cannot be started again, so no restart is waited for."""
    job = with_checkpoints(make_job(dp=2, timeout_s=TIMEOUT_S), tmp_path / "kept", 10**6, every=10, max_restarts=3)
    with hosts(2) as made:
        started = start_on(made, job, tmp_path)
        wait_for_steps(tmp_path, 0, 5)
        made[1].kill_all()
        gone_s = time.monotonic()
        _, said = started[0].communicate(timeout=4 * PATIENCE_S)
        took_s = time.monotonic() - gone_s
        started[1].communicate()
        wait_until_gone(tmp_path)
    assert started[0].returncode == 4
    lost = (
        f"node 1 ({socket.gethostname()}, {made[1].address}) cannot be reached: nothing has been heard of it for 30 s"
    )
    assert said.splitlines() == [f"node 0 ({socket.gethostname()}): {lost}"]
    assert took_s < TIMEOUT_S
