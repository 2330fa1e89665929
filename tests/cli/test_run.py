"""Running for real on two ranks: calibrate, run, compare, and what happens when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.calls import Simplan, refused
from tests.interrupts import heed_interrupts

ROOT = Path(__file__).resolve().parents[2]

SCENARIO = """\
name: tiny run
model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: this-machine, num_devices: 2}
training: {global_batch_size: 8, precision: fp32, data: markov}
plan: {pp: 2, schedule: 1f1b, microbatch_size: 2}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(SCENARIO)
    return file


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One calibration for all tests here: it is the slowest part."""
    folder = tmp_path_factory.mktemp("calibration")
    (folder / "tiny.yaml").write_text(SCENARIO)
    command = [sys.executable, "-m", "simplan", "calibrate", "tiny.yaml", "--budget", "1", "--calibration", "c.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "3 layers" in done.stdout
    return folder / "c.json"


def test_run_and_compare(simplan: Simplan, new_simplan: Simplan, tiny: Path, tmp_path: Path, calibration: Path) -> None:
    result = new_simplan("run", tiny, "--json", "--steps", "5", "--warmup", "1", "--calibration", calibration)
    assert result.returncode == 0, result.stderr
    assert "calibrating" not in result.stderr, "the calibration given is enough"
    document = json.loads(result.stdout)
    assert len(document["measurement"]["step_times_s"]) == 5
    assert [rank["rank"] for rank in document["measurement"]["ranks"]] == [0, 1]
    assert document["comparison"]["structure_equal"] is True
    assert document["prediction"]["table"][0][0] == "0F0"

    folder = tmp_path / "simplan-out" / "tiny-run"
    prediction, measurement = folder / "prediction.json", folder / "measurement.json"
    compared = simplan("compare", prediction, measurement, "--json")
    assert json.loads(compared.stdout) == document["comparison"]
    text = simplan("compare", prediction, measurement, "--baseline", measurement).stdout
    assert "step time" in text
    assert "above 1.242" in text, "the entropy rate of the data"
    assert f"1.00 times the samples and 1.00 times the seconds of {measurement}" in text
    assert [point["num_samples"] for point in document["measurement"]["loss_curve"]] == [8, 16, 24, 32, 40, 48]
    for name in ("predicted", "measured"):
        trace = json.loads((folder / f"{name}.trace.json").read_text())
        actions = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 0)]
        computed = [name for name in actions if name[:2] in ("1F", "1B")]
        assert computed == [f"1{kind}{microbatch}" for microbatch in range(4) for kind in "FB"]

    tiny.write_text(SCENARIO.replace("1f1b", "gpipe"))
    assert simplan("predict", tiny, "-o", tmp_path / "other.json", "--calibration", calibration).returncode == 0
    refused(simplan("compare", tmp_path / "other.json", measurement), "plan: differs")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_a_run_leaves_nothing_behind(
    number: int, code: int, tiny: Path, tmp_path: Path, calibration: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "simplan", "run", str(tiny), "--steps", "100000", "-o", str(tmp_path / "out")]
    command += ["--calibration", str(calibration)]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )
    steps = tmp_path / "out" / "rank0.steps.jsonl"
    deadline_s = time.monotonic() + 600
    while not (steps.exists() and steps.read_text().count("\n") >= 5):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=600)
    assert process.returncode == code
    assert "Traceback" not in said
    assert left_behind(tmp_path) == []
    measurement = json.loads((tmp_path / "out" / "measurement.json").read_text())
    assert measurement["complete"] is False
    assert measurement["step_times_s"], "what was measured is kept"


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    names = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                names.append(line)
    return names
