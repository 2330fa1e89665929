"""What an interrupted calibration leaves behind, and how the next one goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from simplan.cli import calibrations
from simplan.cli.calibrations import CalibrationTarget, ensure, measure, requests_for
from simplan.cost.calibration.format import Calibration, CalibrationRequest
from simplan.cost.calibration.store import load
from simplan.io import read_model, write_model
from simplan.model.layer import CollectiveKind
from simplan.scenario import load_scenario
from simplan.scenario.text import parse_scenario
from tests.cli.calls import Simplan, refused
from tests.cost.test_calibrated import CALIBRATION
from tests.cost.test_nccl_tests import HEADER, TABLE, ranks_text, row


@pytest.mark.parametrize(("load", "is_busy"), [(2.0, False), (2.1, True)])
def test_a_calibration_says_that_the_machine_is_busy(
    load: float,
    is_busy: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibrations, "run_executor", lambda args, on_event: write_model(args[3], CALIBRATION))
    monkeypatch.setattr(calibrations, "num_cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    measure(requests_for([], 2, 10.0, CalibrationTarget("cpu")), tmp_path / "calibration.json")
    assert ("note: this machine has been busy" in capsys.readouterr().err) == is_busy


def test_measured_values_are_kept_and_only_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CalibrationRequest] = []
    first = CALIBRATION.model_copy(update={"communication": (), "pending": ("links",)})
    second = CALIBRATION.model_copy(update={"layers": ()})
    answers: list[tuple[Calibration, bool]] = [(first, True), (second, False)]

    def run(args: list[str], on_event: Callable[[Any], None]) -> None:
        asked.append(read_model(args[1], CalibrationRequest))
        calibration, interrupted = answers.pop(0)
        write_model(args[3], calibration)
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(calibrations, "run_executor", run)
    file = tmp_path / "calibration.json"
    requests = requests_for([], 2, 10.0, CalibrationTarget("cpu"))
    with pytest.raises(KeyboardInterrupt):
        measure(requests, file)
    kept = load(file)
    assert kept is not None
    assert (kept.layers, kept.pending) == (CALIBRATION.layers, ("links",))
    assert measure(requests, file) == CALIBRATION
    assert load(file) == CALIBRATION
    assert [request.pending for request in asked] == [(), ("links",)]


def test_without_a_scenario_all_that_prices_any_model_is_asked_for() -> None:
    (request,) = requests_for([], 4, 240.0, CalibrationTarget("cuda", ("fp32", "bf16")))
    assert (request.num_ranks, request.device, request.grid) == (4, "cuda", ("fp32", "bf16"))
    assert set(request.communication) == set(CollectiveKind)
    assert request.overlap
    (request,) = requests_for([], None, 240.0, CalibrationTarget("cpu"))
    assert request.grid == ("fp32",)


def test_a_server_next_to_the_only_worker_of_a_node_is_sent_to() -> None:
    """Two nodes time sends between them; inside of a node, a worker and a server are two processes."""
    document = {
        "model": {"preset": "gpt2-124m"},
        "cluster": {"preset": "this-machine", "num_devices": 2, "num_nodes": 2, "inter_link_gbit_per_device": 1},
        "training": {"global_batch_size": 2, "precision": "fp32"},
        "plan": {"dp_replicate": 2, "replication": {"kind": "parameter_server", "staleness": 1}},
    }
    requests = requests_for([parse_scenario(json.dumps(document))], None, 10.0)
    asked = {request.num_ranks: (len(request.shapes), request.communication) for request in requests}
    assert asked == {1: (1, (CollectiveKind.SEND,)), 2: (0, (CollectiveKind.SEND,))}


@pytest.mark.parametrize(
    ("age", "slower", "asked", "said"),
    [
        (timedelta(days=300), 1.5, 1, ""),
        (timedelta(days=300), 3.0, 2, "computes 3.00 times slower than when it was calibrated"),
        (timedelta(0), 3.0, 0, ""),
    ],
    ids=["scaled", "taken anew", "believed"],
)
def test_an_old_calibration_is_compared_with_the_machine_of_now(
    age: timedelta,
    slower: float,
    asked: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests: list[CalibrationRequest] = []
    timing = CALIBRATION.layers[0].model_copy(update={"reference_s": 0.001})
    old = CALIBRATION.model_copy(update={"layers": (timing,), "created": (datetime.now(UTC) - age).isoformat()})
    new = old.model_copy(update={"reference_s": 0.001 * slower, "created": datetime.now(UTC).isoformat()})

    def run(args: list[str], on_event: Callable[[Any], None]) -> None:
        requests.append(read_model(args[1], CalibrationRequest))
        write_model(args[3], new)

    monkeypatch.setattr(calibrations, "run_executor", run)
    monkeypatch.setattr(calibrations, "covers", lambda calibration, scenario: True)
    file, scenario_file = tmp_path / "calibration.json", tmp_path / "s.yaml"
    write_model(file, old)
    scenario_file.write_text(
        "model: {family: gpt, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 96,"
        " seq_len: 32}\ncluster: {preset: this-machine, num_devices: 2}\n"
        "training: {global_batch_size: 4, precision: fp32}\nplan: {dp_replicate: 2}\n"
    )
    calibration = ensure([load_scenario(scenario_file)], file)
    assert calibration is not None
    assert len(requests) == asked
    assert calibration.pace == (1.5 if slower == 1.5 else None)
    assert said in capsys.readouterr().err
    assert load(file) == (new if asked == 2 else old), "prices are scaled for this run only"


def test_output_of_nccl_tests_becomes_a_calibration(tmp_path: Path, simplan: Simplan) -> None:
    """A log becomes a calibration, ``show links`` compares it, and ``predict`` uses it."""
    log, file = tmp_path / "log.txt", tmp_path / "h100.json"
    log.write_text(HEADER + ranks_text(16, 2) + TABLE + row(2**20, 90) + row(2**30, 8e3), encoding="utf-8")
    made = simplan("calibrate", "--nccl-tests", str(log), "--calibration", str(file))
    assert made.returncode == 0, made.stderr
    assert "holds 2 timings of collectives" in made.stdout
    shown = simplan("show", "links", "--calibration", str(file))
    assert shown.stdout.splitlines()[1].split()[:3] == ["all_reduce", "16", "2"]
    assert "links of dgx-h100" in shown.stdout
    refused(simplan("show", "models", "--calibration", str(file)), "simplan show links --calibration")
    both = simplan("calibrate", "--nccl-tests", str(log), "--ranks", "4", "--calibration", str(file))
    refused(both, "--nccl-tests", "instead of measuring")
    log.write_text(log.read_text().replace("H100 80GB HBM3", "A100-SXM4-40GB"), encoding="utf-8")
    again = simplan("calibrate", "--nccl-tests", str(log), "--calibration", str(file))
    refused(again, "was measured on NVIDIA H100 80GB HBM3", "give --calibration another file")
