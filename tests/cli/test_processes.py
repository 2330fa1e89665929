"""An executor that is told to end and says how it has left: a stand-in of a few lines in its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from simplan.cli import processes

LEAVES = """\
import os, signal, sys, time

def leave(number, frame):
    sys.stderr.write("node 1 (b) has left the run\\n")
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
print('{"event": "note", "text": "ready"}', flush=True)
if sys.argv[1] == "alone":
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize("asked", ["by us", "alone"])
def test_a_node_that_has_left_says_so_and_ends_with_143(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the signal came to the command line, or to the executor itself."""
    (tmp_path / "executor.py").write_text(LEAVES)
    monkeypatch.setattr(processes, "_ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(processes, "require_executor", lambda: None)

    def heard(event: dict[str, Any]) -> None:
        if asked == "by us":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        processes.run_executor([asked], heard)
    assert caught.value.code == 143
    assert capsys.readouterr().err.splitlines()[-1] == "node 1 (b) has left the run"
