"""Calibrates this machine: starts ranks that time layers, matmuls and links, and gathers a Calibration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from executor.launch import Beats, launch_ranks
from simplan.cost.calibration import Calibration, CalibrationRequest
from simplan.errors import RunError

__all__ = ["Progress", "calibrate"]

Progress = Callable[[int, int, str], None]
"""Called with per cent done, 100, and what is being timed."""

_PATIENCE_S = 120.0


def calibrate(request: CalibrationRequest, on_progress: Progress | None = None) -> Calibration:
    """Times what the request names on ``num_ranks`` ranks at once.

    Raises:
        RunError: A rank failed or hung; all are ended.
    """
    told = ""

    def on_poll(beats: Beats) -> None:
        nonlocal told
        if on_progress is None or not beats or beats[0] is None or beats[0].doing == told:
            return
        told = beats[0].doing
        on_progress(min(100, beats[0].step), 100, told)

    with tempfile.TemporaryDirectory(prefix="simplan-calibrate-") as folder:
        out_dir = Path(folder)
        request_file, result_file = out_dir / "request.json", out_dir / "calibration.json"
        request_file.write_text(request.model_dump_json())
        launch_ranks(
            "executor.calibrate_worker",
            [str(request_file), str(result_file)],
            num_ranks=request.num_ranks,
            out_dir=out_dir,
            timeout_s=_PATIENCE_S + request.budget_s,
            on_poll=on_poll,
        )
        if not result_file.exists():
            raise RunError("the ranks ended without a calibration")
        return Calibration.model_validate_json(result_file.read_bytes())
