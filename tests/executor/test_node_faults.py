"""Faults of runs on several hosts: a network that is cut, and ranks that are started again on all of them."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from executor.rank import RankFiles
from simplan.program.job import Job
from simplan.program.nodes import Nodes
from tests.executor.conftest import MakeJob
from tests.executor.test_faults import wait_until_gone
from tests.executor.test_nodes import start
from tests.hosts import Host, hosts, unavailable

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_hosts_can_be_made")]
PORT = 29_517
PATIENCE_S = 120.0


@pytest.fixture
def _hosts_can_be_made() -> None:
    if reason := unavailable():
        pytest.skip(reason)


def start_on(made: Sequence[Host], job: Job, folder: Path) -> list[subprocess.Popen[str]]:
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
    timeout_s = 60.0
    with hosts(3) as made:
        started = start_on(made, make_job(dp=3, num_steps=10**6, timeout_s=timeout_s), tmp_path)
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
    assert took_s < timeout_s
    assert json.loads((tmp_path / "0" / "measurement.json").read_text())["failure"] == said[0]
