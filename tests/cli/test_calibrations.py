"""What an interrupted calibration leaves behind, and how the next one goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simplan.cli import calibrations
from simplan.cli.calibrations import Wanted, measure, requests_for
from simplan.cost.calibration import Calibration, CalibrationRequest
from simplan.cost.store import load
from simplan.io import read_model, write_model
from simplan.spec.layer import CollectiveKind
from tests.cost.test_calibrated import CALIBRATION


def test_what_was_measured_is_kept_and_only_the_rest_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CalibrationRequest] = []
    first = CALIBRATION.model_copy(update={"communication": (), "pending": ("links",)})
    second = CALIBRATION.model_copy(update={"layers": ()})
    answers: list[tuple[Calibration, bool]] = [(first, True), (second, False)]

    def run(args: list[str], on_event: Callable[[Any], None]) -> None:
        asked.append(read_model(args[1], CalibrationRequest))
        found, interrupted = answers.pop(0)
        write_model(args[3], found)
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(calibrations, "run_executor", run)
    file = tmp_path / "calibration.json"
    requests = requests_for([], 2, 10.0, Wanted("cpu"))
    with pytest.raises(KeyboardInterrupt):
        measure(requests, file)
    kept = load(file)
    assert kept is not None
    assert (kept.layers, kept.pending) == (CALIBRATION.layers, ("links",))
    assert measure(requests, file) == CALIBRATION
    assert load(file) == CALIBRATION
    assert [request.pending for request in asked] == [(), ("links",)]


def test_without_a_scenario_all_that_prices_any_model_is_asked_for() -> None:
    (request,) = requests_for([], 4, 240.0, Wanted("cuda", ("fp32", "bf16")))
    assert (request.num_ranks, request.device, request.grid) == (4, "cuda", ("fp32", "bf16"))
    assert set(request.communication) == set(CollectiveKind)
    assert request.overlap
    (request,) = requests_for([], None, 240.0, Wanted("cpu"))
    assert request.grid == ("fp32",)
