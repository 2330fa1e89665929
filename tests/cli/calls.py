"""Helpers that tests of the command line share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from subprocess import CompletedProcess

from tests.support.problems import says

Simplan = Callable[..., "CompletedProcess[str]"]
"""Runs a command with these arguments."""


def refused(result: CompletedProcess[str], *parts: str) -> None:
    """Exit code 2 and a sentence that says each of these, nothing else."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr.lower()
    for part in parts:
        assert says(result.stderr, part), result.stderr


def bash(command: str, environment: Mapping[str, str]) -> CompletedProcess[str]:
    """Output and exit code of a line of shell."""
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=False, timeout=600
    )


def here(scenario: str) -> str:
    """The scenario on this machine, which computes in fp32."""
    return scenario.replace("dgx-h100", "this-machine").replace("{global", "{precision: fp32, global")
