"""Compilation of the simulator: its cache, and who waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(folder / "cache")}
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)


def test_only_the_first_process_is_told_to_wait(tmp_path: Path) -> None:
    """Functions that are called are announced once; one that no process calls is never compiled nor announced."""
    functions = (
        f"def {name}(x):\n    return {number} * x\n" for number, name in ((2, "twice"), (3, "thrice"), (4, "no"))
    )
    (tmp_path / "loops.py").write_text("\n".join(functions))
    code = "from simplan.jit import jit; import loops; jit(loops.no); print(jit(loops.twice)(1) + jit(loops.thrice)(1))"
    runs = [run_in(tmp_path, code) for _ in range(2)]
    assert [run.stdout for run in runs] == ["5\n", "5\n"]
    assert [run.stderr for run in runs] == ["compiling the simulator, once per installation (5 to 20 s)\n", ""]


def test_changes_in_imported_files_reach_cached_code(tmp_path: Path) -> None:
    """A constant of one file, in a function of a second one, that a third one calls."""
    start, end = "from simplan.jit import jit\n", "\n@jit\ndef {}(x):\n    return {}\n"
    (tmp_path / "inner.py").write_text(start + "from constants import FACTOR" + end.format("scaled", "FACTOR * x"))
    (tmp_path / "outer.py").write_text(start + "from inner import scaled" + end.format("more", "scaled(x) + 1"))
    outputs = []
    for factor in (2, 30, 30):
        (tmp_path / "constants.py").write_text(f"FACTOR = {factor}\n")
        code = "import outer; print(outer.more(1), sum(outer.more.stats.cache_hits.values()))"
        outputs.append(run_in(tmp_path, code).stdout.split())
    assert outputs == [["3", "0"], ["31", "0"], ["31", "1"]]


def test_cached_code_of_a_renamed_class_is_outdated(tmp_path: Path) -> None:
    """Its types are pickled by name, and numba unpickles them before it compares anything."""
    code = """
import pickle
from pathlib import Path
from simplan.jit import jit
import loops
compiled = jit(loops.twice)
index = compiled._cache._cache_file
Path(index._index_path).parent.mkdir(parents=True, exist_ok=True)
Path(index._index_path).write_bytes(pickle.dumps(index._version) + b"csimplan.errors\\nRenamed\\n.")
print(compiled(1))
"""
    (tmp_path / "loops.py").write_text("def twice(x):\n    return 2 * x\n")
    assert run_in(tmp_path, code).stdout == "2\n"
