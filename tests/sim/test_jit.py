"""Compilation of the simulator: who waits for it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_only_the_first_process_is_told_to_wait(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text("def twice(x):\n    return 2 * x\n\ndef thrice(x):\n    return 3 * x\n")
    code = "from simplan.jit import jit; import loops; print(jit(loops.twice)(1) + jit(loops.thrice)(1))"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    runs = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
        for _ in range(2)
    ]
    assert [run.stdout for run in runs] == ["5\n", "5\n"]
    assert [run.stderr for run in runs] == ["compiling the simulator, once per installation (5 to 20 s)\n", ""]
