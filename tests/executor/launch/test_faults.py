"""Ranks that die or hang, and callers that give up: the run ends, says why, keeps its steps and leaves no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import executor.__main__
from executor.launch.processes import is_ours
from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from executor.run import run_job
from simplan.errors import RunError, SpecError
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from tests.executor.conftest import make_job, make_model
from tests.executor.launch.apart import run_apart
from tests.interrupts import heed_interrupts

PATIENCE_S = 300.0  # for things that take a second or two; only a failing test waits that long


def processes_of(out_dir: Path) -> list[str]:
    """Command lines of running processes that name the folder of the run."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(str(out_dir).encode() in word for word in words):
                processes.append(b" ".join(words).decode())
    return processes


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def wait_until_gone(out_dir: Path) -> None:
    wait_until(lambda: processes_of(out_dir) == [])


RAISED = "rank 1 raised RuntimeError: boom in 1F1 of step 3; the traceback is in "
KILLED = "rank 1 was killed by signal 9 in 1F1 of step 3"
LEFT = "rank 1 ended with exit code 3 in 1F1 of step 3; its output is in "
HUNG = "rank 1 made no progress for 20 s (last action 1F1 of step 3); rank 0 was waiting in 0B1"


@pytest.mark.parametrize(
    ("run", "fault", "said"),
    [
        pytest.param(run_apart, "raise", RAISED, marks=pytest.mark.slow),
        pytest.param(run_apart, "kill", KILLED, marks=pytest.mark.slow),
        pytest.param(run_apart, "exit", LEFT, marks=pytest.mark.slow),
        (run_job, "raise", RAISED),
        (run_job, "kill", KILLED),
        pytest.param(run_job, "exit", LEFT, marks=pytest.mark.slow),
        pytest.param(
            run_job, "hang", HUNG, marks=pytest.mark.slow
        ),  # not under torchrun: importing torch on a loaded machine is a long silence, too
    ],
)
def test_a_failing_rank_ends_the_run(
    run: Any, fault: str, said: str, tmp_path: Path, with_fault: Callable[[str], str]
) -> None:
    """Under torchrun and forked: forked ranks of the other tests live and die as torchrun's."""
    told: list[tuple[int, int]] = []
    job = make_job("1f1b", pp=2, num_steps=50, timeout_s=20.0 if fault == "hang" else 60.0)
    with pytest.raises(RunError) as caught:
        run(job, tmp_path, lambda *step: told.append(step), rank_module=with_fault(fault))
    assert str(caught.value).startswith(said)
    assert told == [(1, 51), (2, 51)]
    kept = Measurement.model_validate_json((tmp_path / "measurement.json").read_bytes())
    assert not kept.complete
    assert kept.failure == str(caught.value)
    assert len(kept.warmup_step_times_s) == 1
    assert len(kept.step_times_s) == 1
    assert len(kept.losses) == 2
    assert [len(rank.actions) for rank in kept.ranks] == [10, 10]
    (log,) = tmp_path.glob("logs/*/attempt_0/1/stderr.log")
    assert ("boom" in log.read_text()) == (fault == "raise")
    wait_until_gone(tmp_path)


def test_a_caller_that_gives_up_leaves_no_ranks(tmp_path: Path) -> None:
    pids: list[int] = []

    def give_up(step: int, of: int) -> None:
        beats = [read_beat(RankFiles(tmp_path, rank).heartbeat) for rank in range(2)]
        pids.extend(beat.pid for beat in beats if beat is not None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(make_job(dp=2, num_steps=10**6), tmp_path, give_up)
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def command_for(job: RunSpec, folder: Path) -> list[str]:
    job_file = folder / "job.json"
    job_file.write_text(job.model_dump_json())
    return [sys.executable, "-m", "executor", "run", str(job_file), "--out", str(folder / "out")]


@pytest.fixture
def endless_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``python -m executor run`` of very many steps, just started."""
    command = command_for(make_job(dp=2, num_steps=10**6), tmp_path)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_interrupts) as process:
        yield process
        process.kill()


def wait_for_a_step(run: subprocess.Popen[str]) -> None:
    assert run.stdout is not None
    assert json.loads(run.stdout.readline()) == {"event": "step", "step": 1, "of": 10**6 + 1}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_the_launcher_ends_all(
    endless_run: subprocess.Popen[str], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    wait_for_a_step(endless_run)
    endless_run.send_signal(number)
    _, messages = endless_run.communicate(timeout=PATIENCE_S)
    assert endless_run.returncode == code
    assert "Traceback" not in messages
    wait_until_gone(tmp_path)
    kept = Measurement.model_validate_json((tmp_path / "out" / "measurement.json").read_bytes())
    assert kept.failure == "the run was interrupted"
    assert kept.losses


@pytest.mark.slow
def test_a_run_is_alone_and_its_ranks_do_not_outlive_it(endless_run: subprocess.Popen[str], tmp_path: Path) -> None:
    """A second run in its folder would overwrite its files, and take its heartbeats for those of its own ranks.

    It listens on the loopback only: torch's own store would listen at every address, without a password. Killed, it
    leaves no rank, and steps to gather.
    """
    wait_for_a_step(endless_run)
    assert {address for _, address in listening(endless_run.pid)} == {"0100007F"}
    with pytest.raises(SpecError) as caught:
        run_job(make_job(), tmp_path / "out")
    assert str(caught.value).startswith(f"--output = {tmp_path / 'out'}: is in use by process {endless_run.pid} since ")
    assert endless_run.poll() is None
    assert len(processes_of(tmp_path)) == 3, "the launcher and two ranks"
    endless_run.kill()
    endless_run.communicate(timeout=PATIENCE_S)
    wait_until_gone(tmp_path)
    job, out = str(tmp_path / "job.json"), tmp_path / "out"
    assert not (out / "measurement.json").exists()
    assert executor.__main__.main(["gather", job, "--out", str(out), "--failure", "it was killed"]) == 0
    kept = Measurement.model_validate_json((out / "measurement.json").read_bytes())
    assert (kept.complete, kept.failure) == (False, "it was killed")
    assert len(kept.losses) == len(kept.step_times_s) + len(kept.warmup_step_times_s) >= 1
    assert [len(rank.step_times_s) for rank in kept.ranks] == [len(kept.step_times_s)] * 2


def test_a_stranger_named_by_a_heartbeat_is_not_signalled(tmp_path: Path) -> None:
    """Heartbeats are files, in which anybody may have written any process."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as mine:
        assert is_ours(mine.pid)
        mine.kill()
    assert not is_ours(mine.pid)
    assert not is_ours(os.getppid())
    assert not is_ours(1)


def listening(pid: int) -> set[tuple[int, str]]:
    """Process and address (hexadecimal) of listening sockets of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pids = [pid, *map(int, children)]
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # TCP_LISTEN
                sockets[f"socket:[{words[9]}]"] = words[1].partition(":")[0]
    ports = set()
    for process in pids:
        for handle in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):
                if (target := str(handle.readlink())) in sockets:
                    ports.add((process, sockets[target]))
    return ports


def test_ranks_that_start_do_not_outlive_a_killed_launcher(endless_run: subprocess.Popen[str], tmp_path: Path) -> None:
    """Killed as soon as the ranks exist, so before they have imported torch."""
    wait_until(lambda: len(processes_of(tmp_path)) == 3)
    endless_run.kill()
    wait_until_gone(tmp_path)
    assert list((tmp_path / "out").glob("*.heartbeat")) == []


@pytest.mark.slow
def test_a_launcher_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """It is asked, not killed, so that it keeps what it has measured."""
    parent_program = f"import subprocess; subprocess.run({command_for(make_job(dp=2, num_steps=10**6), tmp_path)!r})"
    with subprocess.Popen([sys.executable, "-c", parent_program], stdout=subprocess.PIPE, text=True) as parent:
        wait_for_a_step(parent)
        parent.kill()
        wait_until_gone(tmp_path)  # while its output can still be written
    kept = Measurement.model_validate_json((tmp_path / "out" / "measurement.json").read_bytes())
    assert kept.failure == "the run was interrupted"


@pytest.mark.slow
def test_a_stopped_rank_counts_as_hanging_and_is_ended(tmp_path: Path) -> None:
    """A rank that takes no signals but KILL, as one stuck in a driver; it is the culprit even where it waited."""
    stopped: list[int] = []

    def stop_rank_1(step: int, of: int) -> None:
        del of
        beat = read_beat(RankFiles(tmp_path, 1).heartbeat)
        if step == 2 and beat is not None:
            os.kill(beat.pid, signal.SIGSTOP)
            stopped.append(beat.pid)

    job = make_job("1f1b", pp=2, model=make_model("llama"), num_steps=10**6, timeout_s=25.0)
    with pytest.raises(RunError, match=r"^rank 1 .*signal.* 25 s$"):
        run_job(job, tmp_path, stop_rank_1)
    assert stopped
    wait_until_gone(tmp_path)


@pytest.fixture
def _same_signals() -> Iterator[None]:
    """The executor's main program takes SIGTERM."""
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("_same_signals")
def test_a_bad_job_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, command, job_file, out, folder = command_for(make_job(plan={"tp": 2}), tmp_path)
    assert executor.__main__.main([command, job_file, out, folder]) == 2
    assert capsys.readouterr().err.startswith("plan.tp = 2: must divide model.vocab_size = 97; use 1")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_same_signals")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Invalid JSON"),
        ('{"schema_version": 2, "nmae": "x"}', "nmae"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_job(text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file = tmp_path / "job.json"
    if text is not None:
        job_file.write_text(text)
    assert executor.__main__.main(["run", str(job_file), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(str(job_file))
    assert said in message
