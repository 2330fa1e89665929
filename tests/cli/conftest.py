"""The command line as a user starts it: a process of its own, in an empty folder, with an empty cache.

Most tests fork it from a process that has imported simplan; what is about starting takes ``new_simplan``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.cli.calls import Simplan
from tests.forking import ForkServer

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600  # a hang is a failure; nothing here is about speed

SCENARIO = """\
name: small
model: {family: gpt, num_hidden_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 8}
plan: {pp: 2, schedule: gpipe}
expect:
  - {metric: num_microbatches, value: 8, why: batch size / microbatch size}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "SIMPLAN_"))}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


@pytest.fixture
def new_simplan(tmp_path: Path, environment: dict[str, str]) -> Simplan:
    """Runs a command in a new interpreter."""

    def call(*args: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "simplan", *map(str, args)]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
            env={**environment, **(env or {})},
            check=False,
        )

    return call


@cache
def server() -> ForkServer:
    """The one of this process."""
    return ForkServer("tests.cli.fork_server", {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"})


@pytest.fixture
def simplan(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Simplan:
    """Runs a command in a forked process."""
    said = tmp_path_factory.mktemp("said")

    def call(*args: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        request = {
            "args": [str(arg) for arg in args],
            "folder": str(tmp_path),
            "environment": {**environment, **(env or {})},
            "out": str(said / "out"),
            "err": str(said / "err"),
            "limit_s": LIMIT_S,
        }
        code = server().ask(request)
        assert code != -signal.SIGALRM, f"simplan {request['args']} hangs"
        return subprocess.CompletedProcess(args, code, (said / "out").read_text(), (said / "err").read_text())

    return call


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SCENARIO)
    return file
