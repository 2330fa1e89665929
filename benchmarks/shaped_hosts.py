"""Prediction errors on communication-bound steps: hosts joined by bandwidth-shaped links.

Hosts are network namespaces of this machine with links shaped to a bandwidth (``tests/hosts.py``; root only), each with
one rank on one core. Models are small, so that most of a step is communication. As a user would, the benchmark times
one core with ``simplan calibrate``, each network with ``simplan calibrate --nodes``, and runs each plan with ``simplan
run`` on all hosts. Measurements are cached in ``build`` until the table is complete, so an interrupted command resumes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from benchmarks.table import BenchmarkRow
from simplan.validate.compare import AT_THIS_SPEED
from tests.hosts import Host, hosts, unavailable

_ROOT = Path(__file__).resolve().parent.parent
_KEPT = _ROOT / "build" / "shaped-hosts"
_PORT = 29433
_GOAL = 0.08
_BOUND = 0.5  # fraction of a step from which it counts as communication-bound
_NUM_HOSTS = (2, 4)
_MBIT_PER_S = (100, 400, 1600)
_WIDE = "{family: gpt, num_hidden_layers: 2, hidden_size: 192, num_attention_heads: 4, vocab_size: 512, seq_len: 32}"
_LONG = "{{family: gpt, num_hidden_layers: {}, hidden_size: 64, num_attention_heads: 2, vocab_size: 64, seq_len: 64}}"


@dataclass(frozen=True, slots=True)
class _Cell:
    """One configuration of the table.

    Attributes:
        num_hosts: Hosts, with one rank each.
        mbit_per_s: Bandwidth of each link, Mbit/s.
        plan: Name of the plan.
    """

    num_hosts: int
    mbit_per_s: int
    plan: str

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.plan}, {self.num_hosts} hosts, {self.mbit_per_s} Mbit/s"

    @property
    def file(self) -> Path:
        """Cache file for the output of ``simplan run --json``."""
        return _KEPT / f"{self.plan}-{self.num_hosts}-{self.mbit_per_s}.json"

    @property
    def scenario(self) -> str:
        """Scenario text: many weights and few tokens for data parallelism, the reverse for a pipeline."""
        n = self.num_hosts
        model, batch, plan = {
            "DDP": (_WIDE, 2 * n, f"{{dp_replicate: {n}, microbatch_size: 2}}"),
            "FSDP": (_WIDE, 2 * n, f"{{dp_shard: {n}, microbatch_size: 2}}"),
            "1F1B": (_LONG.format(n), 8 * 16, f"{{pp: {n}, schedule: 1f1b, microbatch_size: 16}}"),
        }[self.plan]
        cluster = f"{{preset: this-machine, num_devices: {n}, num_nodes: {n}, "
        cluster += f"inter_link_gbit_per_device: {self.mbit_per_s / 1000}}}"
        training = f"{{global_batch_size: {batch}, precision: fp32}}"
        return f"name: {self.plan}\nmodel: {model}\ncluster: {cluster}\ntraining: {training}\nplan: {plan}\n"


_CELLS = [_Cell(n, mbit, plan) for n, mbit, plan in product(_NUM_HOSTS, _MBIT_PER_S, ("DDP", "FSDP", "1F1B"))]


def shaped_hosts() -> Iterator[BenchmarkRow]:
    """One row per plan, number of hosts and bandwidth; a single row with the reason if hosts cannot be made."""
    reason = unavailable()
    if reason is not None:
        yield BenchmarkRow("shaped hosts", "", f"not run: {reason}", ok=True)
        return
    _KEPT.mkdir(parents=True, exist_ok=True)
    for (num_hosts, mbit_per_s), cells in groupby(_CELLS, lambda cell: (cell.num_hosts, cell.mbit_per_s)):
        yield from _on_one_network(num_hosts, mbit_per_s, list(cells))
    shutil.rmtree(_KEPT)


def _on_one_network(num_hosts: int, mbit_per_s: int, cells: list[_Cell]) -> Iterator[BenchmarkRow]:
    """Rows of the cells of one network; cells that are not cached are measured."""
    if all(cell.file.exists() for cell in cells):
        yield from map(_row, cells)
        return
    cores = sorted(os.sched_getaffinity(0))
    with hosts(num_hosts, mbit_per_s, cores=[[cores[k % len(cores)]] for k in range(num_hosts)]) as made:
        calibration = _calibration(made, mbit_per_s)
        for cell in cells:
            if not cell.file.exists():
                args = ["--json", "--steps", "5", "--warmup", "2", "--calibration", calibration]
                cell.file.write_text(_on_all(made, ["run", _scenario_file(cell), *args, "-o", _KEPT / cell.file.stem]))
            yield _row(cell)


def _calibration(made: list[Host], mbit_per_s: int) -> Path:
    """Calibrate one core and the network; return the file."""
    here = _KEPT / f"core-{len(made)}.json"
    if not here.exists():
        files = [_scenario_file(cell) for cell in _CELLS if cell.num_hosts == len(made) and cell.mbit_per_s == 100]
        _end(_simplan(made[0], ["calibrate", *files, "--budget", "20", "--calibration", here]))
    network = _KEPT / f"network-{len(made)}-{mbit_per_s}.json"
    if not network.exists():
        unfinished = network.with_suffix(".unfinished")
        shutil.copy(here, unfinished)
        _on_all(made, ["calibrate", "--ranks", "1", "--budget", "10", "--calibration", unfinished])
        unfinished.rename(network)
    return network


def _scenario_file(cell: _Cell) -> Path:
    file = cell.file.with_suffix(".yaml")
    file.write_text(cell.scenario)
    return file


def _on_all(made: list[Host], args: list[Any]) -> str:
    """Run a simplan command on every host; return the output of the first."""
    meeting = ["--nodes", len(made), "--rdzv", f"{made[0].address}:{_PORT}"]
    started = [_simplan(host, [*args, *meeting]) for host in made]
    printed = [_end(process) for process in started]
    return printed[0]


def _simplan(host: Host, args: list[Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.command([sys.executable, "-m", "simplan", *map(str, args)]),
        cwd=_KEPT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> str:
    out, messages = process.communicate()
    if process.returncode:
        raise SystemExit(f"simplan ended with exit code {process.returncode}: {messages}")
    return out


def _row(cell: _Cell) -> BenchmarkRow:
    """Row with the errors of a cell; only communication-bound steps have a goal.

    The goal applies to the prediction rescaled to the compute speed of the run: the network is under test, and the
    cores are shared. The other error is shown too.
    """
    document = json.loads(cell.file.read_text())
    measurement, comparison = document["measurement"], document["comparison"]
    measured_s, times_s = measurement["step_time_s"], measurement["step_times_s"]
    predicted_s = {row["name"]: row["predicted"] for row in comparison["rows"]}
    plain_s = predicted_s["step time"]
    likely_s = predicted_s.get(AT_THIS_SPEED, plain_s)
    moving = _moving(comparison["terms"], "measured_s") / measured_s
    error = likely_s / measured_s - 1
    error_text = (
        f"predicted {plain_s * 1e3:.0f} ms, {likely_s * 1e3:.0f} with computing as fast as in the run, measured "
        f"{measured_s * 1e3:.0f} ms ({min(times_s) * 1e3:.0f} to {max(times_s) * 1e3:.0f}): "
        f"{plain_s / measured_s - 1:+.1%}, {error:+.1%}; communication {moving:.0%}, "
        f"predicted {_moving(comparison['terms'], 'predicted_s') / _moving(comparison['terms'], 'measured_s') - 1:+.1%}"
    )
    bound = moving >= _BOUND
    return BenchmarkRow(cell.name, f"within {_GOAL:.0%}" if bound else "", error_text, abs(error) <= _GOAL or not bound)


def _moving(terms: list[dict[str, Any]], which: str) -> float:
    """Seconds of communication on the critical path."""
    return float(sum(term[which] for term in terms if term["share"] == "exposed_communication"))
