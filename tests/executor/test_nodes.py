"""One run on several hosts that only a network joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from executor.run import run_job
from simplan.program.job import Job
from simplan.program.nodes import Nodes
from tests.hosts import Host, hosts, unavailable

ROOT = Path(__file__).resolve().parents[2]
PORT = 29417
CLOCK_ERROR_S = 0.005  # of a loaded machine; quiet ones are a hundred times better

MakeJob = Callable[..., Job]

why_not = cache(unavailable)


@pytest.fixture(autouse=True)
def _hosts_can_be_made() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def start(host: Host, *args: object, python: Sequence[str] = ("-m", "executor")) -> subprocess.Popen[str]:
    """Starts the executor on a host."""
    return subprocess.Popen(
        host.command([sys.executable, *python, *map(str, args)]),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_on(made: Sequence[Host], job: Job, folder: Path, **fields: Any) -> list[tuple[int, str]]:
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


def test_ddp_on_two_hosts_is_ddp_on_one(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(dp=2, dtype="fp64")
    with hosts(2, own_clocks=True) as made:
        assert run_on(made, job, tmp_path) == [(0, ""), (0, "")]
    there = json.loads((tmp_path / "0" / "measurement.json").read_text())
    here = run_job(job, tmp_path / "here")
    assert there["complete"]
    assert there["losses"] == list(here.losses)
    assert there["environment"]["num_nodes"] == 2
    assert there["environment"]["clock_error_s"] < CLOCK_ERROR_S
    assert not (tmp_path / "1" / "measurement.json").exists()
    reductions = [[c for c in rank["collectives"] if c["kind"] == "all_reduce"] for rank in there["ranks"]]
    assert reductions[0]
    for first, second in zip(*reductions, strict=True):
        # on clocks a thousand seconds apart: no rank can have the sum before the other has begun
        assert max(first["start_s"], second["start_s"]) < min(first["end_s"], second["end_s"]) + CLOCK_ERROR_S
