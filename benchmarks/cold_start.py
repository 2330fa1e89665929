"""Cold start of ``simplan predict``, compared with the import of its dependencies."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.table import BenchmarkRow

_ROUNDS = 9
_SCENARIO = Path(__file__).resolve().parent.parent / "scenarios" / "1f1b.yaml"


def cold_start() -> list[BenchmarkRow]:
    """Rows for the wall time of full processes, measured in turn."""
    imports = [sys.executable, "-c", "import numpy, simpy, pydantic, yaml, typer"]
    predict = [sys.executable, "-m", "simplan", "predict", str(_SCENARIO)]
    _time(imports), _time(predict)  # compiles byte code
    base_s, predict_s = [], []
    for _ in range(_ROUNDS):
        base_s.append(_time(imports))
        predict_s.append(_time(predict))
    ratios = [ours / base for ours, base in zip(predict_s, base_s, strict=True)]
    ratio = statistics.median(ratios)
    return [
        BenchmarkRow(
            "`simplan predict` from cold over importing numpy, simpy, pydantic, yaml, typer",
            "at most 3",
            f"{ratio:.2f} (of {_ROUNDS} rounds {min(ratios):.2f} to {max(ratios):.2f}; "
            f"{statistics.median(predict_s):.2f} s over {statistics.median(base_s):.2f} s)",
            ratio <= 3.0,
        )
    ]


def _time(command: list[str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start_s
