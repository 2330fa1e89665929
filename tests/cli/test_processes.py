"""An executor that is told to end: a stand-in of a few lines in its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from simplan.cli.terminal import processes

LEAVES = """\
import os, signal, sys, time

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
print('{"event": "note", "text": "ready"}', flush=True)
if sys.argv[1] == "alone":
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize("asked", ["by us", "alone"])
def test_an_executor_that_is_told_to_end_ends_the_command_with_143(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the signal came to the command line, or to the executor itself."""
    (tmp_path / "executor.py").write_text(LEAVES)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(processes, "require_executor", lambda: None)

    def heard(event: dict[str, Any]) -> None:
        if asked == "by us":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        processes.run_executor([asked], heard)
    assert caught.value.code == 143
