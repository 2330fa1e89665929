"""Command ``python -m benchmarks.losses``: run all ways, and write docs/reference/losses.json, .svg and .md.

Runs in losses.json are kept if they are of this machine and of the same settings, so a new way runs alone. Without the
file, all ways run. The files are written after every run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import product
from typing import Any

from benchmarks.losses.figure import figure
from benchmarks.losses.report import make_data, page, run_data
from benchmarks.losses.ways import NUM_STEPS, SCENARIO, SEEDS, WAYS, LossRun
from executor.profiling.results import environment
from simplan import load_scenario
from simplan.io import write_text

_PAGE = SCENARIO.parents[2] / "docs" / "reference" / "losses.md"


def main() -> int:
    """Exit code: 0, once all ways have run."""
    runs = dict(_kept())
    for seed, way in product(SEEDS, WAYS):  # seeds are the outer loop, so that a loaded machine slows all ways
        if (way, seed) not in runs:
            asked = LossRun(way, seed)
            run = run_data(asked.measure(), asked.prediction(), {**WAYS[way], "num_steps": NUM_STEPS})
            runs[way, seed] = run
            print(f"seed {seed}, {way}: loss {run['losses'][-1]:.3f}", flush=True)
            _write(runs)
    _write(runs)
    return 0


def _write(runs: Mapping[tuple[str, int], dict[str, Any]]) -> None:
    by_way = {way: [runs[way, seed] for seed in SEEDS if (way, seed) in runs] for way in WAYS}
    by_way = {way: of_way for way, of_way in by_way.items() if of_way}
    load = f"load average {os.getloadavg()[2]:.1f} over the last 15 minutes"
    data = make_data(load_scenario(SCENARIO).job, by_way, f"{datetime.now(UTC).date()}, {_machine()}, {load}.")
    write_text(_PAGE.with_suffix(".json"), json.dumps(data, separators=(",", ":")) + "\n")
    write_text(_PAGE.with_suffix(".svg"), figure(data))
    write_text(_PAGE, page(data))


def _kept() -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Yields runs of the committed data that are not repeated, by way and seed."""
    file, job = _PAGE.with_suffix(".json"), load_scenario(SCENARIO).job
    if not file.exists():
        return
    data = json.loads(file.read_text())
    same = make_data(job, {}, data["machine"])
    if _machine() not in data["machine"] or any(data[key] != same[key] for key in ("model", "data")):
        return
    for way, runs in data["ways"].items():
        for run in runs:
            if way in WAYS and run["settings"] == {**WAYS[way], "num_steps": NUM_STEPS}:
                yield (way, run["seed"]), run


def _machine() -> str:
    facts = environment(2, cuda=False)
    return f"{facts['device']}, {facts['num_cores']} cores, no GPU, torch {facts['torch']}, Python {facts['python']}"


if __name__ == "__main__":
    sys.exit(main())
