"""Command ``python -m benchmarks.losses``: run all ways, and write docs/reference/losses.json, .svg and .md."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime

from benchmarks.losses.figure import figure
from benchmarks.losses.report import make_data, page
from benchmarks.losses.ways import SCENARIO, SEEDS, WAYS, LossRun
from executor.profiling.results import environment
from simplan.io import write_text
from simplan.runs.measurement import Measurement

_PAGE = SCENARIO.parents[2] / "docs" / "reference" / "losses.md"


def main() -> int:
    """Exit code: 0, once all ways have run."""
    runs: dict[str, list[Measurement]] = {way: [] for way in WAYS}
    for seed in SEEDS:  # the outer loop, so that a loaded machine slows all ways
        for way, measured in runs.items():
            run = LossRun(way, seed).measure()
            measured.append(run)
            print(f"seed {seed}, {way}: loss {run.losses[-1]:.3f}, step {1e3 * run.step_time_s:.0f} ms", flush=True)
    data = make_data(runs, _machine())
    write_text(_PAGE.with_suffix(".json"), json.dumps(data, separators=(",", ":")) + "\n")
    write_text(_PAGE.with_suffix(".svg"), figure(data))
    write_text(_PAGE, page(data))
    return 0


def _machine() -> str:
    facts = environment(2, cuda=False)
    load = f"load average {os.getloadavg()[2]:.1f} over the last 15 minutes"
    return (
        f"{datetime.now(UTC).date()}, {facts['device']}, {facts['num_cores']} cores, no GPU, torch {facts['torch']}, "
        f"Python {facts['python']}, {load}."
    )


if __name__ == "__main__":
    sys.exit(main())
