"""Progress where stderr is no terminal."""

from __future__ import annotations

import pytest

from simplan.cli.terminal.progress import ProgressLine


def test_a_pipe_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now_s = iter([0.0, 4.0, 11.0, 11.0, 15.0, 22.0, 22.0])
    monkeypatch.setattr("simplan.cli.terminal.progress.time.monotonic", lambda: next(now_s))
    with ProgressLine("searching", quarters=False) as line:
        for part in range(4):
            line.update(part, 4, f"part {part}")
    assert capsys.readouterr() == ("", "searching: part 1\nsearching: part 3\n")
