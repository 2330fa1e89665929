"""Ranks that are asked to stop in the middle of a training."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

import executor.departure
from executor.checkpoint_folder import newest_checkpoint
from executor.departure import told_to_leave
from executor.exchange import RegroupError
from executor.run import run_job
from executor.stopping import stop_file
from simplan.program.fewer_nodes import FewerNodes, on_fewer_devices
from tests.executor.conftest import MakeJob
from tests.executor.test_checkpoints import with_checkpoints


def test_all_ranks_stop_after_one_step_and_keep_it(make_job: MakeJob, tmp_path: Path) -> None:
    """Between two checkpoints, though only one of them is asked."""
    job = with_checkpoints(make_job(dp=2), tmp_path / "kept", 10**6, every=10**5)
    one = FewerNodes(num_nodes=1, plan=on_fewer_devices(job.plan, 1), boundaries=job.boundaries, table=job.table)
    job = job.model_copy(update={"fewer_nodes": (one,)})

    def ask(step: int, of: int) -> None:
        if step == 2:
            stop_file(tmp_path, 0).touch()

    with pytest.raises(RegroupError):
        run_job(job, tmp_path, ask)
    header, _ = newest_checkpoint(tmp_path / "kept")
    assert header is not None
    assert header.step >= 2
    lines = (tmp_path / "rank0.losses.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(header.step))
    done = [len((tmp_path / f"rank{rank}.steps.jsonl").read_text().splitlines()) for rank in range(2)]
    assert done == [header.step] * 2


def test_a_node_that_is_told_to_leave_has_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with told_to_leave(heeds=True) as departure:
        assert not departure.is_told
        assert not departure.is_due
        for _ in range(2):  # the command line passes on what the executor may have had itself
            signal.raise_signal(signal.SIGTERM)
        assert departure.is_told
        assert not departure.is_due
        monkeypatch.setattr(executor.departure, "_STOP_S", 0.0)
        time.sleep(0.001)
        assert departure.is_due
    assert signal.getsignal(signal.SIGTERM) == previous
