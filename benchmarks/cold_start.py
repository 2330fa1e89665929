"""Cold start of ``simplan predict``: over the import of its dependencies, and in seconds of CPU of large plans."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import BenchmarkRow

_ROUNDS = 9
_SCENARIO = Path(__file__).resolve().parent.parent / "scenarios" / "1f1b.yaml"
_GOALS_S = {"1f1b": 1.0, "interleaved_1f1b, virtual_stages: 3": 1.5}
_LARGE = """
model: {{preset: gpt3-175b, vocab_size: 51200, tied_embeddings: false}}
cluster: {{preset: dgx-a100-80gb, num_devices: 1024}}
training: {{global_batch_size: 1536}}
software: megatron-core
plan: {{tp: 8, pp: 8, dp_replicate: 16, recompute: selective, schedule: {schedule}}}
"""


def cold_start() -> list[BenchmarkRow]:
    """Rows for full processes: wall time, measured in turn, and CPU time. Byte code is there, as after an install."""
    imports = [sys.executable, "-c", "import numpy, simpy, pydantic, yaml, typer"]
    predict = [sys.executable, "-m", "simplan", "predict", str(_SCENARIO)]
    _times(imports), _times(predict)  # compiles byte code
    base_s, predict_s = [], []
    for _ in range(_ROUNDS):
        base_s.append(_times(imports)[0])
        predict_s.append(_times(predict)[0])
    ratios = [ours / base for ours, base in zip(predict_s, base_s, strict=True)]
    ratio = statistics.median(ratios)
    over_imports = BenchmarkRow(
        "`simplan predict` from cold over importing numpy, simpy, pydantic, yaml, typer",
        "at most 3",
        f"{ratio:.2f} (of {_ROUNDS} rounds {min(ratios):.2f} to {max(ratios):.2f}; "
        f"{statistics.median(predict_s):.2f} s over {statistics.median(base_s):.2f} s)",
        ratio <= 3.0,
    )
    return [over_imports, *(_large(schedule, goal_s) for schedule, goal_s in _GOALS_S.items())]


def _large(schedule: str, goal_s: float) -> BenchmarkRow:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "large.yaml"
        file.write_text(_LARGE.format(schedule=schedule))
        cpu_s = [_times([sys.executable, "-m", "simplan", "predict", str(file)])[1] for _ in range(_ROUNDS)]
    middle_s = statistics.median(cpu_s)
    return BenchmarkRow(
        f"`simplan predict` from cold, gpt3-175b on 1,024 devices, {schedule}",
        f"at most {goal_s} s of CPU",
        f"{middle_s:.2f} s (of {_ROUNDS} {min(cpu_s):.2f} to {max(cpu_s):.2f})",
        middle_s <= goal_s,
    )


def _times(command: list[str]) -> tuple[float, float]:
    """Wall time and CPU time of a process, in seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start_s, before_s = time.perf_counter(), _children_s()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start_s, _children_s() - before_s


def _children_s() -> float:
    """CPU seconds of all ended child processes."""
    times = os.times()
    return times.children_user + times.children_system
