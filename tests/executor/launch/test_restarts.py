"""Ranks that die or hang are started again and go on from the newest checkpoint, as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from simplan.errors import RunError
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from tests.executor.conftest import make_job
from tests.executor.launch.apart import run_apart
from tests.executor.launch.test_faults import wait_until_gone
from tests.executor.train.test_checkpoints import undisturbed, with_checkpoints

NUM_STEPS = 60
"""Enough that a rank which is hit after some of them has not finished."""


def run_and_hit(job: RunSpec, number: signal.Signals, times: int, out_dir: Path, rank: int) -> Measurement:
    """A run of which a rank gets a signal, some times, each time when all ranks have done some more steps."""
    hit: list[int] = []

    def hit_it(step: int, of: int) -> None:
        beat = read_beat(RankFiles(out_dir, rank).heartbeat)
        if len(hit) < times and step >= 20 * (len(hit) + 1) and beat is not None:
            os.kill(beat.pid, number)
            hit.append(beat.pid)

    measurement = run_apart(job, out_dir, hit_it)
    assert len(set(hit)) == times
    wait_until_gone(out_dir)
    return measurement


def with_restarts(job: RunSpec, folder: Path, max_restarts: int) -> RunSpec:
    return with_checkpoints(job, folder, NUM_STEPS, every=5, max_restarts=max_restarts)


def restarts_of(run: Measurement) -> list[str]:
    """What was told about them; a loaded machine may also be told to have a slow rank."""
    return [note for note in run.notes if "; restart " in note]


@pytest.mark.slow
def test_a_killed_rank_is_restarted(tmp_path: Path) -> None:
    job = make_job(dp=2)
    whole = undisturbed(job, tmp_path / "whole", NUM_STEPS)
    kept = run_and_hit(with_restarts(job, tmp_path / "kept", 1), signal.SIGKILL, 1, tmp_path / "out", 1)
    assert kept.complete
    assert kept.losses == whole.losses
    (note,) = restarts_of(kept)
    assert note.startswith("rank 1 was killed")
    assert note.endswith("; restart 1 of 1")
    assert len(kept.warmup_step_times_s) == 2, "one at the beginning and one after the restart"
    assert kept.checkpoints[-1].step == NUM_STEPS


STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ddp": {"dp": 2},
    "fsdp": {"plan": {"dp_shard": 2}},
    "1f1b": {"schedule": "1f1b", "pp": 2},
}


FAULTS = [(name, signal.SIGKILL) for name in STRATEGIES] + [(name, signal.SIGSTOP) for name in ("ddp", "1f1b")]
"""Who waits for a rank that is stopped waits in a collective or for a message."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("strategy", "number"), FAULTS, ids=[f"{name}-{number.name}" for name, number in FAULTS])
def test_every_strategy_survives_two_faults(strategy: str, number: signal.Signals, tmp_path: Path) -> None:
    """A silence of a minute: it also counts while torchrun and ranks import torch, long on a loaded machine."""
    job = make_job(**STRATEGIES[strategy], timeout_s=60.0)
    whole = undisturbed(job, tmp_path / "whole", NUM_STEPS)
    last = job.plan.num_devices - 1
    kept = run_and_hit(with_restarts(job, tmp_path / "kept", 2), number, 2, tmp_path / "out", last)
    assert kept.complete
    assert kept.losses == whole.losses
    said = "was killed" if number == signal.SIGKILL else "progress for 60 s"
    assert [said in note for note in restarts_of(kept)] == [True, True]


@pytest.mark.slow
def test_when_no_restart_is_left_the_last_fault_ends_the_run(tmp_path: Path) -> None:
    job = with_restarts(make_job(dp=2), tmp_path / "kept", 1)
    with pytest.raises(RunError, match=r"^rank 1 was killed by signal 9"):
        run_and_hit(job, signal.SIGKILL, 2, tmp_path / "out", 1)
    wait_until_gone(tmp_path)
    left = Measurement.model_validate_json((tmp_path / "out" / "measurement.json").read_bytes())
    assert not left.complete
    assert len(restarts_of(left)) == 1
    assert len(left.losses) >= 35
