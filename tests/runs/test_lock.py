"""Two processes and one folder: the second is told who has it, and a killed one leaves it free."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.runs.lock import exclusive

HOLD = """
import sys
from pathlib import Path
from simplan.runs.lock import exclusive
with exclusive(Path(sys.argv[1]), "--output", is_file=sys.argv[2] == "file"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["folder", "file"])
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, bool]]:
    """Another process that holds a folder or a file, and what it holds."""
    path, is_file = tmp_path / "held.json", request.param == "file"
    command, pipe = [sys.executable, "-c", HOLD, str(path), request.param], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process, path, is_file
        process.kill()


def refusal(path: Path, *, is_file: bool) -> str:
    with pytest.raises(SpecError) as caught, exclusive(path, "--output", is_file=is_file):
        raise AssertionError("two processes hold it")
    return str(caught.value)


def test_the_second_is_told_who_has_it(holder: tuple[subprocess.Popen[str], Path, bool]) -> None:
    process, path, is_file = holder
    said = refusal(path, is_file=is_file)
    assert said.startswith(f"--output = {path}: is in use by process {process.pid} since ")
    assert said.endswith(f"; wait for it, or name another {'file' if is_file else 'folder'}")
    process.communicate("")
    with exclusive(path, "--output", is_file=is_file):
        pass
    assert not path.is_file()
    assert [entry.name for entry in path.parent.iterdir()] == ([] if is_file else [path.name])


def test_a_killed_holder_holds_nobody_up(holder: tuple[subprocess.Popen[str], Path, bool]) -> None:
    process, path, is_file = holder
    process.send_signal(signal.SIGKILL)
    process.wait()
    with exclusive(path, "--output", is_file=is_file):
        assert str(path) in refusal(path, is_file=is_file), "also within one process"


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    """A link at the lock's place would have another file truncated."""
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(SpecError, match="cannot be written"), exclusive(tmp_path, "--output"):
        pass
    assert precious.read_text() == "kept"
