"""``python -m benchmarks.shaped_hosts HOSTS MBIT``: predicted beside measured where the network is what counts.

Hosts are network namespaces of this machine with links shaped to MBIT (``tests/hosts.py``; root only), each with one
rank on one core. The models are small, so that a step is mostly communication. Every plan is run by ``simplan run`` on
every host, as a user would, after a calibration of one core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.table import Row, to_markdown
from tests.hosts import Host, hosts, unavailable

_ROOT = Path(__file__).resolve().parent.parent
_PORT = 29433
_GOAL = 0.08
_WIDE = "{family: gpt, num_hidden_layers: 4, hidden_size: 256, num_attention_heads: 4, vocab_size: 1024, seq_len: 32}"
_LONG = "{family: gpt, num_hidden_layers: 4, hidden_size: 128, num_attention_heads: 2, vocab_size: 128, seq_len: 64}"


def scenarios(num_hosts: int, mbit: float) -> dict[str, str]:
    """Scenario files by name: many weights and few tokens for data parallelism, the reverse for a pipeline."""
    cluster = (
        f"{{preset: this-machine, num_devices: {num_hosts}, num_nodes: {num_hosts}, "
        f"inter_link_gbit_per_device: {mbit / 1000}}}"
    )
    plans = {
        "DDP": (_WIDE, 2 * num_hosts, f"{{dp_replicate: {num_hosts}, microbatch_size: 2}}"),
        "FSDP": (_WIDE, 2 * num_hosts, f"{{dp_shard: {num_hosts}, microbatch_size: 2}}"),
        "1F1B": (_LONG, 8 * 16, f"{{pp: {num_hosts}, schedule: 1f1b, microbatch_size: 16}}"),
    }
    return {
        name: f"name: {name}\nmodel: {model}\ncluster: {cluster}\n"
        f"training: {{global_batch_size: {batch}, precision: fp32}}\nplan: {plan}\n"
        for name, (model, batch, plan) in plans.items()
    }


def shaped_hosts(num_hosts: int, mbit: float) -> list[Row]:
    """A row for every plan."""
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="simplan-hosts-") as name,
        hosts(num_hosts, mbit, cores=[[cores[k % len(cores)]] for k in range(num_hosts)]) as made,
    ):
        folder = Path(name)
        files = {}
        for plan, text in scenarios(num_hosts, mbit).items():
            files[plan] = folder / f"{plan}.yaml"
            files[plan].write_text(text)
        calibrate = ["calibrate", *map(str, files.values()), "--budget", "15", "--calibration", str(folder / "c.json")]
        _end(_simplan(made[0], folder, calibrate))
        for plan, file in files.items():
            rows.append(_row(f"{plan}, {num_hosts} hosts, {mbit:g} Mbit/s", _run(made, folder, file)))
            print(rows[-1].what, rows[-1].found, file=sys.stderr, flush=True)  # minutes pass between them
    return rows


def _run(made: list[Host], folder: Path, file: Path) -> dict[str, Any]:
    started = []
    for k, host in enumerate(made):
        meeting = ["--nodes", str(len(made)), "--rdzv", f"{made[0].address}:{_PORT}"]
        args = ["run", str(file), "--json", "--steps", "6", "-o", str(folder / f"{file.stem}-{k}")]
        started.append(_simplan(host, folder, [*args, *meeting, "--calibration", str(folder / "c.json")]))
    outputs = [_end(process) for process in started]
    found: dict[str, Any] = json.loads(outputs[0])
    return found


def _simplan(host: Host, folder: Path, args: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.command([sys.executable, "-m", "simplan", *args]),
        cwd=folder,
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


def _row(what: str, document: dict[str, Any]) -> Row:
    predicted_s = document["prediction"]["step_time_s"]
    measured_s, times_s = document["measurement"]["step_time_s"], document["measurement"]["step_times_s"]
    error = predicted_s / measured_s - 1
    found = (
        f"predicted {predicted_s * 1e3:.0f} ms, measured {measured_s * 1e3:.0f} ms "
        f"({min(times_s) * 1e3:.0f} to {max(times_s) * 1e3:.0f}): {error:+.1%}"
    )
    return Row(what, f"within {_GOAL:.0%}", found, abs(error) <= _GOAL)


def main(args: list[str]) -> int:
    """Prints the table."""
    if len(args) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    reason = unavailable()
    if reason is not None:
        print(f"no hosts can be made here: {reason}", file=sys.stderr)
        return 2
    print(to_markdown(shaped_hosts(int(args[0]), float(args[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
