"""Command ``python -m benchmarks.faults``: break runs on this machine, and write what each one said and left.

Each fault happens to a real ``simplan run`` of two CPU ranks. The table goes to docs/reference/faults.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import simplan
from executor.launch.rank import RankFiles
from executor.launch.watchdog import read_beat
from simplan.runs.checkpoint import HEADER_FILE, CheckpointHeader

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "faults.md"
_PATIENCE_S = 600.0
_SOME_STEPS = 20  # after which a fault may come, so that there are steps before it to compare
_SCENARIO = """\
name: victim
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 2, vocab_size: 512, seq_len: 32}
cluster: {preset: this-machine, num_devices: 2}
training: {global_batch_size: 8, precision: fp32}
plan: {pp: 2, schedule: 1f1b}
"""
_PLAN = "plan: {pp: 2, schedule: 1f1b}"
_ENDLESS = ("--steps", "100000", "--warmup", "1")
_HEAD = """\
# What happens when something breaks

`make faults` breaks real runs of two CPU ranks and writes this page. Time is from the fault to the end of the
command. "Nothing runs on" means that no process of the run was left.

If the launcher of the ranks is killed, `simplan run` writes the measurement from the ranks' files. On several nodes it
writes none then, because it gets the files of other nodes from the launcher's store, which ends with the launcher. Each
node keeps the files of its ranks (`rank*.steps.jsonl`) in its output folder.

Faults by a schedule, or drawn like those of a simulated run, are in [Run with failures](../how-to/failures.md).

"""


@dataclass
class Run:
    """A ``simplan run`` that has been started.

    Attributes:
        process: The command.
        folder: Its output folder.
    """

    process: subprocess.Popen[str]
    folder: Path

    def rank_pid(self, rank: int) -> int:
        """Process of a rank, once it takes steps."""
        file = RankFiles(self.folder, rank).heartbeat
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end_s:
            beat = read_beat(file)
            if beat is not None and beat.step >= 2:
                return beat.pid
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the run takes no steps: {self.process.communicate()[1]}")

    def executor_pid(self) -> int:
        """Process of the executor, which is the launcher of the ranks."""
        status = Path(f"/proc/{self.rank_pid(0)}/stat").read_text()
        return int(status.rpartition(")")[2].split()[1])


@dataclass(frozen=True)
class Ended:
    """End of a command.

    Attributes:
        code: Exit code.
        seconds: From the fault to the end.
        said: What it said of the fault.
        left: What it left.
    """

    code: int
    seconds: float | None
    said: str
    left: str


@dataclass
class Bench:
    """A folder with a calibration, in which runs are broken.

    Attributes:
        folder: A fresh one.
    """

    folder: Path
    number: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *args: str, out: str | None = None, scenario: str = _SCENARIO) -> Run:
        """Starts a run."""
        self.number += 1
        file = self.folder / f"victim{self.number}.yaml"
        file.write_text(scenario)
        folder = self.folder / (out or f"out{self.number}")
        command = [sys.executable, "-m", "simplan", "run", str(file), "-o", str(folder), *args]
        pipe = subprocess.PIPE
        return Run(
            subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=self.environment, start_new_session=True
            ),
            folder,
        )

    def end(self, run: Run, since_s: float | None) -> Ended:
        """Waits for its end."""
        _, err = run.process.communicate(timeout=_PATIENCE_S)
        seconds = None if since_s is None else time.monotonic() - since_s
        lines = [line for line in err.splitlines() if line.startswith(("error:", "note:"))] or err.splitlines()[-1:]
        return Ended(run.process.returncode, seconds, " ".join(map(self._shorter, lines)), self._left(run))

    def _shorter(self, line: str) -> str:
        line = line.replace(f"{self.folder}{os.sep}", "")
        return re.sub(
            r"\S*/logs/\S+|process \d+|since \S+", lambda m: "..." if "/" in m[0] else m[0].split()[0] + " N", line
        )

    def _left(self, run: Run) -> str:
        end_s = time.monotonic() + 30.0
        while (alive := _processes_of(run.folder)) and time.monotonic() < end_s:
            time.sleep(0.1)
        file = run.folder / "measurement.json"
        kept = "no measurement"
        if file.exists():
            measured = json.loads(file.read_text())
            steps = len(measured["step_times_s"]) + len(measured["warmup_step_times_s"])
            kept = (
                "the whole measurement" if measured["complete"] else f"a measurement of the steps until then ({steps})"
            )
        return f"{kept}; {'nothing runs on' if not alive else f'{len(alive)} processes run on'}"

    def hit(self, fault: Callable[[Run], None], *args: str) -> Ended:
        """Breaks an endless run, and waits for its end."""
        run = self.start(*_ENDLESS, *args)
        try:
            run.rank_pid(1)
            since_s = time.monotonic()
            fault(run)
            return self.end(run, since_s)
        finally:
            _end(run)


def _end(run: Run) -> None:
    if run.process.poll() is None:
        run.process.terminate()
        run.process.communicate(timeout=_PATIENCE_S)


def _processes_of(folder: Path) -> list[int]:
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in words and int(entry.name) != os.getpid():
                processes.append(int(entry.name))
    return processes


def _kill_rank(bench: Bench) -> Ended:
    return bench.hit(lambda run: os.kill(run.rank_pid(1), signal.SIGKILL))


def _kill_replica(bench: Bench) -> Ended:
    """One of two replicas, without which the other may go on."""
    plan = "plan: {dp_replicate: 2, replication: {kind: diloco, inner_steps: 5, min_replicas: 1}}"
    run = bench.start("--steps", "400", "--warmup", "5", scenario=_SCENARIO.replace(_PLAN, plan))
    try:
        while (beat := read_beat(RankFiles(run.folder, 1).heartbeat)) is None or beat.step < _SOME_STEPS:
            run.rank_pid(1)
            time.sleep(0.05)
        os.kill(beat.pid, signal.SIGKILL)
        return bench.end(run, None)
    finally:
        _end(run)


def _stop_rank(bench: Bench) -> Ended:
    return bench.hit(lambda run: os.kill(run.rank_pid(1), signal.SIGSTOP), "--timeout", "15")


def _starve_rank(bench: Bench) -> Ended:
    """Its address space ends where it is now; a step needs some more for its temporaries."""

    def starve(run: Run) -> None:
        pid = run.rank_pid(1)
        resource.prlimit(pid, resource.RLIMIT_AS, (2**20, 2**20))

    return bench.hit(starve)


def _slow_rank(bench: Bench) -> Ended:
    """One of two ranks with equal work stands still for nine tenths of the time, many times in a step."""
    larger = _SCENARIO.replace("hidden_size: 64", "hidden_size: 256").replace("seq_len: 32", "seq_len: 256")
    run = bench.start("--steps", "30", "--warmup", "2", scenario=larger.replace(_PLAN, "plan: {dp_replicate: 2}"))
    try:
        pid = run.rank_pid(1)
        while run.process.poll() is None:
            for number, pause_s in ((signal.SIGSTOP, 0.18), (signal.SIGCONT, 0.02)):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    break
                time.sleep(pause_s)
        return bench.end(run, None)
    finally:
        _end(run)


def _kill_launcher(bench: Bench) -> Ended:
    return bench.hit(lambda run: os.kill(run.executor_pid(), signal.SIGKILL))


def _kill_command(bench: Bench) -> Ended:
    return bench.hit(lambda run: run.process.kill())


def _interrupt_command(bench: Bench) -> Ended:
    return bench.hit(lambda run: run.process.send_signal(signal.SIGINT))


def _terminate_command(bench: Bench) -> Ended:
    return bench.hit(lambda run: run.process.send_signal(signal.SIGTERM))


def _second_run(bench: Bench) -> Ended:
    first = bench.start(*_ENDLESS)
    try:
        first.rank_pid(1)
        second = bench.start(out=first.folder.name)
        ended = bench.end(second, None)
        first.rank_pid(1)
        still = first.process.poll() is None
        return Ended(ended.code, ended.seconds, ended.said, f"the first run goes on: {'yes' if still else 'no'}")
    finally:
        _end(first)


def _second_calibration(bench: Bench) -> Ended:
    file = bench.folder / "shared.json"
    command = [
        sys.executable,
        "-m",
        "simplan",
        "calibrate",
        "--calibration",
        str(file),
        "--ranks",
        "1",
        "--budget",
        "20",
    ]
    pipe = subprocess.PIPE
    first = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=bench.environment)
    try:
        while not file.with_name(f".{file.name}.lock").exists():
            time.sleep(0.05)
        second = subprocess.run(command, capture_output=True, text=True, env=bench.environment, check=False)
        first.communicate(timeout=_PATIENCE_S)
        kept = "the first one's file, whole" if first.returncode == 0 and file.exists() else "no file"
        return Ended(second.returncode, None, bench._shorter(second.stderr.strip()), kept)
    finally:
        first.kill()


def _full_disk(bench: Bench) -> Ended | None:
    """The output folder is a file system of 128 KiB."""
    folder = bench.folder / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return None
    try:
        run = bench.start(*_ENDLESS, out="small-disk/out")
        return bench.end(run, None)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _port_taken(bench: Bench) -> Ended:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        two = _SCENARIO.replace("num_devices: 2", "num_devices: 2, num_nodes: 2, inter_link_gbit_per_device: 1")
        run = bench.start("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", scenario=two)
        return bench.end(run, None)


def _damaged(bench: Bench, damage: Callable[[Path], None], name: str) -> Ended:
    kept = bench.folder / name
    first = bench.start("--steps", "4", "--warmup", "0", "--checkpoint-dir", str(kept), "--checkpoint-every", "2")
    bench.end(first, None)
    damage(kept / "step-00000004")
    again = bench.start(
        "--steps", "6", "--warmup", "0", "--checkpoint-dir", str(kept), "--checkpoint-every", "2", "--resume"
    )
    return bench.end(again, None)


def _truncate(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class _Forged:
    """An object whose pickle would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/simplan-was-here",)


def _forge(folder: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(pickle.dumps(_Forged()))
    header = CheckpointHeader.model_validate_json((folder / HEADER_FILE).read_bytes())
    sums = {**header.file_sha256, file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    (folder / HEADER_FILE).write_text(header.model_copy(update={"file_sha256": sums}).model_dump_json())


def _network_cut(bench: Bench) -> Ended | None:
    """Two hosts in namespaces; the link of the second one goes down."""
    from tests.hosts import hosts, unavailable

    if unavailable() is not None:
        return None
    two = _SCENARIO.replace("num_devices: 2", "num_devices: 2, num_nodes: 2, inter_link_gbit_per_device: 1")
    file = bench.folder / "two-nodes.yaml"
    file.write_text(two)
    with hosts(2, 1000.0) as made:
        folders = [bench.folder / f"host{k}" for k in range(2)]
        endpoint = f"{made[0].address}:29417"
        started = []
        for host, folder in zip(made, folders, strict=True):
            command = [sys.executable, "-m", "simplan", "run", str(file), "-o", str(folder), *_ENDLESS]
            command += ["--nnodes", "2", "--rdzv-endpoint", endpoint, "--timeout", "15"]
            pipe = subprocess.PIPE
            started.append(
                Run(
                    subprocess.Popen(host.command(command), stdout=pipe, stderr=pipe, text=True, env=bench.environment),
                    folder,
                )
            )
        try:
            started[0].rank_pid(0)
            since_s = time.monotonic()
            made[1].cut()
            return bench.end(started[0], since_s)
        finally:
            for run in started:
                _end(run)


_FAULTS: dict[str, Callable[[Bench], Ended | None]] = {
    "a rank is killed": _kill_rank,
    "a replica is killed that may leave (`min_replicas: 1`)": _kill_replica,
    "a rank is stopped (`--timeout 15`)": _stop_rank,
    "a rank is out of memory": _starve_rank,
    "a rank stands still for nine tenths of the time": _slow_rank,
    "the launcher is killed": _kill_launcher,
    "the command is killed": _kill_command,
    "the command is interrupted (Ctrl-C)": _interrupt_command,
    "the command is terminated": _terminate_command,
    "the disk is full": _full_disk,
    "the port of the rendezvous is taken": _port_taken,
    "the network of the other node is cut (`--timeout 15`)": _network_cut,
    "a checkpoint is cut short, and resumed from": lambda bench: _damaged(bench, _truncate, "cut"),
    "a bit of a checkpoint is flipped": lambda bench: _damaged(bench, _flip, "flipped"),
    "a checkpoint is forged to run a command": lambda bench: _damaged(bench, _forge, "forged"),
    "a second run in the same folder": _second_run,
    "a second calibration of the same file": _second_calibration,
}


@contextmanager
def _bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="simplan-faults-") as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(Path(folder) / "cache")}
        bench = Bench(Path(folder), environment=environment)
        bench.end(bench.start("--steps", "2", "--warmup", "1"), None)  # calibrates once for all
        yield bench


def main(names: list[str]) -> None:
    """Runs all faults, or those whose name has one of these words, and prints them; only a full run is stored."""
    rows = ["| fault | exit code | s | what is said | what is left |", "|---|---|---|---|---|"]
    print("\n".join(rows), flush=True)
    with _bench() as bench:
        for name, fault in _FAULTS.items():
            if names and not any(word in name for word in names):
                continue
            ended = fault(bench)
            if ended is None:
                row = f"| {name} | | | not done here: it takes root | |"
            else:
                seconds = "" if ended.seconds is None else f"{ended.seconds:.1f}"
                said = ended.said.replace("|", "\\|")
                row = f"| {name} | {ended.code} | {seconds} | {said} | {ended.left} |"
            print(row, flush=True)
            rows.append(row)
    if not names:
        machine = (
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        when = f"Made on {datetime.now(UTC):%Y-%m-%d} by simplan {simplan.__version__}, {machine}"
        when += f", load average {os.getloadavg()[2]:.0f}.\n\n"
        PAGE.write_text(_HEAD + when + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
