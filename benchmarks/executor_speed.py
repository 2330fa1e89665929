"""Speed of the executor compared with hand-written PyTorch, and overhead of recording."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.executor_ranks import CASES
from benchmarks.table import BenchmarkRow
from executor.launch.launcher import RankLaunch, launch_ranks

_GOALS = {"one device": 0.98}
_GOAL = 0.95
_MAX_RECORDING = 0.02
_TIMEOUT_S = 300.0
_WALL, _CPU = 0, 1  # of a step's times


def executor_speed() -> list[BenchmarkRow]:
    """Rows for ratios of step times, plain over executor (1: equal), with interleaved steps in one run.

    A ratio is computed per round, which has two steps of each variant, interleaved. A step takes as long as its slowest
    rank. Every rank, including a single one, computes on one core. A single rank never waits, so its CPU time excludes
    interference by other programs; there the CPU time decides, and both are shown.
    """
    rows = []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            launch_ranks(
                RankLaunch("benchmarks.executor_ranks", (name, folder), case.plan.num_devices, Path(folder), _TIMEOUT_S)
            )
            ranks = [
                json.loads((Path(folder) / f"times{rank}.json").read_text()) for rank in range(case.plan.num_devices)
            ]
        goal = _GOALS.get(name, _GOAL)
        clock, cpu = (_Times.of(ranks, kind) for kind in (_WALL, _CPU))
        decides = cpu if len(ranks) == 1 else clock
        overhead, recording = decides.ratios("plain", "executor"), decides.ratios("executor", "silent")
        shown = _said(overhead)
        if decides is cpu:
            shown += f" of CPU time, {_said(clock.ratios('plain', 'executor'))} by the clock"
        step_ms = 1e3 * statistics.median(clock.by_way["executor"])
        against = f"{name}: plain PyTorch's step time / the executor's ({case.against})"
        rows.append(BenchmarkRow(against, f">= {goal}", f"{shown}; {step_ms:.0f} ms a step", overhead[1] >= goal))
        cost = [ratio - 1 for ratio in recording]
        said = f"{cost[1]:+.1%} ({cost[0]:+.1%} to {cost[2]:+.1%})"
        rows.append(
            BenchmarkRow(
                f"{name}: what recording adds to a step", f"<= {_MAX_RECORDING:.0%}", said, cost[1] <= _MAX_RECORDING
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of each step on its slowest rank, by variant."""

    by_way: dict[str, list[float]]

    @classmethod
    def of(cls, ranks: list[dict[str, list[list[float]]]], kind: int) -> _Times:
        """Make from the times that ranks wrote; ``kind`` selects wall or CPU time."""
        return cls(
            {
                way: [max(step[kind] for step in steps) for steps in zip(*(rank[way] for rank in ranks), strict=True)]
                for way in ranks[0]
            }
        )

    def ratios(self, first: str, second: str) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the per-round ratio of two variants."""
        of_first, of_second = self._rounds(first), self._rounds(second)
        low, middle, high = statistics.quantiles([a / b for a, b in zip(of_first, of_second, strict=True)], n=4)
        return low, middle, high

    def _rounds(self, way: str) -> list[float]:
        """Seconds of both steps of each round, summed."""
        steps = self.by_way[way]
        return [a + b for a, b in zip(steps[::2], steps[1::2], strict=True)]


def _said(ratios: tuple[float, float, float]) -> str:
    return f"{ratios[1]:.3f} ({ratios[0]:.3f} to {ratios[2]:.3f})"
