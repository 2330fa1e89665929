"""MLPerf Training v5.0: minutes of whole runs, and samples to the target against the batch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.goodput.rows import PublishedRow
from simplan.goodput.batch_scaling import fitted
from simplan.goodput.engines.simulate import simulate
from simplan.goodput.setup import RunSetup, Size

_GOAL = 0.01
_REASONS = {
    "llama2_70b_lora": ". Logs print samples/s in place of steps; in three examined ones that leaves out 9 to 42 s "
    "before the first steps",
}
"""Why a benchmark is missed."""
_WORDS = {
    "llama31_405b": "Llama 3.1 405B",
    "llama2_70b_lora": "Llama 2 70B LoRA",
    "bert": "BERT",
    "llama31_8b": "Llama 3.1 8B (v5.1)",
}


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run of a log: its steps, their mean time, its evaluations, and the minutes that are its result."""

    system: str
    batch: int
    num_steps: int
    step_s: float
    num_evaluations: int
    evaluation_s: float
    minutes: float

    @property
    def predicted_minutes(self) -> float:
        """Minutes of a simulated run with the measured step and evaluation, and without failures."""
        setup = RunSetup(
            num_steps=self.num_steps,
            sizes=(Size(num_nodes=1, step_s=self.step_s),),
            devices_per_node=1,
            evaluation_every=self.num_steps // self.num_evaluations,
            evaluation_s=self.evaluation_s,
        )
        return float(simulate(setup, num_runs=1).time_s[0]) / 60

    @property
    def error(self) -> float:
        """Relative error of the minutes."""
        return self.predicted_minutes / self.minutes - 1


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("mlperf.yaml").read_text())
    return data


def logged_runs(benchmark: str) -> list[LoggedRun]:
    """Runs of a benchmark, one of each system and batch."""
    return [LoggedRun(*row) for row in _data()["runs"][benchmark]]


def samples_to_target(benchmark: str) -> list[tuple[int, float]]:
    """Batch and median of samples to the target."""
    return [(batch, samples) for batch, _, samples, *_ in _data()["samples"][benchmark]["points"]]


def mlperf_rows() -> Iterator[PublishedRow]:
    """Yields rows of minutes, then of samples."""
    for benchmark in _data()["runs"]:
        runs = logged_runs(benchmark)
        close = sum(abs(run.error) <= _GOAL for run in runs)
        worst = max(runs, key=lambda run: abs(run.error))
        yield PublishedRow(
            f"MLPerf {_WORDS[benchmark]}: minutes to train of {len(runs)} systems and batches",
            f"{min(run.minutes for run in runs):.3g} to {max(run.minutes for run in runs):.4g} min",
            "P",
            "mean step and mean evaluation of each log",
            f"steps and evaluations within 1 % of the minutes in {close} of {len(runs)}, median "
            f"{statistics.median(run.error for run in runs):+.2%}, worst {worst.error:+.1%} ({worst.system})"
            f"{_REASONS.get(benchmark, '')}",
            "met" if close == len(runs) else "missed",
        )
    run = next(run for run in logged_runs("llama31_405b") if "n64" in run.system and "eos" in run.system)
    yield PublishedRow(
        "MLPerf Llama 3.1 405B on 512 H100",
        f"{run.minutes:.1f} min",
        "P",
        "its step and evaluation",
        f"{run.num_steps} x {run.step_s:.2f} s + {run.num_evaluations} x {run.evaluation_s:.0f} s = "
        f"{run.predicted_minutes:.1f} min",
        "met" if abs(run.error) <= _GOAL else "missed",
    )
    yield from map(_samples_row, _WORDS)


def _samples_row(benchmark: str) -> PublishedRow:
    """Each batch between the ends predicted from all others."""
    points = samples_to_target(benchmark)
    inner = [
        (batch, fitted([*points[:number], *points[number + 1 :]]).samples(batch) / samples - 1)
        for number, (batch, samples) in enumerate(points)
        if 0 < number < len(points) - 1
    ]
    last = fitted(points[:-1]).samples(points[-1][0]) / points[-1][1] - 1
    worst = max(inner, key=lambda named_error: abs(named_error[1]))
    law = fitted(points)
    resolution = _data()["samples"][benchmark]["evaluation_samples"] / points[0][1]
    return PublishedRow(
        f"MLPerf {_WORDS[benchmark]}: samples to target at batches {points[0][0]:,} to {points[-1][0]:,}",
        f"{points[0][1]:,.0f} to {points[-1][1]:,.0f}",
        "P",
        "all batches except the predicted one",
        f"critical batch {law.critical_batch_size:,.0f}; between the ends at most {worst[1]:+.0%} (at {worst[0]:,}), "
        f"the largest from the others {last:+.0%}. Evaluations resolve {resolution:.0%}",
        "met" if abs(worst[1]) <= max(resolution, 0.1) else "missed",
    )
