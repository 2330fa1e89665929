"""The same program on the files of an earlier commit, in the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["BEFORE", "HERE", "checkout", "run_in"]

BEFORE = "0cd7f5c"  # the last commit before Programs were arrays
HERE = Path(__file__).parent.parent


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "before")
        subprocess.run(["git", "worktree", "add", "--detach", path, commit], cwd=HERE, check=True, capture_output=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", path], cwd=HERE, check=True, capture_output=True)


def run_in(root: Path, program: str, *arguments: str) -> dict[str, Any]:
    """What a program prints, as JSON, with the packages of a folder."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
