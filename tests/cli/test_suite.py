"""The suite on this machine's CPU: three scenarios, of which one cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simplan.cli import suite
from simplan.errors import SpecError
from tests.support.problems import refuses

TINY = """\
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: this-machine, num_devices: 1}
training: {global_batch_size: 4, precision: %s}
plan: {microbatch_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "plain-1.5b.yaml").write_text(TINY % "fp32")
    (made / "rehearse-plain-1.5b.yaml").write_text(TINY % "fp32")
    (made / "plain-1.6b.yaml").write_text(TINY % "fp32" + "software: megatron-core\n")
    return made


@pytest.mark.slow
def test_a_suite_reports_what_ran_and_what_failed_and_goes_on(
    environment: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    def simplan(*args: str | Path) -> str:
        command = [sys.executable, "-m", "simplan", *map(str, args)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600
        ).stdout

    calibration, out = tmp_path / "calibration.json", tmp_path / "out"
    simplan("calibrate", folder / "plain-1.5b.yaml", "--budget", "3", "--calibration", calibration)
    command = ("suite", folder, "-o", out, "--device", "cpu", "--steps", "3", "--json", "--calibration", calibration)
    cases = {case["name"]: case for case in json.loads(simplan(*command))["cases"]}
    assert list(cases) == ["plain-1.5b", "plain-1.6b", "rehearse-plain-1.5b"]
    assert "software = megatron-core" in cases["plain-1.6b"]["failure"]
    for name in ("plain-1.5b", "rehearse-plain-1.5b"):
        assert cases[name]["failure"] is None
        assert abs(cases[name]["error"]["memory"]) < 0.05
        assert cases[name]["measured_step_time_s"] > 0
    assert "| `plain-1.5b` |" in (out / "report.md").read_text()

    (folder / "plain-1.6b.yaml").unlink()
    again = json.loads(simplan(*command))["cases"]
    assert {case["name"]: case for case in again} == {k: v for k, v in cases.items() if k != "plain-1.6b"}


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "_environment", lambda: {"cuda": None})
    with refuses("--device", "cuda", rule="no CUDA device", fix="--device cpu"):
        suite.suite_command(
            [folder], output=tmp_path / "out", as_json=False, calibration_file=None, options=suite.SuiteOptions()
        )
    assert not (tmp_path / "out").exists()


def test_a_folder_without_scenarios_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="holds no scenario"):
        suite.suite_command(
            [tmp_path], output=tmp_path / "out", as_json=False, calibration_file=None, options=suite.SuiteOptions()
        )
