"""Runs on several hosts, each a network namespace with a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from simplan.plan.plan import ParallelPlan
from simplan.program.action import format_table
from simplan.program.tables.plan_table import plan_table
from simplan.runs.elastic import FewerNodes, RendezvousOptions, on_fewer_devices
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.training import TrainingSpec
from tests.executor.launch.test_faults import wait_until_gone
from tests.executor.train.test_checkpoints import with_checkpoints
from tests.hosts import Host

ROOT = Path(__file__).resolve().parents[3]
PORT = 29_417
PATIENCE_S = 400.0
BATCH = 24


def start(host: Host, *args: object) -> subprocess.Popen[str]:
    """Starts the executor on a host."""
    return subprocess.Popen(
        host.command([sys.executable, "-m", "executor", *map(str, args)]),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,  # progress: a pipe that nobody reads is full after a thousand steps
        stderr=subprocess.PIPE,
        text=True,
    )


def start_node(host: Host, place: int, folder: Path, out: str | None = None) -> subprocess.Popen[str]:
    """Starts a node of the run that ``start_on`` has prepared; the first one leads."""
    job = [folder / "job.json"] if place == 0 else []
    return start(host, "run", *job, "--out", folder / (out or str(place)), "--nodes", folder / f"nodes{place}.json")


def start_on(
    made: Sequence[Host], job: RunSpec, folder: Path, *, number: int | None = None, **asked: Any
) -> list[subprocess.Popen[str]]:
    """Starts a job on hosts, or on the first few of them; ``asked`` as of ``RendezvousOptions``."""
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(job.model_dump_json())
    least = job.fewer_nodes[-1].num_nodes if job.fewer_nodes else len(made)
    values: dict[str, Any] = {"min_nodes": least, "max_nodes": len(made), "host": made[0].address, "port": PORT}
    values |= {"ranks_per_node": job.plan.num_devices // len(made), "last_call_timeout_s": 5.0, **asked}
    for k in range(len(made)):
        (folder / f"nodes{k}.json").write_text(RendezvousOptions(**values, leads=k == 0).model_dump_json())
    return [start_node(made[k], k, folder) for k in range(len(made) if number is None else number)]


def cores_of(number: int) -> list[list[int]]:
    """One for each host; where ranks have two threads each on the same cores, a step takes many times as long."""
    cores = sorted(os.sched_getaffinity(0))
    return [[cores[k % len(cores)]] for k in range(number)]


def finished(started: Sequence[subprocess.Popen[str]], folder: Path) -> list[tuple[int, str]]:
    """Exit code and messages of every node, once all have ended."""
    ended = [process.communicate(timeout=PATIENCE_S) for process in started]
    wait_until_gone(folder)
    return [(process.returncode, messages) for process, (_, messages) in zip(started, ended, strict=True)]


def wait_for_step(started: Sequence[subprocess.Popen[str]], folder: Path, number: int, rank: int = 0) -> None:
    """Until a rank has done so many steps of the training, with its files in this folder."""
    file = folder / f"rank{rank}.steps.jsonl"
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        if lines and json.loads(lines[-1]).get("step", -1) >= number:
            return
        assert started[0].poll() is None, started[0].communicate()
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} has not done {number} steps")


def measured(folder: Path) -> Measurement:
    """What the leading node has written."""
    return Measurement.model_validate_json((folder / "0" / "measurement.json").read_bytes())


def table_of(plan: ParallelPlan) -> tuple[tuple[str, ...], ...]:
    """Of the common batch."""
    number = BATCH // (plan.dp * plan.microbatch_size)
    return tuple(tuple(row) for row in format_table(plan_table(plan, number)))


def elastic(job: RunSpec, folder: Path, num_nodes: int, fewer: Sequence[int], **asked: Any) -> RunSpec:
    """The job in float64 with a common batch, that goes on with some numbers of nodes; ``asked`` of checkpoints."""
    job = job.model_copy(
        update={
            "training": TrainingSpec(global_batch_size=BATCH, precision="fp32"),
            "table": table_of(job.plan),
            "dtype": "fp64",
        }
    )
    per_node = job.plan.num_devices // num_nodes
    left = []
    for number in fewer:
        plan = on_fewer_devices(job.plan, number * per_node)
        left.append(FewerNodes(num_nodes=number, plan=plan, boundaries=job.boundaries, table=table_of(plan)))
    made = with_checkpoints(job, folder, **{"num_steps": 45, "every": 5, "max_restarts": 2, **asked})
    return made.model_copy(update={"fewer_nodes": tuple(left)})


def check_parts(folder: Path, whole: Measurement, num_nodes: list[int], per_node: int = 1) -> Measurement:
    """A run that went on with other nodes lost nothing."""
    measurement = measured(folder)
    assert measurement.complete
    plans = [*(part.plan for part in measurement.earlier), measurement.job.plan]
    assert [plan.num_devices for plan in plans] == [number * per_node for number in num_nodes]
    losses: list[float] = []
    for part in measurement.earlier:
        assert part.first_step == len(losses)
        losses += part.losses
        assert part.end_step == len(losses)
    assert measurement.first_step == len(losses)
    assert [*losses, *measurement.losses] == pytest.approx(whole.losses, rel=1e-9)
    return measurement
