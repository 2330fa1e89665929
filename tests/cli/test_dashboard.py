"""``simplan dashboard``: what it starts, and what it refuses."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import streamlit_arguments
from simplan.cli import dashboard, main


def flags() -> dict[str, str]:
    command, script, *rest = streamlit_arguments("localhost", 8501, browser=False)
    assert command == "run"
    assert Path(script).is_file()
    pairs = (argument.removeprefix("--").split("=", 1) for argument in rest)
    return dict(pairs)


def test_it_serves_this_machine_alone() -> None:
    found = flags()
    assert found["server.address"] == "localhost"
    assert found["server.headless"] == "true"
    assert found["browser.gatherUsageStats"] == "false"
    assert Path(found["theme.base"]).is_file()
    assert int(found["server.maxUploadSize"]) <= 64


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.7", False)],
)
def test_who_can_reach_it(host: str, local: bool) -> None:
    assert dashboard.is_local(host) is local


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", "--host", "127.0.0.1", "--port", str(port), "--no-browser"]) == 2
    assert f"--port = {port}: cannot be used on 127.0.0.1" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None if name == "streamlit" else object())
    assert main(["dashboard", "--no-browser"]) == 2
    assert 'needs streamlit, which is not installed here; install it with: pip install "simplan[app]"' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("host", "allow", "told"), [("localhost", False, "1"), ("0.0.0.0", False, "0"), ("0.0.0.0", True, "1")]
)
def test_runs_are_allowed_here_or_when_asked(
    host: str, allow: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Child:
        def __init__(self, command: list[str], **options: Any) -> None:
            seen.update(options["env"])

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Child)
    monkeypatch.setattr(dashboard, "_check_port", lambda host, port: None)
    assert main(["dashboard", "--host", host, "--no-browser", *(["--allow-run"] if allow else [])]) == 0
    assert seen[dashboard.RUN_FLAG] == told
