"""What ``simplan run`` makes before its ranks start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import simplan.cli.execute as execute_module
from simplan.cli.execute import RunOptions, execute
from simplan.errors import RunError
from simplan.program.lower import Lowerer
from simplan.scenario import parse_scenario

SCENARIO = """
name: once
model: {preset: gpt2-124m}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 8}
plan: {pp: 2, schedule: 1f1b}
"""


def test_a_plan_is_lowered_once_at_each_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lowered = []

    def counted(self: Lowerer, *args: Any) -> None:
        lowered.append(args)
        original(self, *args)

    def fails(*args: object) -> None:
        raise RunError("no ranks here")

    original = Lowerer.__init__
    monkeypatch.setattr(Lowerer, "__init__", counted)
    monkeypatch.setattr(execute_module, "run_executor", fails)
    with pytest.raises(RunError, match="no ranks here"):
        execute(parse_scenario(SCENARIO), None, tmp_path, RunOptions())
    assert sorted(how.level for *_, how in lowered) == [1, 2]
    step_time_s = json.loads((tmp_path / "prediction.json").read_text())["step_time_s"]
    events = json.loads((tmp_path / "predicted.trace.json").read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event.get("ph") == "X"]
    assert max(ends) == pytest.approx(step_time_s * 1e6, rel=1e-6), "the trace is of the prediction"
