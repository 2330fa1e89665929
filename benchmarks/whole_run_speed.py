"""Speed of the engines of whole runs: 90 days on 16,384 devices, 10,000 times, each measurement in a separate process.

``python -m benchmarks.whole_run_speed NAME`` runs one measurement and prints it as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from joblib.externals.loky import get_reusable_executor

from benchmarks.alone import alone, peak_bytes
from benchmarks.table import BenchmarkRow
from simplan.goodput.engines.simulate import one_run, simulate
from simplan.goodput.setup import CauseSetup, RunSetup, Size
from simplan.units import GIB

_RUNS, _ROUNDS, _COMPILED_RUNS = 10_000, 3, 50
_DAY_S, _STEP_S = 86_400, 20
_SETUP = RunSetup(
    num_steps=90 * _DAY_S // _STEP_S,
    sizes=(Size(num_nodes=2048, step_s=_STEP_S),),
    devices_per_node=8,
    checkpoint_every=1800 // _STEP_S,
    blocking_s=30.0,
    causes=(CauseSetup(name="device", units_per_node=8, mtbf_s=50_000 * 3600.0, repair_s=_DAY_S),),
    detection_s=60.0,
    restart_s=600.0,
    spares=64,
    repair_s=_DAY_S,
)


def whole_run_speed() -> list[BenchmarkRow]:
    """Rows for 10,000 runs, and for the compiled engine next to SimPy."""
    bulk, ratio = alone("benchmarks.whole_run_speed", "bulk"), alone("benchmarks.whole_run_speed", "ratio")
    ratios = [simpy_s / compiled_s for simpy_s, compiled_s in zip(ratio["simpy_s"], ratio["compiled_s"], strict=True)]
    return [
        BenchmarkRow(
            "10,000 runs of 90 days on 16,384 devices with their failures, 2 processes, with their start",
            "at most 30 s and 1 GiB",
            f"{bulk['seconds']:.0f} s, {bulk['peak_bytes'] / GIB:.2f} GiB in all processes; "
            f"{bulk['stops']:.0f} failures in {bulk['days']:.1f} days on average",
            bulk["seconds"] <= 30 and bulk["peak_bytes"] <= GIB,
        ),
        BenchmarkRow(
            "SimPy over compiled engine, such a run",
            "",
            f"{sorted(ratios)[_ROUNDS // 2]:.0f} (of {_ROUNDS} rounds {min(ratios):.0f} to {max(ratios):.0f}; "
            f"{min(ratio['simpy_s']):.2f} s over {1e3 * min(ratio['compiled_s']):.1f} ms)",
            ok=True,
        ),
    ]


def _bulk() -> dict[str, Any]:
    start_s = time.perf_counter()
    runs = simulate(_SETUP, num_runs=_RUNS, jobs=2)
    seconds = time.perf_counter() - start_s
    get_reusable_executor().shutdown(wait=True)  # the memory of children is known once they have ended
    workers_bytes = 2 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "seconds": seconds,
        "peak_bytes": peak_bytes() + workers_bytes,
        "stops": float(runs.interruptions[:, 0].mean()),
        "days": float(runs.time_s.mean() / _DAY_S),
    }


def _ratio() -> dict[str, Any]:
    simulate(_SETUP, num_runs=1)  # loads numba
    simpy_s, compiled_s = [], []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        one_run(_SETUP)
        simpy_s.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        simulate(_SETUP, num_runs=_COMPILED_RUNS)
        compiled_s.append((time.perf_counter() - start_s) / _COMPILED_RUNS)
    return {"simpy_s": simpy_s, "compiled_s": compiled_s}


if __name__ == "__main__":
    print(json.dumps({"bulk": _bulk, "ratio": _ratio}[sys.argv[1]]()))
