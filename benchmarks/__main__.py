"""Command ``python -m benchmarks [NAME ...]``: run all or the named benchmarks, and print each result immediately.

A name selects all benchmarks that begin with it: ``dashboard`` selects ``dashboard-slider`` and so on.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.accuracy import accuracy
from benchmarks.calculon_speed import calculon_speed
from benchmarks.closed_forms import closed_forms
from benchmarks.cold_start import cold_start
from benchmarks.compiled_speed import compiled_speed
from benchmarks.dashboard import DASHBOARD
from benchmarks.engine_speed import engine_speed
from benchmarks.executor_speed import executor_speed
from benchmarks.large_plan import large_plan
from benchmarks.predict_speed import predict_speed
from benchmarks.random_jobs import random_jobs
from benchmarks.search_speed import search_speed
from benchmarks.shaped_hosts import shaped_hosts
from benchmarks.table import HEADER, BenchmarkRow, to_markdown
from benchmarks.transformers_models import transformers_models
from benchmarks.whole_run_speed import whole_run_speed
from simplan.cli.terminal.processes import ending_signals_raise

_ALL: dict[str, Callable[[], Iterable[BenchmarkRow]]] = {
    "closed-forms": closed_forms,
    "engine-speed": engine_speed,
    "compiled-speed": compiled_speed,
    "executor-speed": executor_speed,
    "predict-speed": predict_speed,
    "calculon-speed": calculon_speed,
    "random-jobs": random_jobs,
    "search-speed": search_speed,
    "large-plan": large_plan,
    "cold-start": cold_start,
    "accuracy": accuracy,
    "shaped-hosts": shaped_hosts,
    "transformers-models": transformers_models,
    "whole-run-speed": whole_run_speed,
    **DASHBOARD,
}
_RESULTS = Path(__file__).with_name("RESULTS.md")


def main(names: list[str]) -> int:
    """Run the benchmarks; only a full run is stored."""
    unknown = [name for name in names if not any(known.startswith(name) for known in _ALL)]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(_ALL)}", file=sys.stderr)
        return 2
    rows = []
    print(HEADER, flush=True)
    for known, benchmark in _ALL.items():
        if not names or known.startswith(tuple(names)):
            for row in benchmark():
                print(row.to_markdown(), flush=True)
                rows.append(row)
    if not names:
        _RESULTS.write_text(f"# Results of `make bench`\n\n{_machine()}\n\n{to_markdown(rows)}\n")
    return 0 if all(row.ok for row in rows if row.goal) else 1


def _machine() -> str:
    from executor.profiling.results import environment

    facts = environment(2, cuda=False)
    return (
        f"{datetime.now(UTC).date()}, {facts['device']}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}, torch {facts['torch']}. "
        "Times are of this machine on that day; ratios are of two things measured in turn in one run."
    )


if __name__ == "__main__":
    with ending_signals_raise():  # so that started servers and ranks end too
        sys.exit(main(sys.argv[1:]))
