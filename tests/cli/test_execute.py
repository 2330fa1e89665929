"""What commands do before ranks start, while an executor runs (a stand-in of a few lines), and after it ended."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import simplan.cli.execute as execute_module
from simplan.cli.execute import (
    RunOptions,
    check_before_calibrating,
    execute,
    refuse_what_is_only_predicted,
    run_spec_of_scenario,
)
from simplan.cli.terminal import processes
from simplan.errors import NotModelledError, RunError
from simplan.io import read_model, write_model
from simplan.program.lowering.lower import Lowerer
from simplan.runs.measurement import Measurement
from simplan.runs.run_spec import RunSpec
from simplan.scenario import parse_scenario
from simplan.validate.compare import compare
from tests.support.problems import refuses

SCENARIO = """
name: once
model: {preset: gpt2-124m}
cluster: {preset: dgx-h100, num_devices: 2}
training: {global_batch_size: 8}
plan: {pp: 2, schedule: 1f1b}
"""


@pytest.mark.parametrize("field", ["background", "jitter"])
def test_a_run_refuses_what_is_only_predicted(field: str) -> None:
    values = {"background": "[{from: node0, to: node1, gbit: 1}]", "jitter": "{compute_relative_std: 0.1}"}
    cluster = f"num_nodes: 2, topology: one-switch, {field}: {values[field]}"
    text = SCENARIO.replace("num_devices: 2", cluster).replace("pp: 2", "pp: 2, dp_replicate: 8")
    with refuses(f"cluster.{field}", rule="predicted", fix="remove it", kind=NotModelledError):
        check_before_calibrating(parse_scenario(text), RunOptions())


def test_only_runs_have_slow_and_late_ranks() -> None:
    text = SCENARIO.replace("num_devices: 2", "num_devices: 2, stragglers: [{rank: 1, slowdown: 2}]")
    text = text.replace("pp: 2, schedule: 1f1b", "dp_replicate: 2").replace("size: 8", "size: 8, backup_workers: 1")
    scenario = parse_scenario(text)
    check_before_calibrating(scenario, RunOptions())
    with pytest.raises(NotModelledError) as caught:
        refuse_what_is_only_predicted(scenario, "a rehearsal")
    assert [problem.field for problem in caught.value.problems] == ["cluster.stragglers", "training.backup_workers"]
    job = run_spec_of_scenario(scenario, scenario.predict(None), RunOptions())
    assert job.slowdowns == (1.0, 2.0)


def test_a_plan_is_lowered_once_at_each_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lowered = []

    def counted(self: Lowerer, *args: Any) -> None:
        lowered.append(args)
        original(self, *args)

    def no_ranks(args: list[str], on_event: object) -> None:
        job = read_model(Path(args[1]), RunSpec)
        write_model(tmp_path / "measurement.json", Measurement(job=job, step_times_s=(1.0,)))

    original = Lowerer.__init__
    monkeypatch.setattr(Lowerer, "__init__", counted)
    monkeypatch.setattr(execute_module, "run_executor", no_ranks)
    outcome = execute(parse_scenario(SCENARIO), None, tmp_path, RunOptions())
    assert sorted(how.level for *_, how in lowered) == [1, 2]
    document = json.loads((tmp_path / "prediction.json").read_text())
    assert outcome.comparison == compare(document, outcome.measurement), "the files say the same"
    assert len(lowered) == 3, "nothing is at hand beside files"
    step_time_s = document["step_time_s"]
    events = json.loads((tmp_path / "predicted.trace.json").read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event.get("ph") == "X"]
    assert max(ends) == pytest.approx(step_time_s * 1e6, rel=1e-6), "the trace is of the prediction"


def test_a_killed_executor_is_reported_with_its_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of an older run in the folder are not its own."""
    (tmp_path / "rank0.steps.jsonl").write_text("of an older run")

    def killed(args: list[str], on_event: object) -> None:
        if args[0] == "run":
            raise processes.ExecutorKilledError("the executor was killed by signal 9")
        assert args[0] == "gather"
        assert not list(tmp_path.glob("*.steps.jsonl"))
        (tmp_path / "measurement.json").write_text(args[-1])

    monkeypatch.setattr(execute_module, "run_executor", killed)
    with pytest.raises(RunError, match=f"killed by signal 9\nwhat was measured until then is in {tmp_path}"):
        execute(parse_scenario(SCENARIO), None, tmp_path, RunOptions())
    assert (tmp_path / "measurement.json").read_text() == "the executor was killed by signal 9"


@pytest.mark.parametrize(
    ("error", "link"),
    [
        ("the disk is full", ""),
        ("rank 1 ran out of memory", "\nwhat to check: https://simplan.readthedocs.io/how-to/troubleshooting/"),
    ],
)
def test_a_run_without_a_measurement_promises_none(
    error: str, link: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(args: list[str], on_event: object) -> None:
        raise RunError(error)

    monkeypatch.setattr(execute_module, "run_executor", fails)
    with pytest.raises(RunError, match=f"^{error}{link}$"):
        execute(parse_scenario(SCENARIO), None, tmp_path, RunOptions())


LEAVES = """\
import os, signal, sys, time

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
print('{"event": "note", "text": "ready"}', flush=True)
if sys.argv[1] == "alone":
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize("asked", ["by us", "alone"])
def test_an_executor_that_is_told_to_end_ends_the_command_with_143(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the signal came to the command line, or to the executor itself."""
    (tmp_path / "executor.py").write_text(LEAVES)
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(processes, "require_executor", lambda: None)

    def heard(event: dict[str, Any]) -> None:
        if asked == "by us":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        processes.run_executor([asked], heard)
    assert caught.value.code == 143
