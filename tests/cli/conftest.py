"""The command line as a user starts it: a process of its own, in an empty folder, with an empty cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60  # a hang is a failure; nothing here is about speed

Simplan = Callable[..., "subprocess.CompletedProcess[str]"]

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
def simplan(tmp_path: Path, environment: dict[str, str]) -> Simplan:
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


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SCENARIO)
    return file
