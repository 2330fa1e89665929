"""The gate on accuracy: what is worse than the committed figures by more than is allowed, by name."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.accuracy_gate import COMMITTED, differences


def committed() -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(COMMITTED.read_text())
    return figures


def test_regressions_are_named() -> None:
    now = committed()
    assert differences(committed(), now) == []
    part = min(now["partitions"])
    now["overall"]["mean_error"] += 0.6
    now["partitions"][part]["mean_error"] += 2.1
    lost = now["runs"].pop(0)
    first, second, third = differences(committed(), now)
    assert first.startswith("all runs: mean error ")
    assert second.startswith(f"{part}: mean error ")
    assert third == f"{lost}: is not predicted any more"


def test_smaller_changes_pass() -> None:
    now = committed()
    now["overall"]["mean_error"] += 0.4
    for figures in now["partitions"].values():
        figures["mean_error"] += 1.9
    assert differences(committed(), now) == []
