"""Forked ranks live and die as torchrun's do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from executor.run import run_job
from simplan.errors import RunError
from tests.executor.conftest import RANK_PROGRAMS


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "rank 1 raised RuntimeError: boom in 1F1 of step 3; the traceback is in "),
        ("kill", "rank 1 was killed by signal 9 in 1F1 of step 3"),
        ("exit", "rank 1 ended with exit code 3 in 1F1 of step 3; its output is in "),
    ],
)
def test_a_failing_rank_ends_the_run(
    fault: str, said: str, tmp_path: Path, make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RANK_PROGRAMS))
    monkeypatch.setenv("TEST_FAULT", fault)
    with pytest.raises(RunError) as caught:
        run_job(make_job("1f1b", pp=2, num_steps=50), tmp_path, rank_module="failing_worker")
    assert str(caught.value).startswith(said)


def test_a_caller_that_gives_up_leaves_no_ranks(tmp_path: Path, make_job: Any) -> None:
    pids: list[int] = []

    def give_up(step: int, of: int) -> None:
        beats = [read_beat(RankFiles(tmp_path, rank).heartbeat) for rank in range(2)]
        pids.extend(beat.pid for beat in beats if beat is not None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(make_job(dp=2, num_steps=10**6), tmp_path, give_up)
    assert len(pids) == 2
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
