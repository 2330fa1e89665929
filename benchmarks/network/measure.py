"""Measurements on shaped hosts, as a user makes them: ``simplan calibrate`` and ``simplan run`` on every host.

A measurement is a file, and is made only if the file does not exist, so that an interrupted comparison resumes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.network.cases import (
    ShapedNetwork,
    ShapedPlan,
    Stream,
    scenario_text,
    star,
)
from simplan.children import terminate_child
from tests.hosts import Host, wired_hosts

_ROOT = Path(__file__).resolve().parents[2]
PORT = 29_433
"""Port of the store of a run, where nodes meet, and to which they send heartbeats."""
_STREAM_PORT = 29_434
_COMPUTE_BUDGET_S = 30
_NETWORK_BUDGET_S = 25


@dataclass(frozen=True)
class Measurements:
    """Folder of measurements.

    Attributes:
        folder: Created if it does not exist.
    """

    folder: Path

    def calibration(self, mbit_per_s: float) -> Path:
        """Calibration of one core, and of two hosts on one switch."""
        return self.folder / f"calibration-{mbit_per_s:.0f}.json"

    def collectives(self, network: ShapedNetwork) -> Path:
        """Timed collectives of a network."""
        return self.folder / f"collectives-{network.name}.json"

    def step(self, network: ShapedNetwork, plan: ShapedPlan) -> Path:
        """Output of ``simplan run --json``."""
        return self.folder / f"step-{network.name}-{plan.name}.json"

    def scenario(self, network: ShapedNetwork, plan: ShapedPlan, *, alone: bool = False) -> Path:
        """Scenario file, which is written; see ``scenario_text``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.step(network, plan).with_suffix(".alone.yaml" if alone else ".yaml")
        file.write_text(scenario_text(network, plan, alone=alone))
        return file

    def calibrate(self, mbit_per_s: float, steps: Sequence[tuple[ShapedNetwork, ShapedPlan]]) -> None:
        """Times one core on the layers of all steps, and communication between two hosts on one switch."""
        core, done = self.folder / "core.json", self.calibration(mbit_per_s)
        if done.exists():
            return
        with hosts_on(star(2, mbit_per_s)) as hosts:
            if not core.exists():
                files = [self.scenario(network, plan, alone=True) for network, plan in steps]
                args = ["--budget", _COMPUTE_BUDGET_S, "--calibration", core.with_suffix(".part")]
                _finished(hosts[:1], [self._start(hosts[0], "simplan", ["calibrate", *files, "--ranks", 1, *args])])
                core.with_suffix(".part").rename(core)
            self._time_links(hosts, done, since=core)

    def time_collectives(self, network: ShapedNetwork) -> None:
        """Times collectives on a network."""
        if not self.collectives(network).exists():
            with hosts_on(network) as hosts:
                meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": PORT, "WORLD_SIZE": len(hosts)}
                common = {**meeting, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
                started = [
                    self._start(host, "benchmarks.network.collectives", environment={**common, "RANK": k})
                    for k, host in enumerate(hosts)
                ]
                _write(self.collectives(network), _finished(hosts, started))

    def run_steps(self, network: ShapedNetwork, plans: Sequence[ShapedPlan]) -> Iterator[ShapedPlan]:
        """Runs the steps of plans on a network, and yields each plan that has been run."""
        left = [plan for plan in plans if not self.step(network, plan).exists()]
        if not left:
            return
        with hosts_on(network) as hosts:
            for plan in left:
                _write(self.step(network, plan), self.run(network, plan, hosts))
                yield plan

    def run(self, network: ShapedNetwork, plan: ShapedPlan, hosts: list[Host]) -> str:
        """Runs the steps of a plan, and returns what ``simplan run --json`` prints."""
        args = ["run", self.scenario(network, plan, alone=True), "--json"]
        args += ["--steps", plan.num_steps[0], "--warmup", plan.num_steps[1]]
        args += ["--calibration", self.calibration(network.mbit_per_s), "-o"]
        folders = [self.step(network, plan).with_suffix(f".out{k}") for k in range(len(hosts))]
        printed = self._on_all(hosts, [[*args, folder] for folder in folders])
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return printed

    def _time_links(self, hosts: list[Host], file: Path, since: Path | None = None) -> None:
        """Times communication between hosts, and adds it to a calibration; every host saves a file of its own."""
        parts = [file.with_suffix(f".part{k}") for k in range(len(hosts))]
        for part in parts:
            part.unlink(missing_ok=True)
            if since is not None:
                shutil.copy(since, part)
        command = ["calibrate", "--ranks", 1, "--budget", _NETWORK_BUDGET_S, "--calibration"]
        self._on_all(hosts, [[*command, part] for part in parts])
        for part in parts[1:]:
            part.unlink()
        parts[0].rename(file)

    def _on_all(self, hosts: list[Host], commands: list[list[Any]]) -> str:
        """Runs a simplan command on each host; returns the output of the first."""
        meeting = ["--nodes", len(hosts), "--rdzv", f"{hosts[0].address}:{PORT}"]
        started = [self._start(host, "simplan", [*args, *meeting]) for host, args in zip(hosts, commands, strict=True)]
        return _finished(hosts, started)

    def _start(
        self, host: Host, module: str, args: Sequence[Any] = (), environment: Mapping[str, Any] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            host.command([sys.executable, "-m", module, *map(str, args)]),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(_ROOT), **{name: str(value) for name, value in environment.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


def _finished(hosts: Sequence[Host], started: Sequence[subprocess.Popen[str]]) -> str:
    """Output of the first command, once all have ended; if one fails, all others are ended."""
    with ThreadPoolExecutor(len(started)) as readers:  # a command whose output is not read waits
        waiting = {readers.submit(process.communicate): process for process in started}
        try:
            for done in as_completed(waiting):
                if (code := waiting[done].returncode) > 0:
                    raise RuntimeError(f"a command ended with exit code {code}: {done.result()[1]}")
        except BaseException:  # after Ctrl-C too: readers wait for their commands
            for host in hosts:
                host.kill_all()
            raise
        return next(iter(waiting)).result()[0]


@contextmanager
def hosts_on(network: ShapedNetwork) -> Iterator[list[Host]]:
    """Hosts of a network, one core each, with the traffic of the other job."""
    cores = sorted(os.sched_getaffinity(0))
    with wired_hosts(network.wires, cores=[[cores[k % len(cores)]] for k in range(network.num_hosts)]) as hosts:
        if network.stream is None:
            yield hosts
            return
        with _streaming(hosts, network.stream):
            yield hosts


_RECEIVE = """\
import socket, sys
connection, _ = socket.create_server(("", int(sys.argv[1]))).accept()
while connection.recv(1 << 20):
    pass
"""
_SEND = """\
import socket, sys, time
address, port, bytes_per_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for _ in range(100):
    try:
        connection = socket.create_connection((address, port))
        break
    except OSError:
        time.sleep(0.1)
connection.setsockopt(socket.SOL_SOCKET, 47, bytes_per_s)  # SO_MAX_PACING_RATE of Linux
while True:
    connection.sendall(bytes(1 << 16))
"""


@contextmanager
def _streaming(hosts: Sequence[Host], stream: Stream) -> Iterator[None]:
    source, destination = hosts[stream.source], hosts[stream.destination]
    rate = str(int(stream.mbit_per_s * 1e6 / 8))
    commands = (
        destination.command([sys.executable, "-c", _RECEIVE, str(_STREAM_PORT)]),
        source.command([sys.executable, "-c", _SEND, destination.address, str(_STREAM_PORT), rate]),
    )
    started = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in started:
            terminate_child(process)
