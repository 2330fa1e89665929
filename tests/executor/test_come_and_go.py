"""Hosts that are told to leave, and hosts that come back: the others go on without and with them, and lose no step."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from executor.checkpoint_folder import newest_checkpoint
from simplan.program.measurement import Measurement
from tests.executor.conftest import MakeJob
from tests.executor.test_lost_nodes import (
    LOST_AFTER,
    check,
    cores_of,
    elastic,
    finished,
    start_on,
    undisturbed,
    wait_for_step,
)
from tests.executor.test_nodes import start
from tests.hosts import Host, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("_hosts_can_be_made")]
HERE = socket.gethostname()
NEVER = 1000
"""Steps between checkpoints that no run of these tests makes: there are only those that are taken because hosts go."""


def start_again(host: Host, place: int, folder: Path) -> subprocess.Popen[str]:
    """The same command as before on a host, with another folder."""
    return start(host, "join", folder / f"nodes{place}.json", "--out", folder / f"{place}-again")


def wait_until_it_says(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it has ended without {text!r}")


def measured(folder: Path) -> Measurement:
    return Measurement.model_validate_json((folder / "0" / "measurement.json").read_bytes())


def steps_of_later_parts(folder: Path) -> list[int]:
    """Steps that were done when each part but the first one began."""
    return [*(part.first_step for part in measured(folder).earlier[1:]), measured(folder).first_step]


def test_a_host_leaves_and_comes_back(make_job: MakeJob, tmp_path: Path) -> None:
    """Three hosts, two, and three again: each time after the very step that was done, and no restart is counted."""
    job = elastic(make_job(plan={"dp_shard": 3}), tmp_path / "kept", 3, [2, 1], every=NEVER, num_steps=150)
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(3, cores=cores_of(3)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        started[1].send_signal(signal.SIGTERM)
        code, said = finished([started[1]], tmp_path / "1")[0]
        wait_for_step(started, tmp_path / "0" / "part-2", LOST_AFTER + 5)
        again = start_again(made[1], 1, tmp_path)
        first, _, last = finished(started, tmp_path / "0")
        came = finished([again], tmp_path)[0]
    assert code == 143
    assert said.startswith(f"node 1 ({HERE}) has left the run, as it was told to; the others can go on after step ")
    assert said.endswith(", of which there is a checkpoint\n")
    assert first == last == came == (0, "")
    notes = [note for note in measured(tmp_path).notes if " go on after step " in note]
    assert check(tmp_path, whole, [3, 2, 3]) == []
    assert [note.split("; ")[0] for note in notes] == [
        f"node 1 ({HERE}) was told to leave",
        f"{HERE} ({made[1].address}) joins",
    ]
    assert [timing.step for timing in measured(tmp_path).checkpoints] == steps_of_later_parts(tmp_path)
    assert "; 2 nodes with 2 ranks go on after step " in notes[0]
    assert "; 3 nodes with 3 ranks go on after step " in notes[1]


def test_a_host_is_told_to_leave_with_all_its_processes(make_job: MakeJob, tmp_path: Path) -> None:
    """As by ``scancel``: its ranks die at once, and the other goes on from the checkpoint before, without a wait."""
    job = elastic(make_job(dp=2), tmp_path / "kept", 2, [1])
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].signal_all(signal.SIGTERM)
        first, left = finished(started, tmp_path)
    assert first == (0, "")
    said = f"node 1 ({HERE}) has left the run, as it was told to; the others can go on after the newest checkpoint\n"
    assert left == (143, said)
    assert check(tmp_path, whole, [2, 1]) == []
    assert any(note.startswith(f"node 1 ({HERE}) was told to leave; 1 node with ") for note in measured(tmp_path).notes)


def test_node_0_is_told_to_leave(make_job: MakeJob, tmp_path: Path) -> None:
    """The run ends on all nodes, with a checkpoint to resume from."""
    job = elastic(make_job(dp=2), tmp_path / "kept", 2, [1], every=NEVER, num_steps=10**6)
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        started[0].send_signal(signal.SIGTERM)
        first, other = finished(started, tmp_path)
    assert first == (143, "")
    said = f"node 0 ({HERE}) was interrupted; it has the store of the run, which ends without it\n"
    assert other == (4, said)
    header, _ = newest_checkpoint(tmp_path / "kept")
    assert header is not None
    assert header.step == len(measured(tmp_path).losses) >= LOST_AFTER


def test_a_host_that_is_cut_off_comes_back(make_job: MakeJob, tmp_path: Path) -> None:
    """It ends by itself, as it hears nothing of the others; its network is there again, and so is its command."""
    job = elastic(make_job(dp=2), tmp_path / "kept", 2, [1], num_steps=250)
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].cut()
        ((code, _),) = finished([started[1]], tmp_path / "1")
        made[1].join()
        again = start_again(made[1], 1, tmp_path)
        assert finished([started[0], again], tmp_path) == [(0, ""), (0, "")]
    assert code == 4
    (note,) = check(tmp_path, whole, [2, 1, 2])
    assert note.endswith("; restart 1 of 2")


def test_a_host_is_started_again_before_it_is_missed(make_job: MakeJob, tmp_path: Path) -> None:
    """It crashes, and its command waits when the other one sees that it is lost: they go on with two."""
    job = elastic(make_job(dp=2), tmp_path / "kept", 2, [1])
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        made[1].kill_all()
        again = start_again(made[1], 1, tmp_path)
        first, _, came = finished([*started, again], tmp_path)
    assert first == came == (0, "")
    (note,) = check(tmp_path, whole, [2, 2])
    assert f"; {HERE} ({made[1].address}) joins; 2 nodes with 2 ranks go on after step " in note
    assert note.endswith("; restart 1 of 2")


def test_a_run_begins_with_the_hosts_that_are_there(make_job: MakeJob, tmp_path: Path) -> None:
    """Two of four, after the last call; two more come at once, without which four cannot go on."""
    job = elastic(make_job(plan={"dp_shard": 4}), tmp_path / "kept", 4, [2], every=NEVER, num_steps=150)
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(4, cores=cores_of(4)) as made:
        started = start_on(made, job, tmp_path, number=2, last_call_timeout_s=1.0)
        wait_for_step(started, tmp_path / "0", LOST_AFTER)
        came = [start_again(made[place], place, tmp_path) for place in (3, 2)]
        assert finished([*started, *came], tmp_path) == [(0, "")] * 4
    assert check(tmp_path, whole, [2, 4], most=4) == []
    assert [timing.step for timing in measured(tmp_path).checkpoints] == steps_of_later_parts(tmp_path)
    notes = measured(tmp_path).notes
    assert "2 nodes with 2 ranks begin, 2 fewer than at most; who comes later is let in when there is a place" in notes
    joins = "; ".join(f"{HERE} ({made[place].address}) joins" for place in (2, 3))
    assert any(note.startswith(f"{joins}; 4 nodes with 4 ranks go on after step ") for note in notes)


def test_a_host_that_dies_as_soon_as_it_is_let_in_costs_no_restart(make_job: MakeJob, tmp_path: Path) -> None:
    """One host begins alone; it knows how others see it when one comes, and goes on alone when that one is gone."""
    job = elastic(make_job(dp=2), tmp_path / "kept", 2, [1], every=NEVER, num_steps=1000)
    whole = undisturbed(job, tmp_path / "whole")
    with hosts(2, cores=cores_of(2)) as made:
        started = start_on(made, job, tmp_path, number=1, last_call_timeout_s=0.0)
        came = start_again(made[1], 1, tmp_path)
        wait_until_it_says(came, "joining the run, which goes on with 2 nodes")
        made[1].kill_all()
        first, _ = finished([*started, came], tmp_path)
    assert first == (0, "")
    assert check(tmp_path, whole, [1, 2, 1], most=2) == []
    lost = f"node 1 ({HERE}, {made[1].address}) cannot be reached: nothing has been heard of it for 30 s; 1 node with "
    assert any(note.startswith(lost) for note in measured(tmp_path).notes)
