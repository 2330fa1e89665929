"""Command ``python -m benchmarks.network``: measure all cases on shaped hosts, and write the report.

Measurements are kept in ``build/netbench`` until all cases have one: an interrupted command resumes. The report is
written in any case.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.network.cases import NETWORKS, STEPS
from benchmarks.network.measure import Measurements
from benchmarks.network.report import make_report, summary
from simplan.cli.terminal.processes import ending_signals_raise
from tests.hosts import unavailable

_KEPT = Path(__file__).resolve().parents[2] / "build" / "netbench"
_RESULTS = Path(__file__).with_name("RESULTS.md")


def main() -> int:
    """Exit code: 0 if all goals are met, 1 if not, 2 if hosts cannot be made here."""
    reason = unavailable()
    if reason is not None:
        print(f"make netbench needs Linux, root and iproute2: {reason}", file=sys.stderr)
        return 2
    measurements = Measurements(_KEPT)
    try:
        for rate in sorted({network.mbit_per_s for network in NETWORKS}):
            measurements.calibrate(rate, STEPS)
        for network in NETWORKS:
            print(f"{network.words}: collectives", flush=True)
            measurements.time_collectives(network)
            for plan in measurements.run_steps(network, [plan for other, plan in STEPS if other is network]):
                print(f"{network.words}: {plan.words}", flush=True)
    finally:
        report = make_report(measurements, _machine())
        _RESULTS.write_text(report.to_markdown())
        _RESULTS.with_suffix(".json").write_text(json.dumps(report.to_json(), indent=1) + "\n")
        print(summary(report), flush=True)
    if not report.missing:
        shutil.rmtree(_KEPT)
    return 0 if report.meets_goals else 1


def _machine() -> str:
    from executor.profiling.results import environment

    facts, load = environment(2, cuda=False), os.getloadavg()[1]
    return (
        f"{datetime.now(UTC).date()}, {facts['device']}, {len(os.sched_getaffinity(0))} cores, torch {facts['torch']}, "
        f"load average {load:.1f} over five minutes at the end."
    )


if __name__ == "__main__":
    with ending_signals_raise():  # so that hosts are removed after Ctrl-C
        sys.exit(main())
