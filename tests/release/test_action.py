"""The action, the hook and the container file, held to the commands that they name."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from simplan.cli.app import app
from tests.release.steps import ROOT, ActionResult, run_action, sample_repository


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    sample_repository(tmp_path / "repository")
    return tmp_path / "repository"


def checked(repository: Path, **inputs: str) -> ActionResult:
    """The action without its installation, which `make release-check` runs, too."""
    temporary = repository.parent / "temporary"
    command = temporary / "simplan" / "bin" / "simplan"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m simplan "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_action(repository, temporary, environment, skip=("Install simplan",), **inputs)


@pytest.mark.parametrize(
    ("paths", "code", "cells"),
    [
        ("plans", 0, ["good", "small"]),
        ("plans/good.yaml\nslow\n", 1, ["good", "late"]),
        ("slow\nwrong/five.yaml", 2, ["late", "five"]),
    ],
)
def test_action_has_the_exit_code_of_check_and_a_summary(
    repository: Path, paths: str, code: int, cells: list[str]
) -> None:
    """Paths are one per line, may have spaces, and all of them are in the table, also where one is wrong."""
    done = checked(repository, paths=paths)
    assert (done.exit_code, done.outputs["exit-code"]) == (code, str(code)), done.log
    rows = [line for line in done.summary.splitlines() if line.startswith("|")]
    assert all(any(f"{cell}.yaml" in row for row in rows) for cell in cells), done.summary
    assert ("::error" in done.log) == (code > 0)


def test_action_writes_a_report_and_runs_no_text_of_an_input(repository: Path) -> None:
    done = checked(repository, paths="plans/$(touch stolen).yaml\n--help\nplans/good.yaml", junit="all tests.xml")
    assert done.exit_code == 2, done.log
    assert "good.yaml" in (repository / "all tests.xml").read_text()
    assert not (repository / "stolen").exists()


def test_hook_takes_scenarios_and_runs_a_command() -> None:
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    name, command = shlex.split(hook["entry"])
    assert (name, command in typer.main.get_command(app).commands) == ("simplan", True)  # type: ignore[attr-defined]
    for file, taken in (("plans/a.yaml", True), ("team/scenarios/b.yml", True), (".github/workflows/c.yml", False)):
        assert bool(re.search(hook["files"], file)) == taken


def test_container_runs_the_dashboard_as_a_user() -> None:
    """Without root, on the port that it exposes, with options that the command has; its sources are all there."""
    text = (ROOT / "Dockerfile").read_text()
    dashboard = typer.main.get_command(app).commands["dashboard"]  # type: ignore[attr-defined]
    default = {option: param.default for param in dashboard.params for option in (*param.opts, *param.secondary_opts)}
    name, *options = yaml.safe_load(text.rpartition("\nCMD ")[2])
    assert name == "dashboard"
    assert {option for option in options if option.startswith("-")} <= default.keys()
    port = str(default["--port"])
    assert re.findall(r"^EXPOSE (\d+)$", text, re.MULTILINE) == [port]
    assert f"127.0.0.1:{port}/_stcore/health" in text
    assert text.index("\nUSER simplan") < text.index("\nENTRYPOINT")
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
