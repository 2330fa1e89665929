"""How fast the executor is beside the same training written by hand in plain PyTorch, and what recording takes."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.executor_ranks import CASES
from benchmarks.table import Row
from executor.launch import launch_ranks

__all__ = ["executor_speed"]

_GOALS = {"one device": 0.98}
_GOAL = 0.95
_MOST_RECORDING = 0.02
_TIMEOUT_S = 300.0


def executor_speed() -> list[Row]:
    """Ratios of step times, plain over executor: 1 is as fast; steps of both in turn, in one run of the same ranks.

    A step takes as long as its slowest rank. Every rank, also one alone, computes on one core.
    """
    rows = []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            launch_ranks(
                "benchmarks.executor_ranks",
                [name, folder],
                num_ranks=case.plan.num_devices,
                out_dir=Path(folder),
                timeout_s=_TIMEOUT_S,
            )
            ranks = [
                json.loads((Path(folder) / f"times{rank}.json").read_text()) for rank in range(case.plan.num_devices)
            ]
        times = {way: [max(of) for of in zip(*(rank[way] for rank in ranks), strict=True)] for way in ranks[0]}
        goal = _GOALS.get(name, _GOAL)
        found = _ratios(times["plain"], times["executor"])
        recording = _ratios(times["executor"], times["silent"])
        step_ms = 1e3 * statistics.median(times["executor"])
        against = f"{name}: plain PyTorch's step time / the executor's ({case.against})"
        rows.append(Row(against, f">= {goal}", f"{_said(found)}; {step_ms:.0f} ms a step", found[1] >= goal))
        cost = [ratio - 1 for ratio in recording]
        said = f"{cost[1]:+.1%} ({cost[0]:+.1%} to {cost[2]:+.1%})"
        rows.append(
            Row(f"{name}: what recording adds to a step", f"<= {_MOST_RECORDING:.0%}", said, cost[1] <= _MOST_RECORDING)
        )
    return rows


def _ratios(first: list[float], second: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the ratios of neighbours, which shared the machine's moods."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high


def _said(ratios: tuple[float, float, float]) -> str:
    return f"{ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})"
