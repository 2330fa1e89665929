"""The dashboard as a process: what ends the command ends the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simplan.cli.app import app
from simplan.cli.dashboard import RUN_FLAG, _check_port
from tests.support.problems import refuses

pytest.importorskip("streamlit")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_the_server(number: signal.Signals, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "simplan", "dashboard", "--no-browser", "--port", str(port)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        while not _answers(port):
            assert process.poll() is None
            time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
    while _answers(port):  # pytest's timeout ends this
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("options", "host", "runs"),
    [
        ([], "localhost", "1"),
        (["--host", "127.0.0.1"], "127.0.0.1", "1"),
        (["--host", "0.0.0.0"], "0.0.0.0", "0"),
        (["--host", "0.0.0.0", "--allow-run"], "0.0.0.0", "1"),
    ],
)
def test_others_are_let_in_only_if_asked_and_start_nothing_then(
    options: list[str], host: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server is started with: unless told otherwise it serves this machine only."""
    started: list[tuple[list[str], dict[str, str]]] = []

    class Child:
        def __init__(self, command: list[str], *, env: dict[str, str], stdin: int) -> None:
            started.append((command, env))

        def wait(self, timeout: float | None = None) -> int:
            return 0

        def terminate(self) -> None:
            pass

    monkeypatch.setattr("simplan.cli.dashboard.subprocess.Popen", Child)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = CliRunner().invoke(app, ["dashboard", "--no-browser", "--port", str(port), *options])
    assert result.exit_code == 0, result.output
    [(command, environment)] = started
    assert command[command.index("--host") + 1] == host
    assert environment[RUN_FLAG] == runs


def test_a_host_that_no_name_can_be_is_refused() -> None:
    """A label of a name has at most 63 letters; the error was one of the encoding."""
    with refuses("--port", "8501", rule="cannot be used"):
        _check_port("x" * 64, 8501)
